"""The scheduler in simulated time: the same policy and admission code, a device that follows a latency table.

Models what decides goodput around them too: the windows beyond which the broker is first-in-first-out, the late
hand-over of the next batch, and CPU lanes that jobs are diverted to.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from inferq_worker.scheduling.admission import Admission, Backlog, ForecastingPolicy, decide, forecast

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable

    from inferq_worker.scheduling.batch import Batch, Policy
    from inferq_worker.scheduling.traces import Arrival

_NEVER_S = float("inf")


@dataclass(slots=True, eq=False)
class SimulatedJob:
    """A job in simulated time, or what is left of it; it brings as many rows to a batch as a step may have.

    `sent_s` is when it came to the broker, `arrived_s` when it came to the worker.
    """

    rows_left: int
    bucket: Hashable
    lane_rank: int
    sent_s: float
    arrived_s: float
    deadline_s: float | None
    serve_late: bool
    step_rows: int | None = None
    payload_bytes: int = 0
    alone: bool = False
    started: bool = False
    rows: int = field(init=False)

    def __post_init__(self) -> None:
        """The next step."""
        self.rows = min(self.rows_left, self.step_rows or self.rows_left)

    def rest(self) -> SimulatedJob | None:
        """What is left when this step leaves."""
        left = self.rows_left - self.rows
        return replace(self, rows_left=left, started=True) if left else None


@dataclass(frozen=True, slots=True)
class Setup:
    """What is simulated.

    Attributes:
        policy: makes the policy under test.
        run_s: rows -> seconds that a run takes.
        predict_s: rows -> seconds that admission believes a run to take; None = it knows.
        after_s: from the end of a run to the answer.
        hand_over_s: the next batch is composed this long before the running one ends; the device waits if it is 0.
        gap_s: the device idles this long between two runs (collation that does not overlap, a round trip).
        window_jobs: urgent jobs in hand at a time, from delivery to answer; the rest waits in the broker, first in
            first out. None = no limit.
        bulk_window_jobs: the same for each other lane.
        step_rows: a job with more rows goes in steps of so many. None = whatever its rows, in one run.
        cpu_lanes: jobs that CPU workers run at a time; 0 = no diversion.
        cpu_run_s: seconds of one job on a CPU lane.
        admits: whether jobs are judged on arrival.
    """

    policy: Callable[[], Policy[SimulatedJob]]
    run_s: Callable[[int], float]
    predict_s: Callable[[int], float] | None = None
    after_s: float = 0.0
    hand_over_s: float = 0.0
    gap_s: float = 0.0
    window_jobs: int | None = None
    bulk_window_jobs: int | None = None
    step_rows: int | None = None
    cpu_lanes: int = 0
    cpu_run_s: float = 0.0
    admits: bool = True


@dataclass(slots=True)
class Report:
    """What came of it.

    Attributes:
        offered: jobs by lane rank.
        in_time: those that were answered by their deadline, by lane rank; without a deadline every answer is in time.
        late: jobs that were answered after their deadline.
        by_cpu: jobs that a CPU answered.
        dropped: jobs that were not answered, by reason.
        batch_rows: batches by size.
        latencies_s: from the broker to the answer, of answered jobs, unsorted.
        busy_s: how long the device ran.
    """

    offered: Counter[int] = field(default_factory=Counter)
    in_time: Counter[int] = field(default_factory=Counter)
    late: int = 0
    by_cpu: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    batch_rows: Counter[int] = field(default_factory=Counter)
    latencies_s: list[float] = field(default_factory=list)
    busy_s: float = 0.0
    ended_s: float = 0.0

    @property
    def jobs(self) -> int:
        """How many jobs were offered."""
        return self.offered.total()

    @property
    def goodput(self) -> float:
        """Share of the offered jobs that were answered by their deadline; 0..1."""
        return self.in_time.total() / self.jobs if self.jobs else 1.0

    @property
    def mean_rows(self) -> float:
        """Mean batch, in rows."""
        batches = self.batch_rows.total()
        return sum(rows * times for rows, times in self.batch_rows.items()) / batches if batches else 0.0

    @property
    def busy_share(self) -> float:
        """Share of the time that the device ran; 0..1."""
        return self.busy_s / self.ended_s if self.ended_s else 0.0

    def quantiles_s(self, *shares: float) -> tuple[float, ...]:
        """Latencies that these shares of the answered jobs do not exceed, in seconds; 0 if none was answered."""
        ordered = sorted(self.latencies_s) or [0.0]
        return tuple(ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in shares)


def simulate(trace: Iterable[Arrival], setup: Setup) -> Report:
    """Replay a trace, sorted by time, through the scheduler; ends when every job has left."""
    return _Simulation(setup).run(trace)


class _Simulation:
    """Time jumps from event to event.

    As in the worker, the policy is asked when a deadline passes, and when something has changed while the device can
    take a batch.
    """

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._policy = setup.policy()
        self._forecasting = self._policy if setup.admits and isinstance(self._policy, ForecastingPolicy) else None
        self._predict_s = setup.predict_s or setup.run_s
        self._report = Report()
        self._broker: defaultdict[int, deque[SimulatedJob]] = defaultdict(deque)
        self._in_hand: Counter[int] = Counter()
        self._running: deque[tuple[float, Batch[SimulatedJob]]] = deque()
        self._now_s = 0.0
        self._free_s = -_NEVER_S
        self._ask_s = _NEVER_S
        self._cpu_free_s = [0.0] * setup.cpu_lanes

    def run(self, trace: Iterable[Arrival]) -> Report:
        for arrival in trace:
            # What happens at the very moment of an arrival comes after it: jobs of one message are taken together.
            self._pass_until(arrival.at_s)
            self._now_s = arrival.at_s
            self._arrive(arrival)
        self._pass_until(_NEVER_S)
        return self._report

    def _pass_until(self, end_s: float) -> None:
        while True:
            answered_s = self._running[0][0] if self._running else _NEVER_S
            next_s = min(answered_s, self._ask_s)
            if next_s >= end_s:
                return
            self._now_s = self._report.ended_s = next_s
            if answered_s <= self._ask_s:
                self._answer(self._running.popleft()[1])
            else:
                self._ask()

    def _arrive(self, arrival: Arrival) -> None:
        self._report.offered[arrival.lane_rank] += 1
        due_s = None if arrival.allowance_s is None else arrival.at_s + arrival.allowance_s
        job = SimulatedJob(
            arrival.rows,
            arrival.bucket,
            arrival.lane_rank,
            arrival.at_s,
            arrival.at_s,
            due_s,
            arrival.serve_late,
            self._setup.step_rows,
        )
        self._broker[job.lane_rank].append(job)
        self._deliver(job.lane_rank)

    def _deliver(self, lane_rank: int) -> None:
        """The broker hands out what the lane's window has room for."""
        setup, queue = self._setup, self._broker[lane_rank]
        window = setup.bulk_window_jobs if lane_rank else setup.window_jobs
        while queue and (window is None or self._in_hand[lane_rank] < window):
            self._admit(queue.popleft())

    def _admit(self, job: SimulatedJob) -> None:
        job.arrived_s = self._now_s
        decision = self._judge(job)
        if decision is Admission.REFUSE:
            self._report.dropped["refused"] += 1
        elif decision is Admission.DIVERT:
            self._divert(job)
        else:
            self._in_hand[job.lane_rank] += 1
            self._add(job)

    def _add(self, job: SimulatedJob) -> None:
        self._policy.add(job)
        due_s = _NEVER_S if job.deadline_s is None else max(self._now_s, job.deadline_s)
        self._ask_s = min(self._ask_s, self._ready_s(), due_s)

    def _judge(self, job: SimulatedJob) -> Admission:
        if self._forecasting is None or job.deadline_s is None or job.lane_rank:
            return Admission.TAKE
        policy, ahead = self._forecasting, dict(self._forecasting.rows_ahead(job.deadline_s))
        own = Backlog(ahead.pop(job.bucket, 0), policy.target_rows(job.bucket), self._predict_s)
        gpu = forecast(
            rows=job.rows_left,
            step_rows=job.rows,
            own=own,
            others=(Backlog(rows, policy.target_rows(key), self._predict_s) for key, rows in ahead.items()),
            start_s=max(self._now_s, self._free_s),
            after_s=self._setup.after_s,
        )
        return decide(gpu, cpu_s=self._cpu_s(), deadline_s=job.deadline_s, may_divert=True, serve_late=job.serve_late)

    def _cpu_s(self) -> float | None:
        """When a CPU lane would answer a job that came there now."""
        return max(self._now_s, self._cpu_free_s[0]) + self._setup.cpu_run_s if self._cpu_free_s else None

    def _divert(self, job: SimulatedJob) -> None:
        finish_s = max(self._now_s, self._cpu_free_s[0]) + self._setup.cpu_run_s
        heapq.heapreplace(self._cpu_free_s, finish_s)
        self._report.by_cpu += 1
        self._count(job, finish_s)

    def _ready_s(self) -> float:
        """When the device takes the next batch."""
        return max(self._now_s, self._free_s - self._setup.hand_over_s)

    def _ask(self) -> None:
        ready_s = self._ready_s()
        free = ready_s <= self._now_s
        start_s = max(self._now_s, self._free_s + self._setup.gap_s)
        poll = self._policy.poll(self._now_s, free=free, start_s=start_s)
        self._ask_s = _NEVER_S if poll.wake_s is None else max(self._now_s, poll.wake_s)
        if poll.batch is not None:
            self._start(poll.batch, start_s)
        if poll.batch is not None or not free:
            self._ask_s = min(self._ask_s, self._ready_s())
        for job in poll.expired:
            self._report.dropped["expired"] += 1
            self._settle(job)
        for job in poll.given_up:
            self._give_up(job)

    def _start(self, batch: Batch[SimulatedJob], start_s: float) -> None:
        run_s = self._setup.run_s(batch.rows)
        self._free_s = start_s + run_s
        self._report.busy_s += run_s
        self._report.batch_rows[batch.rows] += 1
        self._running.append((self._free_s + self._setup.after_s, batch))
        for job in batch.items:
            rest = job.rest()
            if rest is not None:
                self._add(rest)

    def _answer(self, batch: Batch[SimulatedJob]) -> None:
        for job in batch.items:
            if job.rows == job.rows_left:
                self._count(job, self._now_s)
                self._settle(job)

    def _give_up(self, job: SimulatedJob) -> None:
        cpu_s = self._cpu_s()
        if cpu_s is not None and job.deadline_s is not None and cpu_s <= job.deadline_s:
            self._divert(job)
        else:
            self._report.dropped["given_up"] += 1
        self._settle(job)

    def _count(self, job: SimulatedJob, finish_s: float) -> None:
        self._report.latencies_s.append(finish_s - job.sent_s)
        if job.deadline_s is None or finish_s <= job.deadline_s:
            self._report.in_time[job.lane_rank] += 1
        else:
            self._report.late += 1

    def _settle(self, job: SimulatedJob) -> None:
        self._in_hand[job.lane_rank] -= 1
        if self._broker[job.lane_rank]:
            self._deliver(job.lane_rank)
