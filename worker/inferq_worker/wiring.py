"""Puts the steps together: which object knows which. Decides nothing else."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from inferq_schemas import Limits
from inferq_worker.answer import Answerer
from inferq_worker.breakers import Breakers
from inferq_worker.cpu import CpuPool
from inferq_worker.device import Device
from inferq_worker.evacuate import Evacuation
from inferq_worker.finish import Finisher
from inferq_worker.hand import Hand
from inferq_worker.held import Held
from inferq_worker.intake import Intake
from inferq_worker.outbox import Outbox
from inferq_worker.payloads import Payloads
from inferq_worker.pipeline import Pipeline
from inferq_worker.publish import Mover, Replies, ReplyAllowList
from inferq_worker.redelivered import Redelivered
from inferq_worker.scheduling import Batcher, EarliestDeadline, RunningP95, SizeOrTimeout
from inferq_worker.scheduling.admission import ForecastingPolicy
from inferq_worker.scheduling.clock import LoopClock
from inferq_worker.triage import Triage
from inferq_worker.undertaker import Undertaker

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

    from inferq_worker.broker import Broker
    from inferq_worker.observe.metrics import Metrics
    from inferq_worker.scheduling import Policy
    from inferq_worker.served import ServedModel
    from inferq_worker.settings import WorkerSettings
    from inferq_worker.store import Store
    from inferq_worker.tasks import Tasks
    from inferq_worker.work import WorkItem

_FIRST_AFTER_S = 0.003


@dataclass(frozen=True, slots=True)
class Steps:
    """What the program drives and asks: the steps, device, breakers, and pictures of CPU workers to keep current."""

    intake: Intake
    pipeline: Pipeline
    hand: Hand
    held: Held
    finisher: Finisher
    undertaker: Undertaker
    device: Device
    breakers: Breakers
    cpus: Mapping[str, CpuPool]


def wire(  # noqa: PLR0913 - what the program hands in
    settings: WorkerSettings,
    models: Mapping[str, ServedModel],
    broker: Broker,
    store: Store,
    *,
    turns: int,
    worker: str,
    metrics: Metrics,
    tasks: Tasks,
) -> Steps:
    """Build the steps of a worker around its models, connections and store; the device takes `turns` runs at a time."""
    limits = Limits(body_bytes=settings.limits.body_bytes, bundle_jobs=settings.limits.bundle_jobs)
    exchange = settings.broker.reply_exchange
    allow = ReplyAllowList(settings.replies.allow, exchange=exchange)
    held = Held(settings.lanes.max_held_bytes, broker.pause_bulk)
    finisher = Finisher(
        store=store,
        replies=Replies(broker.replies, metrics, exchange=exchange),
        mover=Mover(broker.moves, metrics),
        metrics=metrics,
        tasks=tasks,
        claim_check_bytes=settings.limits.claim_check_bytes,
        held=held,
    )
    answerer = Answerer(worker=worker, role=settings.role)
    clock = LoopClock(asyncio.get_running_loop(), time.monotonic)
    device = Device(turns, clock)
    cpus = {name: CpuPool() for name, model in models.items() if settings.role == "gpu" and model.file.fallback}
    after = RunningP95(_FIRST_AFTER_S)
    beyond = RunningP95(_FIRST_AFTER_S)
    policy = _policy(settings, models, beyond)
    triage = Triage(
        policy=policy if isinstance(policy, ForecastingPolicy) else None,
        latency_of=lambda bucket: _model(models, bucket).latency,
        device=device,
        cpus=cpus,
        after=after,
        beyond=beyond,
        finisher=finisher,
        clock=clock,
        metrics=metrics,
        tasks=tasks,
    )
    outbox = Outbox(finisher, answerer, tasks)
    hand = Hand(policy=policy, outbox=outbox, triage=triage, metrics=metrics)
    batcher: Batcher[WorkItem] = Batcher(policy, clock, hand.expired, hand.given_up)
    breakers = Breakers(
        settings.breaker, models, broker.pause_model, device=device, clock=clock, metrics=metrics, tasks=tasks
    )
    evacuation = Evacuation(breakers, batcher, hand, triage)
    intake = Intake(
        models=models,
        batcher=batcher,
        hand=hand,
        triage=triage,
        evacuation=evacuation,
        outbox=outbox,
        limits=limits,
        max_job_rows=settings.limits.rows,
        allow=allow,
        redelivered=Redelivered(store, worker, metrics),
        payloads=Payloads(store, held, max_bytes=settings.limits.payload_bytes),
        in_hand=held,
        cpu=settings.role == "cpu",
        metrics=metrics,
        tasks=tasks,
    )
    pipeline = Pipeline(
        models=models,
        batcher=batcher,
        hand=hand,
        clock=clock,
        device=device,
        triage=triage,
        breakers=breakers,
        evacuation=evacuation,
        outbox=outbox,
        answerer=answerer,
        finisher=finisher,
        store=store,
        after=after,
        beyond=beyond,
        batches_in_flight=settings.batching.in_flight,
        metrics=metrics,
        tasks=tasks,
    )
    undertaker = Undertaker(limits=limits, allow=allow, finisher=finisher, held=held, metrics=metrics, tasks=tasks)
    return Steps(intake, pipeline, hand, held, finisher, undertaker, device, breakers, cpus)


def _policy(settings: WorkerSettings, models: Mapping[str, ServedModel], beyond: RunningP95) -> Policy[WorkItem]:
    batching = settings.batching

    def max_rows(bucket: Hashable) -> int:
        session = _model(models, bucket).session
        _, shapes = cast("tuple[str, tuple[Hashable, ...]]", bucket)
        return session.max_rows(shapes) if session.info.batchable else 1

    def predict_s(bucket: Hashable, rows: int) -> float | None:
        return _model(models, bucket).latency.predict(rows, bucket)

    def margin_s() -> float:
        """Until the answers are out, in nineteen of twenty cases.

        Under overload every batch is full of jobs that are just in time, so whatever comes later than predicted (the
        start, the end of the run, the answers) makes a share of them late, and as many others were given up for them.
        """
        return beyond.seconds

    if batching.policy == "size_or_timeout":
        return SizeOrTimeout(
            max_rows=max_rows, max_bytes=batching.max_bytes, max_wait_s=batching.max_wait_s, predict_s=predict_s
        )
    return EarliestDeadline(
        max_rows=max_rows,
        max_bytes=batching.max_bytes,
        max_wait_s=batching.max_wait_s,
        predict_s=predict_s,
        margin_s=margin_s,
        bulk_share=batching.bulk_share,
        ageing_s=batching.ageing_s,
    )


def _model(models: Mapping[str, ServedModel], bucket: Hashable) -> ServedModel:
    """A bucket of this worker is (model name, shapes), see `admit`."""
    name, _ = cast("tuple[str, object]", bucket)
    return models[name]
