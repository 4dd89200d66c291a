"""How long a batch of so many rows will run, by shape bucket: learned from warm-up and from every run since."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping

_WEIGHT = 0.15
"""Weight of a new run in the speed of its bucket: half a dozen runs forget a change of speed."""
_CURVE_WEIGHT = 0.02
"""Weight of a new run in the shape of the curve: what makes all sizes slower is speed, not shape."""
_OUTLIER = 3.0
"""A run that took longer than this many times its expectation counts as this many: one hiccup does not move a mean."""
_P95_DEVIATIONS = 2.06
"""p95 of a normal distribution in mean absolute deviations: 1.645 sigma, and sigma = 1.253 deviations."""
_DOUBT, _DOUBT_EVERY_S = 0.8, 1.0
"""Predictions that turn jobs away and that no run confirms lose a fifth each second."""
_LEAST_S = 1e-9
_MOST_BUCKETS = 256
_P95_VALUES = 100
"""So many runs are seconds to a minute of work, and a hiccup is forgotten after them."""
_P95_FIRST = 20
"""The first guess counts as so many, so that one outlier at the start moves nothing."""


@dataclass(slots=True)
class _Speed:
    """How much slower than the curve a bucket runs: moving mean, and mean absolute deviation as a share of it."""

    factor: float = 1.0
    deviation: float = 0.0

    def learn(self, ratio: float) -> None:
        ratio = min(ratio, _OUTLIER * self.factor)
        self.deviation += _WEIGHT * (abs(ratio / self.factor - 1.0) - self.deviation)
        self.factor += _WEIGHT * (ratio - self.factor)


class LatencyTable:
    """Run time in seconds by rows and shape bucket: mean and p95, from one curve and a speed for each bucket.

    The curve is the warm-up's, straight lines between its sizes. Runs teach above all how fast a bucket is at the
    moment, from every size at once, so that a size that has not run lately is predicted as well as the others, and
    noise in one size does not make small batches look slower than large ones. Before anything is known it predicts
    None, and who asks falls back on size-or-timeout.

    Args:
        seed: rows -> seconds from the warm-up.
        padded: rows -> rows that the device computes for them; None = no more than those.
    """

    def __init__(self, seed: Mapping[int, float] | None = None, padded: Callable[[int], int] | None = None) -> None:
        self._padded = padded or _unpadded
        self._curve: dict[int, float] = {}
        for rows, run_s in sorted((seed or {}).items()):
            self._curve[rows] = max(run_s, *self._curve.values(), _LEAST_S)
        self._sizes = sorted(self._curve)
        self._fixed = bool(self._curve)
        self._speeds: dict[Hashable, _Speed] = {}
        self._doubted_s: dict[Hashable, float] = {}

    def observe(self, rows: int, run_s: float, bucket: Hashable = None) -> float | None:
        """Learn from one run; a run that refused every job (0 rows) teaches nothing.

        Returns:
            How wrong the prediction was, as a ratio: 0.5 means that the run took one and a half times as long. None
            if there was none.
        """
        if rows < 1:
            return None
        run_s, rows = max(run_s, _LEAST_S), self._padded(rows)
        predicted_s = self.predict(rows, bucket)
        self._doubted_s.pop(bucket, None)
        speed = self._speed(bucket)
        if predicted_s is None or (not self._fixed and rows not in self._curve):
            insort(self._sizes, rows)
            self._curve[rows] = self._between(rows, run_s / speed.factor)
        else:
            speed.learn(run_s / (predicted_s / speed.factor))
            self._bend(rows, run_s / speed.factor)
        return None if predicted_s is None else run_s / predicted_s - 1.0

    def predict(self, rows: int, bucket: Hashable = None) -> float | None:
        """Mean seconds of a batch of `rows` rows, or None before anything is known."""
        if not self._sizes:
            return None
        speed = self._speeds.get(bucket)
        return _on_lines(self._curve, self._sizes, self._padded(rows)) * (1.0 if speed is None else speed.factor)

    def p95(self, rows: int, bucket: Hashable = None) -> float | None:
        """Seconds that 95 % of such batches do not exceed, or None before anything is known."""
        mean_s = self.predict(rows, bucket)
        speed = self._speeds.get(bucket)
        return mean_s if mean_s is None or speed is None else mean_s * (1.0 + _P95_DEVIATIONS * speed.deviation)

    def doubt(self, now_s: float, bucket: Hashable = None) -> bool:
        """A job is turned away because of these predictions: while no run confirms them they sink.

        What is turned away teaches nothing. Without doubt, a few slow runs, or a warm-up on a busy machine, make a
        worker turn every job away for good.

        Args:
            now_s: monotonic seconds; the first second after a run is free of doubt.
            bucket: of the job.

        Returns:
            Whether predictions changed.
        """
        if now_s - self._doubted_s.setdefault(bucket, now_s) < _DOUBT_EVERY_S:
            if len(self._doubted_s) > _MOST_BUCKETS:
                del self._doubted_s[next(iter(self._doubted_s))]
            return False
        self._doubted_s[bucket] = now_s
        speed = self._speed(bucket)
        speed.factor *= _DOUBT
        speed.deviation *= _DOUBT
        return True

    def snapshot(self) -> Mapping[int, float]:
        """Rows -> mean seconds at the latest speed of the bucket that came last, for `/status`."""
        bucket = next(reversed(self._speeds.copy()), None)
        return {rows: self.predict(rows, bucket) or 0.0 for rows in tuple(self._sizes)}

    def _speed(self, bucket: Hashable) -> _Speed:
        """The bucket's speed, the latest last; shapes come from clients, so only so many are remembered."""
        speed = self._speeds.pop(bucket, None) or _Speed()
        self._speeds[bucket] = speed
        if len(self._speeds) > _MOST_BUCKETS:
            oldest = next(iter(self._speeds))
            del self._speeds[oldest]
            self._doubted_s.pop(oldest, None)
        return speed

    def _bend(self, rows: int, run_s: float) -> None:
        """Let a known size of the curve follow slowly; the curve never falls with rows."""
        known_s = self._curve.get(rows)
        if known_s is not None:
            bent_s = known_s + _CURVE_WEIGHT * (min(run_s, _OUTLIER * known_s) - known_s)
            self._curve[rows] = self._between(rows, bent_s)

    def _between(self, rows: int, run_s: float) -> float:
        place = self._sizes.index(rows)
        least_s = self._curve[self._sizes[place - 1]] if place else _LEAST_S
        most_s = self._curve[self._sizes[place + 1]] if place + 1 < len(self._sizes) else float("inf")
        return min(max(run_s, least_s), most_s)


