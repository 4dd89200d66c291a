"""On arrival: can the GPU answer in time, can a CPU worker, or nobody? Diverts while there is slack, refuses early."""

from __future__ import annotations

from typing import TYPE_CHECKING

from inferq_schemas import FALLBACK_LANE, Result
from inferq_worker.errors import WorkError
from inferq_worker.scheduling.admission import Admission, Backlog, Forecast, ForecastingPolicy, decide, forecast
from inferq_worker.work import Answer

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping

    from inferq_schemas import Job
    from inferq_worker.cpu import CpuPool
    from inferq_worker.device import Device
    from inferq_worker.finish import Finisher
    from inferq_worker.observe.metrics import Metrics
    from inferq_worker.scheduling import Clock, LatencyTable, RunningP95
    from inferq_worker.tasks import Tasks
    from inferq_worker.work import Request, WorkItem


_HANDING_OVER, _CPU_RESERVE = 1.25, 0.3
"""A job of a run that may hang is handed over while a CPU worker has its own estimate and a quarter left, and no less
than this share of the job's time, like the share that clients reserve in `expiration`."""


class Triage:
    """Judges jobs with a deadline.

    Args:
        policy: knows how much runs before a new job; None judges nothing (size-or-timeout).
        latency_of: run times of a bucket's model.
        cpus: CPU workers by model, kept current by the upkeep; empty in the CPU role.
        after: what follows a run until the answer is out.
        beyond: how long after the predicted end of a run that is.
    """

    def __init__(  # noqa: PLR0913 - what a judgement rests on
        self,
        *,
        policy: ForecastingPolicy | None,
        latency_of: Callable[[Hashable], LatencyTable],
        device: Device,
        cpus: Mapping[str, CpuPool],
        after: RunningP95,
        beyond: RunningP95,
        finisher: Finisher,
        clock: Clock,
        metrics: Metrics,
        tasks: Tasks,
    ) -> None:
        self._policy = policy
        self._latency_of = latency_of
        self._device = device
        self._cpus = cpus
        self._finisher = finisher
        self._clock = clock
        self._metrics = metrics
        self._tasks = tasks
        self._after = after
        self._beyond = beyond

    def admits(self, item: WorkItem) -> bool:
        """Whether the GPU takes the job; False: it was diverted.

        Raises:
            WorkError: `deadline_exceeded` with both estimates: neither can answer in time.
        """
        if self._policy is None or item.deadline_s is None or item.alone or item.lane_rank:
            return True
        gpu = self._forecast(self._policy, item, item.deadline_s)
        if gpu is None:
            return True
        cpu_s = self._cpu_finish_s(item)
        decision = decide(
            gpu,
            cpu_s=cpu_s,
            deadline_s=item.deadline_s,
            may_divert=self._may_divert(item),
            serve_late=item.serve_late,
        )
        if decision is not Admission.TAKE:
            self.doubts(item)
        if decision is Admission.DIVERT:
            self._divert(item, gpu.sober_s, cpu_s, "deadline")
            return False
        if decision is Admission.REFUSE:
            raise WorkError("deadline_exceeded", self._both_miss(item, gpu.hopeful_s, cpu_s))
        return True

    def doubts(self, item: WorkItem) -> None:
        """The job is turned away, because of predictions that no run may confirm any more."""
        if self._latency_of(item.bucket).doubt(self._clock.now(), item.bucket):
            self._after.doubt()
            self._beyond.doubt()

    def rescues(self, item: WorkItem, *, reason: str, patience_until_s: float = float("inf")) -> bool:
        """Whether a CPU worker can still answer a job in time, and the job was handed to it.

        Args:
            item: the job.
            reason: why the GPU does not answer it: `deadline`, `overrun`, `timeout` or `breaker`.
            patience_until_s: what in time means for a job without deadline, monotonic seconds.
        """
        cpu_s = self._cpu_finish_s(item)
        due_s = patience_until_s if item.deadline_s is None else item.deadline_s
        if cpu_s is None or cpu_s > due_s or not self._may_divert(item):
            return False
        self._divert(item, None, cpu_s, reason)
        return True

    def last_chance_s(self, item: WorkItem) -> float | None:
        """Until when a CPU worker can safely take the job over, monotonic seconds; None if none ever could."""
        cpu_s = self._cpu_finish_s(item)
        if cpu_s is None or item.deadline_s is None or not self._may_divert(item):
            return None
        reserve_s = _CPU_RESERVE * (item.deadline_s - item.arrived_s)
        return item.deadline_s - max(reserve_s, _HANDING_OVER * (cpu_s - self._clock.now()))

    def _forecast(self, policy: ForecastingPolicy, item: WorkItem, deadline_s: float) -> Forecast | None:
        """When this worker would answer; None while nothing is known of its run times."""
        if self._latency_of(item.bucket).predict(1, item.bucket) is None:
            return None
        ahead = dict(policy.rows_ahead(deadline_s))
        own = self._backlog(policy, item.bucket, ahead.pop(item.bucket, 0))
        return forecast(
            rows=item.rows_left,
            step_rows=item.step_rows,
            own=own,
            others=(self._backlog(policy, bucket, rows) for bucket, rows in ahead.items()),
            start_s=self._device.start_s,
            after_s=self._after.seconds,
        )

    def _backlog(self, policy: ForecastingPolicy, bucket: Hashable, rows: int) -> Backlog:
        latency = self._latency_of(bucket)
        return Backlog(rows, policy.target_rows(bucket), lambda rows: latency.predict(rows, bucket) or 0.0)

    def _may_divert(self, item: WorkItem) -> bool:
        # A suspect moved to another queue would come as new there, and run among others.
        return (
            item.job.fallback == "allow"
            and not item.alone
            and all(request.delivery.lane.name != FALLBACK_LANE for request in item.requests)
        )

    def _cpu_finish_s(self, item: WorkItem) -> float | None:
        pool = self._cpus.get(item.job.model)
        return None if pool is None else pool.finish_s(item.job.rows, self._clock.now())

    def _divert(self, item: WorkItem, gpu_s: float | None, cpu_s: float | None, reason: str) -> None:
        now_s = self._clock.now()
        left_ms = None if item.deadline_s is None else max(0, int((item.deadline_s - now_s) * 1000))
        estimates = {"inferq-divert-reason": reason, "inferq-divert-cpu-ms": _ms(cpu_s, now_s)}
        if gpu_s is not None:
            estimates["inferq-divert-gpu-ms"] = _ms(gpu_s, now_s)
        self._cpus[item.job.model].diverted()
        self._metrics.diverted(item.job.model, reason)
        for request in item.requests:
            self._tasks.spawn(self._hand_over(request, item.job, left_ms, estimates))

    async def _hand_over(self, request: Request, job: Job, left_ms: int | None, why: Mapping[str, object]) -> None:
        if not await self._finisher.hand_on(request, job, to_fallback=True, expiration_ms=left_ms, why=why):
            error = "only a CPU worker could answer in time, and no queue takes the job: were its queues deleted?"
            result = Result.failed(job.id, "deadline_exceeded", error)
            await self._finisher.finish([Answer((request,), result, job.digest(), job=job)], None)

    def _both_miss(self, item: WorkItem, gpu_s: float, cpu_s: float | None) -> str:
        now_s = self._clock.now()
        left_ms = ((item.deadline_s or now_s) - now_s) * 1000
        cpu = "no CPU worker lives" if cpu_s is None else f"a CPU worker would answer in {_ms(cpu_s, now_s)} ms"
        if not self._cpus:
            cpu = "there is no other to ask"
        if cpu_s is not None and not self._may_divert(item):
            cpu = "the job may not go to a CPU worker"
        return f"{left_ms:.0f} ms left; this worker would answer in {_ms(gpu_s, now_s)} ms, and {cpu}"


def _ms(when_s: float | None, now_s: float) -> int:
    return 0 if when_s is None else round((when_s - now_s) * 1000)
