"""Time as an argument: monotonic seconds and one-shot timers. A loop's timers in the worker, a fake in tests."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable


class Timer(Protocol):
    """A scheduled call that can be taken back."""

    def cancel(self) -> None:
        """Do not call after all; harmless when already called."""


class Clock(Protocol):
    """Monotonic seconds, and calls at a point of it."""

    def now(self) -> float:
        """Monotonic seconds."""

    def call_at(self, when_s: float, callback: Callable[[], None]) -> Timer:
        """Call `callback` once at `when_s` (at once if that has passed)."""


class LoopClock:
    """Monotonic seconds, and the timers of an asyncio event loop.

    Not the loop's own time: uvloop's stands still within a turn of the loop and counts whole milliseconds, so that a
    job that has just arrived would lie in the future and its batch would not leave.

    Args:
        monotonic: seconds on the clock that stamps arrivals.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, monotonic: Callable[[], float]) -> None:
        self._loop = loop
        self._monotonic = monotonic

    def now(self) -> float:
        """Monotonic seconds, fresh at every call."""
        return self._monotonic()

    def call_at(self, when_s: float, callback: Callable[[], None]) -> Timer:
        """Call `callback` from the loop at `when_s`, up to a millisecond late.

        Rounded up: loops count whole milliseconds, and a timer that rings early is set again until its time has come.
        """
        delay_ms = math.ceil((when_s - self._monotonic()) * 1000)
        return self._loop.call_later(max(0, delay_ms) / 1000, callback)
