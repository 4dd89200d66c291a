"""The way in: consume -> decode -> admit -> schedule. Each delivery's jobs end up in the scheduler, or are answered."""

from __future__ import annotations

from typing import TYPE_CHECKING

from inferq_schemas import FALLBACK_LANE, Job, RejectedJob
from inferq_worker.admit import admit
from inferq_worker.decode import deadline_s, decode
from inferq_worker.errors import WorkError, as_work_error
from inferq_worker.work import Request, WorkItem

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from inferq_schemas import Limits, Tensor
    from inferq_worker.evacuate import Evacuation
    from inferq_worker.hand import Hand
    from inferq_worker.held import Held
    from inferq_worker.observe.metrics import Metrics
    from inferq_worker.outbox import Outbox
    from inferq_worker.payloads import Payloads
    from inferq_worker.publish import ReplyAllowList
    from inferq_worker.redelivered import Redelivered
    from inferq_worker.scheduling import Batcher
    from inferq_worker.served import ServedModel
    from inferq_worker.tasks import Tasks
    from inferq_worker.triage import Triage
    from inferq_worker.work import Delivery


class Intake:
    """Takes deliveries in.

    Args:
        models: by name.
        batcher: where admitted jobs wait.
        hand: the jobs in hand.
        triage: judges jobs on arrival.
        evacuation: takes those aside whose model must not be run.
        outbox: answers that need no run.
        max_job_rows: most rows of one job.
        redelivered: judges jobs that come a second time.
        payloads: resolves claim checks.
        in_hand: counts message bytes.
        cpu: this worker is the fallback.
        tasks: owns what goes on in the background.
    """

    def __init__(  # noqa: PLR0913 - the composition root hands in every step
        self,
        *,
        models: Mapping[str, ServedModel],
        batcher: Batcher[WorkItem],
        hand: Hand,
        triage: Triage,
        evacuation: Evacuation,
        outbox: Outbox,
        limits: Limits,
        max_job_rows: int,
        allow: ReplyAllowList,
        redelivered: Redelivered,
        payloads: Payloads,
        in_hand: Held,
        cpu: bool,
        metrics: Metrics,
        tasks: Tasks,
    ) -> None:
        self._models = models
        self._batcher = batcher
        self._hand = hand
        self._triage = triage
        self._evacuation = evacuation
        self._outbox = outbox
        self._limits = limits
        self._max_job_rows = max_job_rows
        self._allow = allow
        self._redelivered = redelivered
        self._payloads = payloads
        self._in_hand = in_hand
        self._cpu = cpu
        self._metrics = metrics
        self._tasks = tasks

    def take(self, delivery: Delivery) -> int:
        """Take one delivery in: decode it, admit its jobs, schedule them. Never blocks, never raises.

        Returns:
            Rows in the delivery, for its lane's window.
        """
        if self._hand.draining:
            delivery.settler.give_back(delivery.tag)
            return 0
        self._in_hand.take(delivery)
        delivery.open_requests = 1
        misaddressed = self._misaddressed(delivery)
        try:
            lane, jobs = decode(delivery, self._limits)
        except Exception as unreadable:  # noqa: BLE001 - whatever a body does, its sender is answered
            self._metrics.job_received(delivery.lane.model, delivery.lane.name)
            # Not kept in a name: its traceback holds this frame, and with it the message, until the collector comes by.
            self._outbox.refuse(Request(delivery, delivery.lane.name), as_work_error(unreadable), "")
            return 0
        if delivery.lane.name == FALLBACK_LANE and _belongs_to_the_dead(delivery, jobs, cpu=self._cpu):
            self._in_hand.leave(delivery)
            delivery.settler.reject(delivery.tag)
            return 0
        self._metrics.job_received(delivery.lane.model, lane, jobs=len(jobs))
        delivery.open_requests = len(jobs)
        return sum(self._take_job_safely(job, Request(delivery, lane), misaddressed) for job in jobs)

    def _misaddressed(self, delivery: Delivery) -> WorkError | None:
        """A reply queue off the allow-list is never written to, not even to say so; no job of the message runs."""
        reply_to = delivery.reply_to
        if reply_to is None or self._allow.allows(reply_to):
            return None
        delivery.reply_to = None
        return WorkError("invalid_input", self._allow.refusal(reply_to))

    def _take_job_safely(self, job: Job | RejectedJob, request: Request, misaddressed: WorkError | None) -> int:
        try:
            return self._take_job(job, request, misaddressed)
        except Exception as error:  # noqa: BLE001 - an unsettled message would never be seen again
            self._outbox.refuse(request, as_work_error(error), job.id)
            return 0

    def _take_job(self, job: Job | RejectedJob, request: Request, misaddressed: WorkError | None) -> int:
        if isinstance(job, RejectedJob):
            error = WorkError(job.error.code, job.error.message)
            self._outbox.refuse(request, error, job.id, digest=job.digest)
            return 0
        if misaddressed is not None:
            self._outbox.refuse(request, misaddressed, job.id, job=job)
        elif request.delivery.redelivered or self._payloads.needed(job):
            self._tasks.spawn(self._take_later(job, request))
        else:
            self._schedule(job, request, job.inputs)
        # A job that is refused for its rows must not shrink its lane's window for the next hundreds of messages.
        return min(job.rows, self._max_job_rows)

    async def _take_later(self, job: Job, request: Request) -> None:
        """Admission that has to ask the store first: jobs that come again, and jobs whose inputs lie there."""
        try:
            if request.delivery.redelivered and self._attach(job, request):
                return
            alone = request.delivery.redelivered and await self._redelivered.runs_alone(job.id, job.model)
            payloads = await self._payloads.resolve(job, request)
            self._schedule(job, request, payloads, alone=alone)
        except Exception as error:  # noqa: BLE001 - an unsettled message would never be seen again
            self._outbox.refuse(request, as_work_error(error), job.id, job=job)

    def _schedule(self, job: Job, request: Request, payloads: Mapping[str, Tensor], *, alone: bool = False) -> None:
        if self._hand.draining:
            self._outbox.give_back(request)
            return
        try:
            if self._attach(job, request):
                return
            item = self._admit(job, request, payloads)
            item.alone = alone
            if self._evacuation.takes(item):
                return
            if not self._triage.admits(item):
                return
        except WorkError as error:
            if error.code == "deadline_exceeded":
                self._metrics.deadline_missed(job.model, request.lane, "admit")
            self._outbox.refuse(request, error, job.id, job=job)
            return
        if item.deadline_s is not None and not item.lane_rank:
            self._models[job.model].window.arrived(item.deadline_s - item.arrived_s)
        self._batcher.add(item)
        self._hand.take(item)

    def _admit(self, job: Job, request: Request, payloads: Mapping[str, Tensor]) -> WorkItem:
        model = self._models.get(job.model)
        if model is None or job.version not in (None, model.file.version):
            served = "nothing" if model is None else f"version {model.file.version}"
            raise WorkError(
                "unknown_model", f"model {job.model} {job.version or ''}: this queue's workers serve {served}"
            )
        if job.sent_unix_ms is not None:
            self._metrics.clock_skew(max(0, job.sent_unix_ms - request.delivery.received_unix_ms) / 1000)
        return admit(
            job,
            request,
            payloads,
            model.session.info,
            max_rows=self._max_job_rows,
            deadline_s=deadline_s(job, request.delivery),
            lane_rank=request.delivery.lane.rank,
        )

    def _attach(self, job: Job, request: Request) -> bool:
        """A job that this process holds already: its new delivery waits for the same answer."""
        held = self._hand.find(job.id)
        if held is None:
            return False
        if held.digest != job.digest():
            raise WorkError("conflict", _CONFLICT, keep=False)
        self._hand.attach(held, request)
        return True


_CONFLICT = "this id already stands for another content; use a new id, or force to run again"


def _belongs_to_the_dead(delivery: Delivery, jobs: Sequence[Job | RejectedJob], *, cpu: bool) -> bool:
    """Nobody runs from the fallback what ended workers up to the limit, and the CPU no job that must not fall back.

    A bundle goes as a whole: the undertaker hands its other jobs on one by one.
    """
    if "delivery_limit" in delivery.deaths:
        return True
    return cpu and any(isinstance(job, Job) and job.fallback == "never" for job in jobs)
