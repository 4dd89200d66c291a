"""One device: how many runs it takes at a time, and when it is expected to take the next.

The next batch is composed late, only so long before the running one ends as its last check needs: what arrives
meanwhile still rides along, and what has become hopeless is not run.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from inferq_worker.scheduling import Clock

_UNKNOWN_S = float("inf")
_FIRST_LEAD_S = 0.002
_MARGIN_S = 0.001
_WEIGHT = 0.1


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """One run on the device; monotonic seconds."""

    started_s: float
    slots: int = 1


class Device:
    """The slots of one device.

    Args:
        slots: runs at a time; >= 1.
        clock: monotonic seconds.
    """

    def __init__(self, slots: int, clock: Clock) -> None:
        self._clock = clock
        self._free = asyncio.Semaphore(slots)
        self._turn = asyncio.Lock()
        self._slots = slots
        self._ends_s: dict[Run, float] = {}
        self._changed = asyncio.Event()
        self._check_s = _FIRST_LEAD_S
        self._composed_s = 0.0

    @property
    def start_s(self) -> float:
        """When a batch composed now is expected to start running, monotonic seconds."""
        end_s = min(self._ends_s.values(), default=_UNKNOWN_S)
        if self._taken < self._slots or end_s == _UNKNOWN_S:
            return self._clock.now() + self._composed_s
        return max(self._clock.now(), end_s) + self._composed_s

    @property
    def _taken(self) -> int:
        return sum(run.slots for run in self._ends_s)

    def longest_run_s(self) -> float:
        """Age in seconds of the oldest run under way; 0 while none is. May be asked from any thread."""
        now_s = self._clock.now()
        return now_s - min((run.started_s for run in list(self._ends_s)), default=now_s)

    @property
    def lead_s(self) -> float:
        """How long before a start its batch is composed: what its last check takes, and a millisecond."""
        return self._check_s + _MARGIN_S

    def composed(self, expected_s: float | None) -> None:
        """A batch is composed that is expected to run so long, if known: what arrives now runs after it.

        Holds until it begins; None or 0 says that it will not.
        """
        self._composed_s = expected_s or 0.0

    def checked(self, check_s: float) -> None:
        """The last check of a batch took this long, in seconds."""
        self._check_s += _WEIGHT * (check_s - self._check_s)

    async def nearly_free(self) -> None:
        """Wait until the next batch should be composed; until a slot is free if no run's end can be told."""
        while self._taken >= self._slots:
            compose_s = min(self._ends_s.values()) - self.lead_s
            if compose_s <= self._clock.now():
                return
            self._changed.clear()
            timer = None if compose_s == _UNKNOWN_S else self._clock.call_at(compose_s, self._changed.set)
            try:
                await self._changed.wait()
            finally:
                if timer is not None:
                    timer.cancel()

    async def begin(self, expected_s: float | None, *, alone: bool = False) -> Run:
        """Wait for a free slot, then take it for a run that is expected to last `expected_s` seconds, if known.

        Args:
            expected_s: seconds, None = not known.
            alone: wait for all slots and take them all: a death during the run is then nobody else's.
        """
        slots = self._slots if alone else 1
        taken = 0
        try:
            async with self._turn:
                while taken < slots:
                    await self._free.acquire()
                    taken += 1
        except asyncio.CancelledError:
            self._give_back(taken)
            raise
        self._composed_s = 0.0
        run = Run(self._clock.now(), slots)
        self._ends_s[run] = _UNKNOWN_S if expected_s is None else run.started_s + expected_s
        return run

    def end(self, run: Run) -> None:
        """The run is over: its slot is free."""
        del self._ends_s[run]
        self._give_back(run.slots)
        self._changed.set()

    def _give_back(self, slots: int) -> None:
        for _ in range(slots):
            self._free.release()
