"""When the next batch is composed and when it starts, on a clock that the test moves."""

from __future__ import annotations

import asyncio

import pytest
from tests.fakes import FakeClock

from inferq_worker.device import Device

RUN_S = 0.025


async def turn() -> None:
    """Let every task that can go on do so."""
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


async def test_an_idle_device_wants_its_batch_at_once(clock: FakeClock) -> None:
    device = Device(1, clock)
    await device.nearly_free()
    assert device.start_s == clock.now()
    assert device.longest_run_s() == 0.0


async def test_the_next_batch_is_composed_so_long_before_the_predicted_end_as_its_check_takes(clock: FakeClock) -> None:
    device = Device(1, clock)
    await device.begin(RUN_S)
    composed = asyncio.ensure_future(device.nearly_free())
    await turn()
    clock.advance(RUN_S - device.lead_s - 1e-6)
    await turn()
    assert not composed.done()
    assert device.start_s == pytest.approx(1_000.0 + RUN_S)
    clock.advance(2e-6)
    await turn()
    assert composed.done()


async def test_a_slower_check_makes_for_an_earlier_composition(clock: FakeClock) -> None:
    device = Device(1, clock)
    first_s = device.lead_s
    for _ in range(60):
        device.checked(0.010)
    assert first_s == pytest.approx(0.003)
    assert device.lead_s == pytest.approx(0.011, abs=0.0001)


async def test_a_run_that_ends_early_wants_the_next_batch_at_once(clock: FakeClock) -> None:
    device = Device(1, clock)
    run = await device.begin(RUN_S)
    composed = asyncio.ensure_future(device.nearly_free())
    await turn()
    clock.advance(0.001)
    device.end(run)
    await turn()
    assert composed.done()
    assert clock.pending == [], "the timer is taken back"


async def test_where_no_end_can_be_told_the_next_batch_waits_for_it(clock: FakeClock) -> None:
    device = Device(1, clock)
    run = await device.begin(None)
    composed = asyncio.ensure_future(device.nearly_free())
    await turn()
    clock.advance(3600)
    await turn()
    assert not composed.done()
    assert device.start_s == clock.now()
    device.end(run)
    await turn()
    assert composed.done()


async def test_a_run_that_lasts_longer_than_predicted_is_about_to_end_all_the_time(clock: FakeClock) -> None:
    device = Device(1, clock)
    await device.begin(RUN_S)
    clock.advance(1.0)
    await device.nearly_free()
    assert device.start_s == clock.now()
    assert device.longest_run_s() == pytest.approx(1.0)


async def test_a_composed_batch_begins_when_the_slot_is_free_and_not_before(clock: FakeClock) -> None:
    device = Device(1, clock)
    run = await device.begin(RUN_S)
    begun = asyncio.ensure_future(device.begin(RUN_S))
    clock.advance(2 * RUN_S)
    await turn()
    assert not begun.done()
    device.end(run)
    await turn()
    assert begun.result().started_s == clock.now()


async def test_with_several_slots_a_free_one_is_taken_first_and_then_that_which_ends_first(clock: FakeClock) -> None:
    device = Device(2, clock)
    await device.begin(10 * RUN_S)
    await device.nearly_free()
    assert device.start_s == clock.now()

    await device.begin(RUN_S)
    composed = asyncio.ensure_future(device.nearly_free())
    await turn()
    assert not composed.done()
    assert device.start_s == pytest.approx(1_000.0 + RUN_S)
    clock.advance(RUN_S)
    await turn()
    assert composed.done()


async def test_a_run_alone_waits_for_all_slots_and_lets_nobody_beside_it(clock: FakeClock) -> None:
    device = Device(2, clock)
    first = await device.begin(RUN_S)
    alone = asyncio.ensure_future(device.begin(RUN_S, alone=True))
    await turn()
    later = asyncio.ensure_future(device.begin(RUN_S))
    await turn()
    assert not alone.done()
    assert not later.done(), "who comes later does not pass by"

    device.end(first)
    await turn()
    assert alone.done()
    assert not later.done()
    composed = asyncio.ensure_future(device.nearly_free())
    await turn()
    assert not composed.done(), "no slot is free while it runs"
    assert device.start_s == pytest.approx(clock.now() + RUN_S)

    device.end(alone.result())
    await turn()
    assert later.done()
    assert composed.done()


async def test_of_several_runs_one_whose_end_is_known_decides(clock: FakeClock) -> None:
    device = Device(2, clock)
    await device.begin(None)
    await device.begin(RUN_S)
    assert device.start_s == pytest.approx(1_000.0 + RUN_S)


async def test_the_oldest_run_under_way_is_the_longest(clock: FakeClock) -> None:
    device = Device(2, clock)
    first = await device.begin(RUN_S)
    clock.advance(5)
    second = await device.begin(None)
    clock.advance(2)
    assert device.longest_run_s() == pytest.approx(7)
    device.end(first)
    assert device.longest_run_s() == pytest.approx(2)
    device.end(second)
    assert device.longest_run_s() == 0.0


async def test_who_stops_waiting_for_the_device_leaves_no_timer(clock: FakeClock) -> None:
    device = Device(1, clock)
    await device.begin(RUN_S)
    composed = asyncio.ensure_future(device.nearly_free())
    await turn()
    composed.cancel()
    await turn()
    assert clock.pending == []


async def test_what_arrives_while_a_composed_batch_waits_runs_after_it(clock: FakeClock) -> None:
    device = Device(1, clock)
    run = await device.begin(RUN_S)
    device.composed(0.1)
    assert device.start_s == pytest.approx(1_000.0 + RUN_S + 0.1)
    clock.advance(RUN_S)
    device.end(run)
    assert device.start_s == pytest.approx(clock.now() + 0.1), "free, but not for long"
    await device.begin(0.1)
    assert device.start_s == pytest.approx(clock.now() + 0.1)


@pytest.mark.parametrize("nothing", [None, 0.0])
async def test_a_composed_batch_that_does_not_run_after_all_is_forgotten(
    clock: FakeClock, nothing: float | None
) -> None:
    device = Device(1, clock)
    device.composed(0.1)
    device.composed(nothing)
    assert device.start_s == clock.now()
