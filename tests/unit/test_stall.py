import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from inferq.stall import tell_when_stalled


class Run:
    """A run as the watch sees it: numbers, and what there is to say."""

    def __init__(self) -> None:
        self.answered = 0
        self.under_way = 5
        self.reason = "no worker consumes inferq.m.bulk"
        self.asked = 0
        self.told: list[str] = []

    async def why(self) -> str:
        self.asked += 1
        return self.reason

    async def asked_again(self, times: int = 3) -> None:
        before = self.asked
        async with asyncio.timeout(5):
            while self.asked < before + times:  # noqa: ASYNC110 - bounded above
                await asyncio.sleep(0.001)


@pytest.fixture
async def run() -> AsyncIterator[Run]:
    state = Run()
    watch = asyncio.create_task(
        tell_when_stalled(lambda: state.answered, lambda: state.under_way, state.why, state.told.append, after_s=0.005)
    )
    yield state
    watch.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await watch


async def test_each_reason_is_told_once(run: Run) -> None:
    await run.asked_again()
    run.reason = "Redis is away"
    await run.asked_again()

    assert run.told == ["no worker consumes inferq.m.bulk", "Redis is away"]


async def test_after_some_progress_it_is_told_again(run: Run) -> None:
    await run.asked_again()
    run.answered = 1
    await run.asked_again()

    assert run.told == [run.reason, run.reason]


async def test_who_waits_for_nothing_is_told_nothing(run: Run) -> None:
    run.under_way = 0
    await asyncio.sleep(0.05)

    assert (run.asked, run.told) == (0, [])
