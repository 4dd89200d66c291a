"""The way out under bad weather: Redis away, reply queues gone, the broker silent, channels lost."""

from __future__ import annotations

import asyncio
import inspect
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.fakes import FakeStore, VirtualTime, delivery_of, job_of, request_of
from tests.worker_on_fakes import WorkerOnFakes, fake_worker, virtual_time

from inferq.amqp import PublishForbidden, PublishUnknown, Refused, Unencodable, Unroutable
from inferq.outcome import Outcome
from inferq_schemas import DEFAULT_LIMITS, Result, decode_jobs
from inferq_worker.poison import RunRecord
from inferq_worker.runtime import RowError, TensorSpec
from inferq_worker.runtime.fake import FAKE_INFO, FakeSession
from inferq_worker.store import Store
from inferq_worker.work import Answer

if TYPE_CHECKING:
    from inferq_worker.work import Feeds


@pytest.fixture
async def time(monkeypatch: pytest.MonkeyPatch) -> VirtualTime:
    return virtual_time(monkeypatch)


def failing(_item: Feeds) -> RowError:
    return RowError("inference_failed", "overflow")


def lose_redis_during_the_run(worker: WorkerOnFakes) -> None:
    worker.store.go_away()
    worker.session.gate.set()


def held_back(**fields: Any) -> FakeSession:
    session = FakeSession(**fields)
    session.gate.clear()
    return session


def test_the_fake_store_has_every_method_of_the_real_one() -> None:
    for name, method in inspect.getmembers(Store, inspect.isfunction):
        if not name.startswith("_"):
            assert inspect.signature(getattr(FakeStore, name)) == inspect.signature(method), name


async def test_with_redis_away_interactive_jobs_with_a_reply_address_go_on_and_are_counted_and_named(
    time: VirtualTime, caplog: pytest.LogCaptureFixture
) -> None:
    async with fake_worker(time) as worker:
        worker.store.go_away()
        await worker.take(job_of("a"))
        assert worker.journal == ["published reply.me", "acked 1"]
        assert worker.codes() == {"a": "ok"}
        assert worker.count("result_unstored") == 1
        assert worker.parked == []
    (line,) = [one for one in caplog.records if one.getMessage() == "answered without a stored outcome"]
    assert line.__dict__["jobs"] == ["a"]


@pytest.mark.parametrize(("lane", "reply_to"), [("bulk", "reply.me"), ("interactive", None)])
async def test_with_redis_away_all_others_wait_in_hand_until_it_is_back(
    time: VirtualTime, lane: str, reply_to: str | None
) -> None:
    async with fake_worker(time) as worker:
        worker.store.go_away()
        await worker.take(job_of("a"), lane=lane, reply_to=reply_to)
        await time.advance(60)
        assert worker.journal == []
        assert worker.steps.held.deliveries == 1
        worker.store.come_back()
        await time.settle()
        assert [step for step in worker.journal if "published" not in step] == ["stored a", "acked 1"]
        assert len(worker.replies()) == (reply_to is not None)
        assert worker.steps.held.deliveries == 0
        assert worker.count("result_unstored") == 0


async def test_an_urgent_job_does_not_wait_for_a_patient_neighbour_in_its_batch(time: VirtualTime) -> None:
    async with fake_worker(time, session=held_back()) as worker:
        await worker.take(job_of("first"))
        await worker.take(job_of("urgent"), reply_to="reply.urgent")
        await worker.take(job_of("patient"), lane="bulk", reply_to="reply.patient")
        lose_redis_during_the_run(worker)
        await time.advance(5)
        assert worker.codes("reply.urgent") == {"urgent": "ok"}
        assert worker.codes("reply.patient") == {}
        worker.store.come_back()
        await time.settle()
        assert worker.codes("reply.patient") == {"patient": "ok"}
        assert set(worker.store.outcomes) == {"patient"}


