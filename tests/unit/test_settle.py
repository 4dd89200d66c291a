"""Every delivery is settled once, against a channel that closes on a settlement RabbitMQ would not take."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from tests.fakes import FakeChannel, metrics_of, settler_of

if TYPE_CHECKING:
    from inferq_worker.settle import Settler


class Desk:
    """A settler on a channel with open deliveries."""

    def __init__(self, deliveries: int = 0) -> None:
        self.registry = CollectorRegistry()
        self.channel = FakeChannel()
        self.settler: Settler = settler_of(self.channel, metrics_of(self.registry))
        for _ in range(deliveries):
            self.deliver()

    def deliver(self) -> int:
        tag = self.channel.deliver()
        self.settler.open(tag)
        return tag

    def count(self, name: str) -> float:
        return self.registry.get_sample_value(f"inferq_{name}_total") or 0.0


@pytest.fixture
async def desk() -> Desk:
    return Desk(5)


async def test_a_contiguous_done_prefix_is_one_multiple_ack(desk: Desk) -> None:
    for tag in (3, 1, 2):
        desk.settler.ack(tag)
    await desk.settler.flushed()
    assert desk.channel.frames == [("ack", 3, True)]
    assert desk.channel.open_tags == {4, 5}
    assert len(desk.settler) == 2


async def test_what_lies_behind_an_open_delivery_is_acked_one_by_one(desk: Desk) -> None:
    for tag in (1, 3, 5):
        desk.settler.ack(tag)
    await desk.settler.flushed()
    assert desk.channel.frames == [("ack", 1, True), ("ack", 3, False), ("ack", 5, False)]
    assert desk.channel.open_tags == {2, 4}


async def test_a_gap_that_closes_is_a_prefix_again(desk: Desk) -> None:
    desk.settler.ack(2)
    await desk.settler.flushed()
    desk.settler.ack(1)
    desk.settler.ack(3)
    await desk.settler.flushed()
    assert desk.channel.frames == [("ack", 2, False), ("ack", 3, True)]


async def test_a_multiple_ack_covers_nothing_that_goes_back_or_is_dead(desk: Desk) -> None:
    desk.settler.ack(1)
    desk.settler.give_back(2)
    desk.settler.reject(3)
    desk.settler.ack(4)
    await desk.settler.flushed()
    assert desk.channel.fates == {1: "acked", 2: "requeued", 3: "dead", 4: "acked"}
    assert desk.channel.open_tags == {5}


async def test_a_prefix_reaches_over_what_was_given_back_before(desk: Desk) -> None:
    desk.settler.give_back(1)
    await desk.settler.flushed()
    desk.settler.ack(2)
    await desk.settler.flushed()
    assert desk.channel.frames == [("nack", 1, False), ("ack", 2, True)]
    assert desk.channel.fates == {1: "requeued", 2: "acked"}


async def test_settling_twice_is_an_error_of_ours_and_never_reaches_the_broker(desk: Desk) -> None:
    desk.settler.ack(1)
    with pytest.raises(RuntimeError, match="1 is settled twice"):
        desk.settler.ack(1)
    await desk.settler.flushed()
    with pytest.raises(RuntimeError, match="settled twice"):
        desk.settler.give_back(1)
    assert desk.channel.frames == [("ack", 1, True)]


async def test_a_delivery_of_another_channel_is_not_settled_here(desk: Desk) -> None:
    with pytest.raises(RuntimeError):
        desk.settler.ack(99)


async def test_a_stale_settlement_is_dropped_and_counted(desk: Desk) -> None:
    desk.channel.is_closed = True
    assert desk.settler.stale
    desk.settler.ack(1)
    desk.settler.give_back(2)
    await desk.settler.flushed()
    assert desk.channel.frames == []
    assert desk.count("stale_acks") == 2
    assert desk.count("acks") == 0
    assert len(desk.settler) == 0


async def test_a_channel_that_dies_while_settling_costs_no_error(desk: Desk) -> None:
    desk.channel.dies_after = 1
    desk.settler.ack(1)
    desk.settler.ack(3)
    await desk.settler.flushed()
    assert desk.channel.frames == [("ack", 1, True)]
    assert desk.count("stale_acks") == 1
    desk.settler.ack(2)
    assert desk.count("stale_acks") == 2


async def test_acknowledged_deliveries_are_counted(desk: Desk) -> None:
    desk.settler.ack(1)
    desk.settler.ack(2)
    desk.settler.reject(3)
    await desk.settler.flushed()
    assert desk.count("acks") == 2


async def test_decisions_made_while_others_are_sent_go_out_too(desk: Desk) -> None:
    desk.settler.ack(1)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    desk.settler.ack(2)
    tag = desk.deliver()
    desk.settler.ack(tag)
    await desk.settler.flushed()
    assert desk.channel.open_tags == {3, 4, 5}
    assert desk.channel.error is None


async def test_flushed_returns_when_there_is_nothing_to_do(desk: Desk) -> None:
    await desk.settler.flushed()
    assert desk.channel.frames == []


STEPS = st.lists(
    st.tuples(st.just("deliver"), st.just(0))
    | st.tuples(st.sampled_from(["ack", "give_back", "reject"]), st.integers(0, 20))
    | st.tuples(st.just("turn"), st.integers(1, 3)),
    max_size=60,
)


@settings(max_examples=120, deadline=None)
@given(STEPS, st.none() | st.integers(0, 10))
def test_the_broker_never_sees_a_wrong_tag_and_every_decision_arrives(
    steps: list[tuple[str, int]], dies_after: int | None
) -> None:
    wanted: dict[int, str] = {}

    async def play() -> FakeChannel:
        desk = Desk()
        desk.channel.dies_after = dies_after
        undecided: list[int] = []
        for kind, number in steps:
            if kind == "deliver" and not desk.settler.stale:
                undecided.append(desk.deliver())
            elif kind == "turn":
                for _ in range(number):
                    await asyncio.sleep(0)
            elif kind != "deliver" and undecided:
                tag = undecided.pop(number % len(undecided))
                wanted[tag] = {"ack": "acked", "give_back": "requeued", "reject": "dead"}[kind]
                decide: Any = getattr(desk.settler, kind)
                decide(tag)
        await desk.settler.flushed()
        if not desk.settler.stale:
            assert len(desk.settler) == len(undecided) == len(desk.channel.open_tags)
        return desk.channel

    channel = asyncio.run(play())
    assert channel.error is None
    if not channel.is_closed:
        assert channel.fates == wanted
    assert channel.fates.items() <= wanted.items()
