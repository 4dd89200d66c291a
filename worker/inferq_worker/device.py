"""One device: what runs on it, which batch waits for it, and when the next one should be composed.

A batch is composed late, only so long before the running one ends as its last check needs: what arrives meanwhile still
rides along, and what has become hopeless is not run. It then waits packed in the session, whose threads hand the device
over among themselves; this is the event loop's picture of it.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from inferq_worker.scheduling import RunningP95

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from inferq_worker.scheduling import Clock

_UNKNOWN_S = float("inf")
_FIRST_CHECK_S = 0.002
_MARGIN_S = 0.001
_SUSPICIOUS, _SUSPICIOUS_S = 3.0, 0.05
"""A run that lasts so many times what was expected, and so many seconds longer, may hang."""


class Run:
    """One batch on the device, or next in line for it. Watches its call of the session.

    Args:
        clock: monotonic seconds.
        changed: to be called when it has begun.
        expected_s: how long it is expected to run, in seconds; None = not known.
        alone: nothing else is on the device meanwhile.
        unwanted: which items of the batch nobody waits for any more.

    Attributes:
        planned_end_s: when it was expected to end as its batch was composed, monotonic seconds; None = not known.
        began_s: when it got the device, monotonic seconds; None while it waits.
        on_begun: called soon after.
    """

    def __init__(
        self,
        clock: Clock,
        changed: Callable[[], None],
        expected_s: float | None,
        *,
        alone: bool,
        unwanted: Callable[[], Collection[int]],
    ) -> None:
        self._clock = clock
        self._changed = changed
        self._unwanted = unwanted
        self.expected_s = expected_s
        self.alone = alone
        self.planned_end_s: float | None = None
        self.began_s: float | None = None
        self.on_begun: Callable[[], None] | None = None

    def unwanted(self) -> Collection[int]:
        """The device is this run's now. Asked on the session's thread."""
        self.began_s = self._clock.now()
        return self._unwanted()

    def started(self) -> None:
        """Told on the event loop."""
        self._changed()
        if self.on_begun is not None:
            self.on_begun()

    @property
    def end_s(self) -> float:
        """When it is expected to end, monotonic seconds; infinite where that cannot be told.

        One that has lasted suspiciously long may last as long again.
        """
        if self.began_s is None or self.expected_s is None or self.suspicious_s is None:
            return _UNKNOWN_S
        now_s = self._clock.now()
        return self.began_s + self.expected_s if now_s < self.suspicious_s else 2 * now_s - self.began_s

    @property
    def suspicious_s(self) -> float | None:
        """When it will have lasted so long that it may hang, monotonic seconds; None where that cannot be told."""
        if self.began_s is None or self.expected_s is None:
            return None
        return self.began_s + max(_SUSPICIOUS * self.expected_s, self.expected_s + _SUSPICIOUS_S)


class Device:
    """What is on one device.

    Args:
        slots: runs at a time; >= 1.
        clock: monotonic seconds.

    Attributes:
        lost: no slot is left.
    """

    def __init__(self, slots: int, clock: Clock) -> None:
        self._clock = clock
        self._slots = slots
        self._runs: dict[Run, None] = {}
        self._changed = asyncio.Event()
        self._check = RunningP95(_FIRST_CHECK_S)
        self._composed_s = 0.0
        self._planned_end_s: float | None = None
        self.lost = asyncio.Event()

    @property
    def start_s(self) -> float:
        """When a batch composed now is expected to start running, monotonic seconds."""
        waiting_s = sum(run.expected_s or 0.0 for run in self._runs if run.began_s is None)
        end_s = self._first_end_s() if len(self._running()) >= self._slots else self._clock.now()
        if end_s == _UNKNOWN_S:
            end_s = self._clock.now()
        return max(self._clock.now(), end_s) + waiting_s + self._composed_s

    def longest_run_s(self) -> float:
        """Age in seconds of the oldest run under way; 0 while none is. May be asked from any thread."""
        now_s = self._clock.now()
        return now_s - min((run.began_s for run in list(self._runs) if run.began_s is not None), default=now_s)

    @property
    def lead_s(self) -> float:
        """How long before a start its batch is composed: what 95 % of last checks take, and a millisecond."""
        return self._check.seconds + _MARGIN_S

    def composed(self, expected_s: float | None) -> None:
        """A batch is composed that is expected to run so long, if known: what arrives now runs after it.

        Holds until it is entered; None or 0 says that it will not be.
        """
        self._composed_s = 0.0
        self._planned_end_s = self.start_s + expected_s if expected_s else None
        self._composed_s = expected_s or 0.0

    def checked(self, check_s: float) -> None:
        """The last check of a batch took this long, in seconds."""
        self._check.observe(check_s)

    async def nearly_free(self) -> None:
        """Wait until the next batch should be composed; for a run's end if none can be told, or the loss of all."""
        while (compose_s := self._compose_s()) > self._clock.now():
            await self._wait(compose_s)

    async def empty(self) -> None:
        """Wait until nothing is on the device, nor waits for it."""
        while self._runs:
            await self._wait(_UNKNOWN_S)

    def enter(
        self, expected_s: float | None, *, alone: bool = False, unwanted: Callable[[], Collection[int]] = tuple
    ) -> Run:
        """Put a batch on the device, or next in line for it.

        Args:
            expected_s: seconds that it will run, None = not known.
            alone: until it ends no other batch is composed; the caller has waited for an `empty` device.
            unwanted: which of its items nobody waits for any more; asked when it begins, on the session's thread.
        """
        self._composed_s = 0.0
        run = Run(self._clock, self._changed.set, expected_s, alone=alone, unwanted=unwanted)
        run.planned_end_s, self._planned_end_s = self._planned_end_s, None
        self._runs[run] = None
        return run

    def end(self, run: Run) -> None:
        """The run is over, or will not take place."""
        self._runs.pop(run, None)
        self._changed.set()

    def lose(self) -> None:
        """A run never ended, and keeps its slot. With the last one `lost` is set: nothing can run any more."""
        self._slots -= 1
        if not self._slots:
            self.lost.set()
        self._changed.set()

    def _compose_s(self) -> float:
        """When the next batch should be composed: none is while one waits for the device, or one has it alone."""
        if not self._slots:
            return self._clock.now()
        if any(run.began_s is None or run.alone for run in self._runs):
            return _UNKNOWN_S
        if len(self._runs) < self._slots:
            return self._clock.now()
        return self._first_end_s() - self.lead_s

    def _running(self) -> list[Run]:
        return [run for run in self._runs if run.began_s is not None]

    def _first_end_s(self) -> float:
        return min((run.end_s for run in self._running()), default=_UNKNOWN_S)

    async def _wait(self, until_s: float) -> None:
        """Until something changes, or that time has come."""
        self._changed.clear()
        timer = None if until_s == _UNKNOWN_S else self._clock.call_at(until_s, self._changed.set)
        try:
            await self._changed.wait()
        finally:
            if timer is not None:
                timer.cancel()
