"""The beat of the event loop: how late it is, and when it last was.

The liveness probe reads the beat from another thread: a loop that is stuck cannot say so itself.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


class LoopBeat:
    """Beats at an interval for as long as `run` runs.

    Args:
        on_lag: receives how late each beat was; seconds, >= 0.
        interval_s: time between beats, > 0.
        clock: monotonic seconds.
        sleep: waits that many seconds; tests pass their own.
    """

    def __init__(
        self,
        on_lag: Callable[[float], None],
        *,
        interval_s: float = 0.5,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._on_lag = on_lag
        self._interval_s = interval_s
        self._clock = clock
        self._sleep = sleep
        self._last_beat_s = clock()

    def age_s(self) -> float:
        """Seconds since the last beat, or since the beat was made if there was none. May be asked from any thread."""
        return self._clock() - self._last_beat_s

    async def run(self) -> NoReturn:
        """Beat until cancelled."""
        while True:
            due_s = self._clock() + self._interval_s
            await self._sleep(self._interval_s)
            now_s = self._clock()
            self._last_beat_s = now_s
            self._on_lag(max(0.0, now_s - due_s))
