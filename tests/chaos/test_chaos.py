"""A short chaos run as people start it, on both kinds of stack, and what is left of one that is killed: nothing."""

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from infra.local import docker, install, processes
from tests.stack import PROJECT_FOLDER

pytestmark = [pytest.mark.stack, pytest.mark.timeout(300)]
installed = pytest.mark.skipif(bool(install.missing()), reason=f"not installed: {install.missing()}")
RUN_FOLDER = PROJECT_FOLDER / ".run"


@contextmanager
def chaos(*arguments: str, kind: str = "binaries") -> Iterator[tuple["subprocess.Popen[str]", Path]]:
    """Have a run under way; gives the process of the stack and the folder by which all that belongs to it is known."""
    name = f"chaos-{secrets.token_hex(4)}"
    stack = [sys.executable, str(PROJECT_FOLDER / "infra" / "local" / "stack.py"), "run", "--name", name, "--"]
    command = [*stack, sys.executable, "-u", "-m", "tests.chaos", *arguments]
    images = ("INFERQ_RABBITMQ_IMAGE", "INFERQ_REDIS_IMAGE", "INFERQ_STACK_REDIS_FOLDER")
    environment = {key: value for key, value in os.environ.items() if not key.startswith("INFERQ_") or key in images}
    with subprocess.Popen(
        command,
        env={**environment, "INFERQ_STACK": kind},
        cwd=PROJECT_FOLDER,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            yield process, RUN_FOLDER / name
        finally:
            process.send_signal(signal.SIGTERM)


@installed
def test_a_load_under_faults_keeps_every_promise() -> None:
    faults = "worker_kill,worker_freeze,link_cut,channel_closed,confirms_withheld,redis_restart,row_fails"
    faults += ",clock_skew,clock_jump"

    with chaos("--seed", "7", "--minutes", "0.6", "--rate", "0.3", "--faults", faults) as (process, folder):
        output, _ = process.communicate()

    assert process.returncode == 0, output[-4000:]
    figures = json.loads(output.splitlines()[-1])
    assert figures["lost"] == figures["wrong"] == figures["conflicting"] == 0
    assert figures["confirmed"] > 300
    assert figures["ok"] > 0.5 * figures["confirmed"]
    assert sum(figures["faults"].values()) >= 5
    assert processes.of_folder(folder) == ()


def test_servers_in_containers_are_killed_stopped_and_emptied_too() -> None:
    if not (docker.answers() and docker.fetch()):
        pytest.skip("no Docker engine with the images of docker-compose.yml")
    faults = ("broker_restart", "broker_kill", "memory_alarm", "redis_freeze", "redis_lost")

    length = ("--seed", "5", "--minutes", "0.7", "--rate", "0.3")
    with chaos(*length, "--faults", ",".join(faults), kind="docker") as (process, _):
        output, _ = process.communicate()

    assert process.returncode == 0, output[-4000:]
    figures = json.loads(output.splitlines()[-1])
    assert figures["lost"] == figures["wrong"] == figures["conflicting"] == 0
    assert figures["faults"].keys() == set(faults)


@installed
def test_a_run_whose_driver_is_killed_leaves_no_process() -> None:
    with chaos("--minutes", "5", "--faults", "worker_kill") as (process, folder):
        within(60, lambda: len(workers(folder)) >= 3)
        (driver,) = [pid for pid in processes.of_folder(folder) if b"tests.chaos" in command_line(pid)]
        os.kill(driver, signal.SIGKILL)
        process.communicate()

    assert process.returncode == 128 + signal.SIGKILL
    assert processes.of_folder(folder) == ()
    assert workers(folder) == []


def workers(folder: Path) -> list[int]:
    return [pid for pid in processes.of_folder(folder) if b"poisoned_worker" in command_line(pid)]


def command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def within(limit_s: float, condition: Callable[[], bool]) -> None:
    give_up_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < give_up_s, "not in time"
        time.sleep(0.1)
