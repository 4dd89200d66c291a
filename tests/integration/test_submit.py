"""`inferq submit` and `inferq result` as commands, against a real broker and Redis, and a fake worker."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
from tests.integration.fake_worker import FakeWorker, fake_worker
from tests.stack import Broker, Stack

from inferq_schemas import ModelTopology, Topology

MODEL = "double"


class Shell:
    """Runs `inferq` in a folder of its own against this test's vhost and prefix."""

    def __init__(self, folder: Path, broker: Broker, stack: Stack, prefix: str) -> None:
        self.folder = folder
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("INFERQ_")},
            "INFERQ_BROKER__URL": broker.url,
            "INFERQ_REDIS__URL": stack.redis_url,
            "INFERQ_REDIS__PREFIX": prefix,
        }

    async def start(self, *arguments: str) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "inferq",
            *arguments,
            cwd=self.folder,
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    async def run(self, *arguments: str, text: str = "") -> tuple[int | None, str, str]:
        process = await self.start(*arguments)
        output, errors = await process.communicate(text.encode())
        return process.returncode, output.decode(), errors.decode()


@pytest.fixture
def shell(tmp_path: Path, broker: Broker, stack: Stack, redis_prefix: str) -> Shell:
    broker.load(Topology([ModelTopology(MODEL)]).definitions(broker.vhost))
    return Shell(tmp_path, broker, stack, redis_prefix)


@pytest.fixture
async def worker(shell: Shell, broker: Broker, stack: Stack, redis_prefix: str) -> AsyncIterator[FakeWorker]:
    async with fake_worker(broker.url, MODEL, redis_url=stack.redis_url, prefix=redis_prefix) as fake:
        yield fake


def write_lines(path: Path, count: int) -> None:
    path.write_text("".join(json.dumps({"x": [[n, n + 0.5]]}) + "\n" for n in range(count)))


def read_lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


async def test_json_lines_come_back_as_json_lines(shell: Shell, worker: FakeWorker) -> None:
    write_lines(shell.folder / "in.jsonl", 300)

    code, output, errors = await shell.run("submit", "--model", MODEL, "in.jsonl")

    answers = sorted((json.loads(line) for line in output.splitlines()), key=lambda answer: int(answer["index"]))
    assert code == 0
    assert [answer["outputs"]["x2"] for answer in answers] == [[[2 * n, 2 * n + 1]] for n in range(300)]
    assert "300 jobs in" in errors
    assert errors.endswith("300 ok\n")
    # Nobody looks, so nothing is drawn.
    assert "\r" not in errors


async def test_an_archive_comes_back_as_an_archive_in_its_order(shell: Shell, worker: FakeWorker) -> None:
    x = np.random.default_rng(1).random((103, 5), np.float32)
    np.savez(shell.folder / "in.npz", x=x)

    code, _, errors = await shell.run(
        "submit", "--model", MODEL, "in.npz", "--rows-per-job", "10", "--output", "out.npz"
    )

    assert (code, errors.split(": ")[-1]) == (0, "11 ok\n")
    np.testing.assert_array_equal(np.load(shell.folder / "out.npz")["x2"], x * 2)


async def test_failed_jobs_are_counted_by_code_and_fail_the_command(shell: Shell, worker: FakeWorker) -> None:
    worker.fails = {"bad": "inference_failed"}
    lines = '{"inputs": {"x": [[1]]}, "id": "good"}\n{"inputs": {"x": [[1]]}, "id": "bad"}\n'

    code, output, errors = await shell.run("submit", "--model", MODEL, "-", text=lines)

    assert code == 1
    assert {answer["id"]: answer["status"] for answer in map(json.loads, output.splitlines())} == {
        "good": "ok",
        "bad": "error",
    }
    assert "1 ok, 1 failed (inference_failed 1)" in errors


