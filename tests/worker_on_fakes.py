"""A whole worker on fakes: everything but its sockets and its model. For tests of what a delivery goes through."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from prometheus_client import CollectorRegistry
from tests.fakes import (
    WORKER,
    FakeChannel,
    FakePublisher,
    FakeStore,
    Published,
    VirtualTime,
    delivery_of,
    metrics_of,
    settler_of,
)

from inferq_schemas import (
    DEFAULT_LIMITS,
    PARKING_EXCHANGE,
    Job,
    Result,
    decode_results,
    encode_bundle,
    encode_job,
)
from inferq_worker.answer import Answerer
from inferq_worker.cpu import CpuPool
from inferq_worker.device import Device
from inferq_worker.finish import Finisher
from inferq_worker.held import Held
from inferq_worker.models import ModelFile
from inferq_worker.outbox import Outbox
from inferq_worker.payloads import Payloads
from inferq_worker.pipeline import Pipeline, ServedModel
from inferq_worker.publish import Mover, Replies, ReplyAllowList
from inferq_worker.redelivered import Redelivered
from inferq_worker.runtime.fake import FakeSession
from inferq_worker.scheduling import EarliestDeadline, LatencyTable, Policy, RunningP95, SizeOrTimeout
from inferq_worker.scheduling.admission import ForecastingPolicy
from inferq_worker.scheduling.clock import LoopClock
from inferq_worker.tasks import Tasks
from inferq_worker.triage import Triage
from inferq_worker.undertaker import Undertaker
from inferq_worker.windows import Window

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from inferq_worker.settle import Settler
    from inferq_worker.work import Delivery, WorkItem

MAX_JOB_ROWS = 4096


@dataclass(slots=True)
class WorkerOnFakes:
    """Everything of a worker but its sockets and its model. Built by `fake_worker`.

    Attributes:
        journal: what the outside saw, in order: "stored ID", "published QUEUE", "parked EXCHANGE", "acked TAG".
    """

    time: VirtualTime
    pipeline: Pipeline
    undertaker: Undertaker
    finisher: Finisher
    session: FakeSession
    store: FakeStore
    publisher: FakePublisher
    channel: FakeChannel
    settler: Settler
    held: Held
    tasks: Tasks
    registry: CollectorRegistry
    journal: list[str]
    latency: LatencyTable
    device: Device
    cpus: dict[str, CpuPool]
    serving: list[asyncio.Task[None]] = field(default_factory=list)
    pressure: list[bool] = field(default_factory=list)

    def delivery(self, content: Job | Sequence[Job] | bytes, *, lane: str = "interactive", **fields: Any) -> Delivery:
        """A delivery on the worker's channel; interactive jobs without a deadline get 30 s."""
        if isinstance(content, Job):
            if lane == "interactive" and content.deadline_unix_ms is None:
                content = content.model_copy(update={"deadline_unix_ms": self.unix_ms(30)})
            content = encode_job(content)
        elif not isinstance(content, bytes):
            content = encode_bundle(list(content))
        tag = self.channel.deliver()
        self.settler.open(tag)
        now = {"received_s": self.time.monotonic(), "received_unix_ms": self.unix_ms()}
        return delivery_of(content, lane=lane, **({"settler": self.settler, "tag": tag} | now | fields))

    async def take(self, content: Job | Sequence[Job] | bytes, *, lane: str = "interactive", **fields: Any) -> Delivery:
        """Take a delivery in, and let happen what needs no time."""
        delivery = self.delivery(content, lane=lane, **fields)
        self.pipeline.take(delivery)
        await self.time.settle()
        return delivery

    async def bury(self, content: Job | Sequence[Job] | bytes, *, lane: str = "interactive", **fields: Any) -> Delivery:
        """Hand a delivery to the undertaker, and let happen what needs no time."""
        delivery = self.delivery(content, lane=lane, **({"deaths": ("expired",)} | fields))
        self.undertaker.take(delivery)
        await self.time.settle()
        return delivery

    def unix_ms(self, ahead_s: float = 0.0) -> int:
        return int((self.time.time() + ahead_s) * 1000)

    def replies(self, queue: str = "reply.me") -> list[Result]:
        return [result for one in self.publisher.to(queue) for result in decode_results(one.body)]

    def codes(self, queue: str = "reply.me") -> dict[str, str]:
        """Job id to its error code, or "ok"."""
        return {one.id: one.error.code if one.error else "ok" for one in self.replies(queue)}

    @property
    def parked(self) -> list[Published]:
        return self.publisher.to(PARKING_EXCHANGE)

    @property
    def moved(self) -> list[Published]:
        return [one for one in self.publisher.published if one.exchange not in ("", PARKING_EXCHANGE)]

    def count(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(f"inferq_{name}_total", labels) or 0.0

    def new_channel(self) -> None:
        """The broker closes the channel; what comes from now on comes through another one."""
        self.channel.is_closed = True
        self.channel = FakeChannel(self.journal)
        self.settler = settler_of(self.channel)


@contextlib.asynccontextmanager
async def fake_worker(
    time: VirtualTime,
    *,
    role: str = "gpu",
    session: FakeSession | None = None,
    max_wait_s: float = 0.0,
    max_rows: int = 32,
    max_held_bytes: int = 2**20,
    slots: int = 1,
    policy_name: str = "size_or_timeout",
) -> AsyncIterator[WorkerOnFakes]:
    """A worker that serves model `m`, which doubles `x`, until the block ends; nothing is drained then."""
    registry, journal = CollectorRegistry(), list[str]()
    metrics = metrics_of(registry, role=role)
    session = session or FakeSession()
    channel, store, publisher = FakeChannel(journal), FakeStore(journal), FakePublisher(journal)
    pressure: list[bool] = []
    held = Held(max_held_bytes, pressure.append)
    failure: Exception | None = None
    try:
        async with asyncio.TaskGroup() as group:
            tasks = Tasks(group)
            finisher = Finisher(
                store=cast("Any", store),
                replies=Replies(cast("Any", publisher), metrics),
                mover=Mover(cast("Any", publisher), metrics),
                metrics=metrics,
                tasks=tasks,
                claim_check_bytes=DEFAULT_LIMITS.claim_check_bytes,
                held=held,
            )
            allow = ReplyAllowList((r"reply\..+", r"amq\.rabbitmq\.reply-to\..+"))
            shared: dict[str, Any] = {
                "limits": DEFAULT_LIMITS,
                "allow": allow,
                "finisher": finisher,
                "metrics": metrics,
                "tasks": tasks,
            }
            latency = LatencyTable()
            window = Window(max_rows=max_rows, first_rows=256)
            models = {"m": ServedModel(ModelFile("m", "1", Path("model.onnx")), session, latency, window)}
            answerer = Answerer(worker=WORKER, role=role)
            clock = LoopClock(asyncio.get_running_loop(), time.monotonic)
            policy: Policy[WorkItem] = _policy(policy_name, latency, max_rows=max_rows, max_wait_s=max_wait_s)
            device = Device(slots, clock)
            cpus = {"m": CpuPool()} if role == "gpu" else {}
            triage = Triage(
                policy=policy if isinstance(policy, ForecastingPolicy) else None,
                device=device,
                cpus=cpus,
                after=(after := RunningP95(0.003)),
                finisher=finisher,
                clock=clock,
                metrics=metrics,
                tasks=tasks,
            )
            pipeline = Pipeline(
                models=models,
                policy=policy,
                clock=clock,
                device=device,
                triage=triage,
                outbox=Outbox(finisher, answerer, tasks),
                answerer=answerer,
                max_job_rows=MAX_JOB_ROWS,
                store=cast("Any", store),
                redelivered=Redelivered(cast("Any", store), WORKER, metrics),
                payloads=Payloads(cast("Any", store), held, max_bytes=2**20),
                in_hand=held,
                after=after,
                **shared,
            )
            undertaker = Undertaker(held=held, **shared)
            settler = settler_of(channel, metrics)
            serving = [group.create_task(pipeline.serve())]
            worker = WorkerOnFakes(
                time, pipeline, undertaker, finisher, session, store, publisher, channel, settler, held, tasks,
                registry, journal, latency, device, cpus, serving, pressure,
            )  # fmt: skip
            try:
                yield worker
            except Exception as error:  # noqa: BLE001 - raised below, without the group around it
                failure = error
            assert worker.channel.error is None
            for task in asyncio.all_tasks() - {cast("asyncio.Task[Any]", asyncio.current_task())}:
                task.cancel()
    finally:
        if failure is not None:
            raise failure


def _policy(name: str, latency: LatencyTable, *, max_rows: int, max_wait_s: float) -> Policy[WorkItem]:
    policy = EarliestDeadline if name == "earliest_deadline" else SizeOrTimeout
    return policy(
        max_rows=max_rows,
        max_bytes=2**20,
        max_wait_s=max_wait_s,
        predict_s=lambda bucket, rows: latency.predict(rows, bucket),
    )
