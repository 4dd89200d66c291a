"""The waiting around a policy, on a clock that the test moves: who is woken, when, and what a cancellation loses."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fakes import FakeClock
from tests.scheduled_jobs import Job

from inferq_worker.scheduling import Batch, Batcher, EarliestDeadline, SizeOrTimeout
from inferq_worker.scheduling.batch import Poll
from inferq_worker.scheduling.clock import LoopClock

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

MAX_ROWS, MAX_WAIT_S = 4, 0.010


class Desk:
    """A batcher, its clock, and what it reported."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.expired: list[tuple[str, float]] = []
        policy: SizeOrTimeout[Job] = SizeOrTimeout(
            max_rows=MAX_ROWS, max_bytes=1_000, max_wait_s=MAX_WAIT_S, predict_s=lambda _bucket, _rows: None
        )
        policy.add(warmth := Job("", arrived_s=self.clock.now()))
        policy.discard(warmth)
        self.batcher: Batcher[Job] = Batcher(policy, self.clock, self.note)

    def note(self, job: Job) -> None:
        self.expired.append((job.name, self.clock.now()))

    def put(self, *names: str, left_s: float | None = None, alone: bool = False) -> None:
        now_s = self.clock.now()
        for name in names:
            deadline_s = None if left_s is None else now_s + left_s
            self.batcher.add(Job(name, arrived_s=now_s, deadline_s=deadline_s, alone=alone))

    def ask(self) -> asyncio.Task[Batch[Job] | None]:
        return asyncio.get_running_loop().create_task(self.batcher.next_batch())


async def turn(steps: int = 5) -> None:
    """Let every task that can go on do so, or do only its next steps."""
    for _ in range(steps):
        await asyncio.sleep(0)


async def names(batch: Awaitable[Batch[Job] | None]) -> str | None:
    got = await batch
    return None if got is None else " ".join(job.name for job in got.items)


@pytest.fixture
async def desk() -> Desk:
    return Desk()


async def test_an_arrival_wakes_who_waits(desk: Desk) -> None:
    asked = desk.ask()
    await turn()
    desk.put("a", "b", "c", "d")
    assert await names(asked) == "a b c d"


async def test_the_window_ends_on_the_timer_and_not_before(desk: Desk) -> None:
    asked = desk.ask()
    await turn()
    desk.put("a")
    await turn()
    desk.clock.advance(MAX_WAIT_S * 0.99)
    await turn()
    assert not asked.done()
    desk.clock.advance(MAX_WAIT_S * 0.02)
    assert await names(asked) == "a"


async def test_a_window_that_ended_while_nobody_asked_costs_no_further_wait(desk: Desk) -> None:
    desk.put("a")
    desk.clock.advance(1.0)
    assert await names(desk.batcher.next_batch()) == "a"


async def test_expiry_is_exact_while_every_device_is_busy(desk: Desk) -> None:
    start_s = desk.clock.now()
    desk.put("second", left_s=0.7)
    desk.put("first", left_s=0.3)
    desk.put("never")
    desk.clock.advance(5.0)
    assert desk.expired == [("first", start_s + 0.3), ("second", start_s + 0.7)]
    assert len(desk.batcher) == 1


async def test_expiry_is_exact_while_a_device_waits_for_company(desk: Desk) -> None:
    asked = desk.ask()
    await turn()
    start_s = desk.clock.now()
    desk.put("a", left_s=0.001)
    desk.clock.advance(0.001)
    await turn()
    assert desk.expired == [("a", start_s + 0.001)]
    assert not asked.done()
    desk.put("b")
    await turn()
    desk.clock.advance(MAX_WAIT_S)
    assert await names(asked) == "b"


async def test_each_of_several_devices_gets_a_batch_of_its_own(desk: Desk) -> None:
    asked = [desk.ask() for _ in range(3)]
    await turn()
    desk.put(*"abcdefghij")
    await turn()
    assert [await names(one) for one in asked[:2]] == ["a b c d", "e f g h"]
    assert not asked[2].done()
    desk.clock.advance(MAX_WAIT_S)
    assert await names(asked[2]) == "i j"


async def test_a_suspect_and_the_others_go_to_different_devices(desk: Desk) -> None:
    asked = [desk.ask(), desk.ask()]
    await turn()
    desk.put("suspect", alone=True)
    desk.put(*"abcd")
    assert {await names(one) for one in asked} == {"suspect", "a b c d"}


async def test_a_cancelled_wait_loses_nothing(desk: Desk) -> None:
    asked = desk.ask()
    await turn()
    desk.put(*"abcd")
    asked.cancel()
    await turn()
    assert asked.cancelled()
    assert len(desk.batcher) == 4
    assert await names(desk.batcher.next_batch()) == "a b c d"


@pytest.mark.parametrize("steps", range(6))
async def test_a_wait_cancelled_at_any_moment_loses_nothing(desk: Desk, steps: int) -> None:
    asked = desk.ask()
    await turn()
    desk.put(*"abcd")
    await turn(steps)
    # It has its batch by now, or the batch is still there for the next.
    if asked.cancel():
        assert await names(desk.batcher.next_batch()) == "a b c d"
    else:
        assert await names(asked) == "a b c d"


