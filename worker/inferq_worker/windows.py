"""How much of an urgent lane to hold in hand: what the device answers within the usual deadline, no more.

Deadline order holds inside the window only; beyond it the broker is first-in-first-out. A larger window than can be
answered in time would only take jobs away from other workers.
"""

from __future__ import annotations

from collections import deque

from inferq_worker.work import WINDOW_MAX

_SAMPLE = 256
_USUAL = 0.95


class Window:
    """Follows the device's speed and the deadlines of one model's urgent lane.

    Args:
        max_rows: largest batch; the window never holds less than two.
        first_rows: what it holds before anything is measured.
    """

    def __init__(self, *, max_rows: int, first_rows: int) -> None:
        self._least = min(2 * max_rows, WINDOW_MAX)
        self._rows = first_rows
        self._allowances_s: deque[float] = deque(maxlen=_SAMPLE)

    def arrived(self, allowance_s: float) -> None:
        """A job came with this long to its deadline, in seconds."""
        self._allowances_s.append(allowance_s)

    def rows(self, rows_per_s: float | None) -> int:
        """Rows to hold from now on.

        Args:
            rows_per_s: what the device runs when it is busy, by its measured run times; not what it happened to run
                lately, which in quiet times would shrink the window just before the next burst. None = not known.
        """
        if rows_per_s and self._allowances_s:
            ordered = sorted(self._allowances_s)
            usual_s = ordered[int(_USUAL * (len(ordered) - 1))]
            self._rows = max(self._least, min(WINDOW_MAX, round(rows_per_s * usual_s)))
        return self._rows
