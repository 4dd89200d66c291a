"""Message bytes in hand, and when bulk lanes pause and resume."""

import asyncio
from typing import TYPE_CHECKING

from tests.fakes import delivery_of, request_of

from inferq_worker.held import Held

if TYPE_CHECKING:
    from inferq_worker.work import Delivery


async def test_pressure_begins_above_the_limit_and_ends_at_half_of_it() -> None:
    calls: list[bool] = []
    held = Held(100, calls.append)
    deliveries: list[Delivery] = [delivery_of(bytes(25)) for _ in range(6)]
    for delivery in deliveries[:4]:
        held.take(delivery)
    assert calls == []
    held.take(deliveries[4])
    held.take(deliveries[5])
    assert calls == [True]
    for number, delivery in enumerate(deliveries):
        assert calls == ([True] if number < 4 else [True, False])
        held.leave(delivery)
    assert calls == [True, False]
    assert (held.bytes, held.deliveries) == (0, 0)


async def test_a_single_message_above_the_limit_presses_too() -> None:
    calls: list[bool] = []
    held = Held(100, calls.append)
    delivery = delivery_of(bytes(101))
    held.take(delivery)
    held.leave(delivery)
    assert calls == [True, False]


async def test_inputs_larger_than_the_limit_are_fetched_when_they_are_the_only_ones() -> None:
    calls: list[bool] = []
    held = Held(100, calls.append)
    first, second = request_of(), request_of()
    await held.reserve(first, 101)
    waiting = asyncio.create_task(held.reserve(second, 1))
    await asyncio.sleep(0)
    assert (waiting.done(), calls) == (False, [True])
    held.release(first)
    await waiting
    assert (held.bytes, calls) == (1, [True, False])


async def test_empty_messages_are_counted_as_messages() -> None:
    held = Held(100, lambda _pressed: None)
    held.take(delivery_of(b""))
    assert (held.bytes, held.deliveries) == (0, 1)
