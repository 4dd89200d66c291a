"""What the broker dead-lettered: answered, stored and parked, or given one more chance."""

from __future__ import annotations

import pytest
from tests.fakes import VirtualTime, job_of
from tests.worker_on_fakes import fake_worker, virtual_time

from inferq.amqp import PublishForbidden, PublishUnknown, Unencodable, Unroutable
from inferq.outcome import Outcome
from inferq_schemas import Result, decode_jobs, encode_bundle
from inferq_worker import undertaker


@pytest.fixture
async def time(monkeypatch: pytest.MonkeyPatch) -> VirtualTime:
    return virtual_time(monkeypatch)


async def test_an_expired_job_is_stored_told_parked_and_acked_in_this_order(time: VirtualTime) -> None:
    async with fake_worker(time) as worker:
        await worker.bury(job_of("a", deadline_unix_ms=worker.unix_ms(-1)))
        assert worker.journal == ["stored a", "published reply.me", "parked inferq.parking", "acked 1"]
        assert worker.codes() == {"a": "deadline_exceeded"}
        assert decode_jobs(worker.parked[0].body)[0].id == "a"
        assert worker.count("deadline_missed", model="m", lane="interactive", stage="broker") == 1
        assert worker.count("undertaker_handled", code="deadline_exceeded") == 1
        assert (worker.steps.held.bytes, worker.steps.held.deliveries) == (0, 0)
        assert worker.session.calls == []


async def test_a_job_with_time_left_goes_on_to_the_fallback_with_just_that_time(time: VirtualTime) -> None:
    async with fake_worker(time) as worker:
        await worker.bury(job_of("a", deadline_unix_ms=worker.unix_ms(3)), headers={"x-death": [], "inferq-attempt": 1})
        (moved,) = worker.moved
        assert (moved.exchange, moved.routing_key) == ("inferq.fallback", "m.interactive")
        assert moved.properties.expiration is not None
        assert 2_990 <= int(moved.properties.expiration) <= 3_000
        assert moved.headers == {"inferq-attempt": 2}
        assert worker.journal == ["published inferq.fallback", "acked 1"]
        assert worker.codes() == {}
        assert worker.store.outcomes == {}


async def test_a_job_without_deadline_goes_on_without_a_limit(time: VirtualTime) -> None:
    async with fake_worker(time) as worker:
        await worker.bury(job_of("a"), lane="bulk")
        (moved,) = worker.moved
        assert (moved.exchange, moved.properties.expiration) == ("inferq.fallback", None)


async def test_a_job_that_must_not_fall_back_goes_back_to_its_lane_while_it_has_time(time: VirtualTime) -> None:
    async with fake_worker(time) as worker:
        await worker.bury(
            job_of("a", fallback="never", deadline_unix_ms=worker.unix_ms(3)), deaths=("rejected", "expired")
        )
        assert [one.exchange for one in worker.moved] == ["inferq.jobs"]


async def test_a_job_that_may_be_late_goes_on_after_its_deadline_without_a_limit(time: VirtualTime) -> None:
    async with fake_worker(time) as worker:
        await worker.bury(job_of("a", late="serve", deadline_unix_ms=worker.unix_ms(-1)))
        (moved,) = worker.moved
        assert (moved.exchange, moved.properties.expiration) == ("inferq.fallback", None)


async def test_a_job_that_may_be_late_keeps_its_limit_before_its_deadline(time: VirtualTime) -> None:
    async with fake_worker(time) as worker:
        await worker.bury(job_of("a", late="serve", deadline_unix_ms=worker.unix_ms(3)))
        (moved,) = worker.moved
        assert moved.properties.expiration is not None


async def test_a_model_without_fallback_sends_a_job_with_time_left_back_to_its_lane(time: VirtualTime) -> None:
    async with fake_worker(time) as worker:
        worker.publisher.fail("inferq.fallback", Unroutable("no queue"))
        await worker.bury(job_of("a", deadline_unix_ms=worker.unix_ms(3)))
        assert [one.exchange for one in worker.moved] == ["inferq.jobs"]


async def test_a_job_with_time_left_that_no_queue_takes_is_answered(time: VirtualTime) -> None:
    async with fake_worker(time) as worker:
        worker.publisher.fail("inferq.fallback", Unroutable("no queue"))
        worker.publisher.fail("inferq.jobs", Unroutable("no queue"))
        await worker.bury(job_of("a", deadline_unix_ms=worker.unix_ms(3)))
        assert worker.codes() == {"a": "deadline_exceeded"}
        assert worker.channel.fates == {1: "acked"}


async def test_a_job_handed_on_is_acked_only_once_that_is_confirmed(time: VirtualTime) -> None:
    async with fake_worker(time) as worker:
        worker.publisher.fail("inferq.fallback", PublishUnknown("no confirm"), times=4)
        await worker.bury(job_of("a", deadline_unix_ms=worker.unix_ms(30)))
        assert worker.channel.open_tags == {1}
        await time.advance(10)
        assert worker.journal == ["published inferq.fallback", "acked 1"]