async def test_a_job_that_waits_for_redis_and_comes_again_meanwhile_is_answered_from_the_store(
    time: VirtualTime,
) -> None:
    async with fake_worker(time) as worker:
        worker.store.go_away()
        await worker.take(job_of("a"), lane="bulk")
        await worker.take(job_of("a"), lane="bulk", reply_to="reply.again")
        worker.store.come_back()
        await time.settle()
        assert worker.replies() == worker.replies("reply.again")
        assert worker.channel.fates == {1: "acked", 2: "acked"}


async def test_redis_that_stays_full_is_tried_with_growing_pauses(time: VirtualTime) -> None:
    async with fake_worker(time) as worker:
        worker.store.deaf = True
        await worker.take(job_of("a"), lane="bulk")
        await time.advance(60)
        keeps = sum(operation == "keep" for operation, _ in worker.store.asked)
        assert 10 < keeps < 25
        worker.store.deaf = False
        await time.advance(6)
        assert worker.codes() == {"a": "ok"}


async def test_what_the_broker_took_back_meanwhile_is_out_of_hand(time: VirtualTime) -> None:
    async with fake_worker(time) as worker:
        worker.store.go_away()
        await worker.take(job_of("a"), lane="bulk")
        worker.new_channel()
        worker.store.come_back()
        await time.advance(1)
        assert (worker.steps.held.bytes, worker.steps.held.deliveries) == (0, 0)
        assert worker.channel.fates == {}


async def test_the_record_of_a_run_is_removed_with_its_late_outcome(time: VirtualTime) -> None:
    async with fake_worker(time, session=held_back()) as worker:
        await worker.take(job_of("a"), lane="bulk")
        lose_redis_during_the_run(worker)
        await time.advance(1)
        assert len(worker.store.running) == 1
        worker.store.come_back()
        await time.settle()
        assert worker.store.running == {}


async def test_the_record_of_a_run_answered_without_redis_is_removed_with_the_next_answer(time: VirtualTime) -> None:
    async with fake_worker(time, session=held_back()) as worker:
        await worker.take(job_of("a"))
        lose_redis_during_the_run(worker)
        await time.settle()
        assert worker.codes() == {"a": "ok"}
        # Nothing waits for Redis: a drain would have to wait too.
        assert len(worker.tasks) == 0
        assert len(worker.store.running) == 1
        worker.store.come_back()
        await worker.take(job_of("b"))
        assert worker.store.running == {}


async def test_the_record_of_a_run_that_did_not_take_place_is_removed_with_the_next_answer(time: VirtualTime) -> None:
    async with fake_worker(time) as worker:
        for number in range(2):
            record = RunRecord(f"worker-1/9{number}", "worker-1", frozenset("a"), 0)
            worker.store.running[record.key] = record
            worker.store.go_away()
            await worker.steps.finisher.abandon(record)
        assert len(worker.store.running) == 2
        worker.store.come_back()
        await worker.take(job_of("b"))
        assert worker.store.running == {}


async def test_a_failure_stored_by_a_write_whose_answer_got_lost_is_still_parked(time: VirtualTime) -> None:
    async with fake_worker(time, session=held_back(answer=failing)) as worker:
        await worker.take(job_of("a"), lane="bulk")
        worker.store.deaf = True
        worker.session.gate.set()
        await time.settle()
        assert "a" in worker.store.outcomes
        worker.store.deaf = False
        await time.advance(1)
        assert worker.codes() == {"a": "inference_failed"}
        assert len(worker.parked) == 1
        assert worker.count("duplicates_answered", model="m", lane="bulk") == 0


async def test_a_reply_queue_that_is_gone_keeps_nothing_in_hand(time: VirtualTime) -> None:
    async with fake_worker(time) as worker:
        worker.publisher.fail("reply.me", Unroutable("gone"))
        await worker.take(job_of("a"))
        assert worker.journal == ["stored a", "acked 1"]
        assert worker.store.replied == []
        assert worker.parked == []
        assert worker.count("replies", fate="returned") == 1


