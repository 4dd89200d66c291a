"""The order of the steps: consume -> decode -> admit -> schedule -> infer -> publish -> settle.

The steps do not know each other; this module calls them in turn, decides what follows an error, and records figures.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from inferq_schemas import FALLBACK_LANE, BatchInfo, Job, RejectedJob
from inferq_worker.admit import admit
from inferq_worker.answer import Answerer, RunTimes
from inferq_worker.decode import deadline_s, decode
from inferq_worker.errors import StoreUnavailable, WorkError, as_work_error
from inferq_worker.runtime import RowError
from inferq_worker.scheduling import Batch, Batcher
from inferq_worker.work import Request, WorkItem

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from inferq.outcome import Outcome
    from inferq_schemas import Limits, Tensor
    from inferq_worker.device import Device, Run
    from inferq_worker.finish import Finisher
    from inferq_worker.held import Held
    from inferq_worker.models import ModelFile
    from inferq_worker.observe.metrics import Metrics
    from inferq_worker.outbox import Outbox
    from inferq_worker.payloads import Payloads
    from inferq_worker.poison import RunRecord
    from inferq_worker.publish import ReplyAllowList
    from inferq_worker.redelivered import Redelivered
    from inferq_worker.runtime import RunReport, Session
    from inferq_worker.scheduling import Clock, LatencyTable, Policy, RunningP95
    from inferq_worker.store import Store
    from inferq_worker.tasks import Tasks
    from inferq_worker.triage import Triage
    from inferq_worker.windows import Window
    from inferq_worker.work import Delivery, Feeds

_log = structlog.get_logger(__name__)
_HAND_OVER_TURNS = 5
"""Turns of the event loop from the end of a run to the start of the next: slot, waiter, main loop, task, thread."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model at work: its session, what is known of its run time, and how much of its urgent lane to hold."""

    file: ModelFile
    session: Session
    latency: LatencyTable
    window: Window


