"""When a model must not be run for a while: counts its runs, opens on failures, closes after a probe.

Pure: time is an argument, nothing waits here. Who pauses lanes and makes probes is `inferq_worker.breakers`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from inferq_worker.runtime.settings import BreakerSettings

_SLICES = 12
_RARE = 0.05
"""The p95 of the run time is above a limit just when more than one run in twenty is."""
LEAST_FAILURES = 3
"""Fewer failed runs are no error rate: one bad job alone in its batch fails a run."""


class State(Enum):
    """Closed: jobs run. Open: nothing runs. Half open: a probe runs, and no job."""

    CLOSED = "closed"
    HALF_OPEN = "half_open"
    OPEN = "open"


class Trip(Enum):
    """What opened it."""

    FAILURES = "failures"
    ERRORS = "errors"
    SLOW = "slow"
    TIMEOUTS = "timeouts"
    BROKEN = "broken"
    PROBE_FAILED = "probe_failed"


@dataclass(slots=True)
class Tally:
    """Runs, and how many of them failed, were slow, were cut off at the time limit (those failed as well)."""

    runs: int = 0
    failed: int = 0
    slow: int = 0
    timed_out: int = 0

    def add(self, other: Tally) -> None:
        """Count the other's runs as well."""
        self.runs += other.runs
        self.failed += other.failed
        self.slow += other.slow
        self.timed_out += other.timed_out


class _Recent:
    """What ran in the last `window_s` seconds, in slices: a run leaves with the slice that it fell into."""

    def __init__(self, window_s: float) -> None:
        self._slice_s = window_s / _SLICES
        self._slices: deque[tuple[int, Tally]] = deque()

    def add(self, run: Tally, now_s: float) -> None:
        number = int(now_s // self._slice_s)
        if not self._slices or self._slices[-1][0] != number:
            self._slices.append((number, Tally()))
        while self._slices[0][0] <= number - _SLICES:
            self._slices.popleft()
        self._slices[-1][1].add(run)

    def total(self, now_s: float) -> Tally:
        """Changes nothing: /status asks from another thread."""
        oldest = int(now_s // self._slice_s) - _SLICES
        total = Tally()
        for number, tally in tuple(self._slices):
            if number > oldest:
                total.add(tally)
        return total


class Breaker:
    """The circuit breaker of one model version; all times are monotonic seconds.

    A run fails when no job of it got an answer. One whose mates were answered is the job's own affair, and so are
    faults of callers, which are not reported here at all.

    Args:
        settings: its limits.
        slow_s: a run that takes longer is slow; > 0.
    """

    def __init__(self, settings: BreakerSettings, *, slow_s: float) -> None:
        self._settings = settings
        self._recent = _Recent(settings.window_s)
        self._failed_s: deque[float] = deque(maxlen=settings.failures_in_row)
        self._closed_s = float("-inf")
        self._again = 0
        self.slow_s = slow_s
        self.state = State.CLOSED
        self.half_open_s: float | None = None
        """When it is half-opened; None while it is not open."""
        self.trip: Trip | None = None
        """What opened it last."""

    def ran(self, now_s: float, *, failed: bool, run_s: float) -> bool:
        """Count a run that came to its end; whether that opened it. Runs that end while it is open do not count."""
        return self._count(Tally(1, int(failed), int(run_s > self.slow_s)), now_s)

    def timed_out(self, now_s: float) -> bool:
        """Count a run that was cut off at its time limit; whether that opened it."""
        return self._count(Tally(1, 1, 1, 1), now_s)

    def broke(self, now_s: float) -> bool:
        """The session broke under a run; whether that opened it."""
        if self.state is not State.CLOSED:
            return False
        self._open(Trip.BROKEN, now_s)
        return True

    def tally(self, now_s: float) -> Tally:
        """What has run within the window since it closed."""
        return self._recent.total(now_s)

    def half_open(self) -> None:
        """Its time is up: a probe may run."""
        if self.state is State.OPEN:
            self.state, self.half_open_s = State.HALF_OPEN, None

    def probed(self, now_s: float, *, passed: bool) -> None:
        """The probe of a half-open breaker came to its end."""
        if self.state is not State.HALF_OPEN:
            return
        if passed:
            self.state, self._closed_s = State.CLOSED, now_s
        else:
            self._open(Trip.PROBE_FAILED, now_s)

    def _count(self, run: Tally, now_s: float) -> bool:
        if self.state is not State.CLOSED:
            return False
        self._recent.add(run, now_s)
        if run.failed:
            self._failed_s.append(now_s)
        else:
            self._failed_s.clear()
        trip = self._judge(now_s)
        if trip is not None:
            self._open(trip, now_s)
        return trip is not None

    def _judge(self, now_s: float) -> Trip | None:
        limits, seen = self._settings, self._recent.total(now_s)
        if seen.timed_out >= limits.timeouts:
            return Trip.TIMEOUTS
        if len(self._failed_s) == limits.failures_in_row and now_s - self._failed_s[0] < limits.window_s:
            return Trip.FAILURES
        if seen.runs < limits.min_runs:
            return None
        if seen.failed >= LEAST_FAILURES and seen.failed > limits.error_ratio * seen.runs:
            return Trip.ERRORS
        return Trip.SLOW if seen.slow > _RARE * seen.runs else None

    def _open(self, trip: Trip, now_s: float) -> None:
        """Longer each time that it opens before it has been closed for a whole window."""
        lasted = self.state is State.CLOSED and now_s - self._closed_s >= self._settings.window_s
        self._again = 0 if lasted else self._again + 1
        wait_s = self._settings.half_open_after_s
        for _ in range(self._again):
            wait_s = min(2 * wait_s, self._settings.half_open_max_s)
            if wait_s == self._settings.half_open_max_s:
                break
        self.state, self.trip, self.half_open_s = State.OPEN, trip, now_s + wait_s
        self._recent = _Recent(self._settings.window_s)
        self._failed_s.clear()
