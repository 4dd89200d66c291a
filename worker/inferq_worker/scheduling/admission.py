"""What to do with a job on arrival: take it, divert it to a CPU while there is slack, or refuse it early. Pure.

Diverting only when a job expires rescues nothing: what is left of its time is then less than a CPU needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Mapping


class Admission(Enum):
    """The decision about one job."""

    TAKE = "take"
    DIVERT = "divert"
    REFUSE = "refuse"


@runtime_checkable
class ForecastingPolicy(Protocol):
    """A policy that knows what runs before a new job."""

    def rows_ahead(self, due_s: float) -> Mapping[Hashable, int]:
        """Rows by bucket that run before a new job that is due at `due_s`, monotonic seconds; no zeros."""

    def target_rows(self, bucket: Hashable) -> int:
        """Rows of the batches that jobs of a bucket run in; >= 1."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """When the GPU would answer a new job, in monotonic seconds.

    Attributes:
        hopeful_s: if its own batch is no larger than what waits now.
        sober_s: if its own batch is full by the time it runs, as it is under overload.
    """

    hopeful_s: float
    sober_s: float


class Backlog(NamedTuple):
    """What runs of one bucket before a new job.

    Attributes:
        rows: those that run before.
        target_rows: of a batch of this bucket; >= 1.
        run_s: rows of this bucket -> run seconds.
    """

    rows: int
    target_rows: int
    run_s: Callable[[int], float]


def forecast(
    *, rows: int, step_rows: int, own: Backlog, others: Iterable[Backlog] = (), start_s: float, after_s: float
) -> Forecast:
    """Predict the answer to a job that arrives now.

    Args:
        rows: all its rows.
        step_rows: its largest step: with more rows it goes in several.
        own: what runs before it of its own bucket; it rides with the last of that.
        others: what runs before it of other buckets, with which it cannot ride.
        start_s: when the device is free, monotonic seconds.
        after_s: from the end of a run to the answer, seconds.
    """
    start_s += after_s
    before = [_runs(one) for one in others]
    hopeful_s = start_s + sum(hopeful for hopeful, _ in before)
    sober_s = start_s + sum(sober for _, sober in before)
    if rows > step_rows:
        own_hopeful_s, own_sober_s = _in_steps(rows, step_rows, own)
    else:
        own_hopeful_s, own_sober_s = _in_one(rows, own)
    return Forecast(hopeful_s + own_hopeful_s, sober_s + own_sober_s)


def _runs(backlog: Backlog) -> tuple[float, float]:
    """Seconds that a backlog takes: if its last batch is no larger than what waits, and if it is full by then."""
    rows, target_rows, run_s = backlog
    batches, rest = divmod(rows, target_rows)
    full_s = run_s(target_rows)
    rest_s = run_s(rest) if rest else 0.0
    return batches * full_s + rest_s, batches * full_s + (full_s if batches and rest else rest_s)


def _in_one(rows: int, own: Backlog) -> tuple[float, float]:
    """The same until a job has run that rides with the last rows before it."""
    batches, rest = divmod(own.rows, own.target_rows)
    before_s = batches * own.run_s(own.target_rows)
    small_s = own.run_s(max(rows, min(own.target_rows, rest + rows)))
    return before_s + small_s, before_s + (own.run_s(max(rows, own.target_rows)) if batches else small_s)


def _in_steps(rows: int, step_rows: int, own: Backlog) -> tuple[float, float]:
    """The same until all steps of a large job have run; the last may share its batch."""
    hopeful_s, sober_s = _runs(own)
    steps, last_rows = divmod(rows, step_rows)
    steps_s = steps * own.run_s(step_rows)
    if last_rows:
        hopeful_s += own.run_s(last_rows)
        sober_s += own.run_s(max(last_rows, own.target_rows))
    return hopeful_s + steps_s, sober_s + steps_s


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
