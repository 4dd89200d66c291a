"""The main loop of a device: schedule -> claim -> infer -> publish -> settle.

The way in is `intake`; what happens to a batch between its hand-over and the end of its run is watched by `attend`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from functools import partial
from typing import TYPE_CHECKING

import structlog

from inferq_schemas import BatchInfo
from inferq_worker.answer import RunTimes
from inferq_worker.attend import Attendant
from inferq_worker.errors import StoreUnavailable
from inferq_worker.runtime import DeviceLost, RowError, RunReport, SessionBroken
from inferq_worker.scheduling import Batch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from inferq.outcome import Outcome
    from inferq_worker.answer import Answerer
    from inferq_worker.breakers import Breakers
    from inferq_worker.device import Device, Run
    from inferq_worker.evacuate import Evacuation
    from inferq_worker.finish import Finisher
    from inferq_worker.hand import Hand
    from inferq_worker.observe.metrics import Metrics
    from inferq_worker.outbox import Outbox
    from inferq_worker.poison import RunRecord
    from inferq_worker.scheduling import Batcher, Clock, RunningP95
    from inferq_worker.served import ServedModel
    from inferq_worker.store import Store
    from inferq_worker.tasks import Tasks
    from inferq_worker.triage import Triage
    from inferq_worker.work import Feeds, WorkItem

_log = structlog.get_logger(__name__)


class Pipeline:
    """Turns batches into answers.

    Args:
        models: by name.
        batcher: where admitted jobs wait.
        hand: the jobs in hand.
        clock: monotonic seconds, and timers.
        device: what they run on.
        triage: knows the CPU workers.
        breakers: learn what came of each run.
        evacuation: takes jobs aside whose model must not be run.
        outbox: answers that need no run.
        answerer: signs results.
        finisher: stores, publishes, parks and settles answers.
        after: learns what follows a run until the answers are out.
        beyond: learns how long after the predicted end of a run they are.
        batches_in_flight: most batches between composition and their last answer; >= 1.
        tasks: owns what goes on in the background.
    """

    def __init__(  # noqa: PLR0913 - the composition root hands in every step
        self,
        *,
        models: Mapping[str, ServedModel],
        batcher: Batcher[WorkItem],
        hand: Hand,
        clock: Clock,
        device: Device,
        triage: Triage,
        breakers: Breakers,
        evacuation: Evacuation,
        outbox: Outbox,
        answerer: Answerer,
        finisher: Finisher,
        store: Store,
        after: RunningP95,
        beyond: RunningP95,
        batches_in_flight: int,
        metrics: Metrics,
        tasks: Tasks,
    ) -> None:
        self._models = models
        self._batcher = batcher
        self._hand = hand
        self._clock = clock
        self._device = device
        self._triage = triage
        self._breakers = breakers
        self._evacuation = evacuation
        self._outbox = outbox
        self._answerer = answerer
        self._finisher = finisher
        self._store = store
        self._after = after
        self._beyond = beyond
        self._room = asyncio.Semaphore(batches_in_flight)
        self._metrics = metrics
        self._tasks = tasks

    async def serve(self) -> None:
        """The next batch, a last check, and on to the device; until the scheduler is closed or the device lost."""
        # A call for each, so that nothing of the last one is held while the next is waited for.
        while await self._serve_one():
            pass

    async def _serve_one(self) -> bool:
        """Whether there was a batch."""
        batch = await self._next()
        if batch is None:
            return False
        closed_s = time.monotonic()
        self._device.composed(self._predict_s(batch))
        record, batch = await self._claim(batch)
        if batch.items:
            run = self._device.enter(
                self._predict_s(batch),
                alone=batch.reason == "solo",
                unwanted=partial(self._hand.gone, batch.items),
            )
            self._tasks.spawn(self._answer(batch, record, run, closed_s))
            return True
        self._device.composed(None)
        self._room.release()
        if record is not None:
            await self._finisher.abandon(record)
        return True

    def drain(self) -> None:
        """Take nothing more: what is not in a batch goes back to its queue, so that another worker can batch it."""
        self._hand.draining = True
        self._breakers.close()
        for item in self._batcher.close():
            self._hand.give_back(item)

    async def _next(self) -> Batch[WorkItem] | None:
        await self._room.acquire()
        await self._device.nearly_free()
        if self._device.lost.is_set():
            return None
        return await self._batcher.next_batch(lambda: self._device.start_s)

    def _predict_s(self, batch: Batch[WorkItem]) -> float | None:
        """How long a batch will run; None where nothing is known, or nothing left of it."""
        if not batch.items:
            return None
        first = batch.items[0]
        return self._models[first.job.model].latency.predict(batch.rows, first.bucket)

    async def _claim(self, batch: Batch[WorkItem]) -> tuple[RunRecord | None, Batch[WorkItem]]:
        """The last check before the run: answered or cancelled meanwhile, taken back by the broker, too late.

        A suspect's record, which would convict it, is not written before the device is all its own: while another run
        is under way, an end of the process may be that run's doing.
        """
        if batch.reason == "solo":
            await self._device.empty()
            if self._hand.draining:
                for item in batch.items:
                    self._hand.give_back(item)
                return None, Batch((), batch.reason, batch.opened_s)
        began_s = time.monotonic()
        ids = [item.job.id for item in batch.items]
        forget = [item.job.id for item in batch.items if item.job.force and not _came_before(item)]
        record = self._store.record(ids)
        outcomes: Sequence[Outcome | None] = [None] * len(ids)
        with contextlib.suppress(StoreUnavailable):
            # If it fails, the record may be stored all the same: it is ended with the run like any other.
            outcomes = await self._store.claim(record, ids, forget=forget)
        now_s = time.monotonic()
        runs = tuple(
            item for item, outcome in zip(batch.items, outcomes, strict=True) if self._still_runs(item, outcome, now_s)
        )
        self._device.checked(time.monotonic() - began_s)
        return record, Batch(runs, batch.reason, batch.opened_s)

    def _still_runs(self, item: WorkItem, outcome: Outcome | None, now_s: float) -> bool:
        if item not in self._hand:
            return False
        if outcome is not None:
            self._hand.leave(item)
            self._outbox.repeat(item, outcome)
        elif item.stale:
            self._hand.give_back(item)
        elif item.deadline_s is not None and item.deadline_s <= now_s and not item.serve_late:
            self._hand.expired(item)
        else:
            return not self._evacuation.takes(item)
        return False

    async def _answer(self, batch: Batch[WorkItem], record: RunRecord | None, run: Run, closed_s: float) -> None:
        """Run a batch that has its place on the device, and bring the answers out."""
        try:
            report, record = await self._run(batch, record, run)
            await self._bring_out(batch, report, record, RunTimes(closed_s, time.monotonic()))
            if run.planned_end_s is not None and not report.timed_out:
                self._beyond.observe(time.monotonic() - run.planned_end_s)
        except DeviceLost:
            for item in batch.items:
                if item in self._hand:
                    self._hand.give_back(item)
            if record is not None:
                await self._finisher.abandon(record)
        except SessionBroken as error:
            await self._salvage(batch, record, closed_s, error)
        finally:
            self._room.release()

    async def _salvage(self, batch: Batch[WorkItem], record: RunRecord | None, closed_s: float, why: Exception) -> None:
        """The session broke under a batch. A suspect that was alone with it is convicted, all others get away.

        Their record stays as evidence: whichever other worker gets one of them runs it alone.
        """
        model = batch.items[0].job.model
        _log.critical("session.broken", model=model, jobs=len(batch.items), reason=str(why))
        self._breakers.broke(model)
        if batch.reason == "solo":
            convicted = RowError("inference_failed", "the job ran by itself and broke the session that ran it")
            report = RunReport((convicted,), 0.0, 0, 0)
            await self._bring_out(batch, report, record, RunTimes(closed_s, time.monotonic()))
            return
        for item in batch.items:
            if item in self._hand:
                self._evacuation.takes(item)

    async def _run(
        self, batch: Batch[WorkItem], record: RunRecord | None, run: Run
    ) -> tuple[RunReport, RunRecord | None]:
        """The run, and its record if that is still to be ended."""
        model = self._models[batch.items[0].job.model]
        attendant = Attendant(
            batch, run, hand=self._hand, batcher=self._batcher, triage=self._triage, clock=self._clock
        )
        try:
            with attendant:
                report = await model.session.run([item.feeds for item in batch.items], run)
            if batch.reason == "solo" and record is not None:
                # It survived, and that must be known before the next suspect runs: an end then would condemn both.
                await self._finisher.abandon(record)
                record = None
        finally:
            self._device.end(run)
        if report.wedged:
            self._device.lose()
        return report, record

    async def _bring_out(
        self, batch: Batch[WorkItem], report: RunReport, record: RunRecord | None, times: RunTimes
    ) -> None:
        model = self._models[batch.items[0].job.model]
        info = model.session.info
        self._record(model, batch, report, times)
        done = self._done(batch, report)
        served_by = self._answerer.served_by(model.file.name, model.file.version, info.provider)
        answers = self._answerer.results(done, BatchInfo(report.rows, batch.reason), times, served_by, info)
        for answer in answers:
            if answer.result.late:
                self._metrics.deadline_missed(model.file.name, answer.requests[0].lane, "run")
        await self._finisher.finish(answers, record)
        self._after.observe(time.monotonic() - times.ended_s)

    def _done(self, batch: Batch[WorkItem], report: RunReport) -> list[tuple[WorkItem, Feeds | RowError]]:
        """Jobs that this run answers: not those that left meanwhile, that a CPU still saves, or with steps to run."""
        done: list[tuple[WorkItem, Feeds | RowError]] = []
        for item, outputs in zip(batch.items, report.answers, strict=True):
            if item not in self._hand:
                continue
            if report.timed_out and _timed_out(outputs) and self._triage.rescues(item, reason="timeout"):
                self._hand.leave(item)
                continue
            whole = outputs if isinstance(outputs, RowError) else item.done(outputs, report.run_s)
            if whole is not None:
                self._hand.leave(item)
                done.append((item, whole))
        return done

    def _record(self, model: ServedModel, batch: Batch[WorkItem], report: RunReport, times: RunTimes) -> None:
        name = model.file.name
        self._breakers.ran(name, report)
        if report.timed_out:
            self._metrics.run_timed_out(name)
            _log.error("run.timed_out", model=name, jobs=len(batch.items), rows=batch.rows, wedged=report.wedged)
        elif (error_ratio := model.latency.observe(report.rows, report.run_s, batch.items[0].bucket)) is not None:
            self._metrics.prediction_error(name, error_ratio)
        self._metrics.batch_done(
            name, rows=report.rows, padded_rows=report.padded_rows, reason=batch.reason, run_s=report.run_s
        )
        waited_s: dict[str, list[float]] = {}
        for item in batch.items:
            if not item.started:
                waited_s.setdefault(item.lane, []).append(times.closed_s - item.arrived_s)
        for lane, seconds in waited_s.items():
            self._metrics.queue_times(name, lane, seconds)
        _log.info(
            "batch.done",
            model=name,
            jobs=len(batch.items),
            rows=report.rows,
            reason=batch.reason,
            run_ms=round(report.run_s * 1000, 3),
        )


def _timed_out(outputs: Feeds | RowError) -> bool:
    return isinstance(outputs, RowError) and outputs.code == "inference_timeout"


def _came_before(item: WorkItem) -> bool:
    """`force` forgets the stored outcome once: not between two steps, nor when the job comes back after its own run."""
    return item.started or any(request.delivery.redelivered for request in item.requests)
