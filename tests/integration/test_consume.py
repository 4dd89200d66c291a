"""A lane's consumer against a real broker: what becomes of its channel when it starts again."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from pydantic import SecretStr
from tests.e2e.worker_process import until
from tests.fakes import metrics_of

from inferq.amqp import Link, Publisher, properties
from inferq.settings import BrokerSettings
from inferq_schemas import ModelTopology, Topology
from inferq_worker.consume import LaneConsumer
from inferq_worker.work import Delivery, Lane

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.stack import Broker

LANE = Lane("m", "bulk", 1, "inferq.m.bulk", window=8, window_rows=8)


@pytest.fixture
async def link(broker: Broker) -> AsyncIterator[Link]:
    broker.load(Topology([ModelTopology("m")]).definitions(broker.vhost))
    link = Link(BrokerSettings(url=SecretStr(broker.url)), name="test")
    running = asyncio.create_task(link.run())
    await link.wait_up(20)
    yield link
    running.cancel()
    await asyncio.wait([running])


async def test_a_lane_is_consumed_again_only_when_the_last_reason_against_it_is_gone(link: Link) -> None:
    came: list[Delivery] = []

    def sink(delivery: Delivery) -> int:
        came.append(delivery)
        return 1

    consumer = LaneConsumer(LANE, link, sink, metrics_of())
    running = asyncio.create_task(consumer.run())
    await until(lambda: consumer.consuming)
    await consumer.switch("breaker", paused=True)
    await consumer.switch("bytes", paused=True)
    await consumer.switch("bytes", paused=False)
    assert (consumer.consuming, consumer.paused_by) == (False, ["breaker"])
    await Publisher(link, timeout_s=10).publish(
        b"job", exchange="", routing_key=LANE.queue, properties=properties(), mandatory=True
    )
    consumer._lost.set()
    await until(lambda: not consumer._lost.is_set())
    assert (consumer.consuming, came) == (False, []), "also on the fresh channel after a loss"

    await consumer.switch("breaker", paused=False)
    await until(lambda: came)
    came[0].settler.ack(came[0].tag)
    await consumer.stop()
    await consumer.switch("breaker", paused=True)
    await consumer.switch("breaker", paused=False)
    assert not consumer.consuming, "a lane that was stopped stays so"
    await asyncio.wait_for(running, 20)


async def test_a_channel_that_is_left_closes_once_all_that_it_brought_is_settled(link: Link) -> None:
    came: list[Delivery] = []

    def sink(delivery: Delivery) -> int:
        came.append(delivery)
        return 1

    consumer = LaneConsumer(LANE, link, sink, metrics_of())
    running = asyncio.create_task(consumer.run())
    await Publisher(link, timeout_s=10).publish(
        b"job", exchange="", routing_key=LANE.queue, properties=properties(), mandatory=True
    )
    await until(lambda: came)
    old = consumer._channel
    assert old is not None
    consumer._lost.set()
    await until(lambda: consumer._channel is not old and consumer.consuming)
    assert not old.is_closed, "its delivery is not settled"
    assert consumer.open_deliveries == 1

    came[0].settler.ack(came[0].tag)
    await until(lambda: old.is_closed)
    await until(lambda: consumer.open_deliveries == 0)
    assert consumer.consuming
    assert consumer.problem is None
    assert not consumer._lost.is_set(), "the end of the old channel is not the end of the new one"
    assert len(came) == 1
    await consumer.stop()
    await asyncio.wait_for(running, 20)
