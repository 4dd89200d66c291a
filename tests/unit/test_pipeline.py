"""A delivery's whole walk, on fakes: what is stored, replied and acked, in which order, whatever goes wrong."""

from __future__ import annotations

import asyncio
import gc
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.fakes import WORKER, VirtualTime, job_of, tensor
from tests.worker_on_fakes import MAX_JOB_ROWS, WorkerOnFakes, fake_worker, virtual_time

from inferq.outcome import Outcome
from inferq_schemas import Job, Tensor, decode_jobs, encode_bundle, encode_job
from inferq_worker import intake
from inferq_worker.poison import RunRecord
from inferq_worker.runtime import RowError, SessionBroken
from inferq_worker.runtime.fake import FakeSession, double
from inferq_worker.work import Delivery

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from inferq_worker.work import Feeds


@pytest.fixture
async def time(monkeypatch: pytest.MonkeyPatch) -> VirtualTime:
    return virtual_time(monkeypatch)


def held_back() -> FakeSession:
    """A session whose runs wait until its gate is opened."""
    session = FakeSession()
    session.gate.clear()
    return session


def picky(item: Feeds) -> Feeds | RowError:
    """Refuses rows below zero, and fails on rows above a hundred."""
    if (item["x"] < 0).any():
        return RowError("invalid_input", "below zero")
    return RowError("inference_failed", "overflow") if (item["x"] > 100).any() else double(item)


def run_ids(worker: WorkerOnFakes) -> list[int]:
    """How many jobs each run had."""
    return [len(run) for run in worker.session.calls]


def slowly(command: Callable[..., Awaitable[Any]], seconds: float) -> Callable[..., Awaitable[Any]]:
    """A command of the store that takes its time."""

    async def wait(*args: Any, **fields: Any) -> Any:
        await asyncio.sleep(seconds)
        return await command(*args, **fields)

    return wait


def left_behind(worker: WorkerOnFakes, *ids: str, by: str = "dead") -> None:
    record = RunRecord(f"{by}/{len(worker.store.running)}", by, frozenset(ids), 0)
    worker.store.running[record.key] = record


async def test_an_answer_is_stored_then_replied_then_acked(time: VirtualTime) -> None:
    async with fake_worker(time) as worker:
        await worker.take(job_of("a", 3.0), correlation_id="c1")
        assert worker.journal == ["stored a", "published reply.me", "acked 1"]
        (result,) = worker.replies()
        assert np.array_equal(result.outputs["y"].to_numpy(), np.full((1, 4), 6.0, np.float32))
        assert worker.publisher.published[0].properties.correlation_id == "c1"
        assert worker.store.replied == ["a"]
        assert worker.store.running == {}
        assert (worker.steps.held.bytes, worker.steps.held.deliveries, len(worker.steps.hand)) == (0, 0, 0)


async def test_a_job_without_reply_address_is_stored_hinted_at_and_acked(time: VirtualTime) -> None:
    async with fake_worker(time) as worker:
        await worker.take(job_of(), reply_to=None)
        assert worker.journal == ["stored a", "acked 1"]
        assert worker.store.hinted == ["a"]
        assert worker.store.replied == []


async def test_jobs_that_wait_together_run_together(time: VirtualTime) -> None:
    async with fake_worker(time, session=held_back()) as worker:
        for job_id in "abcd":
            await worker.take(job_of(job_id), lane="bulk")
        worker.session.gate.set()
        await time.settle()
        assert run_ids(worker) == [1, 3]
        assert worker.codes() == dict.fromkeys("abcd", "ok")
        assert worker.channel.open_tags == set()


async def test_the_running_record_stands_while_a_run_runs(time: VirtualTime) -> None:
    async with fake_worker(time, session=held_back()) as worker:
        await worker.take([job_of("a"), job_of("b")], lane="bulk")
        assert [record.ids for record in worker.store.running.values()] == [{"a", "b"}]
        await time.advance(7)
        assert worker.steps.device.longest_run_s() == pytest.approx(7, abs=0.01)
        worker.session.gate.set()
        await time.settle()
        assert worker.store.running == {}
        assert worker.steps.device.longest_run_s() == 0


