"""Where the answers of a run of `inferq submit` go: JSON lines, or one archive. Numbers are those of the records."""

from __future__ import annotations

import contextlib
import sys
from typing import IO, TYPE_CHECKING, Protocol

from inferq.answer_json import answer_line
from inferq.errors import JobFailed
from inferq.npz import NpzWriter
from inferq.records import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from inferq.answers import Answer
    from inferq.checkpoint import Checkpoint
    from inferq.errors import InferqError

__all__ = ["Output", "failure_message", "open_output"]


def failure_message(error: InferqError) -> str:
    """Why a job has no outputs, in the words of who said it."""
    return error.message if isinstance(error, JobFailed) else str(error)


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
    """An .npz of the good answers, and of what the others failed with."""

    def __init__(self, writer: NpzWriter) -> None:
        self._writer = writer

    def add(self, number: int, answer: Answer) -> None:
        if answer.error is None:
            self._writer.add(number, answer.outputs)
        else:
            self._writer.fail(number, answer.id, answer.error.code, failure_message(answer.error))

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
