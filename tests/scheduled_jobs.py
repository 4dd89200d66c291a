"""The least that the scheduler wants to know of a job, and a device with a simple latency; for tests of scheduling."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable


@dataclass(slots=True, eq=False)
class Job:
    """A job, or a step of it with `later_rows` to come."""

    name: str = ""
    rows: int = 1
    payload_bytes: int = 1
    bucket: Hashable = "b"
    lane_rank: int = 0
    arrived_s: float = 0.0
    deadline_s: float | None = None
    alone: bool = False
    serve_late: bool = False
    later_rows: int = 0
    started: bool = False

    @property
    def rows_left(self) -> int:
        return self.rows + self.later_rows

    def rest(self) -> Job | None:
        if not self.later_rows:
            return None
        rows = min(self.rows, self.later_rows)
        return replace(self, rows=rows, later_rows=self.later_rows - rows, started=True)

    def __repr__(self) -> str:
        return self.name


def run_s(rows: int) -> float:
    """The device of the figures: 5 ms, and 0.5 ms for each row."""
    return 0.005 + 0.0005 * rows
