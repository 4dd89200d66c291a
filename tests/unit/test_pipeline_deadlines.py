"""Deadlines on the whole walk: late composition, a device that overruns, diversion, early refusal, timely expiry."""

from __future__ import annotations

from typing import Any

import pytest
from tests.fakes import VirtualTime, job_of
from tests.worker_on_fakes import WorkerOnFakes, fake_worker, virtual_time

from inferq.outcome import Outcome
from inferq_schemas import FALLBACK_EXCHANGE
from inferq_worker.cpu import CpuWorker
from inferq_worker.runtime.fake import FakeSession

EARLIEST = "earliest_deadline"


class Timed(FakeSession):
    """Runs of a second, or as long as `run_s` says."""

    def __init__(self) -> None:
        super().__init__(run_s=1.0, passes=True)


@pytest.fixture
async def time(monkeypatch: pytest.MonkeyPatch) -> VirtualTime:
    return virtual_time(monkeypatch)


def ids(worker: WorkerOnFakes) -> list[tuple[str, ...]]:
    """Jobs of each claim, in order."""
    return [claimed for operation, claimed in worker.store.asked if operation == "claim"]


async def warm(worker: WorkerOnFakes, *sizes: int) -> None:
    """Let the worker learn how long a run takes: a second, of one row or of 32."""
    for rows in sizes or (1, 32):
        await worker.take(job_of(f"warm{rows}", *[1.0] * rows, deadline_unix_ms=worker.unix_ms(600)))
        await worker.time.advance(1.5)
    worker.publisher.published.clear()
    worker.store.asked.clear()
    worker.session.calls.clear()


def has_cpu(worker: WorkerOnFakes, run_s: float = 0.1) -> None:
    entry = CpuWorker(run_s, lanes=1, held_jobs=0, beat=1)
    worker.steps.cpus["m"].update({"c": entry}, gpu_workers=1, queued_jobs=0, now_s=worker.time.monotonic())


@pytest.mark.parametrize("policy_name", ["size_or_timeout", EARLIEST])
async def test_what_arrives_until_just_before_the_run_ends_still_rides_along(
    time: VirtualTime, policy_name: str
) -> None:
    async with fake_worker(time, session=Timed(), policy_name=policy_name) as worker:
        await warm(worker)
        await worker.take(job_of("a"))
        for job_id in ("b", "c", "d"):
            await time.advance(0.33)
            await worker.take(job_of(job_id))
        assert ids(worker) == [("a",)], "nothing is frozen while the run goes on"
        await time.advance(3)
        assert ids(worker) == [("a",), ("b", "c", "d")]


async def test_the_next_batch_is_composed_before_the_run_ends_and_starts_when_it_does(time: VirtualTime) -> None:
    async with fake_worker(time, session=Timed(), policy_name=EARLIEST) as worker:
        await warm(worker)
        await worker.take(job_of("a"))
        await worker.take(job_of("b"))
        await time.advance(1.0 - worker.steps.device.lead_s - 0.002)
        assert ids(worker) == [("a",)]
        await time.advance(0.004)
        assert ids(worker) == [("a",), ("b",)]
        assert len(worker.session.calls) == 1
        await time.advance(0.01)
        assert len(worker.session.calls) == 2


async def test_a_job_that_becomes_too_late_while_its_batch_waits_for_the_device_is_not_run(time: VirtualTime) -> None:
    session = Timed()
    async with fake_worker(time, session=session, policy_name=EARLIEST) as worker:
        await warm(worker)
        session.run_s = 9.0
        await worker.take(job_of("a"))
        await worker.take(job_of("due", deadline_unix_ms=worker.unix_ms(2.5)))
        await worker.take(job_of("patient", deadline_unix_ms=worker.unix_ms(60)))
        await time.advance(1.5)
        assert ids(worker)[-1] == ("due", "patient"), "composed for the predicted end"
        await time.advance(30)
        assert [len(run) for run in worker.session.calls] == [1, 1]
        assert worker.codes() == {"a": "ok", "due": "deadline_exceeded", "patient": "ok"}
        assert worker.store.running == {}
        assert worker.steps.held.deliveries == 0


async def test_a_composed_batch_of_which_nothing_is_left_does_not_keep_the_device(time: VirtualTime) -> None:
    session = Timed()
    async with fake_worker(time, session=session, policy_name=EARLIEST) as worker:
        await warm(worker)
        session.run_s = 9.0
        await worker.take(job_of("a"))
        await worker.take(job_of("due", deadline_unix_ms=worker.unix_ms(2.5)))
        await time.advance(10)
        session.run_s = 1.0
        assert worker.codes() == {"a": "ok", "due": "deadline_exceeded"}
        assert worker.store.running == {}
        assert worker.steps.device.longest_run_s() == 0.0
        await worker.take(job_of("next"))
        await time.advance(1.5)
        assert worker.codes()["next"] == "ok"


