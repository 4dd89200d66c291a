"""One id, one outcome: jobs that come twice, ids that are used twice, and jobs that are taken back."""

from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
from tests import models
from tests.e2e.raw_client import RawClient, job, raw_client
from tests.e2e.worker_process import Site, Workers, until

from inferq import Client, JobFailed

X = np.array([[1, 2, 3]], np.float32)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return models.scale(tmp_path, features=3)


@pytest.fixture
async def raw(site: Site) -> AsyncIterator[RawClient]:
    await site.add_model("scale")
    async with raw_client(site) as client:
        yield client


async def runs(workers: Workers) -> float:
    return await workers.started[0].metric("inferq_batch_rows_sum")


async def test_the_same_job_twice_is_run_once_and_answered_twice_alike(
    raw: RawClient, workers: Workers, model: Path
) -> None:
    await workers.ready("--model", model)
    same = job("scale", X, id="twice")
    before = await runs(workers)

    first = await raw.ask(same, "scale.interactive")
    second = await raw.ask(same, "scale.interactive")

    assert first.ok
    assert second == first, "the second answer is the stored one, with the timings of the only run"
    assert await runs(workers) - before == 1


async def test_copies_that_wait_together_share_one_run(raw: RawClient, workers: Workers, model: Path) -> None:
    same = job("scale", X, id="together")
    names = [await raw.publish(same, "scale.interactive") for _ in range(5)]
    await workers.ready("--model", model)

    results = [await raw.reply(name) for name in names]

    assert [result.timing_ms for result in results] == [results[0].timing_ms] * 5
    assert await runs(workers) == 1
    assert [len(raw.results(name)) for name in names] == [1] * 5


async def test_an_id_with_another_content_is_a_conflict_and_the_outcome_stays(
    raw: RawClient, workers: Workers, model: Path
) -> None:
    await workers.ready("--model", model)
    await raw.ask(job("scale", X, id="used"), "scale.interactive")

    other = await raw.ask(job("scale", X + 1, id="used"), "scale.interactive")

    assert other.error is not None
    assert other.error.code == "conflict"
    kept = (await raw.outcome("used")).result
    np.testing.assert_array_equal(kept.outputs["y"].to_numpy(), 2 * X + 1)


async def test_force_runs_again_and_replaces_the_outcome(raw: RawClient, workers: Workers, model: Path) -> None:
    await workers.ready("--model", model)
    await raw.ask(job("scale", X, id="forced"), "scale.interactive")

    again = await raw.ask(job("scale", X + 1, id="forced", force=True), "scale.interactive")

    assert again.ok
    np.testing.assert_array_equal(again.outputs["y"].to_numpy(), 2 * (X + 1) + 1)
    kept = (await raw.outcome("forced")).result
    np.testing.assert_array_equal(kept.outputs["y"].to_numpy(), 2 * (X + 1) + 1)


async def test_a_job_cancelled_before_its_run_is_answered_cancelled_and_not_run(
    raw: RawClient, workers: Workers, model: Path
) -> None:
    async with Client(raw.site.client_settings()) as client:
        job_id = await client.submit("scale", {"x": X}, lane="bulk", deadline_s=None)
        assert await client.cancel(job_id)
        asked = await raw.publish(job("scale", X, id=job_id), "scale.interactive")
        await workers.ready("--model", model)

        with pytest.raises(JobFailed) as failure:
            await client.result(job_id, timeout_s=30)
        reply = await raw.reply(asked)

    assert failure.value.code == "cancelled"
    assert reply.error is not None
    assert reply.error.code == "cancelled"
    assert await runs(workers) == 0
    await until(lambda: _idle(workers), "both messages are settled")


async def test_an_answered_job_cannot_be_cancelled(raw: RawClient, workers: Workers, model: Path) -> None:
    await workers.ready("--model", model)
    async with Client(raw.site.client_settings()) as client:
        answer = await client.infer("scale", {"x": X}, id="done")

        assert answer.ok
        assert not await client.cancel("done")


async def _idle(workers: Workers) -> bool:
    return await workers.started[0].in_hand() == 0
