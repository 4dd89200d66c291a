"""From the command line to ready, or to one line that says why not; and what a live worker tells about itself."""

import asyncio
import shutil
import signal
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
from infra.local import processes
from tests import models
from tests.e2e.raw_client import job, raw_client
from tests.e2e.worker_process import Site, WorkerProcess, Workers, until

from inferq import Client, UnknownModel

X = np.array([[1, 2, 3]], np.float32)
ANSWERED = 'inferq_jobs_answered_total{code="%s",lane="interactive",model="scale",role="gpu"}'


def repository(folder: Path) -> Path:
    """Two models, one of them in two versions, and one with settings of its own."""
    scale, shared = models.scale(folder, features=3), models.shared_factor(folder)
    for target in ("scale/1", "scale/10", "factor/1"):
        (folder / "models" / target).mkdir(parents=True)
    for target in ("scale/1", "scale/10"):
        shutil.copy(scale, folder / "models" / target / "model.onnx")
    shutil.copy(shared, folder / "models/factor/1/model.onnx")
    (folder / "models/factor/1/model.toml").write_text('shared_inputs = ["factor"]\nfallback = false\n')
    return folder / "models"


async def test_one_worker_serves_several_models_from_files(site: Site, workers: Workers, tmp_path: Path) -> None:
    scale, gather = models.scale(tmp_path, features=3), models.gather(tmp_path)
    await workers.ready("--model", scale, "--model", f"lookup={gather}")
    async with Client(site.client_settings()) as client:
        first = await client.infer("scale", {"x": X})
        second = await client.infer("lookup", {"i": np.array([[3], [1]])})
        with pytest.raises(UnknownModel):
            await client.infer("gather", {"i": np.array([[3]])})

    np.testing.assert_array_equal(first.outputs["y"], 2 * X + 1)
    np.testing.assert_array_equal(second.outputs["y"], [[[3, 30]], [[1, 10]]])


async def test_a_folder_of_models_serves_the_newest_versions_with_their_settings(
    site: Site, workers: Workers, tmp_path: Path
) -> None:
    folder = repository(tmp_path)
    await site.add_model("scale")
    await site.add_model("factor", "--no-fallback")
    await workers.ready("--models", folder)
    async with Client(site.client_settings()) as client:
        answer = await client.infer("scale", {"x": X})
        multiplied = await client.infer("factor", {"x": X[:, :2], "factor": np.float32(7)})

    assert answer.result.served_by is not None
    assert answer.result.served_by.version == "10"
    np.testing.assert_array_equal(multiplied.outputs["y"], X[:, :2] * 7)


EXACT = pytest.param(
    "with the exact check", marks=pytest.mark.plain_only("a worker's user may not read the whole topology")
)


@pytest.mark.parametrize("checks", [EXACT, "over AMQP alone"])
async def test_missing_queues_keep_a_worker_waiting_with_the_mend_in_its_words(
    site: Site, workers: Workers, tmp_path: Path, checks: str
) -> None:
    folder = tmp_path / "models"
    (folder / "later/1").mkdir(parents=True)
    shutil.copy(models.scale(tmp_path, features=3), folder / "later/1/model.onnx")
    await site.add_model("another")
    url = site.broker.management_url if checks == "with the exact check" else ""
    worker = workers.start("--models", folder, BROKER__MANAGEMENT_URL=url)

    async def complaint() -> str:
        _, page = await worker.page("/readyz")
        reason = page["checks"]["broker"]["reason"] if isinstance(page, dict) else ""
        return reason if "inferq.later.interactive" in reason else ""

    reason: str = await until(complaint, "it names the queue")
    assert "inferq topology add-model later" in reason
    assert (await worker.page("/livez"))[0] == 200, "waiting for an operator is no reason to be restarted"

    await site.add_model("later")

    await worker.ready()
    async with Client(site.client_settings()) as client:
        assert (await client.infer("later", {"x": X})).ok


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_worker_without_a_broker_lives_on_unready_and_ends_when_told(
    site: Site, workers: Workers, tmp_path: Path, number: signal.Signals
) -> None:
    (port,) = processes.free_ports(1)
    worker = workers.start(
        "--model",
        models.scale(tmp_path, features=3),
        BROKER__URL=f"amqp://guest:guest@{processes.LOOPBACK}:{port}/",
        BROKER__MANAGEMENT_URL=f"http://guest:guest@{processes.LOOPBACK}:{port}",
    )
    await until(lambda: _loaded(worker), "it has loaded its model")

    status, page = await worker.page("/readyz")
    assert status == 503
    assert not page["checks"]["broker"]["ok"]
    assert (await worker.page("/livez"))[0] == 200
    worker.send(number)

    assert await worker.exited(limit_s=20) == 0
    assert "Traceback" not in worker.log()