async def test_a_drain_finishes_the_batch_that_waits_for_the_device(time: VirtualTime) -> None:
    session = Timed()
    async with fake_worker(time, session=session, policy_name=EARLIEST) as worker:
        await warm(worker)
        session.run_s = 9.0
        await worker.take(job_of("a"))
        await worker.take(job_of("composed"))
        await time.advance(1.5)
        assert ids(worker)[-1] == ("composed",)
        worker.steps.pipeline.drain()
        await time.advance(30)
        assert worker.codes() == {"a": "ok", "composed": "ok"}
        assert set(worker.channel.fates.values()) == {"acked"}
        assert worker.store.running == {}
        assert all(task.done() for task in worker.serving)


async def test_the_urgent_job_goes_first_whatever_came_first(time: VirtualTime) -> None:
    async with fake_worker(time, session=Timed(), max_rows=1, policy_name=EARLIEST) as worker:
        await warm(worker, 1)
        await worker.take(job_of("running"))
        for job_id, left_s in (("last", 60), ("second", 30), ("first", 10)):
            await worker.take(job_of(job_id, deadline_unix_ms=worker.unix_ms(left_s)))
        await time.advance(9)
        assert [one.id for one in worker.replies()] == ["running", "first", "second", "last"]


async def test_a_job_that_the_gpu_would_miss_goes_to_the_cpu_at_once(time: VirtualTime) -> None:
    async with fake_worker(time, session=Timed(), policy_name=EARLIEST) as worker:
        await warm(worker)
        has_cpu(worker)
        await worker.take(job_of("a"))
        await worker.take(job_of("due", deadline_unix_ms=worker.unix_ms(0.5)))
        (moved,) = worker.moved
        assert moved.exchange == FALLBACK_EXCHANGE
        assert moved.headers["inferq-divert-gpu-ms"] == pytest.approx(2003, abs=5)
        assert moved.headers["inferq-divert-cpu-ms"] == 110
        assert worker.count("jobs_diverted", model="m", reason="deadline") == 1
        assert worker.channel.fates[4] == "acked"
        assert len(worker.steps.hand) == 1
        await time.advance(3)
        assert worker.codes() == {"a": "ok"}
        assert worker.steps.held.deliveries == 0


async def test_a_job_that_nobody_answers_in_time_is_refused_well_before_its_deadline(time: VirtualTime) -> None:
    async with fake_worker(time, session=Timed(), policy_name=EARLIEST) as worker:
        await warm(worker)
        await worker.take(job_of("a"))
        await worker.take(job_of("due", deadline_unix_ms=worker.unix_ms(0.5)))
        (refused,) = [one for one in worker.replies() if one.id == "due"]
        assert refused.error is not None
        assert refused.error.code == "deadline_exceeded"
        assert "this worker would answer in 2003 ms, and no CPU worker lives" in refused.error.message
        assert worker.count("deadline_missed", model="m", lane="interactive", stage="admit") == 1
        assert [one.headers["inferq-reason"] for one in worker.parked] == ["deadline_exceeded"]
        await time.advance(3)


async def test_a_job_that_was_taken_and_turns_out_hopeless_is_rescued_by_the_cpu(time: VirtualTime) -> None:
    session = Timed()
    async with fake_worker(time, session=session, policy_name=EARLIEST) as worker:
        await warm(worker)
        has_cpu(worker)
        session.run_s = 1.9
        await worker.take(job_of("a", 1.0, deadline_unix_ms=worker.unix_ms(60)))
        await worker.take([job_of("b1", deadline_unix_ms=worker.unix_ms(1.5))], lane="bulk")
        await time.advance(1.2)
        assert [one.headers["inferq-divert-reason"] for one in worker.moved] == ["deadline"]
        assert worker.moved[0].exchange == FALLBACK_EXCHANGE
        await time.advance(5)
        assert worker.steps.held.deliveries == 0


async def test_a_job_that_was_taken_and_turns_out_hopeless_is_told_before_its_deadline(time: VirtualTime) -> None:
    async with fake_worker(time, session=Timed(), policy_name=EARLIEST) as worker:
        await warm(worker)
        await worker.take(job_of("a"))
        await worker.take([job_of("b1", deadline_unix_ms=worker.unix_ms(1.5))], lane="bulk")
        await time.advance(1.1)
        (told,) = [one for one in worker.replies() if one.id == "b1"]
        assert told.error is not None
        assert "no batch that is large enough to keep up could answer in that time" in told.error.message
        assert worker.count("deadline_missed", model="m", lane="bulk", stage="compose") == 1


async def test_a_batch_is_composed_for_the_moment_when_it_will_start(time: VirtualTime) -> None:
    """Composed 3 ms before the device is free, a run of a second ends 1.003 s later, not 1 s."""
    async with fake_worker(time, session=Timed(), policy_name=EARLIEST) as worker:
        await warm(worker)
        await worker.take(job_of("a"))
        deadline_unix_ms = worker.unix_ms(1.9985)
        await worker.take([job_of("b1", deadline_unix_ms=deadline_unix_ms)], lane="bulk")
        await time.advance(1.1)
        assert worker.codes() == {"b1": "deadline_exceeded", "a": "ok"}