class RunningP95:
    """What 95 % of the latest values do not exceed, in seconds.

    Args:
        first_s: the estimate before anything was seen; > 0.

    Attributes:
        seconds: the estimate.
    """

    def __init__(self, first_s: float) -> None:
        self.seconds = first_s
        self._first_s = first_s
        self._latest_s: deque[float] = deque([first_s] * _P95_FIRST, maxlen=_P95_VALUES)

    def observe(self, value_s: float) -> None:
        """Take a value in."""
        self._latest_s.append(max(value_s, 0.0))
        self.seconds = sorted(self._latest_s)[ceil(0.95 * len(self._latest_s)) - 1]

    def doubt(self) -> None:
        """No value confirms the estimate any more: near the first one, from above."""
        self.seconds = min(self.seconds, max(self._first_s, self.seconds * _DOUBT))
        self._latest_s = deque((min(value_s, self.seconds) for value_s in self._latest_s), maxlen=_P95_VALUES)


def _unpadded(rows: int) -> int:
    return rows


def _on_lines(seconds: Mapping[int, float], sizes: list[int], rows: int) -> float:
    """Between two known sizes on the straight line, below the first like the first, above the last in proportion."""
    index = bisect_left(sizes, rows)
    if index == len(sizes):
        return seconds[sizes[-1]] * rows / sizes[-1]
    upper = sizes[index]
    if upper == rows or index == 0:
        return seconds[upper]
    lower = sizes[index - 1]
    share = (rows - lower) / (upper - lower)
    return seconds[lower] + share * (seconds[upper] - seconds[lower])
