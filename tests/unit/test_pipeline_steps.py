"""A job with more rows than a batch on its walk through the worker: in steps, with others between them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.fakes import VirtualTime, job_of
from tests.worker_on_fakes import WorkerOnFakes, fake_worker, virtual_time

from inferq.outcome import Outcome
from inferq_worker.runtime import RowError
from inferq_worker.runtime.fake import FAKE_INFO, FakeSession, double

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from inferq_worker.poison import RunRecord
    from inferq_worker.work import Feeds

STEP_ROWS = 2
POLICIES = ["size_or_timeout", "earliest_deadline"]


class Timed(FakeSession):
    """Two rows at most, a second for each run."""

    def __init__(self, answer: Callable[[Feeds], Feeds | RowError] = double, *, slots: int = 1) -> None:
        info = replace(FAKE_INFO, max_rows=STEP_ROWS)
        super().__init__(answer, info=info, slots=slots, run_s=1.0, passes=True)


@pytest.fixture
async def time(monkeypatch: pytest.MonkeyPatch) -> VirtualTime:
    return virtual_time(monkeypatch)


def run_rows(worker: WorkerOnFakes) -> list[list[float]]:
    """The rows of every run, by their number."""
    return [[float(row[0]) for item in run for row in item["x"]] for run in worker.session.calls]


def settled(worker: WorkerOnFakes) -> bool:
    return (worker.steps.held.deliveries, len(worker.steps.hand), worker.store.running) == (0, 0, {})


@pytest.mark.parametrize("policy_name", POLICIES)
async def test_its_answer_is_joined_and_told_once(time: VirtualTime, policy_name: str) -> None:
    async with fake_worker(time, session=Timed(), max_rows=STEP_ROWS, policy_name=policy_name) as worker:
        await worker.take(job_of("a", 1, 2, 3, 4, 5))
        await time.advance(10)
        assert run_rows(worker) == [[1, 2], [3, 4], [5]]
        (result,) = worker.replies()
        assert np.array_equal(result.outputs["y"].to_numpy()[:, 0], np.array([2, 4, 6, 8, 10], np.float32))
        assert worker.journal == ["stored a", "published reply.me", "acked 1"]
        assert result.timing_ms is not None
        assert result.timing_ms.run == 3000
        assert (result.batch.rows if result.batch else None) == 1
        assert settled(worker)


@pytest.mark.parametrize("policy_name", POLICIES)
async def test_other_jobs_run_between_two_steps(time: VirtualTime, policy_name: str) -> None:
    async with fake_worker(time, session=Timed(), max_rows=STEP_ROWS, policy_name=policy_name) as worker:
        await worker.take(job_of("large", *range(1, 8)), lane="bulk")
        await time.advance(0.5)
        await worker.take(job_of("x", 91))
        await worker.take(job_of("y", 92))
        await time.advance(20)
        assert run_rows(worker) == [[1, 2], [91, 92], [3, 4], [5, 6], [7]]
        assert worker.codes() == {"x": "ok", "y": "ok", "large": "ok"}
        assert [one.id for one in worker.replies()] == ["x", "y", "large"]


async def test_its_last_step_shares_its_batch(time: VirtualTime) -> None:
    async with fake_worker(time, session=Timed(), max_rows=STEP_ROWS, policy_name="earliest_deadline") as worker:
        await worker.take(job_of("large", 1, 2, 3))
        await worker.take(job_of("small", 9))
        await time.advance(10)
        assert run_rows(worker) == [[1, 2], [3, 9]]
        assert worker.codes() == {"large": "ok", "small": "ok"}


@pytest.mark.parametrize("policy_name", POLICIES)
async def test_of_several_large_jobs_none_is_mixed_up(time: VirtualTime, policy_name: str) -> None:
    async with fake_worker(time, session=Timed(), max_rows=STEP_ROWS, policy_name=policy_name) as worker:
        rows = {name: list(range(start, start + 5)) for name, start in (("a", 10), ("b", 20), ("c", 30))}
        for name, numbers in rows.items():
            await worker.take(job_of(name, *numbers), lane="bulk")
        await time.advance(60)
        answers = {one.id: one.outputs["y"].to_numpy()[:, 0].tolist() for one in worker.replies()}
        assert answers == {name: [2 * number for number in numbers] for name, numbers in rows.items()}
        assert sum(map(len, run_rows(worker))) == 15


async def test_large_jobs_of_one_deadline_are_answered_one_after_the_other(time: VirtualTime) -> None:
    async with fake_worker(time, session=Timed(), max_rows=STEP_ROWS, policy_name="earliest_deadline") as worker:
        due_ms = worker.unix_ms(60)
        # Received at one moment: the worker's clock would else turn one deadline into two, a millisecond apart.
        now: dict[str, Any] = {"received_s": time.monotonic(), "received_unix_ms": worker.unix_ms()}
        for name in ("first", "second", "third"):
            await worker.take(job_of(name, *range(5), deadline_unix_ms=due_ms), **now)
        await time.advance(3.5)
        assert worker.codes() == {"first": "ok"}, "its three runs, with nothing between them"
        await time.advance(20)
        assert [one.id for one in worker.replies()] == ["first", "second", "third"]
        assert settled(worker)


async def test_steps_run_side_by_side_where_the_device_has_slots(time: VirtualTime) -> None:
    async with fake_worker(time, session=Timed(slots=3), max_rows=STEP_ROWS, slots=3) as worker:
        await worker.take(job_of("a", 1, 2, 3, 4, 5))
        await time.advance(1.1)
        (result,) = worker.replies()
        assert np.array_equal(result.outputs["y"].to_numpy()[:, 0], np.array([2, 4, 6, 8, 10], np.float32))
        assert settled(worker)


async def test_of_steps_side_by_side_the_first_that_fails_answers_for_all(time: VirtualTime) -> None:
    def refuses(item: Feeds) -> Feeds | RowError:
        return RowError("invalid_input", "odd")

    async with fake_worker(time, session=Timed(refuses, slots=2), max_rows=STEP_ROWS, slots=2) as worker:
        await worker.take(job_of("a", 1, 2, 3, 4, 5, 6, 7))
        await time.advance(10)
        assert run_rows(worker) == [[1, 2], [3, 4]], "what was under way already"
        assert len(worker.replies()) == 1
        assert worker.channel.fates == {1: "acked"}
        assert settled(worker)


async def test_a_deadline_that_passes_while_a_step_runs_is_told_at_once_and_once(time: VirtualTime) -> None:
    async with fake_worker(time, session=Timed(), max_rows=STEP_ROWS) as worker:
        await worker.take(job_of("a", 1, 2, 3, 4, 5, 6, deadline_unix_ms=worker.unix_ms(0.5)))
        await time.advance(0.6)
        assert worker.codes() == {"a": "deadline_exceeded"}
        await time.advance(10)
        assert (run_rows(worker), len(worker.replies())) == ([[1, 2]], 1)
        assert settled(worker)


async def test_a_job_that_is_answered_while_its_outcome_is_looked_up_is_not_answered_again(
    time: VirtualTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fake_worker(time, session=Timed(), max_rows=STEP_ROWS) as worker:
        claim, hand = worker.store.claim, worker.steps.hand

        async def meanwhile(record: RunRecord, ids: Sequence[str], *, forget: Sequence[str] = ()) -> list[Any]:
            await claim(record, ids, forget=forget)
            hand.expired(hand.items()[0])
            return [Outcome.cancelled("a")]

        monkeypatch.setattr(worker.store, "claim", meanwhile)
        await worker.take(job_of("a", 1, 2, 3))
        await time.advance(10)
        assert ([one.id for one in worker.replies()], run_rows(worker)) == (["a"], [])
        assert settled(worker)


async def test_an_error_in_one_step_ends_the_job_once(time: VirtualTime) -> None:
    def refuses_three(item: Feeds) -> Feeds | RowError:
        return RowError("invalid_input", "three") if (item["x"] == 3).any() else double(item)

    async with fake_worker(time, session=Timed(refuses_three), max_rows=STEP_ROWS) as worker:
        await worker.take(job_of("a", 1, 2, 3, 4, 5, 6))
        await time.advance(10)
        assert run_rows(worker) == [[1, 2], [3, 4]]
        assert worker.codes() == {"a": "invalid_input"}
        assert len(worker.replies()) == 1
        assert worker.channel.fates == {1: "acked"}
        assert settled(worker)


async def test_a_deadline_that_passes_between_two_steps_ends_the_job(time: VirtualTime) -> None:
    async with fake_worker(time, session=Timed(), max_rows=STEP_ROWS) as worker:
        await worker.take(job_of("a", 1, 2, 3, 4, 5, 6, deadline_unix_ms=worker.unix_ms(1.5)))
        await time.advance(10)
        assert run_rows(worker) == [[1, 2], [3, 4]]
        assert worker.codes() == {"a": "deadline_exceeded"}
        assert len(worker.replies()) == 1
        assert settled(worker)


async def test_a_missed_deadline_is_counted_once_however_many_steps_it_took(time: VirtualTime) -> None:
    at = {"model": "m", "lane": "interactive"}
    async with fake_worker(time, session=Timed(), max_rows=STEP_ROWS) as worker:
        await worker.take(job_of("a", *range(8), deadline_unix_ms=worker.unix_ms(0.5), late="serve"))
        await time.advance(10)
        assert {one.id: one.late for one in worker.replies()} == {"a": True}
        assert worker.count("deadline_missed", **at, stage="run") == 1
        assert worker.registry.get_sample_value("inferq_job_queue_time_seconds_count", at) == 1


async def test_a_drain_between_two_steps_gives_it_back(time: VirtualTime) -> None:
    async with fake_worker(time, session=Timed(), max_rows=STEP_ROWS) as worker:
        await worker.take(job_of("a", 1, 2, 3, 4, 5))
        await time.advance(0.5)
        worker.steps.pipeline.drain()
        await time.advance(10)
        assert run_rows(worker) == [[1, 2]]
        assert worker.channel.fates == {1: "requeued"}
        assert worker.replies() == []
        assert all(task.done() for task in worker.serving)
        assert settled(worker)


async def test_a_drain_during_the_last_step_answers_it(time: VirtualTime) -> None:
    async with fake_worker(time, session=Timed(), max_rows=STEP_ROWS) as worker:
        await worker.take(job_of("a", 1, 2, 3))
        await time.advance(1.5)
        worker.steps.pipeline.drain()
        await time.advance(10)
        assert worker.codes() == {"a": "ok"}
        assert worker.channel.fates == {1: "acked"}


@pytest.mark.parametrize("at_s", [0.5, 1.5])
async def test_a_redelivery_meanwhile_waits_for_the_same_answer(time: VirtualTime, at_s: float) -> None:
    async with fake_worker(time, session=Timed(), max_rows=STEP_ROWS) as worker:
        job = job_of("a", 1, 2, 3, 4, 5, deadline_unix_ms=worker.unix_ms(60))
        await worker.take(job)
        await time.advance(at_s)
        worker.new_channel()
        await worker.take(job, redelivered=True, reply_to="reply.again")
        await time.advance(10)
        assert run_rows(worker) == [[1, 2], [3, 4], [5]]
        assert worker.codes("reply.again") == {"a": "ok"}
        assert worker.channel.fates == {1: "acked"}
        assert settled(worker)


async def test_once_the_broker_took_it_back_no_further_step_is_run(time: VirtualTime) -> None:
    async with fake_worker(time, session=Timed(), max_rows=STEP_ROWS) as worker:
        await worker.take(job_of("a", 1, 2, 3, 4, 5))
        await time.advance(0.5)
        worker.new_channel()
        await time.advance(10)
        assert run_rows(worker) == [[1, 2]]
        assert settled(worker)


@pytest.mark.parametrize("force", [False, True])
async def test_a_cancellation_between_two_steps_ends_it(time: VirtualTime, force: bool) -> None:
    async with fake_worker(time, session=Timed(), max_rows=STEP_ROWS) as worker:
        await worker.take(job_of("a", 1, 2, 3, 4, 5, force=force))
        await time.advance(0.5)
        worker.store.put(Outcome.cancelled("a"))
        await time.advance(10)
        assert run_rows(worker) == [[1, 2]]
        assert worker.codes() == {"a": "cancelled"}
        assert settled(worker)


async def test_rows_that_wait_for_a_later_step_are_shown_as_held(time: VirtualTime) -> None:
    at = {"model": "m", "lane": "interactive"}
    async with fake_worker(time, session=Timed(), max_rows=STEP_ROWS) as worker:
        await worker.take(job_of("a", *range(9)))
        await time.advance(1.5)
        worker.steps.hand.observe()
        assert worker.registry.get_sample_value("inferq_held_rows", at) == 7


async def test_a_large_suspect_goes_through_all_its_steps_alone(time: VirtualTime) -> None:
    async with fake_worker(time, session=Timed(), max_rows=STEP_ROWS) as worker:
        record = worker.store.record(["a", "b"])
        worker.store.running["dead/1"] = replace(record, key="dead/1", worker="dead")
        await worker.take(job_of("a", 1, 2, 3), redelivered=True)
        await worker.take(job_of("x", 9))
        await time.advance(10)
        assert sorted(run_rows(worker)) == [[1, 2], [3], [9]]
        assert worker.codes() == {"a": "ok", "x": "ok"}
