"""One device: how many runs it takes at a time, and when it is expected to take the next.

The next batch is composed late, only so long before the running one ends as its last check needs: what arrives
meanwhile still rides along, and what has become hopeless is not run.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from inferq_worker.scheduling import Clock

_FIRST_LEAD_S = 0.002
_MARGIN_S = 0.001
_WEIGHT = 0.1


class Device:
    """The slots of one device.

    Args:
        slots: runs at a time; >= 1.
        clock: monotonic seconds.
    """

    def __init__(self, slots: int, clock: Clock) -> None:
        self._clock = clock
        self._free = asyncio.Semaphore(slots)
        self._slots = slots
        self._ends_s: dict[object, float] = {}
        self._changed = asyncio.Event()
        self._check_s = _FIRST_LEAD_S

    @property
    def start_s(self) -> float:
        """When a batch composed now is expected to start running, monotonic seconds."""
        if len(self._ends_s) < self._slots:
            return self._clock.now()
        return max(self._clock.now(), min(self._ends_s.values()))

    @property
    def lead_s(self) -> float:
        """How long before a start its batch is composed: what its last check takes, and a millisecond."""
        return self._check_s + _MARGIN_S

    def checked(self, check_s: float) -> None:
        """The last check of a batch took this long, in seconds."""
        self._check_s += _WEIGHT * (check_s - self._check_s)

    async def nearly_free(self) -> None:
        """Wait until the next batch should be composed."""
        while len(self._ends_s) >= self._slots:
            wait_s = self.start_s - self.lead_s - self._clock.now()
            if wait_s <= 0:
                return
            self._changed.clear()
            timer = self._clock.call_at(self._clock.now() + wait_s, self._changed.set)
            try:
                await self._changed.wait()
            finally:
                timer.cancel()

    async def begin(self, run: object, expected_s: float) -> None:
        """Wait for a free slot, then take it for a run that is expected to last `expected_s` seconds."""
        await self._free.acquire()
        self._ends_s[run] = self._clock.now() + expected_s

    def end(self, run: object) -> None:
        """The run is over: its slot is free."""
        del self._ends_s[run]
        self._free.release()
        self._changed.set()
