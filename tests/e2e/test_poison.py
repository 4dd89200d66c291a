"""Jobs that end the process: parked after a few restarts, while everything around them is answered."""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from tests import models
from tests.e2e import poisoned_worker
from tests.e2e.poisoned_worker import POISON
from tests.e2e.raw_client import RawClient, job, raw_client
from tests.e2e.worker_process import Site, WorkerProcess, Workers, until

from inferq_schemas import Result

pytestmark = pytest.mark.timeout(180)
PROGRAM = (str(Path(poisoned_worker.__file__)),)


@dataclass
class Supervisor:
    """Starts the worker again whenever it was killed, as systemd or Kubernetes would."""

    workers: Workers
    model: Path
    deaths: int = 0

    async def run(self) -> None:
        while True:
            worker = self.workers.start("--model", self.model, program=PROGRAM)
            status = await worker.exited(limit_s=150)
            assert status == -9, f"the worker ended with {status}"
            self.deaths += 1


@contextlib.asynccontextmanager
async def supervised(workers: Workers, model: Path) -> AsyncIterator[Supervisor]:
    supervisor = Supervisor(workers, model)
    task = asyncio.create_task(supervisor.run())
    try:
        yield supervisor
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return models.scale(tmp_path, features=3)


@pytest.fixture
async def raw(site: Site) -> AsyncIterator[RawClient]:
    await site.add_model("scale")
    async with raw_client(site) as client:
        yield client


def row(value: float) -> np.ndarray:
    return np.array([[value, value, value]], np.float32)


def right(result: Result, value: float) -> bool:
    return result.ok and bool((result.outputs["y"].to_numpy() == 2 * row(value) + 1).all())


async def test_a_job_that_kills_the_process_is_parked_and_those_beside_it_are_answered(
    raw: RawClient, workers: Workers, model: Path
) -> None:
    values = {f"{secrets.token_hex(4)}-{n}": float(n) for n in range(40)}
    poison = "poison-single"
    names = {
        job_id: await raw.publish(_patient(job_id, row(value)), "scale.interactive") for job_id, value in values.items()
    }
    killer = await raw.publish(_patient(poison, row(POISON)), "scale.interactive", headers={"traceparent": "00-abc"})

    async with supervised(workers, model) as supervisor:
        results = {job_id: await raw.reply(name, limit_s=120) for job_id, name in names.items()}
        verdict = await raw.reply(killer, limit_s=120)
        parked = await raw.parked(poison)

    assert [job_id for job_id, value in values.items() if not right(results[job_id], value)] == []
    assert verdict.error is not None
    assert verdict.error.code == "inference_failed"
    assert (await raw.outcome(poison)).result == verdict
    assert parked.headers["inferq-reason"] == "inference_failed"
    assert "process" in str(parked.headers["inferq-message"])
    assert parked.headers["traceparent"] == "00-abc"
    assert parked.routing_key == "scale.interactive"
    assert {name for name in parked.headers if name.startswith("x-")} <= {"x-delivery-count"}, "parking's own count"
    assert supervisor.deaths <= 3


async def test_the_only_mate_of_a_killer_is_answered(raw: RawClient, workers: Workers, model: Path) -> None:
    """Both run alone after the first death, one right after the other: the second must not take the first with it."""
    mates = [_patient("mate", row(1)), _patient("killer", row(POISON))]
    names = [await raw.publish(one, "scale.interactive") for one in mates]

    async with supervised(workers, model):
        mate, killer = [await raw.reply(name, limit_s=120) for name in names]

    assert right(mate, 1), mate.error
    assert killer.error is not None


async def test_a_killer_inside_a_bundle_is_parked_alone(raw: RawClient, workers: Workers, model: Path) -> None:
    values = [float(n) for n in range(24)]
    values[13] = POISON
    bundle = [job("scale", row(value), id=f"b-{n}", deadline_unix_ms=None) for n, value in enumerate(values)]
    name = await raw.publish(bundle, "scale.bulk")

    async with supervised(workers, model) as supervisor:
        await until(lambda: len({result.id for result in raw.results(name)}) == 24, "24 answers", 120)
        await until(lambda: _settled(supervisor.workers.started[-1]), "the bundle is settled")
        by_id = {result.id: result for result in raw.results(name)}
        await raw.parked("b-13")

    wrong = [n for n, value in enumerate(values) if value != POISON and not right(by_id[f"b-{n}"], value)]
    assert wrong == []
    assert by_id["b-13"].error is not None
    assert by_id["b-13"].error.code == "inference_failed"
    assert len(raw.parking) == 1
    assert supervisor.deaths <= 3


async def test_a_job_that_was_alone_when_its_worker_was_killed_from_outside_is_answered(
    raw: RawClient, workers: Workers, tmp_path: Path
) -> None:
    """One death proves nothing: most workers die of memory limits and evictions, and most idle ones run one job."""
    slow = models.slow(tmp_path, layers=400, width=512)
    await raw.site.add_model("slow")
    first = await workers.ready("--model", slow, BATCHING__MAX_ROWS="4")
    x = np.zeros((400, 512), np.float32)
    name = await raw.publish(_patient("victim", x, "slow"), "slow.interactive")
    await until(first.in_hand, "the job is taken")
    await until(lambda: _is_running(first), "it runs")
    await first.kill()
    assert raw.results(name) == []

    await workers.ready("--model", slow, BATCHING__MAX_ROWS="4")
    result = await raw.reply(name, limit_s=90)

    assert result.ok, result.error


def _patient(job_id: str, x: np.ndarray, model: str = "scale") -> dict[str, object]:
    made = job(model, x, id=job_id)
    return made | {"deadline_unix_ms": made["sent_unix_ms"] + 600_000}


async def _settled(worker: WorkerProcess) -> bool:
    return await worker.in_hand() == 0


async def _is_running(worker: WorkerProcess) -> bool:
    _, page = await worker.page("/livez")
    return bool(page["checks"]["run"]["age_s"] > 0)
