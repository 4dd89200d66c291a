"""When the next batch is composed and when it starts, on a clock that the test moves."""

from __future__ import annotations

import asyncio

import pytest
from tests.fakes import FakeClock

from inferq_worker.device import Device, Run

RUN_S = 0.025


async def turn() -> None:
    """Let every task that can go on do so."""
    for _ in range(5):
        await asyncio.sleep(0)


def begin(device: Device, expected_s: float | None = RUN_S, *, alone: bool = False) -> Run:
    """A batch that gets the device at once, as its session would report it."""
    run = device.enter(expected_s, alone=alone)
    run.unwanted()
    run.started()
    return run


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
    begin(device)
    composed = asyncio.ensure_future(device.nearly_free())
    await turn()
    clock.advance(RUN_S - device.lead_s - 1e-6)
    await turn()
    assert not composed.done()
    assert device.start_s == pytest.approx(1_000.0 + RUN_S)
    clock.advance(2e-6)
    await turn()
    assert composed.done()


async def test_slow_checks_make_for_an_earlier_composition(clock: FakeClock) -> None:
    device = Device(1, clock)
    assert device.lead_s == pytest.approx(0.003)
    for number in range(400):
        device.checked(0.010 if number % 10 == 0 else 0.001)
    assert device.lead_s > 0.006, "one check in ten is slow, and few may delay a start"


async def test_a_run_that_ends_early_wants_the_next_batch_at_once(clock: FakeClock) -> None:
    device = Device(1, clock)
    run = begin(device)
    composed = asyncio.ensure_future(device.nearly_free())
    await turn()
    clock.advance(0.001)
    device.end(run)
    await turn()
    assert composed.done()
    assert clock.pending == [], "the timer is taken back"


async def test_where_no_end_can_be_told_the_next_batch_waits_for_it(clock: FakeClock) -> None:
    device = Device(1, clock)
    run = begin(device, None)
    composed = asyncio.ensure_future(device.nearly_free())
    await turn()
    clock.advance(3600)
    await turn()
    assert not composed.done()
    assert device.start_s == clock.now()
    device.end(run)
    await turn()
    assert composed.done()


async def test_a_run_that_lasts_a_little_longer_than_predicted_is_about_to_end(clock: FakeClock) -> None:
    device = Device(1, clock)
    begin(device)
    clock.advance(2 * RUN_S)
    await device.nearly_free()
    assert device.start_s == clock.now()
    assert device.longest_run_s() == pytest.approx(2 * RUN_S)


async def test_a_run_that_may_hang_may_last_as_long_again_and_nothing_is_composed_for_its_end(clock: FakeClock) -> None:
    device = Device(1, clock)
    run = begin(device)
    assert run.suspicious_s == pytest.approx(1_000.0 + 3 * RUN_S)
    clock.advance(1.0)
    assert device.start_s == pytest.approx(clock.now() + 1.0)
    composed = asyncio.ensure_future(device.nearly_free())
    await turn()
    clock.advance(600.0)
    await turn()
    assert not composed.done()
    device.end(run)
    await turn()
    assert composed.done()


async def test_while_one_batch_waits_for_the_device_no_other_is_composed(clock: FakeClock) -> None:
    device = Device(1, clock)
    first = begin(device)
    clock.advance(RUN_S)
    waiting = device.enter(RUN_S)
    composed = asyncio.ensure_future(device.nearly_free())
    clock.advance(RUN_S)
    await turn()
    assert not composed.done()
    assert device.start_s == pytest.approx(clock.now() + RUN_S), "what comes now runs after it"

    device.end(first)
    waiting.unwanted()
    waiting.started()
    await turn()
    assert not composed.done()
    clock.advance(RUN_S)
    await turn()
    assert composed.done()


async def test_a_batch_that_starts_before_the_end_of_the_last_one_is_known_is_no_second_one(clock: FakeClock) -> None:
    device = Device(1, clock)
    first = begin(device)
    begin(device)
    composed = asyncio.ensure_future(device.nearly_free())
    device.end(first)
    await turn()
    assert not composed.done()