async def test_an_answer_that_reached_nobody_and_is_stored_nowhere_is_parked(time: VirtualTime) -> None:
    async with fake_worker(time) as worker:
        worker.store.go_away()
        worker.publisher.fail("reply.me", Unroutable("gone"))
        await worker.take(job_of("a"))
        assert worker.journal == ["parked inferq.parking", "acked 1"]
        assert decode_jobs(worker.parked[0].body)[0].id == "a"


async def test_a_reply_of_unknown_fate_holds_the_ack_until_it_is_confirmed(time: VirtualTime) -> None:
    async with fake_worker(time) as worker:
        worker.publisher.fail("reply.me", PublishUnknown("no confirm"), times=5)
        await worker.take(job_of("a"))
        assert worker.journal == ["stored a"]
        await time.advance(30)
        assert worker.journal == ["stored a", "published reply.me", "acked 1"]


async def test_a_reply_of_unknown_fate_is_given_up_when_the_broker_has_taken_the_job_back(time: VirtualTime) -> None:
    async with fake_worker(time) as worker:
        worker.publisher.fail("reply.me", PublishUnknown("no confirm"), times=8)
        await worker.take(job_of("a"))
        worker.new_channel()
        await time.advance(30)
        assert worker.replies() == []
        assert worker.steps.held.deliveries == 0
        # It comes again and is answered from the store.
        await worker.take(job_of("a"), redelivered=True)
        await time.advance(30)
        assert worker.codes() == {"a": "ok"}
        assert len(worker.session.calls) == 1


async def test_a_failure_is_parked_before_its_message_is_acked_however_long_that_takes(time: VirtualTime) -> None:
    async with fake_worker(time, session=FakeSession(failing)) as worker:
        worker.publisher.fail("inferq.parking", PublishUnknown("no confirm"), Refused("full"), times=3)
        await worker.take(job_of("a"))
        assert worker.journal == ["stored a", "published reply.me"]
        await time.advance(30)
        assert worker.journal[2:] == ["parked inferq.parking", "acked 1"]


async def test_a_failure_of_a_job_that_came_again_is_parked_again_in_case_the_first_time_was_cut_short(
    time: VirtualTime,
) -> None:
    async with fake_worker(time, session=FakeSession(failing)) as worker:
        await worker.take(job_of("a"))
        await worker.take(job_of("a"))
        assert len(worker.parked) == 1
        await worker.take(job_of("a"), redelivered=True)
        assert len(worker.parked) == 2


async def test_a_failure_is_parked_for_the_delivery_that_is_still_ours(time: VirtualTime) -> None:
    async with fake_worker(time, session=held_back(answer=failing)) as worker:
        await worker.take(job_of("a"))
        worker.new_channel()
        await worker.take(job_of("a"), redelivered=True)
        worker.session.gate.set()
        await time.settle()
        assert len(worker.parked) == 1
        assert worker.journal[-2:] == ["parked inferq.parking", "acked 1"]


@pytest.mark.parametrize("error", [PublishForbidden("404"), Unencodable("odd"), RuntimeError("bug")])
async def test_what_can_never_be_parked_goes_back_and_ends_no_worker(time: VirtualTime, error: Exception) -> None:
    async with fake_worker(time, session=FakeSession(failing)) as worker:
        worker.publisher.fail("inferq.parking", error, times=1_000)
        await worker.take(job_of("a"), lane="bulk")
        await time.advance(60)
        assert worker.codes() == {"a": "inference_failed"}
        assert worker.channel.fates == {1: "requeued"}
        assert worker.steps.held.deliveries == 0


async def test_a_store_that_fails_in_no_foreseen_way_ends_no_worker(
    time: VirtualTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: object, **__: object) -> None:
        raise RuntimeError("bug")

    async with fake_worker(time) as worker:
        monkeypatch.setattr(worker.store, "keep", broken)
        await worker.take(job_of("a"))
        assert worker.channel.fates == {1: "requeued"}


