"""Time as an argument: monotonic seconds and one-shot timers. The event loop's clock in the worker, a fake in tests."""

from __future__ import annotations

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
    """The clock of an asyncio event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def now(self) -> float:
        """Monotonic seconds of the loop."""
        return self._loop.time()

    def call_at(self, when_s: float, callback: Callable[[], None]) -> Timer:
        """Call `callback` from the loop at `when_s`."""
        return self._loop.call_at(when_s, callback)
