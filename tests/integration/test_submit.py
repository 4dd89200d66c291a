"""`inferq submit` and `inferq result` as commands, against a real broker and Redis, and a fake worker."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

import aio_pika
import numpy as np
import pytest
from tests.integration.fake_worker import FakeWorker, fake_worker
from tests.stack import Broker, Stack

from inferq_schemas import PARKING_EXCHANGE, Job, ModelTopology, Tensor, Topology, encode_job

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


BAD_SECOND_LINE = '{"x": [[1]]}\n{"x": [[1], [1, 2]]}\n{"x": [[3]]}\n'


async def test_a_bad_line_is_named_and_costs_only_itself(shell: Shell, worker: FakeWorker) -> None:
    code, output, errors = await shell.run("submit", "--model", MODEL, "-", text=BAD_SECOND_LINE)

    answers = {answer["index"]: answer for answer in map(json.loads, output.splitlines())}
    assert code == 1
    assert [answers[index]["status"] for index in range(3)] == ["ok", "error", "ok"]
    assert errors.startswith("inferq: standard input, line 2: invalid_input: input 'x': rows of different length")
    assert "2 ok, 1 failed (invalid_input 1)" in errors
    assert "Traceback" not in errors


async def test_reading_strictly_a_bad_line_ends_it_after_the_answers_before_it(
    shell: Shell, worker: FakeWorker
) -> None:
    code, output, errors = await shell.run("submit", "--strict", "--model", MODEL, "-", text=BAD_SECOND_LINE)

    assert code == 2
    assert len(output.splitlines()) == 1
    assert "inferq: standard input, line 2: input 'x': rows of different length" in errors


async def test_failures_are_shown_and_kept_in_an_archive(shell: Shell, worker: FakeWorker) -> None:
    worker.fails = {"b": "invalid_input"}
    lines = '{"inputs": {"x": [[1]]}, "id": "a"}\n{"inputs": {"x": [[1]]}, "id": "b"}\n'

    code, _, errors = await shell.run("submit", "--model", MODEL, "-", "--output", "out.npz", text=lines)

    assert code == 1
    assert "inferq: standard input, line 2: invalid_input: as the test wants\n" in errors
    with np.load(shell.folder / "out.npz") as written:
        assert written["job_index"].tolist() == [0]
        assert (written["failed_index"].tolist(), written["failed_id"].tolist()) == ([1], ["b"])
        assert written["failed_message"].tolist() == ["as the test wants"]


async def test_whole_numbers_of_an_input_with_fractions_are_floats(shell: Shell, worker: FakeWorker) -> None:
    (shell.folder / "in.jsonl").write_text('{"x": [[1]]}\n{"x": [[0.5]]}\n{"x": [[2]]}\n')

    code, _, errors = await shell.run("submit", "--model", MODEL, "in.jsonl", "--dtype", "z=int32")

    assert code == 0
    assert {job.inputs["x"].dtype for job in worker.seen} == {"float32"}
    assert "--dtype z=int32: no record has an input 'z'; inputs: x" in errors


async def test_an_empty_input_is_said_and_is_no_error(shell: Shell) -> None:
    code, output, errors = await shell.run("submit", "--model", MODEL, "-")

    assert (code, output) == (0, "")
    assert errors == "inferq: nothing to send: no file holds a job\n"


async def test_a_slow_producer_holds_no_answer_up(shell: Shell, worker: FakeWorker) -> None:
    process = await shell.start("submit", "--model", MODEL, "-")
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(b'{"x": [[1]]}\n')
    # The pipe stays open, as if more were to come.
    line = await asyncio.wait_for(process.stdout.readline(), 30)
    process.send_signal(signal.SIGINT)

    _, errors = await process.communicate()

    assert json.loads(line)["outputs"] == {"x2": [[2]]}
    assert process.returncode == 130
    assert b"stopped: 1 answered, of 1 job sent; with --checkpoint" in errors
    assert b"Traceback" not in errors


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
async def test_a_signal_stops_it_with_its_own_status(
    shell: Shell, worker: FakeWorker, number: signal.Signals, status: int
) -> None:
    worker.go.clear()
    write_lines(shell.folder / "in.jsonl", 3)
    process = await shell.start("submit", "--model", MODEL, "in.jsonl")
    await asyncio.wait_for(worker.arrived.wait(), 30)
    process.send_signal(number)

    _, errors = await process.communicate()

    assert process.returncode == status
    assert b"inferq: stopped: 0 answered, of 3 jobs sent" in errors
    assert b"Traceback" not in errors


async def test_a_wait_without_workers_is_explained(shell: Shell) -> None:
    process = await shell.start("submit", "--model", MODEL, "-")
    assert process.stdin is not None
    assert process.stderr is not None
    process.stdin.write(b'{"x": [[1]]}\n')
    process.stdin.close()
    line = await asyncio.wait_for(process.stderr.readline(), 30)
    process.send_signal(signal.SIGTERM)
    await process.communicate()

    assert line == f"inferq: 0 of 1 job answered; waiting: no worker consumes inferq.{MODEL}.bulk\n".encode()


async def test_a_wrong_password_is_final_at_once(shell: Shell, broker: Broker) -> None:
    parts = urlsplit(broker.url)
    url = parts._replace(netloc=f"nina:wrong@{parts.hostname}:{parts.port}").geturl()

    code, _, errors = await shell.run("submit", "--model", MODEL, "-", "--set", f"broker.url={url}")

    assert code == 2
    assert errors.startswith("inferq: the broker does not let user 'nina' in: mend user and password in broker.url")
    assert errors.count("\n") == 1


async def test_a_missing_vhost_is_final_at_once(shell: Shell, broker: Broker) -> None:
    url = urlsplit(broker.url)._replace(path="/nowhere").geturl()

    code, _, errors = await shell.run("submit", "--model", MODEL, "-", "--set", f"broker.url={url}")

    assert code == 2
    assert errors.startswith("inferq: the broker does not open vhost 'nowhere' to user")
    assert errors.count("\n") == 1


async def test_a_lane_that_is_not_there_is_said(shell: Shell) -> None:
    code, _, errors = await shell.run("submit", "--model", MODEL, "--lane", "nope", "-", text='{"x": [[1]]}\n')

    assert code == 2
    assert "check the lane (the default lanes are interactive, bulk)" in errors


async def test_an_unknown_model_ends_it_with_the_mend(shell: Shell) -> None:
    write_lines(shell.folder / "in.jsonl", 500)

    code, output, errors = await shell.run("submit", "--model", "nosuch", "in.jsonl")

    assert (code, output) == (2, "")
    assert errors.startswith("inferq: no queue for model 'nosuch' in lane 'bulk'")
    assert errors.endswith("add the model with `inferq topology add-model nosuch`\n")
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


async def test_a_run_that_was_killed_is_accounted_for_record_by_record(
    shell: Shell, worker: FakeWorker, broker: Broker
) -> None:
    lines = [{"inputs": {"x": [[n, n + 0.5]]}, "id": f"r-{n}"} for n in range(20)]
    (shell.folder / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = ("submit", "--model", MODEL, "in.jsonl", "--output", "out.jsonl", "--checkpoint", "run.ckpt")
    none = await shell.run(*command, "--reconcile")
    # Answered and stored, and killed before the checkpoint is written.
    first = await shell.start(*command, "--bundle", "1", "--window", "10")
    worker.go.clear()
    await asyncio.wait_for(worker.arrived.wait(), 30)
    first.send_signal(signal.SIGKILL)
    await first.communicate()
    worker.go.set()
    assert (await shell.run("result", "r-0", "--wait", "30"))[0] == 0
    await park(broker, encode_job(job_of("r-19")))

    code, output, errors = await shell.run(*command, "--reconcile")

    assert (none[0], "--checkpoint of a run that was begun" in none[2]) == (2, True)
    assert code == 3, errors
    fetched = [str(answer["id"]) for answer in read_lines(shell.folder / "out.jsonl")]
    unknown = 20 - len(fetched) - 1
    assert "r-0" in fetched
    assert "r-19" not in fetched
    assert f"0 answered before, {len(fetched)} fetched now ({len(fetched)} ok), 1 parked (overloaded 1)" in output
    assert f"{unknown} unknown" in output

    assert (await shell.run(*command))[0] == 0
    code, output, _ = await shell.run(*command, "--reconcile")
    assert (code, output) == (0, "20 answered before, 0 fetched now (0 ok), 0 parked, 0 unknown\n")


def job_of(name: str) -> Job:
    return Job.model_validate({"id": name, "model": MODEL, "inputs": {"x": Tensor.from_numpy(np.zeros((1, 2)))}})


async def park(broker: Broker, body: bytes) -> None:
    async with await aio_pika.connect(broker.url) as connection:
        exchange = await (await connection.channel()).get_exchange(PARKING_EXCHANGE)
        message = aio_pika.Message(body, headers={"inferq-reason": "overloaded"}, delivery_mode=2)
        await exchange.publish(message, routing_key=f"{MODEL}.bulk")


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