async def test_parking_is_given_up_when_the_broker_has_taken_every_delivery_back(time: VirtualTime) -> None:
    async with fake_worker(time, session=FakeSession(failing)) as worker:
        worker.publisher.fail("inferq.parking", PublishUnknown("no confirm"), times=1_000)
        await worker.take(job_of("a"))
        worker.new_channel()
        await time.advance(30)
        assert worker.steps.held.deliveries == 0
        assert len(worker.tasks) == 0


async def test_large_outputs_travel_beside_the_outcome(time: VirtualTime) -> None:
    def grow(_item: Feeds) -> Feeds:
        return {"y": np.ones((1, 2**17), np.float32), "small": np.ones((1, 4), np.float32)}

    info = replace(FAKE_INFO, outputs=(TensorSpec("y", "float32", (None, None)),))
    async with fake_worker(time, session=FakeSession(grow, info=info)) as worker:
        await worker.take(job_of("a"))
        (result,) = worker.replies()
        assert result.outputs["y"].ref == "inferq:{a}:out:y"
        assert result.outputs["y"].shape == (1, 2**17)
        assert result.outputs["small"].data is not None
        assert len(worker.store.outputs["inferq:{a}:out:y"]) == 2**19
        stored = worker.store.get("a")
        assert stored is not None
        assert stored.result == result


async def test_large_outputs_travel_in_the_reply_while_redis_is_away(time: VirtualTime) -> None:
    def grow(item: Feeds) -> Feeds:
        return {"y": np.ones((1, 2**17 if item["x"][0, 0] < 9 else 2**22), np.float32)}

    async with fake_worker(time, session=FakeSession(grow)) as worker:
        worker.store.go_away()
        await worker.take(job_of("a"))
        await worker.take(job_of("far-too-large", 9.0), reply_to="reply.other")
        assert len(worker.replies()[0].outputs["y"].to_numpy()[0]) == 2**17
        assert worker.codes("reply.other") == {"far-too-large": "too_large"}
        assert max(len(one.body) for one in worker.publisher.published) < DEFAULT_LIMITS.body_bytes


async def test_the_first_outcome_wins_and_everybody_gets_it(time: VirtualTime) -> None:
    async with fake_worker(time, session=held_back()) as worker:
        job = job_of("a")
        await worker.take(job)
        first = Result.failed("a", "inference_timeout", "somebody else was first")
        worker.store.put(Outcome(job.digest(), first))
        worker.session.gate.set()
        await time.settle()
        assert worker.replies() == [first]
        assert worker.count("duplicates_answered", model="m", lane="interactive") == 1
        # Who was first has parked it.
        assert worker.parked == []


async def test_an_outcome_of_other_content_that_was_first_makes_a_conflict(time: VirtualTime) -> None:
    async with fake_worker(time, session=held_back()) as worker:
        await worker.take(job_of("a", 1.0))
        theirs = Outcome(job_of("a", 2.0).digest(), Result.failed("a", "internal", "theirs"))
        worker.store.put(theirs)
        worker.session.gate.set()
        await time.settle()
        assert worker.codes() == {"a": "conflict"}
        assert worker.store.get("a") == theirs


async def test_hints_go_to_jobs_of_which_anybody_waits_on_redis(time: VirtualTime) -> None:
    async with fake_worker(time, session=held_back()) as worker:
        await worker.take(job_of("first"))
        await worker.take(job_of("both"))
        await worker.take(job_of("both"), reply_to=None)
        worker.session.gate.set()
        await time.settle()
        assert worker.store.hinted == ["both"]
        # Somebody has yet to read it: its time to live is not shortened.
        assert worker.store.replied == ["first"]


