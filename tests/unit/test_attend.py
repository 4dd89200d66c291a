"""What becomes of the jobs of a batch whose run lasts too long, on a whole worker with a clock that the test moves."""

from __future__ import annotations

import pytest
from tests.fakes import VirtualTime, job_of
from tests.worker_on_fakes import WorkerOnFakes, fake_worker, virtual_time

from inferq_schemas import FALLBACK_EXCHANGE, decode_jobs
from inferq_worker.cpu import CpuWorker
from inferq_worker.runtime.fake import FakeSession

EARLIEST = "earliest_deadline"


@pytest.fixture
async def time(monkeypatch: pytest.MonkeyPatch) -> VirtualTime:
    return virtual_time(monkeypatch)


async def hung(worker: WorkerOnFakes, *, cpu_s: float | None = 0.1) -> None:
    """A worker whose runs lasted a tenth of a second up to now, and will not end any more."""
    for number in range(3):
        await worker.take(job_of(f"warm{number}", deadline_unix_ms=worker.unix_ms(600)))
        await worker.time.advance(1.0)
    if cpu_s is not None:
        keep_cpu(worker, cpu_s)
    worker.publisher.published.clear()
    worker.session.gate.clear()


def keep_cpu(worker: WorkerOnFakes, cpu_s: float) -> None:
    entry = CpuWorker(cpu_s, lanes=1, held_jobs=0, beat=int(worker.time.monotonic() * 1000))
    worker.steps.cpus["m"].update({"c": entry}, gpu_workers=1, queued_jobs=0, now_s=worker.time.monotonic())


async def pass_time(worker: WorkerOnFakes, seconds: float, cpu_s: float = 0.1) -> None:
    """Time in which the CPU worker goes on telling of itself."""
    for _ in range(round(seconds / 0.05)):
        keep_cpu(worker, cpu_s)
        await worker.time.advance(0.05)


def moved_ids(worker: WorkerOnFakes) -> list[str]:
    return [decode_jobs(one.body)[0].id for one in worker.moved]


def session() -> FakeSession:
    return FakeSession(run_s=0.1, passes=True)


async def test_a_run_that_overruns_loses_its_jobs_to_the_cpu_at_the_last_moment_that_saves_them(
    time: VirtualTime,
) -> None:
    async with fake_worker(time, session=session(), policy_name=EARLIEST) as worker:
        await hung(worker)
        await worker.take(job_of("soon", deadline_unix_ms=worker.unix_ms(2)))
        await pass_time(worker, 1.35)
        assert worker.moved == [], "the run may still end"
        await pass_time(worker, 0.1)
        (moved,) = worker.moved
        assert moved.exchange == FALLBACK_EXCHANGE
        assert moved.headers["inferq-divert-reason"] == "overrun"
        assert 550 < int(moved.properties.expiration or 0) <= 600
        assert worker.count("jobs_diverted", model="m", reason="overrun") == 1
        assert worker.channel.open_tags == set(), "its message is settled"

        worker.session.gate.set()
        await pass_time(worker, 1)
        assert worker.replies() == [], "the CPU answers it"
        assert worker.store.running == {}


async def test_a_run_that_ends_in_time_keeps_its_jobs(time: VirtualTime) -> None:
    async with fake_worker(time, session=session(), policy_name=EARLIEST) as worker:
        await hung(worker)
        await worker.take(job_of("soon", deadline_unix_ms=worker.unix_ms(2)))
        await pass_time(worker, 1.3)
        worker.session.gate.set()
        await pass_time(worker, 1)
        assert worker.moved == []
        assert worker.codes() == {"soon": "ok"}


async def test_a_run_that_lasts_no_longer_than_others_did_is_left_alone(time: VirtualTime) -> None:
    async with fake_worker(time, session=session(), policy_name=EARLIEST) as worker:
        await hung(worker)
        # Its last chance on the CPU passes before twice the usual time of a run, when nothing is strange yet.
        await worker.take(job_of("soon", deadline_unix_ms=worker.unix_ms(0.22)))
        await time.advance(0.12)
        assert worker.moved == []
        worker.session.gate.set()
        await time.advance(1)
        assert list(worker.codes()) == ["soon"]


@pytest.mark.parametrize("fields", [{"fallback": "never"}, {"deadline_unix_ms": None}])
async def test_jobs_that_must_not_move_or_have_time_wait_for_the_run(
    time: VirtualTime, fields: dict[str, object]
) -> None:
    async with fake_worker(time, session=session(), policy_name=EARLIEST) as worker:
        await hung(worker)
        given = {"deadline_unix_ms": worker.unix_ms(2)} | fields
        await worker.take(job_of("a", **given), lane="bulk")
        await pass_time(worker, 5)
        assert worker.moved == []
        worker.session.gate.set()
        await pass_time(worker, 1)
        assert worker.codes() == {"a": "ok"}


async def test_without_cpu_workers_the_jobs_wait_and_are_answered_late(time: VirtualTime) -> None:
    async with fake_worker(time, session=session(), policy_name=EARLIEST) as worker:
        await hung(worker, cpu_s=None)
        await worker.take(job_of("a", deadline_unix_ms=worker.unix_ms(2)))
        await time.advance(5)
        worker.session.gate.set()
        await time.advance(1)
        (result,) = worker.replies()
        assert (result.status, result.late) == ("ok", True)
        assert worker.moved == []


async def test_jobs_behind_a_run_that_hangs_are_saved_too_each_at_its_own_last_moment(time: VirtualTime) -> None:
    async with fake_worker(time, session=session(), policy_name=EARLIEST) as worker:
        await hung(worker)
        await worker.take(job_of("runs", deadline_unix_ms=worker.unix_ms(10)))
        await time.advance(0.09)
        await worker.take(job_of("next", deadline_unix_ms=worker.unix_ms(10)))
        await pass_time(worker, 0.5)
        await worker.take(job_of("waits", deadline_unix_ms=worker.unix_ms(4)))
        await pass_time(worker, 2.75)
        assert worker.moved == []
        await pass_time(worker, 0.1)
        assert moved_ids(worker) == ["waits"]
        await pass_time(worker, 4)
        assert moved_ids(worker)[1:] == ["runs", "next"]
        assert len(worker.steps.hand) == 0
        worker.session.gate.set()
        await pass_time(worker, 1)
        assert worker.replies() == []
        assert worker.channel.open_tags == set()
        assert worker.store.running == {}
