"""SIGTERM with full hands: nothing is lost, nothing runs alone for it, and a second signal does not wait."""

import signal
from pathlib import Path

import numpy as np
import pytest
from tests import models
from tests.e2e.raw_client import RawClient, job, raw_client
from tests.e2e.worker_process import Site, WorkerProcess, Workers, until

pytestmark = pytest.mark.timeout(180)
WIDTH = 256


def row(n: int) -> np.ndarray:
    return np.full((1, WIDTH), n / 1000, np.float32)


def expected(model: Path, x: np.ndarray) -> np.ndarray:
    """The chain of `models.slow` in numpy."""
    import onnx  # noqa: PLC0415 - only here
    from onnx import numpy_helper  # noqa: PLC0415 - same

    graph = onnx.load(model).graph
    weights = numpy_helper.to_array(graph.initializer[0])
    for node in graph.node:
        x = x @ weights if node.op_type == "MatMul" else np.tanh(x)
    return x


async def fill(raw: RawClient, jobs: int, bundles: int, bundle_jobs: int) -> tuple[dict[str, int], dict[str, range]]:
    """Publish singles and bundles; returns correlation ids with the numbers that stand behind them."""
    singles = {}
    for n in range(jobs):
        made = job("slow", row(n), id=f"s-{n}")
        made["deadline_unix_ms"] += 600_000
        singles[await raw.publish(made, "slow.interactive")] = n
    grouped = {}
    for start in range(jobs, jobs + bundles * bundle_jobs, bundle_jobs):
        numbers = range(start, start + bundle_jobs)
        body = [job("slow", row(n), id=f"b-{n}", deadline_unix_ms=None) for n in numbers]
        grouped[await raw.publish(body, "slow.bulk")] = numbers
    return singles, grouped


async def test_a_drained_worker_hands_its_window_on_and_the_next_one_batches_it(
    site: Site, workers: Workers, tmp_path: Path
) -> None:
    model = models.slow(tmp_path, layers=60, width=WIDTH)
    await site.add_model("slow")
    async with raw_client(site) as raw:
        singles, grouped = await fill(raw, jobs=300, bundles=6, bundle_jobs=32)
        first = workers.start("--model", model, BATCHING__MAX_ROWS="8", LANES__INTERACTIVE_WINDOW="128")
        await until(lambda: _held(first, 100), "its window is full", 60)
        await until(lambda: len(raw.replies) >= 8, "it is at work")

        status = await first.stop()
        answered_by_first = len(raw.replies)
        assert await raw.depth("inferq.slow.fallback", "inferq.dead") == 0, "what went back, went back to its queue"
        await workers.ready("--model", model, BATCHING__MAX_ROWS="8", LANES__INTERACTIVE_WINDOW="128")
        total = len(singles) + sum(map(len, grouped.values()))
        await until(lambda: len({result.id for _, result in raw.replies}) == total, "all answers", 90)

        assert status == 0
        assert first.events("worker.stopped")[0]["status"] == 0
        assert 0 < answered_by_first < total - 100, "the drain gave most of it back"
        _check_answers(raw, model)
        assert await raw.empty_parking() == []


async def test_what_a_drained_worker_had_in_a_batch_is_answered_before_it_ends(
    site: Site, workers: Workers, tmp_path: Path
) -> None:
    model = models.slow(tmp_path, layers=2000, width=512)
    worker = await workers.ready("--model", model)
    async with raw_client(site) as raw:
        name = await raw.publish(job("slow", np.zeros((32, 512), np.float32)), "slow.interactive")
        await until(lambda: _is_running(worker), "it runs")
        assert raw.replies == []

        assert await worker.stop() == 0

        assert raw.results(name)[0].ok
        assert await raw.depth("inferq.slow.interactive") == 0


async def test_a_draining_worker_says_so_and_a_second_signal_ends_it_at_once(
    site: Site, workers: Workers, tmp_path: Path
) -> None:
    model = models.slow(tmp_path, layers=6000, width=512)
    worker = await workers.ready("--model", model)
    async with raw_client(site) as raw:
        name = await raw.publish(job("slow", np.zeros((32, 512), np.float32)), "slow.interactive")
        await until(lambda: _is_running(worker), "it runs")

        worker.send(signal.SIGTERM)
        await until(lambda: _is_draining(worker), "it drains")
        assert raw.results(name) == []
        worker.send(signal.SIGTERM)

        assert await worker.exited(limit_s=10) == -signal.SIGTERM
        assert raw.results(name) == []
        await until(lambda: _has(raw, "inferq.slow.interactive", 1), "the broker has the job again")


def _check_answers(raw: RawClient, model: Path) -> None:
    by_id = {result.id: result for _, result in raw.replies}
    numbers = {job_id: int(job_id.partition("-")[2]) for job_id in by_id}
    given = np.concatenate([by_id[job_id].outputs["y"].to_numpy() for job_id in numbers])
    right = expected(model, np.concatenate([row(n) for n in numbers.values()]))
    np.testing.assert_allclose(given, right, atol=1e-4)
    batches = [result.batch for result in by_id.values()]
    assert {batch.reason for batch in batches if batch} & {"solo"} == set()
    assert np.mean([batch.rows for batch in batches if batch]) > 6, "batches stay full"


async def _held(worker: WorkerProcess, deliveries: int) -> bool:
    return await worker.in_hand() >= deliveries


async def _has(raw: RawClient, queue: str, messages: int) -> bool:
    return await raw.depth(queue) == messages


async def _is_running(worker: WorkerProcess) -> bool:
    _, page = await worker.page("/livez")
    return bool(page["checks"]["run"]["age_s"] > 0)


async def _is_draining(worker: WorkerProcess) -> bool:
    status, page = await worker.page("/readyz")
    return status == 503 and not page["checks"]["draining"]["ok"]
