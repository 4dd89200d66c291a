"""How large a batch to aim at: as large as the deadlines allow, for large batches are what a device is efficient at."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_SAMPLE = 256
_AGAIN_AFTER = 64
_TIGHT_SHARE = 0.1
_RUNS_IN_DEADLINE = 2.0
"""A job waits for the run before its own, then rides in its own: two runs must fit (Nexus, l(b) (1 + 1/n), n = 1)."""


class TargetRows:
    """The largest batch of which two fit into the tight end of the deadlines seen lately.

    Args:
        max_rows: largest batch that is possible.
    """

    def __init__(self, max_rows: int) -> None:
        self._max_rows = max_rows
        self._allowances_s: deque[float] = deque(maxlen=_SAMPLE)
        self._seen = 0
        self._tight_s: float | None = None

    def saw(self, allowance_s: float) -> None:
        """A job arrived with this long to its deadline, in seconds."""
        self._allowances_s.append(allowance_s)
        self._seen += 1
        if self._tight_s is None or self._seen % _AGAIN_AFTER == 0:
            ordered = sorted(self._allowances_s)
            self._tight_s = ordered[int(len(ordered) * _TIGHT_SHARE)]

    def rows(self, predict_s: Callable[[int], float | None]) -> int:
        """The target, 1..max_rows; run times must not fall with rows. All of it while nothing is known."""
        tight_s = self._tight_s
        if tight_s is None or predict_s(1) is None:
            return self._max_rows
        low, high = 1, self._max_rows
        while low < high:
            middle = (low + high + 1) // 2
            if _RUNS_IN_DEADLINE * (predict_s(middle) or 0.0) <= tight_s:
                low = middle
            else:
                high = middle - 1
        return low
