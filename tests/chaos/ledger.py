"""What the driver itself knows of every job: an append-only file of JSON lines, written before anything is judged.

Entries carry `t` (Unix seconds), `e` (what happened) and mostly `id`. Jobs: `sent`, then `confirmed`, `unknown` or
`refused`; `reply` is one raw reply as it came off the wire, `answer` what the client library returned. `fault` marks
the saboteur's deeds, `lost_data` moments at which Redis may have forgotten outcomes.
"""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import msgpack

from inferq_schemas import result_to_wire

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType
    from typing import Self, TextIO

    from tests.chaos.work import Work

    from inferq_schemas import Result

Entry: TypeAlias = "dict[str, Any]"


class Ledger:
    """Writes entries; each is on its way to the disk when the call returns.

    Args:
        path: created, or continued.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.counts: dict[str, int] = {}
        self._open: dict[str, str] = {}
        self._file: TextIO | None = None

    def __enter__(self) -> Self:
        self._file = self.path.open("a", buffering=1)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._file is not None
        self._file.close()

    def write(self, event: str, job_id: str | None = None, **fields: object) -> None:
        """Append one entry."""
        assert self._file is not None
        named = {} if job_id is None else {"id": job_id}
        entry = {"t": round(time.time(), 4), "e": event, **named, **fields}
        self._file.write(json.dumps(entry, separators=(",", ":")) + "\n")
        self.counts[event] = self.counts.get(event, 0) + 1

    def sent(self, job_id: str, work: Work, *, sender: str, model: str, lane: str, **fields: object) -> None:
        """A job is about to be published; what it holds follows from its number."""
        self._open[job_id] = model
        content = {"n": work.number, "rows": work.rows, "kind": work.kind}
        self.write("sent", job_id, sender=sender, model=model, lane=lane, **content, **fields)

    def answered(self, event: str, result: Result, work: Work | None, **fields: object) -> None:
        """A result came: `reply` or `answer`. Its likeness tells whether two results are the same one."""
        self._open.pop(result.id, None)
        right = None
        if result.ok:
            output = result.outputs.get("y")
            right = output is not None and work is not None and work.is_right(output.to_numpy())
        code = "ok" if result.error is None else result.error.code
        message = {} if result.error is None else {"message": result.error.message[:200]}
        self.write(event, result.id, code=code, right=right, likeness=likeness(result), **message, **fields)

    def gave_up(self, job_id: str) -> None:
        """Nobody waits for this job any more, or it is in no queue."""
        self._open.pop(job_id, None)

    def waiting(self, model: str | None = None) -> int:
        """Jobs, of one model or of all, that were sent and not answered to the driver yet."""
        return len(self._open) if model is None else sum(1 for one in self._open.values() if one == model)


def likeness(result: Result) -> str:
    """A digest of everything in a result: two replies to one id must have the same."""
    return hashlib.blake2b(msgpack.packb(result_to_wire(result)), digest_size=8).hexdigest()


@dataclass(slots=True)
class Told:
    """All that the ledger says of one job.

    Attributes:
        sent: its `sent` entry.
        confirmed_t: when a publish of it was first confirmed; None = never.
        unended: whether the client library gave its caller neither an answer nor an error.
        replies: raw replies, in order.
        answers: what the client library returned, in order.
    """

    sent: Entry
    confirmed_t: float | None = None
    unended: bool = False
    replies: list[Entry] = field(default_factory=list)
    answers: list[Entry] = field(default_factory=list)

    @property
    def results(self) -> list[Entry]:
        """Replies and answers."""
        return [*self.replies, *self.answers]


@dataclass(slots=True)
class History:
    """A ledger that was read back."""

    jobs: dict[str, Told] = field(default_factory=dict)
    faults: list[Entry] = field(default_factory=list)
    lost_data: list[tuple[float, float]] = field(default_factory=list)
    strangers: list[Entry] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> History:
        """Read a ledger; a last line that was cut short by a crash is left out."""
        history = cls()
        with path.open() as lines:
            for line in lines:
                if line.endswith("\n"):
                    history.take(json.loads(line))
        return history

    def take(self, entry: Entry) -> None:
        """Add one entry."""
        event, told = entry["e"], self.jobs.get(entry.get("id", ""))
        if event == "sent":
            self.jobs.setdefault(entry["id"], Told(entry))
        elif event == "fault":
            self.faults.append(entry)
        elif event == "lost_data":
            self.lost_data.append((entry["since"], entry["t"]))
        elif told is not None and event == "confirmed":
            told.confirmed_t = told.confirmed_t or entry["t"]
        elif told is not None and event == "unended":
            told.unended = True
        elif told is not None and event == "reply":
            told.replies.append(entry)
        elif told is not None and event == "answer":
            told.answers.append(entry)
        elif event in ("reply", "answer"):
            self.strangers.append(entry)