async def test_a_cancelled_wait_leaves_the_others_awake(desk: Desk) -> None:
    gone, stays = desk.ask(), desk.ask()
    await turn()
    desk.put(*"abcd")
    gone.cancel()
    assert await names(stays) == "a b c d"


async def test_close_wakes_everybody_and_returns_what_has_not_left(desk: Desk) -> None:
    desk.put("a")
    asked = [desk.ask(), desk.ask()]
    await turn()
    assert [job.name for job in desk.batcher.close()] == ["a"]
    assert [await names(one) for one in asked] == [None, None]
    assert await names(desk.batcher.next_batch()) is None
    assert desk.clock.pending == []


async def test_a_closed_batcher_reports_no_expiry(desk: Desk) -> None:
    desk.put("a", left_s=0.1)
    desk.batcher.close()
    desk.clock.advance(1.0)
    assert desk.expired == []


async def test_a_discarded_job_neither_leaves_nor_expires(desk: Desk) -> None:
    job = Job("a", arrived_s=desk.clock.now(), deadline_s=desk.clock.now() + 0.1)
    desk.batcher.add(job)
    assert desk.batcher.discard(job)
    desk.clock.advance(1.0)
    assert desk.expired == []
    assert len(desk.batcher) == 0


async def test_at_most_one_timer_waits(desk: Desk) -> None:
    for left_s in (0.9, 0.5, 0.7, 0.1):
        desk.put("a", left_s=left_s)
    assert len(desk.clock.pending) == 1
    assert desk.clock.pending[0].when_s == pytest.approx(desk.clock.now() + 0.1)


STEPS = st.lists(
    st.tuples(st.just("add"), st.none() | st.integers(1, 30), st.booleans())
    | st.tuples(st.just("cancel"), st.integers(0, 5))
    | st.tuples(st.sampled_from(["ask"]))
    | st.tuples(st.just("turn"), st.integers(1, 3))
    | st.tuples(st.just("pass"), st.integers(0, 12)),
    max_size=60,
)


@settings(max_examples=80, deadline=None)
@given(STEPS, st.booleans())
def test_every_job_leaves_exactly_once_whoever_asks_waits_or_is_cancelled(
    steps: list[tuple[Any, ...]], finish: bool
) -> None:
    async def play() -> tuple[list[str], list[str]]:
        desk = Desk()
        asked: list[asyncio.Task[Batch[Job] | None]] = []
        added: list[str] = []
        for kind, *values in steps:
            if kind == "add":
                left_ms, alone = values
                added.append(str(len(added)))
                desk.put(added[-1], left_s=None if left_ms is None else left_ms / 1000, alone=alone)
            elif kind == "ask":
                asked.append(desk.ask())
            elif kind == "cancel" and asked:
                asked[-1 - values[0] % len(asked)].cancel()
            elif kind == "pass":
                desk.clock.advance(values[0] / 1000)
            elif kind == "turn":
                await turn(values[0])
        await turn()
        if finish:
            # Enough devices and enough time: nothing may be left waiting.
            asked += [desk.ask() for _ in added]
            for _ in range(len(added) + 1):
                await turn()
                desk.clock.advance(MAX_WAIT_S)
            await turn()
            assert len(desk.batcher) == 0
        left = [job.name for job in desk.batcher.close()]
        batches = [batch for batch in await asyncio.gather(*asked, return_exceptions=True) if isinstance(batch, Batch)]
        return added, left + [name for name, _ in desk.expired] + [job.name for one in batches for job in one.items]

    added, ended = asyncio.run(play())
    assert Counter(ended) == Counter(added)


class CoarseLoop:
    """A loop like uvloop: its own time stands still, and its timers count whole milliseconds from there."""

    def __init__(self) -> None:
        self.delays_s: list[float] = []

    def time(self) -> float:
        return 1_000.0

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
        self.delays_s.append(delay_s)
        return asyncio.TimerHandle(delay_s, callback, (), asyncio.get_running_loop())


@pytest.mark.parametrize(
    ("ahead_s", "delay_s"), [(0.0, 0.0), (-5.0, 0.0), (0.0001, 0.001), (0.0042, 0.005), (2.0, 2.0)]
)
async def test_the_loop_clock_rings_no_timer_early(ahead_s: float, delay_s: float) -> None:
    loop = CoarseLoop()
    clock = LoopClock(cast("Any", loop), lambda: 64.0)
    clock.call_at(64.0 + ahead_s, lambda: None)
    assert loop.delays_s == [pytest.approx(delay_s)]


async def test_a_job_that_has_just_arrived_lies_in_nobodys_future() -> None:
    now_s = 1_000.0004
    clock = LoopClock(cast("Any", CoarseLoop()), lambda: now_s)
    policy: SizeOrTimeout[Job] = SizeOrTimeout(
        max_rows=4, max_bytes=99, max_wait_s=0, predict_s=lambda _bucket, _rows: None
    )
    batcher: Batcher[Job] = Batcher(policy, clock, lambda _job: None)
    batcher.add(Job("a", arrived_s=now_s))
    assert await names(batcher.next_batch()) == "a"


