"""How much of an urgent lane to hold in hand: what the device answers within the usual deadline, no more.

Deadline order holds inside the window only; beyond it the broker is first-in-first-out. A larger window than can be
answered in time would only take jobs away from other workers.
"""

from __future__ import annotations

from collections import deque

from inferq_worker.consume import WINDOW_MAX

_SAMPLE = 256
_WEIGHT = 0.2
_USUAL = 0.95


class Window:
    """Follows the measured rate and the deadlines of one model's urgent lane.

    Args:
        max_rows: largest batch; the window never holds less than two.
        first_rows: what it holds before anything is measured.
    """

    def __init__(self, *, max_rows: int, first_rows: int) -> None:
        self._least = min(2 * max_rows, WINDOW_MAX)
        self._rows = first_rows
        self._allowances_s: deque[float] = deque(maxlen=_SAMPLE)
        self._served_rows = 0
        self._rate: float | None = None

    def arrived(self, allowance_s: float) -> None:
        """A job came with this long to its deadline, in seconds."""
        self._allowances_s.append(allowance_s)

    def served(self, rows: int) -> None:
        """So many rows were run."""
        self._served_rows += rows

    def rows(self, elapsed_s: float) -> int:
        """Rows to hold from now on; `elapsed_s` seconds have passed since the last call. Idle times teach nothing."""
        rate, self._served_rows = self._served_rows / elapsed_s, 0
        if rate and self._allowances_s:
            self._rate = rate if self._rate is None else self._rate + _WEIGHT * (rate - self._rate)
            ordered = sorted(self._allowances_s)
            usual_s = ordered[int(_USUAL * (len(ordered) - 1))]
            self._rows = max(self._least, min(WINDOW_MAX, round(self._rate * usual_s)))
        return self._rows
