"""Time: jobs that wait for ever, jobs whose time runs out with nobody there, and the CPU that steps in."""

from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
from tests import models
from tests.e2e.raw_client import RawClient, job, now_ms, raw_client
from tests.e2e.worker_process import Site, Workers, until

from inferq import Client, JobFailed

pytestmark = pytest.mark.timeout(120)
X = np.array([[1, 2, 3]], np.float32)
ANYBODY = ("allow", "never")
LANE, FALLBACK = "inferq.scale.interactive", "inferq.scale.fallback"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return models.scale(tmp_path, features=3)


@pytest.fixture
async def raw(site: Site) -> AsyncIterator[RawClient]:
    await site.add_model("scale")
    async with raw_client(site) as client:
        yield client


async def holds(raw: RawClient, queue: str, messages: int) -> bool:
    return await raw.depth(queue) == messages


async def test_a_job_without_deadline_waits_out_a_backlog_and_the_absence_of_workers(
    raw: RawClient, workers: Workers, model: Path
) -> None:
    backlog = [job("scale", X, deadline_unix_ms=None, sent_unix_ms=None, id=f"w-{n}") for n in range(1200)]
    names = [await raw.publish(backlog[at : at + 60], "scale.bulk") for at in range(0, 1200, 60)]
    patient = await raw.publish(job("scale", X, deadline_unix_ms=None), "scale.bulk")
    # The absence is as long as another job's whole life: once that one has moved on, time has passed for all.
    await raw.publish(_dying(2500), "scale.interactive", expiration_ms=2000)
    await until(lambda: holds(raw, FALLBACK, 1), "the other job's time is up")
    assert await raw.depth("inferq.scale.bulk") == len(names) + 1

    await workers.ready("--model", model)

    assert (await raw.reply(patient)).ok
    await until(lambda: sum(len(raw.results(name)) for name in names) == 1200, "the backlog is answered")
    assert all(result.ok for name in names for result in raw.results(name))


@pytest.mark.parametrize("role", ["gpu", "cpu"])
@pytest.mark.parametrize("fallback", ANYBODY)
async def test_a_deadline_that_passed_with_nobody_there_is_answered_once_by_the_first_worker_that_comes(
    raw: RawClient, workers: Workers, model: Path, role: str, fallback: str
) -> None:
    sent = job("scale", X, fallback=fallback, deadline_unix_ms=now_ms() + 600)
    name = await raw.publish(sent, "scale.interactive", expiration_ms=400)
    await until(lambda: holds(raw, FALLBACK, 1), "the broker took it out of its lane")
    await until(lambda: now_ms() > sent["deadline_unix_ms"], "its deadline has passed")

    worker = await workers.ready("--model", model, "--role", role)
    result = await raw.reply(name)
    parked = await raw.parked(sent["id"])

    async def settled() -> bool:
        return await worker.in_hand() == 0 and await raw.depth(LANE, FALLBACK, "inferq.dead") == 0

    await until(settled, "nothing of it is left")
    assert result.error is not None
    assert result.error.code == "deadline_exceeded"
    assert raw.results(name) == [result], "one answer"
    assert (await raw.outcome(sent["id"])).result == result
    assert parked.headers["inferq-reason"] == "deadline_exceeded"
    assert await raw.empty_parking() == [parked]


async def test_a_job_whose_expiration_fires_while_only_the_cpu_lives_is_answered_by_it(
    raw: RawClient, workers: Workers, model: Path
) -> None:
    await workers.ready("--model", model, "--role", "cpu")
    async with Client(raw.site.client_settings(cpu_reserve_ratio=0.95)) as client:
        answer = await client.infer("scale", {"x": X}, deadline_s=20)

    np.testing.assert_array_equal(answer.outputs["y"], 2 * X + 1)
    assert answer.result.fallback
    assert not answer.result.late
    assert answer.result.served_by is not None
    assert answer.result.served_by.role == "cpu"


async def test_the_cpu_never_answers_a_job_that_forbids_it(raw: RawClient, workers: Workers, model: Path) -> None:
    worker = await workers.ready("--model", model, "--role", "cpu")
    async with Client(raw.site.client_settings()) as client:
        with pytest.raises(JobFailed) as failure:
            await client.infer("scale", {"x": X}, deadline_s=1.5, fallback="never")

    assert failure.value.code == "deadline_exceeded"
    assert await worker.metric("inferq_batch_rows_sum") == 0


async def test_a_job_that_forbids_the_cpu_and_left_its_lane_too_early_goes_back_for_the_gpu(
    raw: RawClient, workers: Workers, model: Path
) -> None:
    """A client in another language may give every job the same `expiration`."""
    cpu = await workers.ready("--model", model, "--role", "cpu")
    name = await raw.publish(job("scale", X, fallback="never"), "scale.interactive", expiration_ms=100)
    await until(lambda: cpu.metric("inferq_acks_total"), "the CPU's undertaker handed it back")

    await workers.ready("--model", model)
    result = await raw.reply(name)

    assert result.ok
    assert not result.fallback
    assert result.served_by is not None
    assert result.served_by.role == "gpu"
    assert await cpu.metric("inferq_batch_rows_sum") == 0


async def test_of_a_bundle_that_expired_the_cpu_answers_only_the_jobs_that_allow_it(
    raw: RawClient, workers: Workers, model: Path
) -> None:
    cpu = await workers.ready("--model", model, "--role", "cpu")
    bundle = [job("scale", X, id=f"{n}-{fallback}", fallback=fallback) for n in range(3) for fallback in ANYBODY]
    name = await raw.publish(bundle, "scale.bulk", expiration_ms=100)
    await until(lambda: len(raw.results(name)) == 3, "the CPU has answered three")
    await until(lambda: holds(raw, "inferq.scale.bulk", 3), "the other three are back in their lane")

    await workers.ready("--model", model)
    await until(lambda: len(raw.results(name)) == 6, "six answers")

    assert all(result.ok for result in raw.results(name))
    answered = {result.id: result.served_by.role for result in raw.results(name) if result.served_by}
    assert answered == {one["id"]: "cpu" if one["fallback"] == "allow" else "gpu" for one in bundle}
    assert await cpu.metric("inferq_batch_rows_sum") == 3


async def test_with_both_roles_alive_the_gpu_role_answers_and_the_cpu_role_rests(
    raw: RawClient, workers: Workers, model: Path
) -> None:
    cpu = await workers.ready("--model", model, "--role", "cpu")
    await workers.ready("--model", model)
    async with Client(raw.site.client_settings()) as client:
        answers = [answer async for answer in client.infer_many("scale", [{"x": X}] * 200)]

    assert [answer.result.fallback for answer in answers] == [False] * 200
    assert await cpu.metric("inferq_batch_rows_sum") == 0


def _dying(left_ms: int) -> dict[str, object]:
    return job("scale", X, deadline_unix_ms=now_ms() + left_ms)
