"""A run that hangs inside one node, where nothing can stop it: its jobs are answered elsewhere, and the worker leaves.

Only the model of the GPU role hangs; the CPU role serves a sound one under the same name, as it would if a device were
at fault. A sound answer is `2 x + 1`.
"""

from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from tests import models
from tests.e2e.raw_client import RawClient, job, now_ms, raw_client
from tests.e2e.worker_process import Site, WorkerProcess, Workers, until

pytestmark = pytest.mark.timeout(180)
MINUTES = 400_000.0
"""Keeps a core busy for more than a minute."""
EXIT_FAILED = 1
TIMED_OUT = 'onnx_inference_timeout_total{model="long"}'


def x(value: float) -> np.ndarray:
    return np.array([[value]], np.float32)


@pytest.fixture
async def raw(site: Site) -> AsyncIterator[RawClient]:
    await site.add_model("long")
    async with raw_client(site) as client:
        yield client


async def gpu_worker(workers: Workers, folder: Path, **knobs: str) -> WorkerProcess:
    return await workers.ready("--model", models.one_long_node(folder), **knobs)


async def cpu_worker(workers: Workers, folder: Path) -> WorkerProcess:
    return await workers.ready("--model", f"long={models.scale(folder, features=1)}", "--role", "cpu")


async def knows_a_cpu(gpu: WorkerProcess) -> bool:
    """Whether the GPU role leaves the fallback queue to a CPU worker."""
    _, page = await gpu.page("/status")
    return not any(lane["queue"] == "inferq.long.fallback" and lane["consuming"] for lane in page["lanes"])


async def runs(gpu: WorkerProcess) -> bool:
    _, page = await gpu.page("/livez")
    return bool(page["checks"]["run"]["age_s"] > 0)


async def test_jobs_of_a_run_that_hangs_are_answered_by_the_cpu_in_time_and_the_worker_leaves(
    raw: RawClient, workers: Workers, tmp_path: Path
) -> None:
    limits = {"RUNTIME__RUN_LIMIT_S": "2", "RUNTIME__STOP_GRACE_S": "0.5"}
    gpu = await gpu_worker(workers, tmp_path, **limits)
    await cpu_worker(workers, tmp_path)
    await until(partial(knows_a_cpu, gpu), "the GPU worker knows of the CPU worker")
    due_ms = now_ms() + 20_000
    hung = await raw.publish(job("long", x(MINUTES), deadline_unix_ms=due_ms), "long.interactive")
    await until(partial(runs, gpu), "it runs")
    behind = [
        await raw.publish(job("long", x(n), deadline_unix_ms=due_ms), "long.interactive", expiration_ms=10_000)
        for n in range(5)
    ]
    results = [await raw.reply(name, limit_s=40) for name in (hung, *behind)]
    assert now_ms() < due_ms
    assert [(one.ok, one.fallback, one.late) for one in results] == [(True, True, False)] * 6
    answers = [float(one.outputs["y"].to_numpy()[0, 0]) for one in results]
    assert answers == [2 * MINUTES + 1] + [2.0 * n + 1 for n in range(5)]
    assert await gpu.exited() == EXIT_FAILED
    assert len(gpu.events("device.lost")) == 1
    assert len(gpu.events("run.timed_out")) == 1


async def test_jobs_whose_time_runs_out_before_the_limit_are_saved_at_the_last_moment(
    raw: RawClient, workers: Workers, tmp_path: Path
) -> None:
    gpu = await gpu_worker(workers, tmp_path)
    await cpu_worker(workers, tmp_path)
    await until(partial(knows_a_cpu, gpu), "the GPU worker knows of the CPU worker")
    due_ms = now_ms() + 4_000
    names = [
        await raw.publish(job("long", x(value), deadline_unix_ms=due_ms), "long.interactive")
        for value in (MINUTES, MINUTES, MINUTES)
    ]
    results = [await raw.reply(name, limit_s=20) for name in names]
    assert now_ms() < due_ms + 500
    assert [(one.ok, one.fallback, one.late) for one in results] == [(True, True, False)] * 3
    assert gpu.returncode is None, "the run has not reached its limit"
    assert await gpu.metric('inferq_jobs_diverted_total{model="long",reason="overrun"}') >= 1
    assert await gpu.metric(TIMED_OUT) == 0