async def test_a_bad_line_is_named_after_the_answers_before_it(shell: Shell, worker: FakeWorker) -> None:
    code, output, errors = await shell.run("submit", "--model", MODEL, "-", text='{"x": [[1]]}\n{"x": [[1], [1, 2]]}\n')

    assert code == 2
    assert len(output.splitlines()) == 1
    assert "inferq: standard input, line 2: input 'x': rows of different length" in errors
    assert "Traceback" not in errors


async def test_an_unknown_model_ends_it_with_the_mend(shell: Shell) -> None:
    write_lines(shell.folder / "in.jsonl", 500)

    code, output, errors = await shell.run("submit", "--model", "nosuch", "in.jsonl")

    assert (code, output) == (2, "")
    assert errors.startswith("inferq: no queue for model 'nosuch', lane 'bulk'")
    assert errors.endswith("add it with `inferq topology add-model nosuch`\n")
    # One line: no log of what was sent, no traceback.
    assert errors.count("\n") == 1


async def test_a_run_that_broke_off_goes_on_and_no_answer_is_there_twice(shell: Shell, worker: FakeWorker) -> None:
    write_lines(shell.folder / "in.jsonl", 1000)
    command = ("submit", "--model", MODEL, "in.jsonl", "--output", "out.jsonl", "--checkpoint", "run.ckpt")
    output = shell.folder / "out.jsonl"
    first = await shell.start(*command, "--window", "64", "--bundle", "4")
    while not (shell.folder / "run.ckpt").exists() or (shell.folder / "run.ckpt").read_text().count("\n") < 2:
        assert first.returncode is None, "it ended before it could be stopped"
        await asyncio.sleep(0.01)
    first.send_signal(signal.SIGKILL)
    await first.communicate()
    seen_before = len(worker.seen)

    code, _, errors = await shell.run(*command)

    indices = [answer["index"] for answer in read_lines(output)]
    assert code == 0
    assert sorted(map(int, map(str, indices))) == list(range(1000))
    assert "answered before" in errors
    # The ids are the same, and those that were answered are not even sent.
    assert len({job.id for job in worker.seen}) == 1000
    assert len(worker.seen) - seen_before < 1000


async def test_an_interrupt_keeps_what_is_answered(shell: Shell, worker: FakeWorker) -> None:
    write_lines(shell.folder / "in.jsonl", 100)
    command = ("submit", "--model", MODEL, "in.jsonl", "--output", "out.jsonl", "--checkpoint", "run.ckpt")
    first = await shell.start(*command, "--window", "10", "--bundle", "1")
    await asyncio.wait_for(worker.arrived.wait(), 30)
    worker.go.clear()
    first.send_signal(signal.SIGINT)
    _, errors = await first.communicate()
    worker.go.set()

    code, _, _ = await shell.run(*command)

    assert first.returncode == 130
    assert "Traceback" not in errors.decode()
    assert code == 0
    indices = [int(str(answer["index"])) for answer in read_lines(shell.folder / "out.jsonl")]
    assert sorted(indices) == list(range(100))


async def test_result_shows_and_writes_an_answer(shell: Shell, worker: FakeWorker) -> None:
    line = '{"inputs": {"x": [1, 2]}, "id": "flower"}'
    await shell.run("submit", "--model", MODEL, "--lane", "interactive", "--add-batch-axis", "-", text=line)

    shown = await shell.run("result", "flower")
    as_json = await shell.run("result", "flower", "--json")
    written = await shell.run("result", "flower", "--npz", "flower.npz")

    assert shown[0] == as_json[0] == written[0] == 0
    assert "x2: int64 [1, 2] [2, 4]" in shown[1]
    assert json.loads(as_json[1])["outputs"] == {"x2": [[2, 4]]}
    assert np.load(shell.folder / "flower.npz")["x2"].tolist() == [[2, 4]]


async def test_result_of_an_unknown_job_says_how_to_wait(shell: Shell) -> None:
    code, output, errors = await shell.run("result", "nothing")

    assert (code, output) == (3, "")
    assert "inferq result nothing --wait" in errors