async def test_a_live_worker_tells_what_it_does(site: Site, workers: Workers, tmp_path: Path) -> None:
    worker = await workers.ready("--model", models.scale(tmp_path, features=3))
    async with raw_client(site) as raw:
        names = [await raw.publish(job("scale", X), "scale.interactive") for _ in range(20)]
        assert all([(await raw.reply(name)).ok for name in names])
        await raw.ask(job("scale", X.astype(np.float64)), "scale.interactive")
        await until(lambda: _idle(worker), "it is done")

    for page in ("/livez", "/readyz", "/startupz"):
        status, found = await worker.page(page)
        assert status == 200
        assert all(check["ok"] for check in found["checks"].values()), found
    assert await worker.metric(ANSWERED % "ok") == 20
    assert await worker.metric(ANSWERED % "invalid_input") == 1
    assert await worker.metric("inferq_batch_rows_sum") == 20
    assert await worker.metric("inferq_acks_total") == 21
    assert await worker.metric('inferq_replies_total{fate="confirmed"}') == 21
    assert await worker.metric('inferq_broker_connected{link="consume"}') == 1
    assert await worker.metric("inferq_redis_available") == 1
    provider = 'inferq_execution_provider_info{model="scale",provider="CPUExecutionProvider"'
    assert await worker.metric(provider) == 1
    status, found = await worker.page("/status")
    assert found["role"] == "gpu"
    model = found["models"]["scale"]
    assert model["provider"] == "CPUExecutionProvider"
    assert (model["requested_provider"], model["cache"]) == ("CPUExecutionProvider", "off")
    nodes = model["nodes_by_provider"]["CPUExecutionProvider"]
    assert await worker.metric('inferq_session_nodes{model="scale",provider="CPUExecutionProvider"}') == nodes > 0
    assert f'"nodes": {{"CPUExecutionProvider": {nodes}}}' in worker.log()
    assert model["run_ms_by_rows"]["32"] > 0
    lanes = {lane["queue"]: lane for lane in found["lanes"]}
    assert lanes["inferq.scale.interactive"]["consuming"]
    assert lanes["inferq.dead"]["consuming"]
    assert (await worker.page("/nothing"))[0] == 404


async def test_no_password_is_shown_anywhere(site: Site, workers: Workers, tmp_path: Path) -> None:
    worker = await workers.ready("--model", models.scale(tmp_path, features=3))
    password = urlsplit(site.amqp_url("inferq-gpu")).password

    assert password
    assert f":{password}@" not in worker.log() + (await asyncio.to_thread(worker.get, "/status"))[1]


@pytest.mark.parametrize(
    ("arguments", "knobs", "words"),
    [
        pytest.param([], {}, ["no model to serve", "--model"], id="no model"),
        pytest.param(["--model", "gone.onnx"], {}, ["gone.onnx", "not there"], id="a file that is not there"),
        pytest.param(["--models", "nowhere"], {}, ["nowhere", "not there"], id="a folder that is not there"),
        pytest.param(["--model", "batch_mean.onnx"], {}, ["batch_mean", "rows", ".toml"], id="a model that mixes rows"),
        pytest.param(["--model", "junk.onnx"], {}, ["junk"], id="a file that is no model"),
        pytest.param(["--model", "scale.onnx"], {"BATCHING__MAX_ROW": "3"}, ["MAX_ROW is", "MAX_ROWS?"], id="a typo"),
        pytest.param(["--model", "scale.onnx"], {"BATCHING__MAX_ROWS": "0"}, ["max_rows"], id="a value out of bounds"),
        pytest.param(["--model", "scale.onnx"], {"BROKER__URL": "http://x/"}, ["broker.url", "amqp"], id="a bad url"),
        pytest.param(
            ["--model", "scale.onnx", "--provider", "cuda", "--require-provider"],
            {"RUNTIME__PROVIDER": ""},
            ["CUDA"],
            id="a provider that is required and not there",
        ),
        pytest.param(
            ["--model", "scale.onnx"],
            {"MEMORY__LIMIT_BYTES": str(64 * 2**20)},
            ["64 MiB", "at least", "memory.limit_bytes"],
            id="a memory limit below what the model takes",
        ),
        pytest.param(
            ["--model", "scale.onnx"],
            {"MEMORY__LIMIT_BYTES": str(2**30), "LANES__INTERACTIVE_WINDOW": "2000"},
            ["lanes.interactive_window", "limits.body_bytes"],
            id="a window that does not fit into memory",
        ),
        pytest.param(
            ["--model", "scale.onnx", "--model", "scale=batch_mean.onnx"], {}, ["scale", "twice"], id="a name twice"
        ),
    ],
)
async def test_what_keeps_a_worker_from_starting_is_one_message_and_exit_status_2(
    site: Site, workers: Workers, tmp_path: Path, arguments: list[str], knobs: dict[str, str], words: list[str]
) -> None:
    models.scale(tmp_path, features=3)
    models.batch_mean(tmp_path)
    (tmp_path / "junk.onnx").write_bytes(b"no protobuf at all" * 10)

    worker = workers.start(*arguments, **knobs)

    assert await worker.exited() == 2
    said = [line for line in worker.log().splitlines() if not line.startswith("{")]
    problems = [line for line in said if line != "inferq: the configuration cannot be used:"]
    assert len(problems) == 1, said
    assert [word for word in words if word not in problems[0]] == [], problems[0]


async def test_an_admin_port_that_is_taken_is_said_with_its_knob(site: Site, workers: Workers, tmp_path: Path) -> None:
    model = models.scale(tmp_path, features=3)
    first = await workers.ready("--model", model)
    port = first.events("admin.listening")[0]["port"]

    second = workers.start("--model", model, "--admin-port", str(port))

    assert await second.exited() == 2
    assert "admin.port" in second.log()
    assert "Traceback" not in second.log()


async def _loaded(worker: WorkerProcess) -> bool:
    return (await worker.page("/startupz"))[0] == 200


async def _idle(worker: WorkerProcess) -> bool:
    return await worker.in_hand() == 0