async def test_each_bad_job_of_a_bundle_gets_its_own_answer_and_the_others_go_on(time: VirtualTime) -> None:
    strange = Job.build(id="strange", model="m", inputs={"z": tensor(1.0)})
    late = job_of("late", deadline_unix_ms=1)
    never = job_of("elsewhere", version="9")
    jobs = [job_of("good"), strange, late, never, job_of("broken"), job_of("poor", -1.0), job_of("hot", 999.0)]
    body = encode_bundle(jobs).replace(b"broken", b"br ken")
    async with fake_worker(time, session=FakeSession(picky)) as worker:
        delivery = await worker.take(body, lane="bulk")
        assert worker.codes() == {
            "good": "ok",
            "strange": "invalid_input",
            "late": "deadline_exceeded",
            "elsewhere": "unknown_model",
            "": "malformed",
            "poor": "invalid_input",
            "hot": "inference_failed",
        }
        assert delivery.open_requests == 0
        assert worker.channel.fates == {1: "acked"}
        # What its caller cannot mend is for operators to see; each such job by itself.
        assert {decode_jobs(one.body)[0].id for one in worker.parked} == {"late", "hot"}


async def test_a_bad_job_gets_the_same_answer_alone_in_a_bundle_and_when_sent_again_later(time: VirtualTime) -> None:
    bad = encode_job(job_of("bad", deadline_unix_ms=7)).replace(b"shape\x92\x01", b"shape\x92\x02")
    later = bad.replace(b"deadline_unix_ms\x07", b"deadline_unix_ms\x09")
    other = bad.replace(b"float32", b"float16")
    bundle = encode_bundle([job_of("good"), job_of("bad", deadline_unix_ms=7)])
    bundle = bundle.replace(encode_job(job_of("bad", deadline_unix_ms=7)), bad)
    assert len({bad, later, other}) == 3
    async with fake_worker(time) as worker:
        for body in (bad, bundle, later, other):
            await worker.take(body, lane="bulk")
        assert [(one.id, one.error and one.error.code) for one in worker.replies() if one.id != "good"] == [
            ("bad", "invalid_input"),
            ("bad", "invalid_input"),
            ("bad", "invalid_input"),
            ("bad", "conflict"),
        ]


async def test_a_bundle_is_acked_only_when_its_last_job_has_its_answer(time: VirtualTime) -> None:
    async with fake_worker(time, session=held_back(), max_rows=1) as worker:
        await worker.take([job_of("a"), job_of("b"), job_of("bad", version="9")], lane="bulk")
        assert worker.codes() == {"bad": "unknown_model"}
        assert worker.channel.open_tags == {1}
        worker.session.gate.set()
        await time.settle()
        assert worker.journal[-1] == "acked 1"
        assert worker.codes() == {"bad": "unknown_model", "a": "ok", "b": "ok"}


@pytest.mark.parametrize(
    ("body", "code"),
    [(b"\xc1", "malformed"), (b"", "malformed"), (b"\xc4\x05", "malformed"), (b"\x00" * (2**23 + 1), "too_large")],
)
async def test_an_unreadable_body_is_answered_and_acked(time: VirtualTime, body: bytes, code: str) -> None:
    async with fake_worker(time, max_held_bytes=2**30) as worker:
        await worker.take(body, correlation_id="c9")
        assert worker.codes() == {"": code}
        assert worker.publisher.published[0].properties.correlation_id == "c9"
        assert worker.journal[-1] == "acked 1"
        assert worker.parked == []
        assert worker.store.outcomes == {}


