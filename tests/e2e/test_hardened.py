"""Hardened workers and clients do their whole work: TLS both ways, a user each, and that user's rights only."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests import models
from tests.e2e.worker_process import WorkerProcess, Workers, until
from tests.hardened import HardenedSite, hardened_site
from tests.stack import Stack

from inferq import Client, JobFailed
from inferq.stall import why_nothing_comes
from inferq_schemas import ModelTopology

pytestmark = pytest.mark.timeout(180)
X = np.ones((1, 3), np.float32)
LARGE = np.ones((40_000, 3), np.float32)  # above the claim check: its bytes travel through Redis, both ways


@pytest.fixture
def site(secure_stack: Stack, tmp_path: Path) -> Iterator[HardenedSite]:
    with hardened_site(secure_stack, tmp_path, [ModelTopology("scale")]) as opened:
        yield opened


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Not a single file, so that no worker asks the management API for anything."""
    folder = tmp_path / "models" / "scale" / "1"
    folder.mkdir(parents=True)
    models.scale(folder, features=3).rename(folder / "model.onnx")
    return tmp_path / "models"


async def worker(workers: Workers, repository: Path, role: str) -> WorkerProcess:
    return await workers.ready("--set", f"models.dir={repository}", "--role", role)


async def test_every_way_of_a_job_works_with_the_roles_rights_and_needs_no_more(
    site: HardenedSite, workers: Workers, repository: Path
) -> None:
    gpu, cpu = [await worker(workers, repository, role) for role in ("gpu", "cpu")]
    async with Client(site.client_settings(), reply="both") as client:
        assert (await client.infer("scale", {"x": X})).outputs
        large = await client.infer("scale", {"x": LARGE}, lane="bulk")
        assert next(iter(large.outputs.values())).shape == LARGE.shape
        answers = [answer async for answer in client.infer_many("scale", [{"x": X}] * 300)]
        assert all(answer.error is None for answer in answers)
        job_id = await client.submit("scale", {"x": X})
        assert (await client.result(job_id, timeout_s=30)).outputs
        assert not await client.cancel(job_id)
        assert await client.cancel("never-sent")
        with pytest.raises(JobFailed, match="cancelled"):
            await client.infer("scale", {"x": X}, id="never-sent")
        assert (await client.infer("scale", {"x": X}, id="never-sent", force=True)).outputs
        await gpu.stop()
        # The broker moves it to the fallback, and the CPU worker answers.
        assert (await client.infer("scale", {"x": X}, deadline_s=4)).result.fallback
        await cpu.stop()
        with pytest.raises(Exception, match="no answer"):
            await client.infer("scale", {"x": X}, deadline_s=0.5, id="too-late")
        # Dead by now: the next worker answers, stores and parks it.
        await worker(workers, repository, "cpu")
        with pytest.raises(JobFailed, match="deadline_exceeded"):
            await client.result("too-late", timeout_s=60)
        await operate(site)
        assert (await client.result("too-late", timeout_s=60)).outputs, "it ran when it was sent back"
    assert site.refusals() == []


async def operate(site: HardenedSite) -> None:
    """An operator pauses the model and resumes it, and sends back the parked job; a sender is told who paused."""

    async def inferq(*words: str) -> str:
        done = await site.inferq(*words)
        assert done.returncode == 0, done.stderr
        return done.stdout

    async def parked() -> bool:
        return "too-late" in await inferq("dead", "list", "--json")

    await inferq("pause", "scale", "--why", "night shift")
    assert "night shift" in await inferq("pause")
    assert "scale was paused by" in await why_nothing_comes(site.client_settings(), "inferq.scale.interactive")
    await inferq("resume", "scale")

    await until(parked, "it is parked")
    assert "deadline_exceeded" in await inferq("dead", "show", "too-late")
    # Nobody reads its lane here: after most of this time the broker moves it to the CPU worker.
    await inferq("dead", "requeue", "too-late", "--deadline-s", "6")