class Pipeline:
    """Takes deliveries in, and runs the loop that turns batches into answers.

    Args:
        models: by name.
        policy: decides which jobs of all models run together, and when.
        clock: monotonic seconds, and timers.
        device: what they run on.
        triage: judges jobs on arrival.
        outbox: answers that need no run.
        max_job_rows: most rows of one job.
        answerer: signs results.
        finisher: stores, publishes, parks and settles answers.
        redelivered: judges jobs that come a second time.
        payloads: resolves claim checks.
        in_hand: counts message bytes.
        after: learns what follows a run until the answers are out.
        tasks: owns what goes on in the background.
    """

    def __init__(  # noqa: PLR0913 - the composition root hands in every step
        self,
        *,
        models: Mapping[str, ServedModel],
        policy: Policy[WorkItem],
        clock: Clock,
        device: Device,
        triage: Triage,
        outbox: Outbox,
        limits: Limits,
        max_job_rows: int,
        allow: ReplyAllowList,
        answerer: Answerer,
        finisher: Finisher,
        store: Store,
        redelivered: Redelivered,
        payloads: Payloads,
        in_hand: Held,
        after: RunningP95,
        metrics: Metrics,
        tasks: Tasks,
    ) -> None:
        self._models = models
        self._batcher = Batcher(policy, clock, self.expired, self.given_up)
        self._device = device
        self._triage = triage
        self._outbox = outbox
        self._limits = limits
        self._max_job_rows = max_job_rows
        self._allow = allow
        self._answerer = answerer
        self._finisher = finisher
        self._store = store
        self._redelivered = redelivered
        self._payloads = payloads
        self._in_hand = in_hand
        self._after = after
        self._metrics = metrics
        self._tasks = tasks
        self._held: dict[str, WorkItem] = {}
        self._lanes_seen: set[tuple[str, str]] = set()
        self._draining = False

    def take(self, delivery: Delivery) -> int:
        """Take one delivery in: decode it, admit its jobs, schedule them. Never blocks, never raises.

        Returns:
            Rows in the delivery, for its lane's window.
        """
        if self._draining:
            delivery.settler.give_back(delivery.tag)
            return 0
        self._in_hand.take(delivery)
        delivery.open_requests = 1
        misaddressed = self._misaddressed(delivery)
        try:
            lane, jobs = decode(delivery, self._limits)
        except Exception as unreadable:  # noqa: BLE001 - whatever a body does, its sender is answered
            error = as_work_error(unreadable)
            self._metrics.job_received(delivery.lane.model, delivery.lane.name)
            self._outbox.refuse(Request(delivery, delivery.lane.name), error, "")
            return 0
        if delivery.lane.name == FALLBACK_LANE and _belongs_to_the_dead(delivery, jobs, cpu=self._answerer.is_fallback):
            self._in_hand.leave(delivery)
            delivery.settler.reject(delivery.tag)
            return 0
        self._metrics.job_received(delivery.lane.model, lane, jobs=len(jobs))
        delivery.open_requests = len(jobs)
        return sum(self._take_job_safely(job, Request(delivery, lane), misaddressed) for job in jobs)

    async def serve(self) -> None:
        """The main loop of the device: the next batch, a last check, the run, and the answers on their way."""
        while True:
            await self._device.nearly_free()
            batch = await self._batcher.next_batch(lambda: self._device.start_s)
            if batch is None:
                return
            closed_s = time.monotonic()
            self._device.composed(self._predict_s(batch))
            if batch.reason == "solo":
                await self._run_alone(batch, closed_s)
                continue
            record, batch = await self._claim(batch)
            self._device.checked(time.monotonic() - closed_s)
            self._device.composed(self._predict_s(batch))
            if batch.items:
                run, batch = await self._begin(batch)
                if batch.items:
                    self._tasks.spawn(self._answer(batch, record, run, closed_s))
                    continue
                self._device.end(run)
            await self._finisher.abandon(record)

    async def _run_alone(self, batch: Batch[WorkItem], closed_s: float) -> None:
        """Run a suspect with nothing beside it.

        Its record, which would convict it, is not written before the device is all its own: while another run is under
        way, an end of the process may be that run's doing.
        """
        run, batch = await self._begin(batch)
        if batch.items:
            record, batch = await self._claim(batch)
            if batch.items:
                self._tasks.spawn(self._answer(batch, record, run, closed_s))
                return
            await self._finisher.abandon(record)
        self._device.end(run)

    async def _begin(self, batch: Batch[WorkItem]) -> tuple[Run, Batch[WorkItem]]:
        """Wait for the device, which may be free later than predicted; jobs that expire meanwhile are told at once."""
        begun = asyncio.ensure_future(self._device.begin(self._predict_s(batch), alone=batch.reason == "solo"))
        try:
            while not begun.done():
                due_s = min(
                    (one.deadline_s for one in batch.items if one.deadline_s and not one.serve_late), default=None
                )
                wait_s = None if due_s is None else max(0.0, due_s - time.monotonic())
                await asyncio.wait({begun}, timeout=wait_s)
                batch = self._still_due(batch)
        finally:
            if not begun.done():
                begun.cancel()
        return begun.result(), batch

    def _predict_s(self, batch: Batch[WorkItem]) -> float | None:
        """How long a batch will run; None where nothing is known, or nothing left of it."""
        if not batch.items:
            return None
        first = batch.items[0]
        return self._models[first.job.model].latency.predict(batch.rows, first.bucket)

    def _still_due(self, batch: Batch[WorkItem]) -> Batch[WorkItem]:
        """What is left to run when the device is free at last, which may be later than predicted."""
        now_s = time.monotonic()
        runs = []
        for item in batch.items:
            if self._draining:
                self._give_back(item)
            elif _too_late(item, now_s):
                self.expired(item)
            else:
                runs.append(item)
        return Batch(tuple(runs), batch.reason, batch.opened_s)

    async def _answer(self, batch: Batch[WorkItem], record: RunRecord, run: Run, closed_s: float) -> None:
        """Run a batch that has its slot of the device, and bring the answers out."""
        model = self._models[batch.items[0].job.model]
        unended: RunRecord | None = record
        try:
            report = await model.session.run([item.feeds for item in batch.items])
            if batch.reason == "solo":
                # It survived, and that must be known before the next suspect runs: an end then would condemn both.
                await self._finisher.abandon(record)
                unended = None
        finally:
            self._device.end(run)
        times = RunTimes(closed_s, time.monotonic())
        self._record(model, batch, report, times)
        done = list(self._step(batch, report))
        for _ in range(_HAND_OVER_TURNS):
            # The device is free: the batch that waits for it starts before anything else is done with this one.
            await asyncio.sleep(0)
        info = model.session.info
        served_by = self._answerer.served_by(model.file.name, model.file.version, info.provider)
        answers = list(self._answerer.results(done, BatchInfo(report.rows, batch.reason), times, served_by, info))
        for item, _ in done:
            if item.deadline_s is not None and times.ended_s > item.deadline_s:
                self._metrics.deadline_missed(model.file.name, item.lane, "run")
        await self._finisher.finish(answers, unended)
        self._after.observe(time.monotonic() - times.ended_s)

    def _step(self, batch: Batch[WorkItem], report: RunReport) -> Iterator[tuple[WorkItem, Feeds | RowError]]:
        """Jobs that are done with this run; a large one that is not waits for its next step among the others."""
        for item, outputs in zip(batch.items, report.answers, strict=True):
            item.run_s += report.run_s
            whole = outputs if isinstance(outputs, RowError) else item.step(outputs)
            if whole is not None:
                self._held.pop(item.job.id, None)
                yield item, whole
            elif self._draining:
                self._give_back(item)
            else:
                self._batcher.add(item)

    def expired(self, item: WorkItem) -> None:
        """The scheduler gave a job up: its deadline passed while it waited."""
        self._metrics.deadline_missed(item.job.model, item.lane, "compose")
        waited_ms = (time.monotonic() - item.arrived_s) * 1000
        error = WorkError("deadline_exceeded", f"deadline passed after {waited_ms:.0f} ms in the worker's queue")
        self._give_up(item, error)

    def given_up(self, item: WorkItem) -> None:
        """The scheduler gave a job up that has time left: no run could answer it without making many others late."""
        if self._triage.rescues(item, self._models[item.job.model].latency):
            self._held.pop(item.job.id, None)
            return
        self._metrics.deadline_missed(item.job.model, item.lane, "compose")
        left_ms = ((item.deadline_s or 0.0) - time.monotonic()) * 1000
        message = f"{left_ms:.0f} ms left, and no batch that is large enough to keep up could answer in that time"
        self._give_up(item, WorkError("deadline_exceeded", message))

    def drain(self) -> None:
        """Take nothing more: what is not in a batch goes back to its queue, so that another worker can batch it."""
        self._draining = True
        for item in self._batcher.close():
            self._give_back(item)

    @property
    def held_jobs(self) -> int:
        """Jobs in hand: waiting or running."""
        return len(self._held)

    def observe(self) -> None:
        """Record what is held of each lane now, and for how long."""
        now_s = time.monotonic()
        held: dict[tuple[str, str], list[WorkItem]] = {lane: [] for lane in self._lanes_seen}
        for item in self._held.values():
            held.setdefault((item.job.model, item.lane), []).append(item)
        for (model, lane), items in held.items():
            self._lanes_seen.add((model, lane))
            rows, payload_bytes = sum(item.rows_left for item in items), sum(item.payload_bytes for item in items)
            self._metrics.held(model, lane, jobs=len(items), rows=rows, payload_bytes=payload_bytes)
            oldest_s = min((item.arrived_s for item in items), default=now_s)
            self._metrics.oldest_job_age(model, lane, now_s - oldest_s)

    def _misaddressed(self, delivery: Delivery) -> WorkError | None:
        """A reply queue off the allow-list is never written to, not even to say so; no job of the message runs."""
        reply_to = delivery.reply_to
        if reply_to is None or self._allow.allows(reply_to):
            return None
        delivery.reply_to = None
        message = f"reply_to {reply_to[:100]!r} is not on the allow-list; name the reply queue reply.<something>"
        return WorkError("invalid_input", message)

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
        if self._draining:
            self._outbox.give_back(request)
            return
        try:
            if self._attach(job, request):
                return
            item = self._admit(job, request, payloads)
            item.alone = alone
            if not self._triage.admits(item, self._models[job.model].latency):
                return
        except WorkError as error:
            if error.code == "deadline_exceeded":
                self._metrics.deadline_missed(job.model, request.lane, "admit")
            self._outbox.refuse(request, error, job.id, job=job)
            return
        if item.deadline_s is not None and not item.lane_rank:
            self._models[job.model].window.arrived(item.deadline_s - item.arrived_s)
        self._held[job.id] = item
        self._batcher.add(item)

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
        held = self._held.get(job.id)
        if held is None or any(known is request for known in held.requests):
            return held is not None
        if held.digest != job.digest():
            raise WorkError("conflict", _CONFLICT, keep=False)
        held.requests.append(request)
        return True

    async def _claim(self, batch: Batch[WorkItem]) -> tuple[RunRecord, Batch[WorkItem]]:
        """The last check before the run: answered or cancelled meanwhile, taken back by the broker, too late."""
        ids = [item.job.id for item in batch.items]
        forget = [item.job.id for item in batch.items if _forces(item)]
        record = self._store.record(ids)
        outcomes: Sequence[Outcome | None] = [None] * len(ids)
        with contextlib.suppress(StoreUnavailable):
            # If it fails, the record may be stored all the same: it is ended with the run like any other.
            outcomes = await self._store.claim(record, ids, forget=forget)
        now_s = time.monotonic()
        runs = []
        for item, outcome in zip(batch.items, outcomes, strict=True):
            if outcome is not None:
                self._held.pop(item.job.id, None)
                self._outbox.repeat(item, outcome)
            elif item.stale:
                self._give_back(item)
            elif _too_late(item, now_s):
                self.expired(item)
            else:
                runs.append(item)
        return record, Batch(tuple(runs), batch.reason, batch.opened_s)

    def _record(self, model: ServedModel, batch: Batch[WorkItem], report: RunReport, times: RunTimes) -> None:
        name = model.file.name
        error_ratio = model.latency.observe(report.rows, report.run_s, batch.items[0].bucket)
        if error_ratio is not None:
            self._metrics.prediction_error(name, error_ratio)
        self._metrics.batch_done(
            name, rows=report.rows, padded_rows=report.padded_rows, reason=batch.reason, run_s=report.run_s
        )
        for item in batch.items:
            if not item.started:
                self._metrics.queue_time(name, item.lane, times.closed_s - item.arrived_s)
        _log.info(
            "batch.done",
            model=name,
            jobs=len(batch.items),
            rows=report.rows,
            reason=batch.reason,
            run_ms=round(report.run_s * 1000, 3),
        )

    def _give_up(self, item: WorkItem, error: WorkError) -> None:
        self._held.pop(item.job.id, None)
        self._outbox.fail(item, error)

    def _give_back(self, item: WorkItem) -> None:
        self._held.pop(item.job.id, None)
        for request in item.requests:
            self._outbox.give_back(request)


_CONFLICT = "this id already stands for another content; use a new id, or force to run again"


def _too_late(item: WorkItem, now_s: float) -> bool:
    return item.deadline_s is not None and item.deadline_s <= now_s and not item.serve_late


def _forces(item: WorkItem) -> bool:
    """`force` forgets the stored outcome once: not between two steps, nor when the job comes back after its own run."""
    again = item.started or any(request.delivery.redelivered for request in item.requests)
    return item.job.force and not again


def _belongs_to_the_dead(delivery: Delivery, jobs: Sequence[Job | RejectedJob], *, cpu: bool) -> bool:
    """Nobody runs from the fallback what ended workers up to the limit, and the CPU no job that must not fall back.

    A bundle goes as a whole: the undertaker hands its other jobs on one by one.
    """
    if "delivery_limit" in delivery.deaths:
        return True
    return cpu and any(isinstance(job, Job) and job.fallback == "never" for job in jobs)
