"""One run of `inferq submit`: files in, answers out, a checkpoint between them. Types and prints nothing."""

from __future__ import annotations

import collections
import contextlib
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, Protocol, Self

from inferq.answer_json import answer_line
from inferq.errors import JobFailed
from inferq.jobs import Item
from inferq.npz import NpzWriter, npz_records, npz_rows
from inferq.records import InputError, Reading, Record, json_lines

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence
    from types import TracebackType

    from inferq.answers import Answer
    from inferq.checkpoint import Checkpoint
    from inferq.jobs import Deadline
    from inferq.progress import Progress

__all__ = ["STDIN", "Sources", "Submission", "Tally", "open_output"]

STDIN: Final = Path("-")


@dataclass(frozen=True, slots=True)
class Numbered:
    """A record, its number in the whole run from 0, and the file it came from with its number there."""

    number: int
    file: Path
    number_in_file: int
    record: Record


class Sources:
    """The files of a run, read one after the other.

    Args:
        files: .npz archives, or JSON lines; `STDIN` is JSON lines.
        reading: how values become arrays.
        rows_per_job: rows of one job out of an .npz, >= 1.

    Raises:
        InputError: a file is not there or no archive.
    """

    def __init__(self, files: Sequence[Path], reading: Reading, rows_per_job: int) -> None:
        self._files = files
        self._reading = reading
        self._rows_per_job = rows_per_job
        self._sizes = {file: _size(file) for file in files}
        self._read_bytes = 0.0

    def share(self) -> float | None:
        """How much has been read, 0..1; None where standard input is among the files."""
        if STDIN in self._sizes:
            return None
        return self._read_bytes / max(1, sum(self._sizes[file] for file in self._files))

    def identity(self) -> list[list[Any]]:
        """Names and sizes, by which a checkpoint knows its files again."""
        return [[str(file), self._sizes[file]] for file in self._files]

    def records(self) -> Iterator[Numbered]:
        """All records of all files, in order.

        Raises:
            InputError: at the record that cannot be read.
        """
        number = 0
        for file in self._files:
            for number_in_file, record in enumerate(self._of(file)):
                yield Numbered(number, file, number_in_file, record)
                number += 1

    def _of(self, file: Path) -> Iterator[Record]:
        if file.suffix == ".npz":
            yield from self._archive(file)
        elif file == STDIN:
            yield from json_lines(sys.stdin.buffer, "standard input", self._reading, on_read=self._count)
        else:
            with file.open("rb") as lines:
                yield from json_lines(lines, str(file), self._reading, on_read=self._count)

    def _archive(self, file: Path) -> Iterator[Record]:
        jobs = -(-npz_rows(file) // self._rows_per_job)
        for record in npz_records(file, self._rows_per_job, self._reading):
            self._count(self._sizes[file] / jobs)
            yield record

    def _count(self, size: float) -> None:
        self._read_bytes += size


def _size(file: Path) -> int:
    if file == STDIN:
        return 0
    try:
        return file.stat().st_size
    except OSError as error:
        raise InputError(
            f"{file}: {error.strerror}; name a file of JSON lines or an .npz, or - for standard input"
        ) from error


class Output(Protocol):
    """Where answers go."""

    def add(self, number: int, answer: Answer) -> None:
        """Take the answer to that record."""

    def flush(self) -> int:
        """Bring what was taken on its way to the disk; returns the output's length in bytes, or 0 if it has none."""


class _Lines:
    """JSON lines, good and failed answers alike."""

    def __init__(self, file: IO[bytes], written_bytes: int = 0) -> None:
        self._file = file
        self._bytes = written_bytes

    def add(self, number: int, answer: Answer) -> None:
        line = answer_line(answer, index=number)
        self._file.write(line)
        self._bytes += len(line)

    def flush(self) -> int:
        self._file.flush()
        return self._bytes


class _Archive:
    """An .npz of the good answers; failures are told on standard error only."""

    def __init__(self, writer: NpzWriter) -> None:
        self._writer = writer

    def add(self, number: int, answer: Answer) -> None:
        if answer.ok:
            self._writer.add(number, answer.outputs)

    def flush(self) -> int:
        return 0


@contextlib.contextmanager
def open_output(path: Path | None, checkpoint: Checkpoint | None) -> Iterator[Output]:
    """Open the output for the length of a `with`.

    Args:
        path: .npz, or any other name for JSON lines; None = standard output.
        checkpoint: what is beyond its last entry is cut off, because those records come again.

    Raises:
        InputError: the output cannot be written, or is shorter than the checkpoint says.
    """
    if path is None:
        yield _Lines(sys.stdout.buffer)
    elif path.suffix == ".npz":
        with NpzWriter(path) as writer:
            yield _Archive(writer)
    else:
        with _open_lines(path, checkpoint) as file:
            yield _Lines(file, 0 if checkpoint is None else checkpoint.output_bytes)


def _open_lines(path: Path, checkpoint: Checkpoint | None) -> IO[bytes]:
    try:
        # Not "w": a run that goes on keeps what it had.
        file = path.open("ab" if checkpoint is not None else "wb")
        length = path.stat().st_size
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror}") from error
    if checkpoint is None:
        return file
    if length < checkpoint.output_bytes:
        file.close()
        raise InputError(
            f"{path} has {length} bytes, its checkpoint says {checkpoint.output_bytes}; "
            "bring the file back, or delete the checkpoint to start anew",
        )
    file.truncate(checkpoint.output_bytes)
    return file


