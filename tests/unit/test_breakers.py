"""A model that fails: its jobs go to a CPU worker in time or back, its lanes rest, and a probe brings it back."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from tests.fakes import VirtualTime, job_of
from tests.worker_on_fakes import WorkerOnFakes, fake_worker

from inferq_schemas import FALLBACK_EXCHANGE, decode_jobs
from inferq_worker import answer, hand, pipeline, publish, wiring
from inferq_worker.cpu import CpuWorker
from inferq_worker.errors import WorkError
from inferq_worker.runtime import DeviceLost, RowError, RunReport, SessionBroken
from inferq_worker.runtime.fake import FakeSession, double

if TYPE_CHECKING:
    from inferq_worker.work import Feeds

BAD, REFUSED = -1.0, -2.0
FAILED = RunReport((RowError("inference_failed", "device says no"),), 0.001, 1, 0)
TIMED_OUT = RunReport((RowError("inference_timeout", "stopped at its limit"),), 30.0, 1, 0, timed_out=True)
LONG_S = 600


@pytest.fixture
async def time(monkeypatch: pytest.MonkeyPatch) -> VirtualTime:
    return VirtualTime(monkeypatch, pipeline, hand, wiring, publish, answer)


def moody(item: Feeds) -> Feeds | RowError:
    if (item["x"] == BAD).any():
        return RowError("inference_failed", "index out of bounds")
    return RowError("invalid_input", "below zero") if (item["x"] == REFUSED).any() else double(item)


def failing_worker(time: VirtualTime, *, max_rows: int = 1, **options: Any) -> Any:
    """A worker with one job a run, which opens at the fifth failure in a row."""
    return fake_worker(time, session=FakeSession(moody), max_rows=max_rows, **options)


async def fail(worker: WorkerOnFakes, times: int, value: float = BAD) -> None:
    for n in range(times):
        await worker.take(job_of(f"bad-{n}-{worker.time.time()}", value, deadline_unix_ms=worker.unix_ms(LONG_S)))


def cpu_lives(worker: WorkerOnFakes, *, run_s: float, queued_jobs: int = 0) -> None:
    entry = CpuWorker(run_s, lanes=1, held_jobs=0, beat=1)
    worker.steps.cpus["m"].update({"c": entry}, gpu_workers=1, queued_jobs=queued_jobs, now_s=worker.time.monotonic())


def time_out(worker: WorkerOnFakes, times: int = 2) -> None:
    """As if other runs had been cut off at their limit."""
    for _ in range(times):
        worker.steps.breakers.ran("m", TIMED_OUT)


def state(worker: WorkerOnFakes) -> str:
    return str(worker.steps.breakers.status("m")["state"])


def moved(worker: WorkerOnFakes) -> list[str]:
    return [decode_jobs(one.body)[0].id for one in worker.moved]


async def test_five_failed_runs_pause_the_lanes_and_the_next_job_goes_back_unrun(time: VirtualTime) -> None:
    async with failing_worker(time) as worker:
        await fail(worker, 4)
        assert state(worker) == "closed"
        await fail(worker, 1)
        assert state(worker) == "open"
        assert worker.journal[-1] == "acked 5", "the job that opened it has its answer, as any other"
        assert "paused m" in worker.journal
        runs = len(worker.session.calls)
        await worker.take(job_of("next", 1.0))
        assert worker.channel.fates[6] == "requeued"
        assert (len(worker.session.calls), len(worker.steps.hand)) == (runs, 0)
        assert len(worker.codes()) == 5
        assert worker.count("breaker_transitions", model="m", state="open", reason="failures") == 1


async def test_faults_of_callers_count_neither_as_failures_nor_as_good_runs(time: VirtualTime) -> None:
    async with failing_worker(time) as worker:
        await fail(worker, 10, REFUSED)
        assert worker.steps.breakers.status("m")["runs"] == 0
        await fail(worker, 4)
        await fail(worker, 1, REFUSED)
        assert state(worker) == "closed"
        await fail(worker, 1)
        assert state(worker) == "open"


async def test_a_job_that_fails_among_mates_that_are_answered_does_not_count_against_the_model(
    time: VirtualTime,
) -> None:
    async with failing_worker(time, max_rows=2, max_wait_s=0.01) as worker:
        for n in range(10):
            bundle = [job_of(f"good-{n}", 1.0), job_of(f"bad-{n}", BAD)]
            await worker.take(bundle, lane="bulk")
            await worker.time.advance(0.1)
        assert worker.steps.breakers.status("m")["failed"] == 0
        assert sorted(worker.codes().values()) == ["inference_failed"] * 10 + ["ok"] * 10


async def test_a_job_goes_back_only_when_the_broker_has_confirmed_that_the_lanes_rest(time: VirtualTime) -> None:
    """Before that it would be delivered here again at once, and again, up to its delivery limit."""
    async with failing_worker(time) as worker:
        worker.lanes.answers.clear()
        await fail(worker, 5)
        await worker.take(job_of("early", 1.0))
        await worker.time.advance(1)
        assert 6 in worker.channel.open_tags
        again = await worker.take(job_of("early", 1.0), redelivered=True)
        worker.lanes.answers.set()
        await worker.time.settle()
        assert [worker.channel.fates[tag] for tag in (6, again.tag)] == ["requeued", "requeued"]
        assert worker.journal.index("paused m") < worker.journal.index("requeued 6")


async def test_what_waits_for_a_run_leaves_when_the_breaker_opens(time: VirtualTime) -> None:
    async with failing_worker(time) as worker:
        worker.session.gate.clear()
        await fail(worker, 5)
        for n in range(3):
            await worker.take(job_of(f"waits-{n}", 1.0, deadline_unix_ms=worker.unix_ms(LONG_S)))
        worker.session.gate.set()
        await worker.time.settle()
        assert state(worker) == "open"
        assert [worker.channel.fates[tag] for tag in range(1, 9)] == ["acked"] * 5 + ["requeued"] * 3
        assert len(worker.session.calls) == 5
        assert len(worker.steps.hand) == 0


async def test_a_job_that_waits_for_company_leaves_at_once(time: VirtualTime) -> None:
    async with failing_worker(time, max_rows=2, max_wait_s=60) as worker:
        await worker.take(job_of("first-after-quiet", 1.0), lane="bulk")
        await worker.take(job_of("waits", 1.0), lane="bulk")
        assert worker.channel.fates == {1: "acked"}
        time_out(worker)
        await worker.time.settle()
        assert worker.channel.fates == {1: "acked", 2: "requeued"}


async def test_a_job_that_left_by_another_way_before_the_lanes_rest_does_not_go_back_as_well(
    time: VirtualTime,
) -> None:
    async with failing_worker(time) as worker:
        worker.lanes.answers.clear()
        await fail(worker, 5)
        await worker.take(job_of("saved", 1.0))
        (item,) = worker.steps.hand.jobs_of("m")
        worker.steps.hand.fail(item, WorkError("deadline_exceeded", "saved by nobody"))
        worker.lanes.answers.set()
        await worker.time.settle()
        assert worker.channel.fates[6] == "acked"


async def test_a_job_that_comes_while_the_device_is_busy_goes_back_at_once(time: VirtualTime) -> None:
    async with failing_worker(time) as worker:
        worker.session.gate.clear()
        await worker.take(job_of("runs", 1.0))
        time_out(worker)
        await worker.take(job_of("comes", 1.0))
        assert worker.channel.fates == {2: "requeued"}


async def test_a_job_that_the_cpu_answers_in_time_is_diverted_and_one_that_it_does_not_goes_back(
    time: VirtualTime,
) -> None:
    async with failing_worker(time) as worker:
        cpu_lives(worker, run_s=0.5)
        await fail(worker, 5)
        await worker.take(job_of("in-time", 1.0, deadline_unix_ms=worker.unix_ms(1.0)))
        await worker.take(job_of("too-late", 1.0, deadline_unix_ms=worker.unix_ms(0.4)))
        await worker.take(job_of("forbidden", 1.0, deadline_unix_ms=worker.unix_ms(30), fallback="never"))
        (moved,) = worker.moved
        assert (moved.exchange, decode_jobs(moved.body)[0].id) == (FALLBACK_EXCHANGE, "in-time")
        assert moved.headers["inferq-divert-reason"] == "breaker"
        assert [worker.channel.fates[tag] for tag in (6, 7, 8)] == ["acked", "requeued", "requeued"]
        assert worker.count("jobs_diverted", model="m", reason="breaker") == 1


async def test_jobs_without_deadline_go_to_the_cpu_while_it_answers_before_the_model_may_be_back(
    time: VirtualTime,
) -> None:
    async with failing_worker(time) as worker:
        cpu_lives(worker, run_s=1.9)
        await fail(worker, 5)
        for n in range(4):
            await worker.take(job_of(f"patient-{n}", 1.0), lane="bulk")
        assert moved(worker) == ["patient-0", "patient-1"], "the third would be answered after 5.7 s; probed after 5"
        assert [one.properties.expiration for one in worker.moved] == [None, None]
        assert [worker.channel.fates[tag] for tag in (8, 9)] == ["requeued", "requeued"]


async def test_nothing_is_diverted_while_no_cpu_worker_lives(time: VirtualTime) -> None:
    async with failing_worker(time) as worker:
        await fail(worker, 5)
        await worker.take(job_of("a", 1.0))
        await worker.take(job_of("b", 1.0), lane="bulk")
        assert worker.moved == []
        assert [worker.channel.fates[tag] for tag in (6, 7)] == ["requeued", "requeued"]


async def test_in_the_cpu_role_there_is_nobody_to_divert_to(time: VirtualTime) -> None:
    async with failing_worker(time, role="cpu") as worker:
        await fail(worker, 5)
        due_ms = worker.unix_ms(30)
        await worker.take(job_of("a", 1.0, deadline_unix_ms=due_ms), lane="fallback", routing_key="m.interactive")
        assert worker.moved == []
        assert worker.channel.fates[6] == "requeued"
        assert "paused m" in worker.journal


async def test_answers_of_the_cpu_role_are_timed_from_the_senders_clock(time: VirtualTime) -> None:
    async with failing_worker(time, role="cpu") as worker:
        sent = {"sent_unix_ms": worker.unix_ms(-0.3), "deadline_unix_ms": worker.unix_ms(30)}
        await worker.take(job_of("a", 1.0, **sent), lane="fallback", routing_key="m.interactive")
        at = {"model": "m", "le": "0.25"}
        assert worker.registry.get_sample_value("inferq_fallback_latency_seconds_bucket", at) == 0
        assert worker.registry.get_sample_value("inferq_fallback_latency_seconds_bucket", at | {"le": "0.5"}) == 1


async def test_a_large_job_between_two_steps_goes_back(time: VirtualTime) -> None:
    async with failing_worker(time, max_rows=2) as worker:
        worker.session.gate.clear()
        await worker.take(job_of("large", *[1.0] * 6), lane="bulk")
        time_out(worker)
        worker.session.gate.set()
        await worker.time.settle()
        assert worker.channel.fates == {1: "requeued"}
        assert len(worker.session.calls) == 1


async def test_a_batch_that_is_being_claimed_when_the_breaker_opens_does_not_run(time: VirtualTime) -> None:
    async with failing_worker(time) as worker:
        claim, answers = worker.store.claim, asyncio.Event()

        async def slowly(*args: Any, **fields: Any) -> Any:
            found = await claim(*args, **fields)
            await answers.wait()
            return found

        worker.store.claim = slowly
        await worker.take(job_of("chosen", 1.0))
        time_out(worker)
        answers.set()
        await worker.time.settle()
        assert worker.channel.fates == {1: "requeued"}
        assert (worker.session.calls, worker.store.running) == ([], {})


async def test_after_five_seconds_a_probe_and_no_job_brings_the_model_back(time: VirtualTime) -> None:
    async with failing_worker(time) as worker:
        await fail(worker, 5)
        runs = len(worker.session.calls)
        await worker.time.advance(4.9)
        assert worker.session.probed == 0
        worker.session.gate.clear()
        await worker.time.advance(0.2)
        assert (worker.session.probed, state(worker)) == (1, "half_open")
        await worker.take(job_of("meanwhile", 1.0))
        worker.session.gate.set()
        await worker.time.settle()
        assert (state(worker), worker.journal[-1]) == ("closed", "resumed m")
        assert len(worker.session.calls) == runs
        assert worker.channel.fates[6] == "requeued"
        await worker.take(job_of("after", 1.0))
        assert worker.codes()["after"] == "ok"


async def test_probes_that_fail_or_are_slow_keep_it_open_ever_longer(time: VirtualTime) -> None:
    async with failing_worker(time) as worker:
        worker.session.probes = [FAILED, RunReport(({},), 0.9, 1, 0)]
        await fail(worker, 5)
        probed = []
        for _ in range(36):
            await worker.time.advance(1.001)
            probed.append(worker.session.probed)
        assert [probed.index(n) + 1 for n in (1, 2, 3)] == [5, 15, 35]
        assert state(worker) == "closed"
        assert worker.count("breaker_transitions", model="m", state="open", reason="probe_failed") == 2
        assert worker.journal.count("paused m") == 1


async def test_a_probe_that_is_cut_off_fails_and_one_that_does_not_end_costs_its_slot(time: VirtualTime) -> None:
    async with failing_worker(time) as worker:
        wedged = RunReport(TIMED_OUT.answers, 30.0, 0, 0, timed_out=True, wedged=True)
        worker.session.probes = [TIMED_OUT, wedged]
        await fail(worker, 5)
        await worker.time.advance(5.1)
        assert (state(worker), worker.steps.device.lost.is_set()) == ("open", False)
        await worker.time.advance(10.1)
        assert worker.steps.device.lost.is_set()


async def test_a_probe_that_never_has_its_turn_says_nothing_of_the_model(time: VirtualTime) -> None:
    async with failing_worker(time) as worker:
        await fail(worker, 5)
        worker.session.broken = DeviceLost("no slot is left")
        await worker.time.advance(6)
        assert state(worker) == "half_open"
        assert worker.count("breaker_transitions", model="m", state="open", reason="probe_failed") == 0


async def test_a_session_that_is_broken_for_good_ends_the_worker_at_the_probe(time: VirtualTime) -> None:
    async def broken() -> None:
        async with failing_worker(time) as worker:
            await fail(worker, 5)
            worker.session.broken = SessionBroken("the device failed")
            await worker.time.advance(6)

    with pytest.raises(ExceptionGroup) as caught:
        await broken()
    assert caught.group_contains(SessionBroken)


async def test_a_session_that_broke_is_rebuilt_before_the_probe_and_its_jobs_go_back(time: VirtualTime) -> None:
    async with failing_worker(time) as worker:
        worker.session.broken = SessionBroken("device-side assert")
        await worker.take(job_of("a"))
        await worker.take(job_of("b"))
        await time.advance(1)
        assert state(worker) == "open"
        assert worker.codes() == {}
        assert worker.steps.held.deliveries == 0
        assert worker.session.rebuilds == 0
        await time.advance(5)
        assert (worker.session.rebuilds, worker.session.probed, state(worker)) == (1, 1, "closed")
        await worker.take(job_of("c"))
        await time.advance(1)
        assert worker.codes() == {"c": "ok"}


async def test_a_session_that_cannot_be_rebuilt_ends_the_worker(time: VirtualTime) -> None:
    async def break_it_for_good() -> None:
        async with failing_worker(time) as worker:
            worker.session.broken = worker.session.beyond_repair = SessionBroken("device-side assert")
            await worker.take(job_of("a"))
            await time.advance(10)

    with pytest.raises(ExceptionGroup) as caught:
        await break_it_for_good()
    assert caught.group_contains(SessionBroken)


async def test_two_runs_that_were_cut_off_open_it(time: VirtualTime) -> None:
    async with failing_worker(time) as worker:
        time_out(worker, 1)
        await worker.take(job_of("good", 1.0))
        assert state(worker) == "closed"
        time_out(worker, 1)
        await worker.time.settle()
        assert (state(worker), worker.steps.breakers.status("m")["opened_by"]) == ("open", "timeouts")
        assert worker.journal[-1] == "paused m"


async def test_the_status_says_what_was_seen_and_when_the_probe_comes(time: VirtualTime) -> None:
    async with failing_worker(time) as worker:
        await fail(worker, 2)
        await worker.take(job_of("good", 1.0))
        status = worker.steps.breakers.status("m")
        assert {name: status[name] for name in ("state", "opened_by", "probe_in_s", "runs", "failed", "slow")} == {
            "state": "closed", "opened_by": None, "probe_in_s": None, "runs": 3, "failed": 2, "slow": 0,
        }  # fmt: skip
        assert not worker.steps.breakers.all_open
        await fail(worker, 5)
        assert worker.steps.breakers.status("m")["probe_in_s"] == pytest.approx(5, abs=0.01)
        assert worker.steps.breakers.all_open


async def test_a_model_that_is_slow_by_nature_is_not_slow_at_its_own_pace(time: VirtualTime) -> None:
    settings = {"run_p95_s": 0.8, "slow_factor": 3}
    async with fake_worker(time, max_rows=4, breaker=settings, warm_run_s={1: 0.5, 4: 2.0}) as worker:
        assert worker.steps.breakers.status("m")["slow_above_s"] == 6.0
    async with fake_worker(time, max_rows=4, breaker=settings, warm_run_s={1: 0.01, 4: 0.02}) as worker:
        assert worker.steps.breakers.status("m")["slow_above_s"] == 0.8


async def test_a_drain_gives_back_what_waits_for_the_lanes_and_makes_no_more_probes(time: VirtualTime) -> None:
    async with failing_worker(time) as worker:
        worker.lanes.answers.clear()
        await fail(worker, 5)
        await worker.take(job_of("a", 1.0))
        worker.steps.pipeline.drain()
        worker.lanes.answers.set()
        async with asyncio.timeout(1):
            await worker.tasks.idle()
        await worker.settler.flushed()
        assert worker.channel.fates[6] == "requeued"
        await worker.time.advance(20)
        assert worker.session.probed == 0


async def test_a_probe_that_ends_during_a_drain_resumes_nothing(time: VirtualTime) -> None:
    async with failing_worker(time) as worker:
        await fail(worker, 5)
        worker.session.gate.clear()
        await worker.time.advance(5.1)
        worker.steps.pipeline.drain()
        worker.session.gate.set()
        await worker.time.settle()
        assert worker.session.probed == 1
        assert "resumed m" not in worker.journal
        assert len(worker.tasks) == 0