async def test_with_several_slots_a_free_one_is_taken_first_and_then_that_which_ends_first(clock: FakeClock) -> None:
    device = Device(2, clock)
    begin(device, 10 * RUN_S)
    await device.nearly_free()
    assert device.start_s == clock.now()

    begin(device)
    composed = asyncio.ensure_future(device.nearly_free())
    await turn()
    assert not composed.done()
    assert device.start_s == pytest.approx(1_000.0 + RUN_S)
    clock.advance(RUN_S)
    await turn()
    assert composed.done()


async def test_a_run_alone_waits_for_an_empty_device_and_lets_nobody_beside_it(clock: FakeClock) -> None:
    device = Device(2, clock)
    first = begin(device)
    empty = asyncio.ensure_future(device.empty())
    await turn()
    assert not empty.done()
    device.end(first)
    await turn()
    assert empty.done()

    alone = begin(device, alone=True)
    composed = asyncio.ensure_future(device.nearly_free())
    clock.advance(10 * RUN_S)
    await turn()
    assert not composed.done(), "not even shortly before its end"
    device.end(alone)
    await turn()
    assert composed.done()


async def test_of_several_runs_one_whose_end_is_known_decides(clock: FakeClock) -> None:
    device = Device(2, clock)
    begin(device, None)
    begin(device)
    assert device.start_s == pytest.approx(1_000.0 + RUN_S)


async def test_the_oldest_run_under_way_is_the_longest(clock: FakeClock) -> None:
    device = Device(2, clock)
    first = begin(device)
    clock.advance(5)
    second = begin(device, None)
    device.enter(None)
    clock.advance(2)
    assert device.longest_run_s() == pytest.approx(7)
    device.end(first)
    assert device.longest_run_s() == pytest.approx(2)
    device.end(second)
    assert device.longest_run_s() == 0.0, "what waits does not run"


async def test_who_stops_waiting_for_the_device_leaves_no_timer(clock: FakeClock) -> None:
    device = Device(1, clock)
    begin(device)
    composed = asyncio.ensure_future(device.nearly_free())
    await turn()
    composed.cancel()
    await turn()
    assert clock.pending == []


async def test_what_arrives_while_a_composed_batch_is_checked_runs_after_it(clock: FakeClock) -> None:
    device = Device(1, clock)
    run = begin(device)
    device.composed(0.1)
    assert device.start_s == pytest.approx(1_000.0 + RUN_S + 0.1)
    clock.advance(RUN_S)
    device.end(run)
    assert device.start_s == pytest.approx(clock.now() + 0.1), "free, but not for long"
    begin(device, 0.1)
    assert device.start_s == pytest.approx(clock.now() + 0.1)


@pytest.mark.parametrize("nothing", [None, 0.0])
async def test_a_composed_batch_that_does_not_run_after_all_is_forgotten(
    clock: FakeClock, nothing: float | None
) -> None:
    device = Device(1, clock)
    device.composed(0.1)
    device.composed(nothing)
    assert device.start_s == clock.now()


async def test_a_run_begins_without_the_items_that_nobody_waits_for(clock: FakeClock) -> None:
    gone = [1]
    run = Device(1, clock).enter(RUN_S, unwanted=lambda: gone)
    gone.append(3)
    assert run.unwanted() == [1, 3]
    assert run.began_s == clock.now()


async def test_a_device_whose_every_slot_is_lost_is_lost(clock: FakeClock) -> None:
    device = Device(2, clock)
    hung = [begin(device), begin(device)]
    device.end(hung[0])
    device.lose()
    assert not device.lost.is_set()
    begin(device)
    composed = asyncio.ensure_future(device.nearly_free())
    await turn()
    assert not composed.done(), "one slot is left, and taken"
    device.end(hung[1])
    device.lose()
    await turn()
    assert device.lost.is_set()
    assert composed.done(), "nobody waits for it any more"
