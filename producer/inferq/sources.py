"""Reads the records of a run of `inferq submit`, file after file, and counts how far it got. Sends nothing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from inferq.lines import file_lines, pipe_lines
from inferq.npz import npz_records, npz_rows
from inferq.records import BadRecord, InputError, JsonLines, Reading, Record, look_ahead

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator, Sequence

__all__ = ["STDIN", "Numbered", "Sources"]

STDIN: Final = Path("-")
_STDIN_DESCRIPTOR: Final = 0


@dataclass(frozen=True, slots=True)
class Numbered:
    """A record, its number in the whole run from 0, and the file it came from with its number there."""

    number: int
    file: Path
    number_in_file: int
    record: Record | BadRecord

    @property
    def where(self) -> str:
        """Its place, for people: `flowers.jsonl, line 3`."""
        return f"{_name(self.file)}, {self.record.place}"


class Sources:
    """The files of a run, read one after the other.

    Args:
        files: .npz archives, or JSON lines; `STDIN` is JSON lines.
        reading: how values become arrays.
        rows_per_job: rows of one job out of an .npz, >= 1.
        strict: a line that is no job ends the reading.

    Raises:
        InputError: a file is not there or no archive.
    """

    def __init__(self, files: Sequence[Path], reading: Reading, rows_per_job: int, *, strict: bool = False) -> None:
        self._files = files
        self._reading = reading
        self._rows_per_job = rows_per_job
        self._strict = strict
        self._sizes = {file: _size(file) for file in files}
        self._read_bytes = 0.0
        self._count = 0
        self.all_read = False

    @property
    def has_stdin(self) -> bool:
        """Whether records may have to be waited for; then `arriving` reads them, else `records`."""
        return STDIN in self._sizes

    def share(self) -> float | None:
        """How much has been read, 0..1; None where standard input is among the files."""
        if self.has_stdin:
            return None
        return self._read_bytes / max(1, sum(self._sizes[file] for file in self._files))

    def identity(self) -> list[list[Any]]:
        """Names and sizes, by which a checkpoint knows its files again."""
        return [[str(file), self._sizes[file]] for file in self._files]

    def unused_dtypes(self) -> dict[str, str]:
        """What was said about inputs that no record had, once all was read."""
        unused = self._reading.dtypes.keys() - self._reading.seen.names if self.all_read and self._count else ()
        return {name: self._reading.dtypes[name] for name in sorted(unused)}

    @property
    def input_names(self) -> list[str]:
        """Inputs that a record had so far."""
        return sorted(self._reading.seen.names)

    def records(self) -> Iterator[Numbered]:
        """All records of all files, in order; those of standard input are `arriving`'s.

        Raises:
            InputError: an archive is damaged, or, if reading strictly, a line is no job.
        """
        self._count = 0
        for file in self._files:
            yield from self._numbered(file)
        self.all_read = True

    async def arriving(self) -> AsyncGenerator[Numbered, None]:
        """As `records`, but waits for standard input without holding anything up."""
        self._count = 0
        for file in self._files:
            if file != STDIN:
                for numbered in self._numbered(file):
                    yield numbered
                continue
            lines, number_in_file = JsonLines(self._reading), 0
            async for line in pipe_lines(_STDIN_DESCRIPTOR):
                if (record := lines.record(line)) is not None:
                    yield self._next(file, number_in_file, record)
                    number_in_file += 1
        self.all_read = True

    def _numbered(self, file: Path) -> Iterator[Numbered]:
        records = self._archive(file) if file.suffix == ".npz" else self._lines(file)
        for number_in_file, record in enumerate(records):
            yield self._next(file, number_in_file, record)

    def _next(self, file: Path, number_in_file: int, record: Record | BadRecord) -> Numbered:
        numbered = Numbered(self._count, file, number_in_file, record)
        if self._strict and isinstance(record, BadRecord):
            raise InputError(f"{numbered.where}: {record.problem}")
        self._count += 1
        return numbered

    def _lines(self, file: Path) -> Iterator[Record | BadRecord]:
        lines = JsonLines(self._reading)
        with file.open("rb") as content:
            if content.seekable():
                look_ahead(file_lines(content), self._reading)
                content.seek(0)
            for line in file_lines(content):
                self._read_bytes += len(line)
                if (record := lines.record(line)) is not None:
                    yield record

    def _archive(self, file: Path) -> Iterator[Record]:
        jobs = -(-npz_rows(file) // self._rows_per_job)
        for record in npz_records(file, self._rows_per_job, self._reading):
            self._read_bytes += self._sizes[file] / jobs
            yield record


def _name(file: Path) -> str:
    return "standard input" if file == STDIN else str(file)


def _size(file: Path) -> int:
    if file == STDIN:
        return 0
    try:
        return file.stat().st_size
    except OSError as error:
        raise InputError(
            f"{file}: {error.strerror}; name a file of JSON lines or an .npz, or - for standard input"
        ) from error
