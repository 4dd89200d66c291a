"""A worker over its memory limit: it answers what runs, hands the rest on, says why, and ends with its own status."""

from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper
from tests import models
from tests.e2e.raw_client import job, raw_client
from tests.e2e.worker_process import Site, WorkerProcess, Workers, until

pytestmark = pytest.mark.timeout(180)
MIB = 2**20
EXIT_MEMORY = 3
LARGE, JOBS = 7168, 40
KNOBS = {
    "LIMITS__BODY_BYTES": str(MIB),
    "BATCHING__MAX_BYTES": str(MIB),
    "BATCHING__MAX_ROWS": "1",
    "MEMORY__SAMPLE_EVERY_S": "0.05",
}


def greedy(folder: Path) -> Path:
    """y = x times the sum of x, by way of their outer product: [n, w] to [n, w], with w^2 numbers in between."""
    return models.write(
        folder / "greedy.onnx",
        [
            helper.make_node("Unsqueeze", ["x", "two"], ["column"]),
            helper.make_node("Unsqueeze", ["x", "one"], ["row"]),
            helper.make_node("Mul", ["column", "row"], ["square"]),
            helper.make_node("ReduceSum", ["square", "two"], ["y"], keepdims=0),
        ],
        [("x", TensorProto.FLOAT, ["n", "w"])],
        [("y", TensorProto.FLOAT, ["n", "w"])],
        {"one": np.array([1], np.int64), "two": np.array([2], np.int64)},
    )


async def test_a_worker_over_its_limit_drains_and_ends_and_the_next_one_answers_the_rest(
    site: Site, workers: Workers, tmp_path: Path
) -> None:
    model, snapshots = greedy(tmp_path), tmp_path / "heaps"
    await site.add_model("greedy")
    x = np.zeros((1, LARGE), np.float32)
    x[0, :3] = (1, 2, 3)
    first = await workers.ready(
        "--model",
        model,
        **KNOBS,
        MEMORY__LIMIT_BYTES=str(200 * MIB),
        MEMORY__SNAPSHOT_DIR=str(snapshots),
        MEMORY__SNAPSHOT_FRAMES="1",
    )
    async with raw_client(site) as raw:
        # 196 MiB while it runs, and ONNX Runtime keeps them.
        made = [job("greedy", x) for _ in range(JOBS)]
        for one in made:
            one["deadline_unix_ms"] += 600_000
        names = [await raw.publish(one, "greedy.interactive") for one in made]

        status = await first.exited(90)
        answered_by_first = len(raw.replies)
        await workers.ready("--model", model, **KNOBS)
        await until(lambda: len(raw.replies) == len(names), "all are answered", 90)

        assert status == EXIT_MEMORY
        assert 0 < answered_by_first < len(names)
        for name in names:
            (result,) = raw.results(name)
            np.testing.assert_array_equal(result.outputs["y"].to_numpy()[0, :4], [6, 12, 18, 0])
        assert await raw.empty_parking() == []
    (event,) = first.events("worker.memory_exceeded")
    assert "limit of 209715200" in event["reason"]
    (snapshot,) = snapshots.iterdir()
    assert str(snapshot) == event["snapshot"]
    assert event["reason"] in snapshot.read_text()
    assert first.events("worker.stopped")[0]["status"] == EXIT_MEMORY


async def test_a_worker_shows_its_memory_and_its_limit(site: Site, workers: Workers, tmp_path: Path) -> None:
    worker = await workers.ready(
        "--model", models.scale(tmp_path, features=3), **KNOBS, MEMORY__LIMIT_BYTES=str(1024 * MIB)
    )
    await until(lambda: _resident(worker), "it has sampled")
    _, page = await worker.page("/status")
    assert page["memory"]["limit_bytes"] == await worker.metric("inferq_memory_limit_bytes") == 1024 * MIB
    assert 0 < page["memory"]["anonymous_bytes"] < page["memory"]["resident_bytes"]
    (lowered,) = worker.events("memory.windows_lowered")
    assert page["settings"]["lanes"]["max_held_bytes"] < 512 * MIB
    assert "lanes.max_held_bytes" in lowered["knobs"]


async def _resident(worker: WorkerProcess) -> bool:
    return await worker.metric("inferq_resident_bytes") > 0
