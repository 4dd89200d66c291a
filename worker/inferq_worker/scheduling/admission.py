"""What to do with a job on arrival: take it, divert it to a CPU while there is slack, or refuse it early. Pure.

Diverting only when a job expires rescues nothing: what is left of its time is then less than a CPU needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable


class Admission(Enum):
    """The decision about one job."""

    TAKE = "take"
    DIVERT = "divert"
    REFUSE = "refuse"


@runtime_checkable
class ForecastingPolicy(Protocol):
    """A policy that knows what runs before a new job."""

    def rows_ahead(self, due_s: float) -> int:
        """Rows that run before a new job that is due at `due_s`, monotonic seconds."""

    def target_rows(self, bucket: Hashable) -> int:
        """Rows of the batches that they run in; >= 1."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """When the GPU would answer a new job, in monotonic seconds.

    Attributes:
        hopeful_s: if its own batch is no larger than what waits now.
        sober_s: if its own batch is full by the time it runs, as it is under overload.
    """

    hopeful_s: float
    sober_s: float


def forecast(
    *, rows_ahead: int, rows: int, target_rows: int, start_s: float, run_s: Callable[[int], float], after_s: float
) -> Forecast:
    """Predict the answer to a job that arrives now.

    Args:
        rows_ahead: rows that run before it.
        rows: its own; with more than a batch it runs alone.
        target_rows: rows of the batches before it.
        start_s: when the device is free, monotonic seconds.
        run_s: rows -> run seconds.
        after_s: from the end of a run to the answer, seconds.
    """
    batches, rest = divmod(rows_ahead, target_rows)
    before_s = start_s + batches * run_s(target_rows) + after_s
    own_s = run_s(max(rows, min(target_rows, rest + rows)))
    return Forecast(before_s + own_s, before_s + (run_s(max(rows, target_rows)) if batches else own_s))


def decide(gpu: Forecast, *, cpu_s: float | None, deadline_s: float, may_divert: bool, serve_late: bool) -> Admission:
    """Decide about a job with a deadline.

    Args:
        gpu: when the GPU would answer.
        cpu_s: when a CPU worker would, None if none lives.
        deadline_s: monotonic seconds.
        may_divert: the job allows the fallback, and has not come from there.
        serve_late: the caller wants a late answer rather than none.
    """
    if gpu.sober_s <= deadline_s:
        return Admission.TAKE
    if may_divert and cpu_s is not None and cpu_s <= deadline_s:
        return Admission.DIVERT
    if gpu.hopeful_s <= deadline_s or serve_late:
        return Admission.TAKE
    return Admission.REFUSE
