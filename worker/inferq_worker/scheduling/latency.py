"""How long a batch of so many rows will run, by shape bucket: learned from warm-up and from every run since."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

_WEIGHT = 0.2
"""Weight of a new run in the moving averages: five runs forget a change of speed."""
_OUTLIER = 3.0
"""A run that took longer than this many times its expectation counts as this many: one hiccup does not move a mean."""
_P95_DEVIATIONS = 2.06
"""p95 of a normal distribution in mean absolute deviations: 1.645 sigma, and sigma = 1.253 deviations."""

_MOST_BUCKETS = 1024
"""Shapes come from clients; of more than so many the one that was met first is forgotten."""
_DOUBT = 0.1
_DOUBT_EVERY_S = 1.0
"""Predictions that turn jobs away and that no run confirms lose a tenth of their distance to the start each second."""
_P95_STEP, _P95_LEAST_S = 0.2, 0.0002


@dataclass(slots=True)
class _Estimate:
    """Moving mean and mean absolute deviation of one size, in seconds."""

    mean_s: float
    deviation_s: float = 0.0

    def learn(self, run_s: float) -> None:
        run_s = min(run_s, _OUTLIER * self.mean_s) if self.mean_s else run_s
        self.deviation_s += _WEIGHT * (abs(run_s - self.mean_s) - self.deviation_s)
        self.mean_s += _WEIGHT * (run_s - self.mean_s)


class LatencyTable:
    """Run time in seconds by rows and shape bucket: mean and p95, straight lines between known sizes.

    A bucket that has not run yet is expected to be as fast as the warm-up; one that has run at some sizes is expected
    to differ from the warm-up by the same factor at the others. Before anything is known it predicts None, and who
    asks falls back on size-or-timeout.

    Args:
        seed: rows -> seconds from the warm-up.
    """

    def __init__(self, seed: Mapping[int, float] | None = None) -> None:
        self._seed = dict(seed or {})
        self._seed_sizes = sorted(self._seed)
        self._buckets: dict[Hashable, dict[int, _Estimate]] = {}
        self._factors: dict[Hashable, float] = {}
        self._doubted_s: dict[Hashable, float] = {}

    def observe(self, rows: int, run_s: float, bucket: Hashable = None) -> float | None:
        """Learn from one run; a run that refused every job (0 rows) teaches nothing.

        Returns:
            How wrong the prediction was, as a ratio: 0.5 means that the run took one and a half times as long. None
            if there was none.
        """
        if rows < 1:
            return None
        predicted_s = self.predict(rows, bucket)
        self._doubted_s.pop(bucket, None)
        if bucket not in self._buckets and len(self._buckets) >= _MOST_BUCKETS:
            self._forget(next(iter(self._buckets)))
        known = self._buckets.setdefault(bucket, {})
        if rows in known:
            known[rows].learn(run_s)
        elif rows in self._seed and predicted_s:
            known[rows] = _Estimate(predicted_s)
            known[rows].learn(run_s)
        else:
            known[rows] = _Estimate(min(run_s, _OUTLIER * predicted_s) if predicted_s else run_s)
        self._learn_factor(rows, known[rows].mean_s, bucket)
        return run_s / predicted_s - 1.0 if predicted_s else None

    def doubt(self, now_s: float, bucket: Hashable = None) -> bool:
        """A job is turned away because of these predictions: while no run confirms them they near the warm-up's.

        What is turned away teaches nothing. Without doubt, a few slow runs make a worker turn every job away for good.

        Args:
            now_s: monotonic seconds; the first second after a run is free of doubt.
            bucket: of the job.

        Returns:
            Whether predictions changed.
        """
        if bucket not in self._buckets:
            bucket = None
        if now_s - self._doubted_s.setdefault(bucket, now_s) < _DOUBT_EVERY_S:
            return False
        self._doubted_s[bucket] = now_s
        for rows, estimate in self._buckets.get(bucket, {}).items():
            seeded_s = _on_lines(self._seed, self._seed_sizes, rows) or 0.0
            estimate.mean_s -= _DOUBT * max(0.0, estimate.mean_s - seeded_s)
            estimate.deviation_s -= _DOUBT * estimate.deviation_s
        if bucket in self._factors:
            self._factors[bucket] -= _DOUBT * max(0.0, self._factors[bucket] - 1.0)
        return True

    def predict(self, rows: int, bucket: Hashable = None) -> float | None:
        """Mean seconds of a batch of `rows` rows, or None before anything is known."""
        known = self._buckets.get(bucket)
        if known is not None and rows in known:
            return known[rows].mean_s
        seeded_s = _on_lines(self._seed, self._seed_sizes, rows)
        if seeded_s is not None:
            return seeded_s * self._factors.get(bucket, 1.0)
        if known:
            return _on_lines({size: estimate.mean_s for size, estimate in known.items()}, sorted(known), rows)
        return None

    def p95(self, rows: int, bucket: Hashable = None) -> float | None:
        """Seconds that 95 % of such batches do not exceed, or None before anything is known."""
        mean_s = self.predict(rows, bucket)
        if mean_s is None:
            return None
        known = self._buckets.get(bucket)
        if not known:
            return mean_s
        nearest = known.get(rows) or known[min(known, key=lambda size: abs(size - rows))]
        return mean_s + _P95_DEVIATIONS * nearest.deviation_s * (mean_s / nearest.mean_s if nearest.mean_s else 1.0)

    def snapshot(self) -> Mapping[int, float]:
        """Rows -> mean seconds, the warm-up's sizes and those that ran, for `/status`. May be asked from any thread."""
        ran = {rows: one.mean_s for known in list(self._buckets.values()) for rows, one in list(known.items())}
        return dict(sorted((self._seed | ran).items()))

    def _forget(self, bucket: Hashable) -> None:
        for kept in (self._buckets, self._factors, self._doubted_s):
            kept.pop(bucket, None)

    def _learn_factor(self, rows: int, mean_s: float, bucket: Hashable) -> None:
        seeded_s = _on_lines(self._seed, self._seed_sizes, rows)
        if seeded_s:
            factor = self._factors.get(bucket, mean_s / seeded_s)
            self._factors[bucket] = factor + _WEIGHT * (mean_s / seeded_s - factor)


class RunningP95:
    """What 95 % of the values seen lately do not exceed, in seconds, without keeping them.

    A step up for each value above the estimate and a nineteenth of it down for each below: it rests where one in twenty
    lies above.

    Args:
        first_s: the estimate before anything was seen; > 0.
    """

    def __init__(self, first_s: float) -> None:
        self.seconds = first_s
        self._first_s = first_s

    def observe(self, value_s: float) -> None:
        """Take a value in."""
        step_s = _P95_STEP * max(self.seconds, _P95_LEAST_S)
        self.seconds += 0.95 * step_s if value_s > self.seconds else -0.05 * step_s

    def doubt(self) -> None:
        """No value confirms the estimate any more: near the first one, from above."""
        self.seconds -= _DOUBT * max(0.0, self.seconds - self._first_s)


def _on_lines(seconds: Mapping[int, float], sizes: list[int], rows: int) -> float | None:
    """Between two known sizes on the straight line, below the first like the first, above the last in proportion."""
    if not sizes:
        return None
    index = bisect_left(sizes, rows)
    if index == len(sizes):
        return seconds[sizes[-1]] * rows / sizes[-1]
    upper = sizes[index]
    if upper == rows or index == 0:
        return seconds[upper]
    lower = sizes[index - 1]
    share = (rows - lower) / (upper - lower)
    return seconds[lower] + share * (seconds[upper] - seconds[lower])
