"""Reads `inferq.dead`: what the broker dead-lettered is answered, stored and parked. Workers of every role do it.

The broker's reason decides: expired means `deadline_exceeded`, but never before the deadline: `expiration` leaves a
reserve for the CPU, so a job with time left goes on to the fallback. The delivery limit means `inference_failed`.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from inferq_schemas import Job, RejectedJob, Result
from inferq_worker.decode import deadline_s, decode
from inferq_worker.errors import WorkError, as_work_error
from inferq_worker.work import Answer, Request

if TYPE_CHECKING:
    from inferq_schemas import Limits
    from inferq_worker.finish import Finisher
    from inferq_worker.held import Held
    from inferq_worker.observe.metrics import Metrics
    from inferq_worker.publish import ReplyAllowList
    from inferq_worker.tasks import Tasks
    from inferq_worker.work import Delivery

_log = logging.getLogger(__name__)


class Undertaker:
    """Gives every dead-lettered job its terminal answer, or one more chance where it still has time."""

    def __init__(
        self,
        *,
        limits: Limits,
        allow: ReplyAllowList,
        finisher: Finisher,
        held: Held,
        metrics: Metrics,
        tasks: Tasks,
    ) -> None:
        self._limits = limits
        self._allow = allow
        self._finisher = finisher
        self._metrics = metrics
        self._tasks = tasks
        self._held = held

    def take(self, delivery: Delivery) -> int:
        """Take one dead-lettered message; the work goes on in the background."""
        self._held.take(delivery)
        self._tasks.spawn(self._bury(delivery))
        return 1

    async def _bury(self, delivery: Delivery) -> None:
        if delivery.reply_to is not None and not self._allow.allows(delivery.reply_to):
            delivery.reply_to = None
        try:
            lane, jobs = decode(delivery, self._limits)
        except Exception as unreadable:  # noqa: BLE001 - an unsettled message would never be seen again
            delivery.open_requests = 1
            answer = _answer(Request(delivery, delivery.lane.name), "", as_work_error(unreadable))
            await self._finisher.finish([answer], None)
            return
        delivery.open_requests = len(jobs)
        await asyncio.gather(*(self._bury_or_leave(Request(delivery, lane), job) for job in jobs))

    async def _bury_or_leave(self, request: Request, job: Job | RejectedJob) -> None:
        try:
            await self._bury_job(request, job)
        except Exception:  # noqa: BLE001 - logged whole
            # Back it goes, up to the delivery limit, and then the broker parks it: nobody's worker ends over it.
            _log.exception("dead job %r could not be buried", job.id)
            self._finisher.leave(request)

    async def _bury_job(self, request: Request, job: Job | RejectedJob) -> None:
        if isinstance(job, RejectedJob):
            error = WorkError(job.error.code, job.error.message)
            await self._finisher.finish([_answer(request, job.id, error, digest=job.digest)], None)
            return
        error = _verdict(request.delivery)
        if error.code == "deadline_exceeded" and await self._goes_on(request, job):
            return
        if error.code == "deadline_exceeded":
            self._metrics.deadline_missed(job.model, request.lane, "broker")
        self._metrics.undertaker_handled(error.code)
        await self._finisher.finish([_answer(request, job.id, error, job)], None)

    async def _goes_on(self, request: Request, job: Job) -> bool:
        """Whether the job had time left, or wants its answer late, and was handed on."""
        try:
            due_s = deadline_s(job, request.delivery)
        except WorkError:
            return False
        left_ms = None if due_s is None else int((due_s - request.delivery.received_s) * 1000)
        if left_ms is not None and left_ms <= 0:
            if job.late == "drop":
                return False
            left_ms = None
        return await self._finisher.hand_on(request, job, to_fallback=job.fallback == "allow", expiration_ms=left_ms)


def _verdict(delivery: Delivery) -> WorkError:
    if "delivery_limit" in delivery.deaths:
        return WorkError("inference_failed", "the job was delivered up to the limit and no worker survived it")
    return WorkError("deadline_exceeded", "the deadline passed before a worker could run the job")


def _answer(
    request: Request, job_id: str, error: WorkError, job: Job | None = None, *, digest: bytes | None = None
) -> Answer:
    digest = digest if job is None else job.digest()
    return Answer((request,), Result.failed(job_id, error.code, error.message), digest, job=job)