@pytest.mark.parametrize("policy_name", ["size_or_timeout", EARLIEST])
async def test_expiry_is_told_within_milliseconds_while_the_device_is_busy(time: VirtualTime, policy_name: str) -> None:
    session = Timed()
    async with fake_worker(time, session=session, policy_name=policy_name) as worker:
        session.run_s = 2.0
        await worker.take(job_of("a"))
        told: dict[str, float] = {}
        bundle = [job_of(f"b{n}", deadline_unix_ms=worker.unix_ms(0.1 + n * 0.01)) for n in range(100)]
        due = {job.id: (job.deadline_unix_ms or 0) / 1000 for job in bundle}
        await worker.take(bundle, lane="bulk")
        while len(told) < len(bundle):
            await time.advance(0.001)
            told |= {one.id: time.time() for one in worker.replies() if one.id != "a" and one.id not in told}
        assert max(told[job_id] - due[job_id] for job_id in due) < 0.004
        assert min(told[job_id] - due[job_id] for job_id in due) >= 0


async def test_a_redelivered_suspect_is_neither_judged_nor_rescued(time: VirtualTime) -> None:
    async with fake_worker(time, session=Timed(), policy_name=EARLIEST) as worker:
        await warm(worker)
        has_cpu(worker)
        await worker.take(job_of("a"))
        record = worker.store.record(["s", "other"])
        worker.store.running["dead/1"] = type(record)("dead/1", "dead", record.ids, 0)
        await worker.take(job_of("s", deadline_unix_ms=worker.unix_ms(1.5)), redelivered=True)
        await time.advance(5)
        assert worker.moved == []
        assert worker.codes()["s"] == "deadline_exceeded"


async def test_the_cpu_role_refuses_what_it_cannot_answer_in_time_and_diverts_nothing(time: VirtualTime) -> None:
    fields: dict[str, Any] = {"lane": "fallback", "routing_key": "m.interactive"}
    async with fake_worker(time, session=Timed(), role="cpu", policy_name=EARLIEST) as worker:
        await worker.take(job_of("warm", deadline_unix_ms=worker.unix_ms(60)), **fields)
        await time.advance(1.5)
        await worker.take(job_of("due", deadline_unix_ms=worker.unix_ms(0.5)), **fields)
        await time.advance(2)
        assert worker.codes() == {"warm": "ok", "due": "deadline_exceeded"}
        assert worker.moved == []


async def test_after_a_few_slow_runs_jobs_are_turned_away_only_for_a_while(time: VirtualTime) -> None:
    session = Timed()
    async with fake_worker(time, session=session, policy_name=EARLIEST) as worker:
        taken = dict[str, list[str]]()
        for phase, run_s, jobs in (("well", 0.02, 10), ("hiccup", 0.5, 10), ("after", 0.02, 200)):
            session.run_s = run_s
            for number in range(jobs):
                job_id = f"{phase}-{number}"
                await worker.take(job_of(job_id, deadline_unix_ms=worker.unix_ms(0.05)))
                await time.advance(0.6)
            codes = worker.codes()
            taken[phase] = [codes[f"{phase}-{number}"] for number in range(jobs)]
        assert "deadline_exceeded" in taken["hiccup"]
        assert taken["after"][100:] == ["ok"] * 100


async def test_a_job_that_arrives_when_the_next_batch_is_composed_is_told_of_that_run_too(time: VirtualTime) -> None:
    async with fake_worker(time, session=Timed(), policy_name=EARLIEST) as worker:
        await warm(worker)
        await worker.take(job_of("a"))
        await worker.take(job_of("b"))
        await time.advance(0.999)
        assert ids(worker) == [("a",), ("b",)]
        await worker.take(job_of("c", deadline_unix_ms=worker.unix_ms(1.5)))
        (refused,) = worker.replies()
        assert refused.error is not None
        assert "this worker would answer in 2004 ms" in refused.error.message
        await time.advance(5)
        assert worker.codes() == {"c": "deadline_exceeded", "a": "ok", "b": "ok"}


async def test_a_composed_batch_that_was_answered_meanwhile_holds_nobody_up(time: VirtualTime) -> None:
    async with fake_worker(time, session=Timed(), policy_name=EARLIEST) as worker:
        await warm(worker)
        worker.store.put(Outcome.cancelled("a"))
        await worker.take(job_of("a"))
        assert worker.codes() == {"a": "cancelled"}
        assert worker.steps.device.start_s == pytest.approx(time.monotonic())
        await worker.take(job_of("b", deadline_unix_ms=worker.unix_ms(1.2)))
        await time.advance(2)
        assert worker.codes()["b"] == "ok"
