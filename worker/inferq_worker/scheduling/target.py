"""How large a batch to aim at: large ones are what a device is efficient at, but jobs must survive two of them."""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_SAMPLE_JOBS = 256
_AGAIN_AFTER_JOBS = 128
_LEFT_OUT = (0.0, 0.05, 0.1, 0.2, 0.4, 0.7)
_RUNS_IN_DEADLINE = (2.0, 1.2)
"""A job waits for the run before its own, then rides in its own: two runs must fit (Nexus, l(b) (1 + 1/n), n = 1).
Where no deadline allows that, as many rows as can be in time if the device is nearly free when they come."""
_SLACK_S = 1e-6
"""Deadlines are sums of floats."""


class TargetRows:
    """The size at which the device answers the most jobs in time, given the deadlines seen lately.

    A larger batch has more throughput, and fewer jobs that can bear it. The product decides, so that a few jobs in a
    hurry cannot make all batches small (nor a single job with a hopeless deadline make them single rows).

    """

    def __init__(self) -> None:
        self._allowances_s: deque[float] = deque(maxlen=_SAMPLE_JOBS)
        self._ordered_s: list[float] = []
        self._seen = self._again_at = 0

    def saw(self, allowance_s: float) -> bool:
        """A job arrived with this long to its deadline, in seconds; returns whether answers change from now on."""
        self._allowances_s.append(allowance_s)
        self._seen += 1
        if self._seen < self._again_at:
            return False
        # Often at first, so that a fresh worker does not aim for long by what its first job happened to be.
        self._again_at = self._seen + min(self._seen, _AGAIN_AFTER_JOBS)
        self._ordered_s = sorted(self._allowances_s)
        return True

    def forget(self) -> bool:
        """No job with a deadline comes any more; returns whether answers change from now on."""
        known = bool(self._ordered_s)
        self._allowances_s.clear()
        self._ordered_s = []
        self._seen = self._again_at = 0
        return known

    def rows(self, predict_s: Callable[[int], float | None], max_rows: int) -> int:
        """The target, 1..max_rows; run times must not fall with rows. All of it while nothing is known."""
        if not self._ordered_s or predict_s(1) is None:
            return max_rows
        most = (self._most_in_time(predict_s, runs, max_rows) for runs in _RUNS_IN_DEADLINE)
        return next(filter(None, most), max_rows)

    def _most_in_time(self, predict_s: Callable[[int], float | None], runs: float, max_rows: int) -> int:
        best_rows, best_score = 0, 0.0
        jobs = len(self._ordered_s)
        for left_out in sorted({int(share * jobs) for share in _LEFT_OUT}):
            limit_s = (self._ordered_s[left_out] + _SLACK_S) / runs
            rows = largest(partial(_runs_within, predict_s, limit_s), max_rows)
            score = (jobs - left_out) * rows / max(predict_s(rows) or 0.0, _SLACK_S) if rows else 0.0
            if score > best_score:
                best_rows, best_score = rows, score
        return best_rows


def _runs_within(predict_s: Callable[[int], float | None], limit_s: float, rows: int) -> bool:
    return (predict_s(rows) or 0.0) <= limit_s


def largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest of 1..most that fits, given that with a number all smaller ones fit; 0 if none does."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low
