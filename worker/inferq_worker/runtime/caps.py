"""How many rows of a shape find memory on the device: learned from runs that did not, and probed upward later.

Shapes come from clients, so only the latest caps are remembered. Used by the threads of a session and, for its batches,
by the scheduler.
"""

import threading
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from inferq_worker.runtime.interface import RunFailed

_FIRST_PATIENCE_RUNS, _MOST_PATIENCE_RUNS = 16, 4096
_MOST_CAPS = 256
_TRIES = 2
"""So many failures of one size, with no success of it, speak of the size and not of a single item."""


@dataclass(slots=True)
class _Cap:
    """Most rows that found memory, the nearly full runs since that was learned, and how many to wait for."""

    rows: int
    good_runs: int = 0
    patience_runs: int = _FIRST_PATIENCE_RUNS


class RowCaps:
    """Most rows of one native run by shape, padding included. Safe from several threads.

    After a number of good runs that were more than half full the next size up is allowed. If that fails too, twice as
    many good runs must come before the next attempt.

    Args:
        max_rows: of a shape that nothing is known of; >= 1.
        buckets: sizes that runs are padded to, ascending; empty = any size.
    """

    def __init__(self, max_rows: int, buckets: Sequence[int] = ()) -> None:
        self._max_rows = max_rows
        self._buckets = tuple(buckets)
        self._caps: dict[Hashable, _Cap] = {}
        self._lock = threading.Lock()

    def limit(self, shape: Hashable) -> int:
        """Most rows of the next run; above the cap when it is time to try more."""
        if not self._caps:
            return self._max_rows
        with self._lock:
            cap = self._caps.get(shape)
            if cap is None:
                return self._max_rows
            return cap.rows if cap.good_runs < cap.patience_runs else self._above(cap.rows)

    def fitted(self, shape: Hashable, rows: int) -> None:
        """A run of so many rows found memory at once."""
        if not self._caps:
            return
        with self._lock:
            cap = self._caps.get(shape)
            if cap is None:
                return
            if rows >= self._max_rows:
                del self._caps[shape]
            elif rows > cap.rows:
                self._caps[shape] = _Cap(rows)
            elif 2 * rows > cap.rows:
                cap.good_runs += 1

    def overflowed(self, shape: Hashable, *, failed: int, fits: int) -> None:
        """A run of `failed` rows found no memory, all of its rows did in runs of at most `fits`; 1 <= fits < failed."""
        with self._lock:
            cap = self._caps.pop(shape, None)
            if cap is None:
                self._caps[shape] = _Cap(fits)
            else:
                # Only a size that failed lowers the cap: what is left over of a larger run may be any size below it.
                rows = fits if failed <= cap.rows else max(fits, cap.rows)
                self._caps[shape] = _Cap(rows, patience_runs=min(2 * cap.patience_runs, _MOST_PATIENCE_RUNS))
            if len(self._caps) > _MOST_CAPS:
                del self._caps[next(iter(self._caps))]

    def snapshot(self) -> Mapping[Hashable, int]:
        """Shape -> cap in rows, of the shapes that have one; from any thread."""
        with self._lock:
            return {shape: cap.rows for shape, cap in self._caps.items()}

    def _above(self, rows: int) -> int:
        larger = next((size for size in self._buckets if size > rows), 2 * rows)
        return min(larger, self._max_rows)


class Trial:
    """Which sizes found memory, while one packed run is answered in as many native runs as that takes.

    Args:
        limit_rows: a larger run is known to fail.
    """

    def __init__(self, limit_rows: int) -> None:
        self._limit_rows = limit_rows
        self._failed: Counter[int] = Counter()
        self.fits = 0

    @property
    def failed(self) -> int:
        """The smallest size that found no memory, in rows; 0 if all did."""
        return min(self._failed, default=0)

    def check(self, rows: int) -> None:
        """Raise `RunFailed` instead of trying what will fail."""
        if rows > self._limit_rows or (rows > self.fits and self._failed[rows] >= _TRIES):
            raise RunFailed("out_of_memory", f"{rows} rows do not find memory at a time")

    def fitted(self, rows: int) -> None:
        """A run of so many rows succeeded."""
        self.fits = max(self.fits, rows)

    def overflowed(self, rows: int) -> None:
        """A run of so many rows found no memory."""
        self._failed[rows] += 1
