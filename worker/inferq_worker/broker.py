"""The worker's side of the broker: two connections, one consumer a lane, the undertaker's queue, and their upkeep."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, TypeAlias

from inferq.amqp import CONNECTION_ERRORS, Link, OnUp, Publisher, end_if_cancelled, loss_is_an_error
from inferq.pauses import in_force
from inferq_schemas import DEAD_QUEUE, FALLBACK_LANE, fallback_queue, lane_queue
from inferq_worker.consume import LaneConsumer
from inferq_worker.errors import StoreUnavailable
from inferq_worker.work import WINDOW_MAX, Lane

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from aiormq.channel import Channel

    from inferq.pauses import Pause
    from inferq.settings import BrokerSettings
    from inferq_worker.budget import Windows
    from inferq_worker.consume import PauseReason
    from inferq_worker.cpu import CpuPool
    from inferq_worker.models import ModelFile
    from inferq_worker.observe.metrics import Metrics
    from inferq_worker.store import Store
    from inferq_worker.work import Delivery

_log = logging.getLogger(__name__)
_VERIFY_EVERY_S = 15.0
_FALLBACK_EVERY_S = 1.0
Sink: TypeAlias = "Callable[[Delivery], int]"


def lanes_of(model: ModelFile, role: str, windows: Windows, max_rows: int) -> list[Lane]:
    """The lanes that a worker of this role consumes for a model, the most urgent first.

    A window holds at least two batches where memory allows that, or a batch would never be full. The GPU role also
    knows the model's fallback queue: while no CPU worker lives, its jobs would be answered by nobody.
    """
    settings, most = windows.lanes, windows.most_urgent
    urgent = min(most, max(settings.interactive_window, min(2 * max_rows, WINDOW_MAX)))
    patient = max(settings.bulk_window_rows, 2 * max_rows)
    if role == "cpu":
        return [Lane(model.name, FALLBACK_LANE, 0, fallback_queue(model.name), urgent, urgent, most)]
    first, *others = model.lanes
    lanes = [Lane(model.name, first, 0, lane_queue(model.name, first), urgent, urgent, most)]
    most = windows.most_patient
    for rank, name in enumerate(others, start=1):
        queue = lane_queue(model.name, name)
        lanes.append(Lane(model.name, name, rank, queue, min(most, settings.bulk_window), patient, most))
    fallback = Lane(
        model.name, FALLBACK_LANE, len(model.lanes), fallback_queue(model.name), min(most, urgent), urgent, most
    )
    return [*lanes, fallback] if model.fallback else lanes


class Broker:
    """Connections and consumers of one worker.

    Consuming and settling go over one connection, publishing over the other: a memory alarm stops publishers, and acks
    on the same connection with them.

    Args:
        role: "gpu" or "cpu".
        worker: this process, shown in the broker's connection list.
    """

    def __init__(self, settings: BrokerSettings, *, role: str, worker: str, metrics: Metrics) -> None:
        self._role = role
        self._metrics = metrics
        self.consuming = Link(settings, name=f"inferq {role} {worker} consume", on_up=self._on_up("consume"))
        self.publishing = Link(settings, name=f"inferq {role} {worker} publish", on_up=self._on_up("publish"))
        self.replies = Publisher(self.publishing, timeout_s=settings.publish_timeout_s)
        self.moves = Publisher(self.publishing, timeout_s=settings.publish_timeout_s)
        self.consumers: list[LaneConsumer] = []
        self._counting: Channel | None = None
        self._set_up = asyncio.Event()

    def consume(self, lanes: Iterable[Lane], jobs: Sink, dead: Sink, *, dead_window: int) -> None:
        """Set up the consumers: job lanes to `jobs`, the dead-letter queue to `dead`. `run` starts them."""
        for lane in lanes:
            adopted = self._role == "gpu" and lane.name == FALLBACK_LANE
            self._add(lane, jobs, optional=adopted, paused_by="cpu_worker" if adopted else None)
        dead_lane = Lane("", "dead", 0, DEAD_QUEUE, dead_window, window_rows=dead_window, window_max=dead_window)
        self._add(dead_lane, dead)
        self._set_up.set()

    def _add(self, lane: Lane, sink: Sink, *, optional: bool = False, paused_by: PauseReason | None = None) -> None:
        consumer = LaneConsumer(lane, self.consuming, sink, self._metrics, optional=optional, paused_by=paused_by)
        self.consumers.append(consumer)

    async def run(self) -> None:
        """Keep the connections alive, and every consumer once it is set up; ends by cancellation."""
        async with asyncio.TaskGroup() as group:
            for link in (self.consuming, self.publishing):
                group.create_task(link.run())
            await self._set_up.wait()
            for consumer in self.consumers:
                group.create_task(consumer.run())
            group.create_task(self._upkeep())

    async def watch_fallback(self, store: Store, pools: Mapping[str, CpuPool]) -> None:
        """Keep the picture of the CPU workers current, and serve the fallback queue of a model for which none lives."""
        fallbacks = [one for one in self.consumers if one.optional]
        while fallbacks:
            for consumer in fallbacks:
                pool = pools[consumer.lane.model]
                try:
                    workers, gpu_workers = await store.cpu_workers(consumer.lane.model)
                except StoreUnavailable:
                    # Nothing is diverted to workers that are not heard of. Whether they left their queue, nobody knows.
                    continue
                if "operator" in consumer.paused_by:
                    # Nobody takes jobs from there: nothing is diverted to it.
                    workers = {}
                depth = await self._depth(consumer.lane.queue) if workers else None
                pool.update(workers, gpu_workers=gpu_workers, queued_jobs=depth, now_s=(now_s := time.monotonic()))
                await consumer.switch("cpu_worker", paused=pool.lives(now_s))
            end_if_cancelled()
            await asyncio.sleep(_FALLBACK_EVERY_S)

    async def _depth(self, queue: str) -> int | None:
        """Messages that wait in a queue, by the broker's own count; None if it cannot be asked."""
        try:
            if self._counting is None or self._counting.is_closed:
                self._counting = await self.consuming.channel(confirms=False)
            with loss_is_an_error():
                declared = await self._counting.queue_declare(queue, passive=True)
        except CONNECTION_ERRORS:
            return None
        return declared.message_count

    def pause_bulk(self, pressed: bool) -> None:  # noqa: FBT001 - a callback with one meaning
        """Pause or resume the lanes that may wait, because too many bytes are in hand."""
        _log.warning("message bytes in hand are %s the limit", "above" if pressed else "below half of")
        for consumer in self.consumers:
            if consumer.lane.rank > 0 and not consumer.optional:
                consumer.switch_soon("bytes", paused=pressed)

    async def pause_model(self, model: str, paused: bool) -> None:  # noqa: FBT001 - a callback with one meaning
        """Pause or resume all lanes of a model, because it fails; when paused, the broker sends no more of its jobs."""
        lanes = [one for one in self.consumers if one.lane.model == model]
        await asyncio.gather(*(one.switch("breaker", paused=paused) for one in lanes))

    def obey(self, pauses: Mapping[str, Pause]) -> None:
        """Take no jobs of lanes that operators paused; take them again where they did not, or no longer."""
        now_ms = int(time.time() * 1000)
        for consumer in self.consumers:
            lane = consumer.lane
            pause = in_force(pauses, lane.model, lane.name, now_ms) if lane.model else None
            paused = pause is not None
            if paused != ("operator" in consumer.paused_by):
                _log.warning("lane %s is %s", lane.queue, f"paused by {pause.by}: {pause.why}" if pause else "resumed")
                consumer.switch_soon("operator", paused=paused)

    async def stop(self) -> None:
        """Take no more deliveries. Channels stay open for settling."""
        await asyncio.gather(*(consumer.stop() for consumer in self.consumers))

    async def flush(self) -> None:
        """Hand every settlement made so far to the connection."""
        await asyncio.gather(*(consumer.flushed() for consumer in self.consumers))

    def problems(self) -> list[str]:
        """What keeps lanes from being consumed; empty when all is well."""
        links = (("consuming", self.consuming), ("publishing", self.publishing))
        down = [f"{name} connection is down: {link.last_error}" for name, link in links if not link.up.is_set()]
        if not self._set_up.is_set():
            return down or ["the queues are being checked"]
        return down or [one.problem for one in self.consumers if one.problem is not None and not one.optional]

    def status(self) -> list[dict[str, object]]:
        """Each lane's window and state, for `/status`."""
        return [
            {
                "queue": one.lane.queue,
                "consuming": one.consuming,
                "paused_by": one.paused_by,
                "window": one.window,
                "in_hand": one.open_deliveries,
                "problem": one.problem,
            }
            for one in self.consumers
        ]

    def _on_up(self, name: str) -> OnUp:
        async def up(link: Link) -> None:
            if link.connects > 1:
                self._metrics.broker_reconnected(name)
            self._metrics.broker_connected(name, connected=True)

        return up

    async def _upkeep(self) -> None:
        while True:
            await asyncio.sleep(_VERIFY_EVERY_S)
            for name, link in (("consume", self.consuming), ("publish", self.publishing)):
                self._metrics.broker_connected(name, connected=link.up.is_set())
                self._metrics.broker_blocked(name, blocked=await link.blocked())
            for consumer in self.consumers:
                await consumer.verify()
