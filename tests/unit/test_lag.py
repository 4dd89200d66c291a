"""The loop's beat over a clock that the test moves."""

import asyncio

import pytest

from inferq_worker.observe.lag import LoopBeat


class Clock:
    """Moves when told to, or when somebody sleeps, and then by more than was asked for: the loop was busy."""

    def __init__(self, *late_s: float) -> None:
        self.now_s = 100.0
        self._late_s = list(late_s)

    def __call__(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        if not self._late_s:
            raise asyncio.CancelledError
        self.now_s += seconds + self._late_s.pop(0)


async def test_each_beat_reports_how_late_it_was() -> None:
    clock, seen = Clock(0.0, 1.5, 0.25), list[float]()
    beat = LoopBeat(seen.append, interval_s=0.5, clock=clock, sleep=clock.sleep)
    with pytest.raises(asyncio.CancelledError):
        await beat.run()
    assert seen == [0.0, 1.5, 0.25]


async def test_the_age_counts_from_the_last_beat() -> None:
    clock = Clock(0.0)
    beat = LoopBeat(lambda _lag_s: None, interval_s=0.5, clock=clock, sleep=clock.sleep)
    clock.now_s += 3
    assert beat.age_s() == 3
    with pytest.raises(asyncio.CancelledError):
        await beat.run()
    assert beat.age_s() == 0
    clock.now_s += 11
    assert beat.age_s() == 11