@pytest.mark.parametrize("deaths", [("delivery_limit",), ("rejected", "delivery_limit"), ("expired", "delivery_limit")])
async def test_the_delivery_limit_means_that_inference_failed_however_much_time_is_left(
    time: VirtualTime, deaths: tuple[str, ...]
) -> None:
    async with fake_worker(time) as worker:
        await worker.bury(job_of("a", deadline_unix_ms=worker.unix_ms(30)), deaths=deaths)
        assert worker.codes() == {"a": "inference_failed"}
        assert [one.headers["inferq-reason"] for one in worker.parked] == ["inference_failed"]
        assert worker.moved == []


async def test_each_job_of_a_bundle_gets_what_is_its_due(time: VirtualTime) -> None:
    async with fake_worker(time) as worker:
        jobs = [
            job_of("late", deadline_unix_ms=worker.unix_ms(-1)),
            job_of("early", deadline_unix_ms=worker.unix_ms(9)),
            job_of("broken"),
        ]
        body = encode_bundle(jobs).replace(b"broken", b"br ken")
        await worker.bury(body, lane="bulk")
        assert worker.codes() == {"late": "deadline_exceeded", "": "malformed"}
        assert [decode_jobs(one.body)[0].id for one in worker.moved] == ["early"]
        assert [decode_jobs(one.body)[0].id for one in worker.parked] == ["late"]
        assert worker.channel.fates == {1: "acked"}
        assert worker.steps.held.deliveries == 0


async def test_an_unreadable_dead_letter_is_told_and_acked(time: VirtualTime) -> None:
    async with fake_worker(time) as worker:
        await worker.bury(b"\xc1")
        assert worker.codes() == {"": "malformed"}
        assert worker.parked == []
        assert worker.channel.fates == {1: "acked"}


async def test_an_unreadable_dead_letter_of_nobody_is_parked_as_it_came(time: VirtualTime) -> None:
    async with fake_worker(time) as worker:
        await worker.bury(b"\xc1", reply_to=None)
        assert [one.body for one in worker.parked] == [b"\xc1"]


@pytest.mark.parametrize("body", [b"\xc1", job_of("a", deadline_unix_ms=1)])
async def test_no_reply_queue_off_the_allow_list_is_written_to(time: VirtualTime, body: object) -> None:
    async with fake_worker(time) as worker:
        await worker.bury(body, reply_to="inferq.m.bulk")  # type: ignore[arg-type]  # either kind of content
        assert worker.publisher.to("inferq.m.bulk") == []
        assert worker.channel.fates == {1: "acked"}


async def test_a_job_that_was_answered_before_it_died_keeps_its_answer(time: VirtualTime) -> None:
    async with fake_worker(time) as worker:
        job = job_of("a", deadline_unix_ms=worker.unix_ms(-1))
        worker.store.put(Outcome(job.digest(), Result("a", "ok")))
        await worker.bury(job)
        assert worker.codes() == {"a": "ok"}
        assert worker.parked == []


async def test_a_sender_whose_clock_is_far_ahead_is_answered(time: VirtualTime) -> None:
    async with fake_worker(time) as worker:
        ahead = {"sent_unix_ms": worker.unix_ms(60), "deadline_unix_ms": worker.unix_ms(90)}
        await worker.bury(job_of("a", **ahead))
        assert list(worker.codes()) == ["a"]
        assert worker.channel.fates == {1: "acked"}


async def test_a_job_over_which_the_broker_closes_the_channel_goes_on_bare(time: VirtualTime) -> None:
    async with fake_worker(time) as worker:
        worker.publisher.fail("inferq.fallback", PublishForbidden("406"), times=3)
        await worker.bury(job_of("a", deadline_unix_ms=worker.unix_ms(30)), headers={"mine": 1})
        await time.advance(10)
        (moved,) = worker.moved
        assert (moved.headers, moved.properties.expiration) == ({"inferq-attempt": 2}, None)
        assert worker.channel.fates == {1: "acked"}


@pytest.mark.parametrize("error", [PublishForbidden("403"), Unencodable("odd"), RuntimeError("bug")])
async def test_a_job_that_can_never_go_on_goes_back_and_ends_no_worker(time: VirtualTime, error: Exception) -> None:
    async with fake_worker(time) as worker:
        worker.publisher.fail("inferq.fallback", error, times=1_000)
        await worker.bury(job_of("a", deadline_unix_ms=worker.unix_ms(300)))
        await time.advance(60)
        assert worker.channel.fates == {1: "requeued"}
        assert worker.steps.held.deliveries == 0


async def test_a_dead_job_that_breaks_the_undertaker_goes_back(
    time: VirtualTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_delivery: object) -> None:
        raise RuntimeError("bug")

    monkeypatch.setattr(undertaker, "_verdict", broken)
    async with fake_worker(time) as worker:
        await worker.bury([job_of("a"), job_of("b")], lane="bulk")
        assert worker.channel.fates == {1: "requeued"}


async def test_with_redis_away_a_dead_job_without_urgency_waits(time: VirtualTime) -> None:
    async with fake_worker(time) as worker:
        worker.store.go_away()
        await worker.bury(job_of("a", deadline_unix_ms=worker.unix_ms(-1)), lane="bulk")
        await time.advance(10)
        assert worker.journal == []
        worker.store.come_back()
        await time.settle()
        assert worker.journal[-1] == "acked 1"
