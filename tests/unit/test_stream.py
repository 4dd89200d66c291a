import asyncio

import pytest

from inferq.stream import Window


async def test_the_window_makes_the_source_wait_for_jobs_and_for_bytes() -> None:
    window = Window(max_jobs=2, max_bytes=100)
    await window.enter(60)

    assert not window.has_room(50)
    assert window.has_room(40)
    await window.enter(40)
    assert not window.has_room(0)


async def test_a_job_larger_than_the_window_passes_alone() -> None:
    window = Window(max_jobs=2, max_bytes=100)

    await window.enter(500)

    assert not window.has_room(0)
    window.leave(500)
    assert (window.jobs, window.bytes) == (0, 0)


async def test_room_that_is_given_back_lets_the_next_one_in() -> None:
    window = Window(max_jobs=1, max_bytes=100)
    await window.enter(10)
    waiting = asyncio.create_task(window.enter(20))
    await asyncio.sleep(0)
    assert not waiting.done()

    window.leave(10)
    await waiting

    assert (window.jobs, window.bytes) == (1, 20)


async def test_a_cancelled_wait_takes_no_room() -> None:
    window = Window(max_jobs=1, max_bytes=100)
    await window.enter(10)
    waiting = asyncio.create_task(window.enter(20))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting

    assert (window.jobs, window.bytes) == (1, 10)
