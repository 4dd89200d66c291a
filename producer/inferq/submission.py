"""One run of `inferq submit`: records in, answers out, a checkpoint between them. Opens nothing itself."""

from __future__ import annotations

import collections
import contextlib
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Self

from inferq.answers import failed_answer
from inferq.errors import InvalidJob, JobFailed, JobTooLarge
from inferq.jobs import Item
from inferq.outputs import failure_message
from inferq.records import BadRecord, Record

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from types import TracebackType

    from inferq.answers import Answer
    from inferq.checkpoint import Checkpoint
    from inferq.errors import InferqError
    from inferq.jobs import Deadline
    from inferq.outputs import Output
    from inferq.progress import Progress
    from inferq.sources import Numbered, Sources

__all__ = ["Submission", "Tally", "failure_line", "is_final"]

_SHOWN_FAILURES: Final = 3
_DTYPE_REFUSED: Final = re.compile(r"inputs\.(?P<name>.+)\.dtype is \w+, the model takes (?P<dtype>\w+)")


@dataclass(slots=True)
class Tally:
    """What became of the jobs of a run."""

    ok: int = 0
    late: int = 0
    fallback: int = 0
    unanswered: int = 0
    skipped: int = 0
    sent: int = 0
    codes: collections.Counter[str] = field(default_factory=collections.Counter)

    @property
    def failed(self) -> int:
        """Jobs without outputs."""
        return sum(self.codes.values())

    def add(self, answer: Answer) -> None:
        """Count one answer."""
        self.ok += answer.ok
        self.late += answer.result.late
        self.fallback += answer.result.fallback
        if answer.error is not None:
            self.codes[answer.error.code] += 1
            self.unanswered += not is_final(answer)


def is_final(answer: Answer) -> bool:
    """Whether another run would get the same. A job that is too large may pass once Redis takes its inputs."""
    answered = answer.error is None or isinstance(answer.error, JobFailed)
    return answered or (isinstance(answer.error, InvalidJob) and not isinstance(answer.error, JobTooLarge))


def failure_line(where: str, error: InferqError) -> str:
    """One line about a failed job for a person, with the mend that only this side knows.

    Args:
        where: the record's place.
        error: what became of it.
    """
    message = " ".join(failure_message(error).split())
    refused = _DTYPE_REFUSED.search(message)
    mend = f"; say it with --dtype {refused['name']}={refused['dtype']}" if refused else ""
    return f"{where}: {error.code}: {message}{mend}"


class Submission:
    """Feeds records to a client and takes its answers.

    Args:
        sources: the files.
        output: where answers go.
        progress: counts, draws, and shows the first failures of different kinds.
        checkpoint: None = ids are random and nothing is remembered.
    """

    def __init__(self, sources: Sources, output: Output, progress: Progress, checkpoint: Checkpoint | None) -> None:
        self._sources = sources
        self._output = output
        self._progress = progress
        self._checkpoint = checkpoint
        # Item number to record number and place, of what is under way.
        self._under_way: dict[int, tuple[int, str]] = {}
        self._shown: set[tuple[str, str]] = set()
        self.tally = Tally()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._commit()

    @property
    def jobs_under_way(self) -> int:
        """Jobs that were given to the client and have no answer yet."""
        return len(self._under_way)

    def items(self) -> Iterator[Item] | AsyncIterator[Item]:
        """The jobs to send: all records but those that the checkpoint has; a bad one is counted and left out."""
        return self._arriving() if self._sources.has_stdin else self._reading()

    def _reading(self) -> Iterator[Item]:
        for numbered in self._sources.records():
            if (item := self._item(numbered)) is not None:
                yield item

    async def _arriving(self) -> AsyncIterator[Item]:
        async with contextlib.aclosing(self._sources.arriving()) as records:
            async for numbered in records:
                if (item := self._item(numbered)) is not None:
                    yield item

    def open_records(self) -> Iterator[tuple[Numbered, str]]:
        """Records without an answer in the checkpoint, each with the id that its job had; for `reconcile`.

        A bad one is counted as answered and left out.
        """
        for numbered in self._sources.records():
            if self._open(numbered) is not None:
                yield numbered, self._job_id(numbered) or ""

    def finish(self, numbered: Numbered, answer: Answer) -> None:
        """Take the answer to one of `open_records`."""
        self._finish(numbered.number, numbered.where, answer)

    def _item(self, numbered: Numbered) -> Item | None:
        record = self._open(numbered)
        if record is None:
            return None
        job_id = self._job_id(numbered)
        self._under_way[self.tally.sent] = (numbered.number, numbered.where)
        self.tally.sent += 1
        deadline_s: Deadline = "default" if record.deadline_s is None else record.deadline_s
        return Item(record.inputs, id=job_id, params=record.params, deadline_s=deadline_s)

    def _open(self, numbered: Numbered) -> Record | None:
        """The record, unless it is answered: before, or now because it is no job."""
        self._progress.read += 1
        if self._checkpoint is not None and numbered.number in self._checkpoint.answered:
            self.tally.skipped += 1
            self._progress.skipped += 1
            return None
        record = numbered.record
        if isinstance(record, BadRecord):
            failed = failed_answer(self._job_id(numbered) or "", InvalidJob(record.problem))
            self._finish(numbered.number, numbered.where, failed)
            return None
        return record

    def _job_id(self, numbered: Numbered) -> str | None:
        own = numbered.record.id if isinstance(numbered.record, Record) else None
        if own is None and self._checkpoint is not None:
            return self._checkpoint.job_id(str(numbered.file), numbered.number_in_file)
        return own

    async def take(self, answers: AsyncIterator[Answer]) -> None:
        """Take all answers; what they raise is raised, after what came before was written."""
        async for answer in answers:
            number, where = self._under_way.pop(answer.index or 0)
            self._finish(number, where, answer)
            if not self._under_way and self._checkpoint is None:
                # Whoever reads the output has all there is, while the source is slow.
                self._output.flush()

    def _finish(self, number: int, where: str, answer: Answer) -> None:
        self.tally.add(answer)
        self._progress.add(ok=answer.ok)
        if answer.error is not None:
            self._show(where, answer.error)
        if self._checkpoint is None:
            self._output.add(number, answer)
        elif is_final(answer):
            self._output.add(number, answer)
            if self._checkpoint.add(number):
                self._commit()
        # Otherwise nobody answered: the next run over this checkpoint tries again.

    def _show(self, where: str, error: InferqError) -> None:
        # Numbers and ids differ from job to job; what is left is the kind of the failure.
        kind = (error.code, re.sub(r"[0-9a-f]*\d[0-9a-f-]*", "#", failure_message(error)))
        if kind in self._shown or len(self._shown) >= _SHOWN_FAILURES:
            return
        self._shown.add(kind)
        self._progress.note(f"inferq: {failure_line(where, error)}")

    def _commit(self) -> None:
        length = self._output.flush()
        if self._checkpoint is not None:
            self._checkpoint.commit(length)
