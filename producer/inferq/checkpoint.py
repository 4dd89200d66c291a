"""Remembers which records are answered, so that a run that broke off goes on where it was.

An append-only text file beside the output: one line of JSON that says whose it is, then one line for every few hundred
answers, written after the output they belong to. What the output holds beyond the last line is cut off at the start.
"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING, Any, Final, Self

from inferq.records import InputError

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

__all__ = ["Answered", "Checkpoint"]

_FORMAT: Final = "inferq-checkpoint-1"
_COMMIT_EVERY: Final = 256


@dataclass(slots=True)
class Answered:
    """A set of record numbers that is nearly an interval: all below `below`, and some above.

    Answers come almost in order, so a million of them take the memory of those under way.
    """

    below: int = 0
    above: set[int] = field(default_factory=set)

    def __contains__(self, number: int) -> bool:
        return number < self.below or number in self.above

    def __len__(self) -> int:
        return self.below + len(self.above)

    def add(self, number: int) -> None:
        """Add a number; harmless when done twice."""
        if number < self.below:
            return
        self.above.add(number)
        while self.below in self.above:
            self.above.remove(self.below)
            self.below += 1


class Checkpoint:
    """One checkpoint file.

    Args:
        path: the file; made if it is not there.
        job: what the run is of (files with sizes, model, output); a checkpoint of another is refused.

    Raises:
        InputError: the file is of another run, or no checkpoint.
    """

    def __init__(self, path: Path, job: dict[str, Any]) -> None:
        self._path = path
        self._new: list[int] = []
        self.answered = Answered()
        self.output_bytes = 0
        self.run_id = uuid.uuid4().hex[:12]
        whole_bytes = self._load(job) if path.exists() and path.stat().st_size else 0
        # A line that a crash cut in two must not join with the next one.
        self._file: IO[bytes] = path.open("ab")
        self._file.truncate(whole_bytes)
        if not whole_bytes:
            self._append({"format": _FORMAT, "run": self.run_id, "job": job})

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def job_id(self, file: str, number: int) -> str:
        """The id of a record: the same in every run over this checkpoint, so that a rerun deduplicates."""
        tag = hashlib.blake2b(file.encode(), digest_size=6).hexdigest()
        return f"{self.run_id}.{tag}.{number}"

    def add(self, number: int) -> bool:
        """Note that a record is answered; True = now is the time to write the output out and `commit`."""
        self._new.append(number)
        return len(self._new) >= _COMMIT_EVERY

    def commit(self, output_bytes: int) -> None:
        """Write down what was noted.

        Args:
            output_bytes: length of the output, which must be on its way to the disk already.
        """
        if self._new:
            for number in self._new:
                self.answered.add(number)
            self._append({"done": self._new, "output_bytes": output_bytes})
            self._new = []

    def _append(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def _load(self, job: dict[str, Any]) -> int:
        """Read the file; returns the length of its whole lines in bytes."""
        whole_bytes = 0
        with self._path.open("rb") as file:
            for number, line in enumerate(file):
                if not line.endswith(b"\n"):
                    break
                self._read_line(number, line, job)
                whole_bytes += len(line)
        if not whole_bytes:
            # Somebody's file, which opening it as a checkpoint would empty.
            self._read_line(0, b"", job)
        return whole_bytes

    def _read_line(self, number: int, line: bytes, job: dict[str, Any]) -> None:
        try:
            entry = json.loads(line)
            if number == 0:
                self._check(entry, job)
                self.run_id = str(entry["run"])
                return
            for record in entry["done"]:
                self.answered.add(int(record))
            self.output_bytes = int(entry["output_bytes"])
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"{self._path}, line {number + 1}: no checkpoint of inferq submit; name another file or delete it",
            ) from error

    def _check(self, header: dict[str, Any], job: dict[str, Any]) -> None:
        if header["format"] != _FORMAT:
            raise ValueError("another format")
        of: dict[str, Any] = header["job"]
        other = sorted(key for key in of.keys() | job.keys() if of.get(key) != job.get(key))
        if other:
            key = other[0]
            raise InputError(
                f"{self._path} is the checkpoint of another run ({key}: {of.get(key)!r} there, {job.get(key)!r} now); "
                "name another file, or delete it to start anew",
            )