async def test_a_job_is_handed_on_and_settled_once_that_is_confirmed(time: VirtualTime) -> None:
    async with fake_worker(time) as worker:
        delivery = worker.delivery(job_of("a"), lane="bulk")
        delivery.open_requests = 1
        worker.steps.held.take(delivery)
        worker.publisher.fail("inferq.fallback", PublishUnknown("no confirm"), times=3)
        request, job = request_of(delivery), job_of("a")
        handing = asyncio.create_task(worker.steps.finisher.hand_on(request, job, to_fallback=True, expiration_ms=700))
        await time.settle()
        assert worker.channel.open_tags == {1}
        await time.advance(10)
        assert await handing
        assert worker.channel.fates == {1: "acked"}
        assert [(one.exchange, one.properties.expiration) for one in worker.moved] == [("inferq.fallback", "700")]
        assert worker.steps.held.deliveries == 0


async def test_a_job_handed_on_after_the_broker_took_it_back_is_out_of_hand(time: VirtualTime) -> None:
    async with fake_worker(time) as worker:
        delivery = worker.delivery(job_of("a"), lane="bulk")
        delivery.open_requests = 1
        worker.steps.held.take(delivery)
        worker.publisher.fail("inferq.jobs", PublishUnknown("no confirm"), times=1_000)
        worker.new_channel()
        assert await worker.steps.finisher.hand_on(
            request_of(delivery), job_of("a"), to_fallback=False, expiration_ms=None
        )
        assert (worker.steps.held.bytes, worker.steps.held.deliveries) == (0, 0)


async def test_a_model_without_fallback_sends_its_job_back_to_its_lane(time: VirtualTime) -> None:
    async with fake_worker(time) as worker:
        delivery = worker.delivery(job_of("a"), lane="bulk")
        delivery.open_requests = 1
        worker.steps.held.take(delivery)
        worker.publisher.fail("inferq.fallback", Unroutable("no queue"))
        request = request_of(delivery)
        assert await worker.steps.finisher.hand_on(request, job_of("a"), to_fallback=True, expiration_ms=None)
        assert [one.exchange for one in worker.moved] == ["inferq.jobs"]


async def test_a_job_that_no_queue_takes_stays_open(time: VirtualTime) -> None:
    async with fake_worker(time) as worker:
        delivery = worker.delivery(job_of("a"), lane="bulk")
        delivery.open_requests = 1
        worker.publisher.fail("inferq.jobs", Unroutable("no queue"))
        request = request_of(delivery)
        assert not await worker.steps.finisher.hand_on(request, job_of("a"), to_fallback=False, expiration_ms=None)
        assert worker.channel.open_tags == {1}


async def test_an_answer_without_digest_is_told_and_not_stored(time: VirtualTime) -> None:
    async with fake_worker(time) as worker:
        delivery = worker.delivery(b"?")
        delivery.open_requests = 1
        worker.steps.held.take(delivery)
        await worker.steps.finisher.finish(
            [Answer((request_of(delivery),), Result.failed("", "malformed", "no"))], None
        )
        await time.settle()
        assert worker.journal == ["published reply.me", "acked 1"]


async def test_finishing_nothing_touches_nothing(time: VirtualTime) -> None:
    async with fake_worker(time) as worker:
        await worker.steps.finisher.finish([], None)
        await worker.steps.finisher.abandon(None)
        assert worker.store.asked == []


async def test_a_delivery_counts_as_in_hand_until_its_last_job_is_done(time: VirtualTime) -> None:
    async with fake_worker(time) as worker:
        delivery = delivery_of(bytes(10), settler=worker.settler, tag=worker.channel.deliver())
        worker.settler.open(delivery.tag)
        worker.steps.held.take(delivery)
        delivery.open_requests = 2
        worker.steps.finisher.settle(request_of(delivery))
        assert worker.steps.held.bytes == 10
        worker.steps.finisher.settle(request_of(delivery))
        await time.settle()
        assert worker.steps.held.bytes == 0
        assert worker.channel.fates == {1: "acked"}
