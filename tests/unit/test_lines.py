import asyncio
import io
import os
import tempfile
from collections.abc import AsyncIterator

import pytest

from inferq.lines import file_lines, pipe_lines


@pytest.mark.parametrize(
    ("content", "lines"),
    [
        (b"", []),
        (b"a\n\nb", [b"a\n", b"\n", b"b"]),
        (b"0123456789\nb\n", [b"01234", b"b\n"]),
        (b"0123\nb\n", [b"0123\n", b"b\n"]),
        (b"01234567890", [b"01234"]),
    ],
)
def test_a_long_line_is_cut_and_the_next_begins_where_it_should(content: bytes, lines: list[bytes]) -> None:
    assert list(file_lines(io.BytesIO(content), max_bytes=4)) == lines


async def test_a_pipe_gives_its_lines_as_they_come_and_holds_nothing_up() -> None:
    reading, writing = os.pipe()
    lines = aiter(pipe_lines(reading))
    coming = asyncio.ensure_future(anext(lines))
    os.write(writing, b"fir")
    os.write(writing, b"st\nsec")
    assert await coming == b"first"

    os.write(writing, b"ond\n\nlast")
    os.close(writing)

    assert [line async for line in _rest(lines)] == [b"second", b"", b"last"]
    os.close(reading)


async def test_a_long_line_of_a_pipe_is_cut() -> None:
    reading, writing = os.pipe()
    os.write(writing, b"0123456789\nb\n")
    os.close(writing)

    assert [line async for line in pipe_lines(reading, max_bytes=4)] == [b"01234", b"b"]
    os.close(reading)


async def test_waiting_for_a_pipe_can_be_cancelled() -> None:
    reading, writing = os.pipe()
    coming = asyncio.ensure_future(anext(aiter(pipe_lines(reading))))
    await asyncio.sleep(0)
    coming.cancel()

    assert (await asyncio.gather(coming, return_exceptions=True))[0].__class__ is asyncio.CancelledError
    os.close(writing)
    os.close(reading)


async def test_a_redirected_file_is_read_to_its_end() -> None:
    with tempfile.TemporaryFile() as file:
        file.write(b"a\nb")
        file.seek(0)

        assert [line async for line in pipe_lines(file.fileno())] == [b"a", b"b"]


async def _rest(lines: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    async for line in lines:
        yield line
