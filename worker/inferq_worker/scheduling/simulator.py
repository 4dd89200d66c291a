"""The scheduler in simulated time: the same policy and admission code, a device that follows a latency table.

Models what decides goodput around them too: the window beyond which the broker is first-in-first-out, the late
hand-over of the next batch, and CPU lanes that jobs are diverted to.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from inferq_worker.scheduling.admission import Admission, decide, forecast

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Sequence

    from inferq_worker.scheduling.batch import Batch, Policy

_NEVER_S = float("inf")


@dataclass(frozen=True, slots=True)
class Arrival:
    """One job of a trace: when it comes, and its deadline from then on; seconds."""

    at_s: float
    allowance_s: float | None = None
    rows: int = 1
    lane_rank: int = 0
    bucket: Hashable = 0
    serve_late: bool = False


@dataclass(slots=True, eq=False)
class SimulatedJob:
    """A job in simulated time."""

    rows: int
    payload_bytes: int
    bucket: Hashable
    lane_rank: int
    arrived_s: float
    deadline_s: float | None
    serve_late: bool
    alone: bool = False


@dataclass(frozen=True, slots=True)
class Setup:
    """What is simulated.

    Attributes:
        policy: makes the policy under test.
        run_s: rows -> seconds that a run takes.
        after_s: from the end of a run to the answer.
        hand_over_s: the next batch is composed this long before the running one ends; the device waits if it is 0.
        gap_s: the device idles this long between two runs (collation that does not overlap, a round trip).
        window_jobs: jobs in hand at a time; the rest waits in the broker, first in first out. None = no limit.
        cpu_lanes: jobs that CPU workers run at a time; 0 = no diversion.
        cpu_run_s: seconds of one job on a CPU lane.
        admits: whether jobs are judged on arrival.
    """

    policy: Callable[[], Policy[SimulatedJob]]
    run_s: Callable[[int], float]
    after_s: float = 0.0
    hand_over_s: float = 0.0
    gap_s: float = 0.0
    window_jobs: int | None = None
    cpu_lanes: int = 0
    cpu_run_s: float = 0.0
    admits: bool = True


@dataclass(slots=True)
class Report:
    """What came of it. Latencies in seconds, of answered jobs, unsorted."""

    offered: int = 0
    in_time: int = 0
    late: int = 0
    by_cpu: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    batch_rows: Counter[int] = field(default_factory=Counter)
    latencies_s: list[float] = field(default_factory=list)
    busy_s: float = 0.0
    ended_s: float = 0.0

    @property
    def goodput(self) -> float:
        """Share of the offered jobs that were answered by their deadline; 0..1."""
        return self.in_time / self.offered if self.offered else 1.0

    def quantile_s(self, share: float) -> float:
        """Latency that this share of the answered jobs does not exceed, in seconds."""
        ordered = sorted(self.latencies_s)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def simulate(trace: Iterable[Arrival], setup: Setup) -> Report:
    """Replay a trace, sorted by time, through the scheduler."""
    return _Simulation(setup).run(trace)


class _Simulation:
    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._policy = setup.policy()
        self._report = Report()
        self._queued: deque[SimulatedJob] = deque()
        self._in_hand = 0
        self._free_s = 0.0
        self._cpu_free_s = [0.0] * setup.cpu_lanes

    def run(self, trace: Iterable[Arrival]) -> Report:
        arrivals = iter(trace)
        coming = next(arrivals, None)
        now_s = 0.0
        while True:
            ready_s = max(now_s, self._free_s - self._setup.hand_over_s)
            wake_s = self._step(ready_s) if coming is None or ready_s < coming.at_s else ready_s
            if coming is None and wake_s == _NEVER_S:
                break
            if coming is not None and coming.at_s <= wake_s:
                now_s = max(now_s, coming.at_s)
                self._arrive(coming)
                coming = next(arrivals, None)
            else:
                now_s = wake_s
        self._report.ended_s = max(now_s, self._free_s)
        return self._report

    def _arrive(self, arrival: Arrival) -> None:
        self._report.offered += 1
        due_s = None if arrival.allowance_s is None else arrival.at_s + arrival.allowance_s
        job = SimulatedJob(arrival.rows, 0, arrival.bucket, arrival.lane_rank, arrival.at_s, due_s, arrival.serve_late)
        if self._setup.window_jobs is not None and self._in_hand >= self._setup.window_jobs:
            self._queued.append(job)
        else:
            self._admit(job, arrival.at_s)

    def _admit(self, job: SimulatedJob, now_s: float) -> None:
        decision = self._judge(job, now_s)
        if decision is Admission.TAKE:
            self._in_hand += 1
            self._policy.add(job)
        elif decision is Admission.REFUSE:
            self._report.dropped["refused"] += 1
        else:
            finish_s = heapq.heappop(self._cpu_free_s)
            finish_s = max(now_s, finish_s) + self._setup.cpu_run_s
            heapq.heappush(self._cpu_free_s, finish_s)
            self._report.by_cpu += 1
            self._answered(job, finish_s)

    def _judge(self, job: SimulatedJob, now_s: float) -> Admission:
        setup = self._setup
        rows_ahead = getattr(self._policy, "rows_ahead", None)
        if not setup.admits or job.deadline_s is None or job.lane_rank or rows_ahead is None:
            return Admission.TAKE
        gpu = forecast(
            rows_ahead=rows_ahead(job.deadline_s),
            rows=job.rows,
            target_rows=self._policy.target_rows(job.bucket),  # type: ignore[attr-defined]
            start_s=max(now_s, self._free_s),
            run_s=setup.run_s,
            after_s=setup.after_s,
        )
        cpu_s = max(now_s, self._cpu_free_s[0]) + setup.cpu_run_s if self._cpu_free_s else None
        return decide(gpu, cpu_s=cpu_s, deadline_s=job.deadline_s, may_divert=True, serve_late=job.serve_late)

    def _step(self, now_s: float) -> float:
        """Ask the policy at a moment at which the device can take a batch; returns when to ask again."""
        start_s = max(now_s, self._free_s + self._setup.gap_s if self._report.busy_s else now_s)
        poll = self._policy.poll(now_s, free=True, start_s=start_s)
        for reason, jobs in (("expired", poll.expired), ("given_up", poll.given_up)):
            self._report.dropped[reason] += len(jobs)
            self._settled(len(jobs), now_s)
        if poll.batch is not None:
            self._run_batch(poll.batch, start_s, now_s)
            return now_s
        return _NEVER_S if poll.wake_s is None else max(now_s, poll.wake_s)

    def _run_batch(self, batch: Batch[SimulatedJob], start_s: float, now_s: float) -> None:
        run_s = self._setup.run_s(batch.rows)
        self._free_s = start_s + run_s
        self._report.busy_s += run_s
        self._report.batch_rows[batch.rows] += 1
        for job in batch.items:
            self._answered(job, self._free_s + self._setup.after_s)
        self._settled(len(batch.items), now_s)

    def _answered(self, job: SimulatedJob, finish_s: float) -> None:
        self._report.latencies_s.append(finish_s - job.arrived_s)
        if job.deadline_s is None or finish_s <= job.deadline_s:
            self._report.in_time += 1
        else:
            self._report.late += 1

    def _settled(self, jobs: int, now_s: float) -> None:
        self._in_hand -= jobs
        window = self._setup.window_jobs
        while self._queued and window is not None and self._in_hand < window:
            self._admit(self._queued.popleft(), now_s)


def mean_rows(report: Report) -> float:
    """Mean batch, in rows."""
    batches = sum(report.batch_rows.values())
    return sum(rows * times for rows, times in report.batch_rows.items()) / batches if batches else 0.0


def merge(reports: Sequence[Report]) -> float:
    """Mean goodput of several runs."""
    return sum(report.goodput for report in reports) / len(reports)
