"""A whole worker on fakes: everything but its sockets and its model. For tests of what a delivery goes through."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from prometheus_client import CollectorRegistry
from tests.fakes import (
    WORKER,
    FakeChannel,
    FakeLanes,
    FakePublisher,
    FakeStore,
    Published,
    VirtualTime,
    delivery_of,
    metrics_of,
    settler_of,
)

from inferq_schemas import (
    PARKING_EXCHANGE,
    Job,
    Result,
    decode_results,
    encode_bundle,
    encode_job,
)
from inferq_worker import answer, hand, pipeline, publish, wiring
from inferq_worker.models import ModelFile
from inferq_worker.runtime.fake import FakeSession
from inferq_worker.scheduling import LatencyTable
from inferq_worker.served import ServedModel
from inferq_worker.settings import WorkerSettings
from inferq_worker.tasks import Tasks
from inferq_worker.windows import Window
from inferq_worker.wiring import wire

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    import pytest

    from inferq_worker.settle import Settler
    from inferq_worker.wiring import Steps
    from inferq_worker.work import Delivery

MAX_JOB_ROWS = 4096


@dataclass(slots=True)
class WorkerOnFakes:
    """Everything of a worker but its sockets and its model. Built by `fake_worker`.

    Attributes:
        journal: what the outside saw, in order: "stored ID", "published QUEUE", "parked EXCHANGE", "acked TAG",
            "paused MODEL", "resumed MODEL".
    """

    time: VirtualTime
    steps: Steps
    session: FakeSession
    store: FakeStore
    publisher: FakePublisher
    channel: FakeChannel
    settler: Settler
    tasks: Tasks
    registry: CollectorRegistry
    journal: list[str]
    latency: LatencyTable
    serving: list[asyncio.Task[None]]
    pressure: list[bool]
    lanes: FakeLanes

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
        self.steps.intake.take(delivery)
        await self.time.settle()
        return delivery

    async def bury(self, content: Job | Sequence[Job] | bytes, *, lane: str = "interactive", **fields: Any) -> Delivery:
        """Hand a delivery to the undertaker, and let happen what needs no time."""
        delivery = self.delivery(content, lane=lane, **({"deaths": ("expired",)} | fields))
        self.steps.undertaker.take(delivery)
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


def virtual_time(patch: pytest.MonkeyPatch) -> VirtualTime:
    """The clock of a worker on fakes; made inside the running loop."""
    return VirtualTime(patch, pipeline, hand, wiring, publish, answer)


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
    breaker: dict[str, float] | None = None,
    warm_run_s: dict[int, float] | None = None,
) -> AsyncIterator[WorkerOnFakes]:
    """A worker that serves model `m`, which doubles `x`, until the block ends; nothing is drained then."""
    registry, journal = CollectorRegistry(), list[str]()
    metrics = metrics_of(registry, role=role)
    session = session or FakeSession(slots=slots)
    session.info = replace(session.info, max_rows=max_rows)
    channel, store, publisher = FakeChannel(journal), FakeStore(journal), FakePublisher(journal)
    pressure: list[bool] = []
    settings = WorkerSettings.model_validate(
        {
            "role": role,
            "models": {"files": ("m=model.onnx",)},
            "batching": {"policy": policy_name, "max_rows": max_rows, "max_wait_s": max_wait_s, "max_bytes": 2**20},
            "limits": {"rows": MAX_JOB_ROWS, "payload_bytes": 2**20},
            "breaker": breaker or {},
        }
    )
    # Less than a real worker could be told to hold.
    held = settings.lanes.model_copy(update={"max_held_bytes": max_held_bytes})
    settings = settings.model_copy(update={"lanes": held})
    lanes = FakeLanes(journal)
    broker = SimpleNamespace(pause_bulk=pressure.append, pause_model=lanes.pause, replies=publisher, moves=publisher)
    failure: Exception | None = None
    try:
        async with asyncio.TaskGroup() as group:
            latency = LatencyTable(warm_run_s)
            window = Window(max_rows=max_rows, first_rows=256)
            models = {"m": ServedModel(ModelFile("m", "1", Path("model.onnx")), session, latency, window)}
            tasks = Tasks(group)
            steps = wire(
                settings, models, cast("Any", broker), cast("Any", store),
                turns=slots, worker=WORKER, metrics=metrics, tasks=tasks,
            )  # fmt: skip
            settler = settler_of(channel, metrics)
            serving = [group.create_task(steps.pipeline.serve())]
            worker = WorkerOnFakes(
                time, steps, session, store, publisher, channel, settler, tasks, registry, journal, latency, serving,
                pressure, lanes,
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
