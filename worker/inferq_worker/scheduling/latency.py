"""How long a batch of so many rows will run, learned from warm-up and from every run since."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

_WEIGHT = 0.2
"""Weight of a new run in the moving average: five runs forget a change of speed."""


class LatencyTable:
    """Run time in seconds by number of rows: a moving average per size, straight lines between known sizes.

    Before anything is known it predicts None, and who asks falls back on size-or-timeout.
    """

    def __init__(self, seed: Mapping[int, float] | None = None) -> None:
        self._seconds: dict[int, float] = dict(seed or {})
        self._sizes = sorted(self._seconds)

    def observe(self, rows: int, run_s: float) -> None:
        """Learn from one run of `rows` rows that took `run_s` seconds; a run that refused every job teaches nothing."""
        if rows < 1:
            return
        known = self._seconds.get(rows)
        if known is None:
            self._sizes.insert(bisect_left(self._sizes, rows), rows)
            self._seconds[rows] = run_s
        else:
            self._seconds[rows] = known + _WEIGHT * (run_s - known)

    def predict(self, rows: int) -> float | None:
        """Seconds that a batch of `rows` rows is expected to run, or None before anything is known."""
        if not self._sizes:
            return None
        index = bisect_left(self._sizes, rows)
        if index == len(self._sizes):
            largest = self._sizes[-1]
            return self._seconds[largest] * rows / largest
        upper = self._sizes[index]
        if upper == rows or index == 0:
            return self._seconds[upper]
        lower = self._sizes[index - 1]
        share = (rows - lower) / (upper - lower)
        return self._seconds[lower] + share * (self._seconds[upper] - self._seconds[lower])

    def snapshot(self) -> Mapping[int, float]:
        """Rows -> seconds, for `/status`."""
        return {rows: self._seconds[rows] for rows in self._sizes}