@dataclass(slots=True)
class Tally:
    """What became of the jobs of a run."""

    ok: int = 0
    late: int = 0
    fallback: int = 0
    unanswered: int = 0
    skipped: int = 0
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
            self.unanswered += not isinstance(answer.error, JobFailed)


class Submission:
    """Feeds records to a client and takes its answers.

    Args:
        sources: the files.
        output: where answers go.
        progress: counts and draws.
        checkpoint: None = ids are random and nothing is remembered.
    """

    def __init__(self, sources: Sources, output: Output, progress: Progress, checkpoint: Checkpoint | None) -> None:
        self._sources = sources
        self._output = output
        self._progress = progress
        self._checkpoint = checkpoint
        # Item number to record number, of what is under way.
        self._numbers: dict[int, int] = {}
        self.tally = Tally()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._commit()

    def items(self) -> Iterator[Item]:
        """The jobs to send: all records but those that the checkpoint has."""
        sent = 0
        for numbered in self._sources.records():
            if self._checkpoint is not None and numbered.number in self._checkpoint.answered:
                self.tally.skipped += 1
                continue
            self._numbers[sent] = numbered.number
            sent += 1
            yield self._item(numbered)

    def _item(self, numbered: Numbered) -> Item:
        record = numbered.record
        job_id = record.id
        if job_id is None and self._checkpoint is not None:
            job_id = self._checkpoint.job_id(str(numbered.file), numbered.number_in_file)
        deadline_s: Deadline = "default" if record.deadline_s is None else record.deadline_s
        return Item(record.inputs, id=job_id, params=record.params, deadline_s=deadline_s)

    async def take(self, answers: AsyncIterator[Answer]) -> None:
        """Take all answers; what they raise is raised, after what came before was written."""
        async for answer in answers:
            number = self._numbers.pop(answer.index or 0)
            self.tally.add(answer)
            self._progress.add(ok=answer.ok)
            if self._checkpoint is None:
                self._output.add(number, answer)
            elif answer.ok or isinstance(answer.error, JobFailed):
                self._output.add(number, answer)
                if self._checkpoint.add(number):
                    self._commit()
            # Otherwise nobody answered: the next run over this checkpoint tries again.

    def _commit(self) -> None:
        length = self._output.flush()
        if self._checkpoint is not None:
            self._checkpoint.commit(length)