async def test_the_loop_clock_calls_back_from_the_loop() -> None:
    loop = asyncio.get_running_loop()
    clock, rang = LoopClock(loop, time.monotonic), asyncio.Event()
    clock.call_at(clock.now() + 3600, rang.set).cancel()
    clock.call_at(clock.now() - 1, rang.set)
    await rang.wait()


@dataclass(slots=True)
class Scripted:
    """A policy that answers as told, and notes what it was asked."""

    answers: list[Poll[Job]]
    asked: list[tuple[float, bool, float | None]] = field(default_factory=list)

    def add(self, item: Job) -> None:
        """Nothing is held."""

    def discard(self, item: Job) -> bool:
        del item
        return False

    def poll(self, now_s: float, *, free: bool, start_s: float | None = None) -> Poll[Job]:
        self.asked.append((now_s, free, start_s))
        return self.answers.pop(0) if self.answers else Poll(None, (), None)

    def drain(self) -> tuple[Job, ...]:
        return ()

    def __len__(self) -> int:
        return 0


def a_batch(*names: str) -> Batch[Job]:
    return Batch(tuple(Job(name, arrived_s=0.0) for name in names), "full", 0.0)


async def test_what_is_left_of_a_large_job_waits_again_before_anybody_else_is_chosen(desk: Desk) -> None:
    now_s = desk.clock.now()
    desk.batcher.add(Job("large", rows=MAX_ROWS, later_rows=MAX_ROWS + 1, arrived_s=now_s, deadline_s=now_s + 9.0))
    desk.put("small")
    desk.clock.advance(MAX_WAIT_S)
    assert [await names(desk.ask()) for _ in range(3)] == ["large", "large", "large small"]
    assert len(desk.batcher) == 0


async def test_a_deadline_that_passes_while_a_step_runs_is_reported_for_what_is_left(desk: Desk) -> None:
    now_s = desk.clock.now()
    desk.batcher.add(Job("large", rows=MAX_ROWS, later_rows=1, arrived_s=now_s, deadline_s=now_s + 0.5))
    assert await names(desk.ask()) == "large"
    desk.clock.advance(1.0)
    assert desk.expired == [("large", now_s + 0.5)]


async def test_jobs_given_up_are_reported_apart_from_those_that_expired() -> None:
    expired, given_up = list[Job](), list[Job]()
    late, hopeless = Job("late", arrived_s=0.0), Job("hopeless", arrived_s=0.0)
    policy = Scripted([Poll(a_batch("a"), (late,), None, (hopeless,))])
    batcher = Batcher(policy, FakeClock(), expired.append, given_up.append)
    assert await names(batcher.next_batch()) == "a"
    assert (expired, given_up) == ([late], [hopeless])


async def test_who_does_not_ask_for_jobs_given_up_gets_them_as_expired() -> None:
    expired = list[Job]()
    late, hopeless = Job("late", arrived_s=0.0), Job("hopeless", arrived_s=0.0)
    batcher = Batcher(Scripted([Poll(a_batch("a"), (late,), None, (hopeless,))]), FakeClock(), expired.append)
    await batcher.next_batch()
    assert expired == [late, hopeless]


async def test_the_policy_is_told_when_the_run_will_begin_as_it_stands_at_each_look() -> None:
    clock = FakeClock()
    policy = Scripted([Poll(None, (), clock.now() + 1.0), Poll(None, (), None), Poll(a_batch("a"), (), None)])
    batcher: Batcher[Job] = Batcher(policy, clock, lambda _job: None)
    starts_s = iter([1_007.0, 1_008.0])
    asked = asyncio.ensure_future(batcher.next_batch(lambda: next(starts_s)))
    await turn()
    clock.advance(1.0)
    assert await names(asked) == "a"
    assert policy.asked == [(1_000.0, True, 1_007.0), (1_001.0, False, None), (1_001.0, True, 1_008.0)]


async def test_with_deadline_order_a_late_start_gives_up_what_an_early_one_would_have_served() -> None:
    async def taken_by(start_s: float) -> tuple[str | None, list[str]]:
        given_up = list[Job]()
        policy: EarliestDeadline[Job] = EarliestDeadline(
            max_rows=4, max_bytes=1_000, max_wait_s=0.0, predict_s=lambda _bucket, _rows: 0.02
        )
        batcher = Batcher(policy, FakeClock(), lambda _job: None, given_up.append)
        batcher.add(Job("urgent", arrived_s=1_000.0, deadline_s=1_000.04))
        batcher.add(Job("patient", arrived_s=1_000.0, deadline_s=1_009.0))
        return await names(batcher.next_batch(lambda: start_s)), [job.name for job in given_up]

    assert await taken_by(1_000.0) == ("urgent patient", [])
    assert await taken_by(1_000.05) == ("patient", ["urgent"])
