"""The JavaScript example as a stranger would run it: a copy of the folder, `npm ci`, `node index.js`."""

import asyncio
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.integration.fake_worker import fake_worker
from tests.stack import PROJECT_FOLDER, Broker

from inferq_schemas import ModelTopology, Topology

EXAMPLE = PROJECT_FOLDER / "producer" / "examples" / "node"
NPM_LIMIT_S = 50


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The installed example, outside the working tree."""
    node = shutil.which("node")
    if node is None or shutil.which("npm") is None:
        pytest.skip("no node or npm here: install Node.js 18 or newer to run the JavaScript example")
    folder = tmp_path_factory.mktemp("node") / "example"
    shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns("node_modules"))
    try:
        installed = subprocess.run(
            ["npm", "ci", "--no-audit", "--no-fund"],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=NPM_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        pytest.skip(f"npm could not install the example's two packages within {NPM_LIMIT_S} s")
    if installed.returncode:
        pytest.skip(f"npm could not install the example's two packages: {installed.stderr.strip()[-300:]}")
    return folder


async def run(example: Path, *arguments: str) -> tuple[int | None, str, str]:
    environment = {"PATH": os.environ["PATH"], "HOME": str(example)}
    process = await asyncio.create_subprocess_exec(
        "node", "index.js", *arguments, cwd=example, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    output, errors = await process.communicate()
    return process.returncode, output.decode(), errors.decode()


def test_the_lock_file_names_no_registry() -> None:
    lock = (EXAMPLE / "package-lock.json").read_text()

    assert "resolved" not in lock
    assert "://" not in lock


@pytest.mark.timeout(120)
async def test_it_gets_an_answer_with_nothing_but_the_contract(example: Path, broker: Broker) -> None:
    broker.load(Topology([ModelTopology("double")]).definitions(broker.vhost))
    async with fake_worker(broker.url, "double") as worker:
        code, output, errors = await run(
            example, "--url", broker.url, "--model", "double", "--shape", "2,2", "--values", "1,2,3.5,-4"
        )

    assert (code, errors) == (0, "")
    answer = json.loads(output)
    assert answer["status"] == "ok"
    assert answer["outputs"]["x2"] == {"dtype": "float32", "shape": [2, 2], "values": [2, 4, 7, -8]}
    job, message = worker.seen[0], worker.properties[0]
    assert message.correlation_id == job.id
    assert message.delivery_mode == 2
    assert job.deadline_unix_ms is not None


@pytest.mark.timeout(120)
async def test_it_says_what_to_do_about_an_unknown_model(example: Path, broker: Broker) -> None:
    broker.load(Topology([ModelTopology("double")]).definitions(broker.vhost))

    code, output, errors = await run(example, "--url", broker.url, "--model", "nosuch")

    assert (code, output) == (1, "")
    assert "inferq topology add-model" in errors
    assert "lane" in errors


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--values", "a,b"], '--values: "a"'),
        (["--values", "1,,2"], '--values: ""'),
        (["--shape", "0,4"], '--shape: "0"'),
        (["--deadline-ms", "soon"], '--deadline-ms: "soon"'),
    ],
)
@pytest.mark.timeout(120)
async def test_what_is_no_number_is_refused(example: Path, arguments: list[str], said: str) -> None:
    code, _, errors = await run(example, "--model", "m", *arguments)

    assert code == 1
    assert said in errors
    assert errors.count("\n") == 1


@pytest.mark.timeout(120)
async def test_help_shows_the_options(example: Path) -> None:
    code, output, errors = await run(example, "--help")

    assert (code, errors) == (0, "")
    assert output.startswith("usage: node index.js --model NAME")