async def test_an_unreadable_body_that_nobody_can_be_told_about_is_parked_as_it_came(time: VirtualTime) -> None:
    async with fake_worker(time) as worker:
        await worker.take(b"\xc1", reply_to=None)
        assert [one.body for one in worker.parked] == [b"\xc1"]
        assert worker.journal[-1] == "acked 1"


async def test_a_failure_of_ours_in_taking_a_job_in_is_answered_too(
    time: VirtualTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stumble(*_args: Any, **_fields: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(intake, "admit", stumble)
    async with fake_worker(time) as worker:
        await worker.take(job_of("a"))
        await worker.take(job_of("b"), redelivered=True)
        assert worker.codes() == {"a": "internal", "b": "internal"}
        assert worker.channel.open_tags == set()


@pytest.mark.parametrize("queue", ["inferq.m.bulk", "somebody.elses"])
async def test_a_reply_address_off_the_allow_list_is_never_written_to(time: VirtualTime, queue: str) -> None:
    body = encode_bundle([job_of("good"), job_of("broken"), job_of("late", deadline_unix_ms=1), job_of("fine")])
    async with fake_worker(time) as worker:
        await worker.take(body.replace(b"broken", b"br ken"), lane="bulk", reply_to=queue)
        await worker.take(b"\xc1", reply_to=queue)
        await worker.take(job_of("again"), reply_to=queue, redelivered=True)
        assert worker.publisher.to(queue) == []
        assert worker.session.calls == []
        for job_id in ("good", "fine", "late", "again"):
            outcome = worker.store.get(job_id)
            assert outcome is not None
            assert outcome.result.error is not None
            assert outcome.result.error.code == "invalid_input"
            assert queue in outcome.result.error.message
        assert worker.channel.open_tags == set()


async def test_jobs_without_readable_id_share_no_outcome(time: VirtualTime) -> None:
    async with fake_worker(time) as worker:
        for number in range(2):
            body = encode_job(job_of("broken", deadline_unix_ms=number)).replace(b"broken", b"br ken")
            await worker.take(body, reply_to=f"reply.{number}")
        assert worker.codes("reply.0") == worker.codes("reply.1") == {"": "malformed"}
        assert worker.store.outcomes == {}


async def test_a_duplicate_of_a_job_under_way_waits_for_the_same_answer(time: VirtualTime) -> None:
    async with fake_worker(time, session=held_back()) as worker:
        await worker.take(job_of(), reply_to="reply.first")
        await worker.take(job_of(), reply_to="reply.second")
        worker.session.gate.set()
        await time.settle()
        assert run_ids(worker) == [1]
        assert worker.replies("reply.first") == worker.replies("reply.second")
        assert worker.channel.fates == {1: "acked", 2: "acked"}


async def test_the_same_job_twice_in_one_bundle_runs_once_and_is_answered_twice(time: VirtualTime) -> None:
    async with fake_worker(time) as worker:
        await worker.take([job_of("a"), job_of("a")], lane="bulk")
        assert run_ids(worker) == [1]
        assert [one.id for one in worker.replies()] == ["a", "a"]
        assert worker.channel.fates == {1: "acked"}


async def test_a_redelivery_of_a_job_that_we_still_hold_attaches_itself(time: VirtualTime) -> None:
    async with fake_worker(time, session=held_back()) as worker:
        await worker.take(job_of())
        worker.new_channel()
        await worker.take(job_of(), redelivered=True)
        worker.session.gate.set()
        await time.settle()
        assert run_ids(worker) == [1]
        assert worker.journal[-1] == "acked 1"
        assert worker.channel.fates == {1: "acked"}
        assert worker.count("stale_acks") == 1


async def test_a_redelivery_with_payloads_in_redis_attaches_itself_once(
    time: VirtualTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job.build(id="a", model="m", inputs={"x": Tensor(dtype="float32", shape=(1, 4), ref="inferq:{a}:in:x")})
    async with fake_worker(time, session=held_back()) as worker:
        worker.store.inputs["a", "x"] = bytes(16)
        await worker.take(job)
        # The first answer leaves while the second delivery still reads its payload.
        monkeypatch.setattr(worker.store, "payloads", slowly(worker.store.payloads, 2))
        delivery = await worker.take(job, redelivered=True)
        worker.session.gate.set()
        await time.advance(3)
        assert run_ids(worker) == [1]
        assert len(worker.replies()) == 2
        assert worker.channel.fates == {1: "acked", 2: "acked"}
        assert delivery.open_requests == 0


async def test_an_id_in_flight_with_other_content_is_a_conflict_and_harms_nothing(time: VirtualTime) -> None:
    async with fake_worker(time, session=held_back()) as worker:
        await worker.take(job_of("a", 1.0), reply_to="reply.first")
        await worker.take(job_of("a", 2.0), reply_to="reply.second")
        await worker.take(job_of("a", 3.0), reply_to="reply.third", redelivered=True)
        worker.session.gate.set()
        await time.settle()
        assert worker.codes("reply.first") == {"a": "ok"}
        assert worker.codes("reply.second") == worker.codes("reply.third") == {"a": "conflict"}
        stored = worker.store.get("a")
        assert stored is not None
        assert stored.result.ok
        assert worker.parked == []


async def test_a_stored_outcome_answers_without_a_run(time: VirtualTime) -> None:
    async with fake_worker(time) as worker:
        await worker.take(job_of())
        await worker.take(job_of(), reply_to="reply.again")
        assert run_ids(worker) == [1]
        assert worker.replies("reply.again") == worker.replies()
        assert worker.channel.fates == {1: "acked", 2: "acked"}
        assert worker.count("duplicates_answered", model="m", lane="interactive") == 1


async def test_a_stored_outcome_of_other_content_is_a_conflict(time: VirtualTime) -> None:
    async with fake_worker(time) as worker:
        await worker.take(job_of("a", 1.0))
        before = worker.store.outcomes["a"]
        await worker.take(job_of("a", 2.0), reply_to="reply.again")
        assert worker.codes("reply.again") == {"a": "conflict"}
        assert worker.store.outcomes["a"] == before
        assert run_ids(worker) == [1]
        assert worker.count("conflicts", model="m") == 1


async def test_force_runs_again_once_and_not_when_its_own_message_comes_back(time: VirtualTime) -> None:
    async with fake_worker(time) as worker:
        await worker.take(job_of())
        await worker.take(job_of(force=True))
        assert run_ids(worker) == [1, 1]
        await worker.take(job_of(force=True), redelivered=True)
        assert run_ids(worker) == [1, 1]
        assert len(worker.replies()) == 3


async def test_a_job_cancelled_before_its_run_is_answered_so(time: VirtualTime) -> None:
    async with fake_worker(time, session=held_back()) as worker:
        await worker.take(job_of("first"))
        await worker.take(job_of("a"))
        worker.store.put(Outcome.cancelled("a"))
        worker.session.gate.set()
        await time.settle()
        assert worker.codes() == {"first": "ok", "a": "cancelled"}
        assert worker.parked == []
        assert worker.store.running == {}
        assert worker.channel.open_tags == set()


async def test_a_job_cancelled_while_it_ran_keeps_its_cancellation(time: VirtualTime) -> None:
    async with fake_worker(time, session=held_back()) as worker:
        await worker.take(job_of("a"))
        worker.store.put(Outcome.cancelled("a"))
        worker.session.gate.set()
        await time.settle()
        assert worker.codes() == {"a": "cancelled"}


async def test_a_redelivered_suspect_runs_alone(time: VirtualTime) -> None:
    async with fake_worker(time, session=held_back(), max_wait_s=0.01) as worker:
        await worker.take(job_of("first"), lane="bulk")
        left_behind(worker, "suspect", "other")
        await worker.take(job_of("suspect"), lane="bulk", redelivered=True)
        await worker.take(job_of("a"), lane="bulk")
        await worker.take(job_of("b"), lane="bulk", redelivered=True)
        worker.session.gate.set()
        await time.advance(1)
        assert run_ids(worker) == [1, 1, 2]
        assert worker.replies()[1].id == "suspect"
        batch = worker.replies()[1].batch
        assert batch is not None
        assert batch.reason == "solo"
        assert worker.count("suspects", model="m") == 1


async def test_the_record_of_a_solo_run_is_gone_before_the_next_run_begins(
    time: VirtualTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fake_worker(time, session=held_back()) as worker:
        left_behind(worker, "s1", "s2")
        await worker.take(job_of("s1"), redelivered=True)
        await worker.take(job_of("s2"), redelivered=True)
        # However long the answer takes.
        monkeypatch.setattr(worker.store, "keep", slowly(worker.store.keep, 60))
        worker.session.began.clear()
        worker.session.gate.set()
        await worker.session.began.wait()
        mine = [record.ids for record in worker.store.running.values() if record.worker == WORKER]
        assert mine == [{"s2"}]


@pytest.mark.parametrize("slots", [1, 2])
async def test_no_record_of_a_suspect_stands_while_another_run_could_end_the_process(
    time: VirtualTime, slots: int
) -> None:
    async with fake_worker(time, session=held_back(), slots=slots) as worker:
        left_behind(worker, "suspect", "other")
        await worker.take(job_of("harmless"))
        await worker.take(job_of("suspect"), redelivered=True)
        await worker.take(job_of("next"))
        await time.advance(1)
        mine = [sorted(one.ids) for one in worker.store.running.values() if one.worker == WORKER]
        assert ["harmless"] in mine
        assert ["suspect"] not in mine
        worker.session.gate.set()
        await time.settle()
        assert worker.codes() == {"harmless": "ok", "suspect": "ok", "next": "ok"}


async def test_a_suspect_that_ended_a_worker_alone_is_parked_unrun(time: VirtualTime) -> None:
    async with fake_worker(time) as worker:
        left_behind(worker, "a", "b")
        left_behind(worker, "a", by="dead too")
        await worker.take(job_of("a"), redelivered=True)
        assert worker.session.calls == []
        assert worker.codes() == {"a": "inference_failed"}
        assert [one.headers["inferq-job"] for one in worker.parked] == ["a"]
        assert worker.journal[-2:] == ["parked inferq.parking", "acked 1"]


async def test_a_suspect_that_breaks_the_session_alone_is_parked(time: VirtualTime) -> None:
    async with fake_worker(time) as worker:
        left_behind(worker, "a", "b")
        worker.session.broken = SessionBroken("device-side assert")
        await worker.take(job_of("a"), redelivered=True)
        await time.advance(1)
        assert worker.codes() == {"a": "inference_failed"}
        assert [one.headers["inferq-job"] for one in worker.parked] == ["a"]
        assert [one for one in worker.store.running.values() if one.worker == WORKER] == []


async def test_a_job_that_waits_past_its_deadline_is_told_once_stored_and_parked(time: VirtualTime) -> None:
    async with fake_worker(time, session=held_back()) as worker:
        await worker.take(job_of("first"))
        await worker.take(job_of("a", deadline_unix_ms=worker.unix_ms(2)))
        await time.advance(1.99)
        assert worker.codes() == {}
        await time.advance(0.02)
        assert worker.codes() == {"a": "deadline_exceeded"}
        assert [one.headers["inferq-reason"] for one in worker.parked] == ["deadline_exceeded"]
        assert worker.channel.fates == {2: "acked"}
        worker.session.gate.set()
        await time.advance(1)
        assert run_ids(worker) == [1]
        assert [one.id for one in worker.replies()] == ["a", "first"]
        assert worker.count("deadline_missed", model="m", lane="interactive", stage="compose") == 1


async def test_jobs_that_expire_together_are_stored_together(time: VirtualTime) -> None:
    async with fake_worker(time, session=held_back()) as worker:
        await worker.take(job_of("first"))
        deadline_unix_ms = worker.unix_ms(1)
        for number in range(20):
            worker.steps.intake.take(worker.delivery(job_of(f"a{number}", deadline_unix_ms=deadline_unix_ms)))
        await time.advance(1.1)
        keeps = [ids for operation, ids in worker.store.asked if operation == "keep"]
        assert [len(ids) for ids in keeps] == [20]


async def test_a_job_that_may_be_late_is_run_after_its_deadline_and_says_so(time: VirtualTime) -> None:
    async with fake_worker(time, session=held_back()) as worker:
        await worker.take(job_of("first"))
        await worker.take(job_of("a", deadline_unix_ms=worker.unix_ms(1), late="serve"))
        await time.advance(2)
        worker.session.gate.set()
        await time.advance(1)
        assert {one.id: one.late for one in worker.replies()} == {"first": False, "a": True}


async def test_a_job_whose_deadline_passes_while_it_runs_is_answered_late(time: VirtualTime) -> None:
    async with fake_worker(time, session=held_back()) as worker:
        await worker.take(job_of("a", deadline_unix_ms=worker.unix_ms(1)))
        await time.advance(2)
        worker.session.gate.set()
        await time.settle()
        (result,) = worker.replies()
        assert (result.ok, result.late) == (True, True)
        assert worker.count("deadline_missed", model="m", lane="interactive", stage="run") == 1


async def test_a_job_whose_deadline_passes_during_the_last_check_is_not_run(
    time: VirtualTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fake_worker(time) as worker:
        monkeypatch.setattr(worker.store, "claim", slowly(worker.store.claim, 2))
        await worker.take(job_of("a", deadline_unix_ms=worker.unix_ms(1)))
        await time.advance(3)
        assert worker.codes() == {"a": "deadline_exceeded"}
        assert worker.session.calls == []
        assert worker.store.running == {}


async def test_jobs_that_the_broker_took_back_are_not_run(time: VirtualTime) -> None:
    async with fake_worker(time, session=held_back()) as worker:
        await worker.take(job_of("first"))
        await worker.take(job_of("a"))
        worker.new_channel()
        worker.session.gate.set()
        await time.settle()
        assert run_ids(worker) == [1]
        assert worker.steps.held.deliveries == 0
        assert len(worker.steps.hand) == 0


async def test_a_broken_session_gives_its_jobs_back_and_leaves_its_record_as_evidence(time: VirtualTime) -> None:
    async with fake_worker(time, session=held_back()) as worker:
        await worker.take(job_of("a"))
        worker.session.broken = SessionBroken("device lost")
        worker.session.gate.set()
        await time.advance(1)
        assert [record.ids for record in worker.store.running.values()] == [{"a"}]
        assert worker.store.outcomes == {}
        assert worker.steps.held.deliveries == 0


async def test_draining_gives_back_what_waits_and_finishes_what_runs(time: VirtualTime) -> None:
    async with fake_worker(time, session=held_back()) as worker:
        await worker.take(job_of("runs"))
        await worker.take(job_of("waits"))
        await worker.take([job_of("b1"), job_of("b2")], lane="bulk")
        worker.steps.pipeline.drain()
        await worker.take(job_of("too-late"))
        assert worker.channel.fates == {2: "requeued", 3: "requeued", 4: "requeued"}
        worker.session.gate.set()
        await time.settle()
        assert worker.channel.fates[1] == "acked"
        assert worker.codes() == {"runs": "ok"}
        assert all(task.done() for task in worker.serving)
        assert (worker.steps.held.bytes, worker.steps.held.deliveries, len(worker.steps.hand)) == (0, 0, 0)
        assert worker.count("jobs_requeued", model="m", lane="interactive") == 1


async def test_draining_gives_a_partly_answered_bundle_back_once_the_rest_of_it_has_run(time: VirtualTime) -> None:
    async with fake_worker(time, session=held_back(), max_rows=1) as worker:
        await worker.take([job_of("runs"), job_of("waits"), job_of("bad", version="9")], lane="bulk")
        worker.steps.pipeline.drain()
        await time.settle()
        assert worker.channel.open_tags == {1}
        worker.session.gate.set()
        await time.settle()
        assert worker.channel.fates == {1: "requeued"}
        assert worker.codes() == {"bad": "unknown_model", "runs": "ok"}
        # It comes again, here or elsewhere: only what had no answer runs.
        assert set(worker.store.outcomes) == {"runs", "bad"}


async def test_draining_gives_back_jobs_that_still_ask_redis(time: VirtualTime) -> None:
    async with fake_worker(time) as worker:
        delivery = worker.delivery(job_of("a"), redelivered=True)
        worker.steps.intake.take(delivery)
        worker.steps.pipeline.drain()
        await time.settle()
        assert worker.channel.fates == {1: "requeued"}
        assert worker.session.calls == []


@pytest.mark.parametrize(
    ("content", "deaths"),
    [
        (job_of("a"), ("delivery_limit",)),
        (job_of("a"), ("expired", "delivery_limit")),
        ([job_of("a"), job_of("b")], ("delivery_limit",)),
        (job_of("a", fallback="never"), ("expired",)),
        ([job_of("a"), job_of("b", fallback="never")], ("expired",)),
    ],
)
async def test_the_cpu_role_sends_unrun_to_the_dead_what_it_must_not_run(
    time: VirtualTime, content: Job | list[Job], deaths: tuple[str, ...]
) -> None:
    async with fake_worker(time, role="cpu") as worker:
        await worker.take(content, lane="fallback", routing_key="m.bulk", deaths=deaths)
        assert worker.channel.fates == {1: "dead"}
        assert worker.session.calls == []
        assert worker.publisher.published == []
        assert (worker.steps.held.bytes, worker.steps.held.deliveries) == (0, 0)


async def test_the_cpu_role_answers_what_expired_and_marks_it_as_fallback(time: VirtualTime) -> None:
    async with fake_worker(time, role="cpu") as worker:
        await worker.take(job_of("a"), lane="fallback", routing_key="m.bulk", deaths=("expired",))
        (result,) = worker.replies()
        assert (result.ok, result.fallback) == (True, True)


async def test_a_gpu_worker_runs_what_must_not_fall_back_also_when_it_serves_the_fallback_queue(
    time: VirtualTime,
) -> None:
    async with fake_worker(time) as worker:
        job = job_of("a", fallback="never", deadline_unix_ms=worker.unix_ms(9))
        await worker.take(job, lane="fallback", routing_key="m.interactive", deaths=("expired",))
        assert worker.codes() == {"a": "ok"}


async def test_a_gpu_worker_does_not_run_from_the_fallback_queue_what_ended_workers_up_to_the_limit(
    time: VirtualTime,
) -> None:
    async with fake_worker(time) as worker:
        await worker.take(job_of("a"), lane="fallback", routing_key="m.bulk", deaths=("delivery_limit",))
        assert worker.channel.fates == {1: "dead"}
        assert worker.session.calls == []


async def test_jobs_of_a_claim_check_run_with_what_redis_holds(time: VirtualTime) -> None:
    job = Job.build(id="a", model="m", inputs={"x": Tensor(dtype="float32", shape=(1, 4), ref="inferq:{a}:in:x")})
    async with fake_worker(time) as worker:
        worker.store.inputs["a", "x"] = np.full((1, 4), 2.0, np.float32).tobytes()
        await worker.take(job)
        assert np.array_equal(worker.replies()[0].outputs["y"].to_numpy(), np.full((1, 4), 4.0, np.float32))


async def test_fetched_inputs_are_in_hand_until_their_job_has_its_answer(time: VirtualTime) -> None:
    job = Job.build(id="a", model="m", inputs={"x": Tensor(dtype="float32", shape=(8, 4), ref="inferq:{a}:in:x")})
    async with fake_worker(time, session=held_back()) as worker:
        worker.store.inputs["a", "x"] = bytes(128)
        delivery = await worker.take(job)
        assert worker.steps.held.bytes == len(delivery.body) + 128
        worker.session.gate.set()
        await time.settle()
        assert worker.codes() == {"a": "ok"}
        assert worker.steps.held.bytes == 0


async def test_take_tells_the_rows_of_a_delivery(time: VirtualTime) -> None:
    async with fake_worker(time) as worker:
        assert worker.steps.intake.take(worker.delivery([job_of("a", 1, 2, 3), job_of("b", 1)], lane="bulk")) == 4
        assert worker.steps.intake.take(worker.delivery(b"\xc1")) == 0
        await time.settle()


async def test_a_job_refused_for_its_rows_does_not_shrink_the_window_of_its_lane(time: VirtualTime) -> None:
    job = Job.build(id="a", model="m", inputs={"x": Tensor(dtype="float32", shape=(2**53 - 1, 0), data=b"")})
    async with fake_worker(time) as worker:
        assert worker.steps.intake.take(worker.delivery(job)) == MAX_JOB_ROWS
        await time.settle()
        assert worker.codes() == {"a": "too_large"}


async def test_pressure_is_reported_while_too_many_bytes_are_in_hand(time: VirtualTime) -> None:
    async with fake_worker(time, session=held_back(), max_held_bytes=300) as worker:
        for number in range(5):
            await worker.take(job_of(str(number)))
        assert worker.pressure == [True]
        worker.session.gate.set()
        await time.settle()
        assert worker.pressure == [True, False]


async def test_received_and_answered_jobs_are_counted_by_lane_and_code(time: VirtualTime) -> None:
    async with fake_worker(time) as worker:
        await worker.take([job_of("a"), job_of("b", version="9")], lane="bulk")
        at = {"model": "m", "lane": "bulk"}
        assert worker.count("jobs_received", **at) == 2
        assert worker.count("jobs_answered", **at, role="gpu", code="ok") == 1
        assert worker.count("jobs_answered", **at, role="gpu", code="unknown_model") == 1


async def test_what_is_held_is_shown_by_lane(time: VirtualTime) -> None:
    async with fake_worker(time, session=held_back()) as worker:
        await worker.take(job_of("a", 1, 2))
        await time.advance(3)
        worker.steps.hand.observe()
        at = {"model": "m", "lane": "interactive"}
        assert worker.registry.get_sample_value("inferq_held_rows", at) == 2
        assert worker.registry.get_sample_value("inferq_oldest_job_age_seconds", at) == pytest.approx(3, abs=0.01)
        worker.session.gate.set()
        await time.settle()
        worker.steps.hand.observe()
        assert worker.registry.get_sample_value("inferq_held_rows", at) == 0


@pytest.mark.parametrize(
    "content", [job_of("a", 1.0), b"no job", job_of("a", model="other")], ids=["ok", "bad", "unknown"]
)
async def test_a_message_that_is_settled_is_let_go_at_once_and_not_by_the_garbage_collector(
    content: Job | bytes, time: VirtualTime
) -> None:
    async with fake_worker(time) as worker:
        others = _deliveries()
        gc.disable()
        try:
            for _ in range(3):
                await worker.take(content)
            await time.settle()
            held = [one for one in _deliveries() if not any(one is other for other in others)]
        finally:
            gc.enable()
        assert len(worker.replies()) == 3
        assert held == []


def _deliveries() -> list[Delivery]:
    return [one for one in gc.get_objects() if type(one) is Delivery]
