"""Cuts files and standard input into lines that are bounded in length. Knows nothing of what a line means.

A file is read where it stands. A pipe is waited for on the event loop, because a producer that is slow to write must
hold up neither the answers nor the heartbeats.
"""

from __future__ import annotations

import asyncio
import os
from typing import IO, TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

__all__ = ["MAX_LINE_BYTES", "file_lines", "pipe_lines"]

MAX_LINE_BYTES: Final = 64 * 2**20
"""A job's body is at most 8 MiB; written as JSON numbers that is several times as much."""
_CHUNK_BYTES: Final = 2**16


def file_lines(file: IO[bytes], max_bytes: int = MAX_LINE_BYTES) -> Iterator[bytes]:
    """Yield the lines of a file with their ends; of a line above `max_bytes` only a little more than that.

    What was cut off is skipped, so that the next line begins where it should.
    """
    while line := file.readline(max_bytes + 1):
        part = line
        while len(line) > max_bytes and part and not part.endswith(b"\n"):
            part = file.readline(max_bytes + 1)
        yield line


async def pipe_lines(descriptor: int, max_bytes: int = MAX_LINE_BYTES) -> AsyncIterator[bytes]:
    """Yield the lines of a pipe, a terminal or a redirected file, without their ends; long ones cut as `file_lines`.

    Args:
        descriptor: open for reading; whoever reads it through a buffer would miss what was read here.
        max_bytes: of a line.
    """
    line = bytearray()
    while chunk := await _read(descriptor):
        *ends, rest = chunk.split(b"\n")
        for end in ends:
            line += end[: max_bytes + 1 - len(line)]
            yield bytes(line)
            line.clear()
        line += rest[: max_bytes + 1 - len(line)]
    if line:
        yield bytes(line)


async def _read(descriptor: int) -> bytes:
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    try:
        loop.add_reader(descriptor, readable.set)
    except PermissionError:
        # A regular file: it cannot be waited for, and never needs to be.
        return os.read(descriptor, _CHUNK_BYTES)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(descriptor)
    return os.read(descriptor, _CHUNK_BYTES)
