"""Runs `inferq worker` as an operator would: a process of its own, watched through its log and its probes."""

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.demo.errors import DemoError

_READY_LIMIT_S = 120.0
_STOP_LIMIT_S = 75.0  # a worker drains for up to 60 s
_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker process, and where it writes."""

    role: str
    process: subprocess.Popen[bytes]
    log_file: Path

    def events(self) -> Iterator[dict[str, Any]]:
        """Read the JSON lines it has logged so far."""
        for line in self.log_file.read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                yield json.loads(line)

    def event(self, name: str) -> dict[str, Any] | None:
        """Find the first event of that name."""
        return next((event for event in self.events() if event.get("message") == name), None)


@dataclass(frozen=True, slots=True)
class Launch:
    """What both roles are started with: the folder of their models, that of their logs, their whole environment."""

    models_folder: Path
    log_folder: Path
    environment: Mapping[str, str]


@contextlib.asynccontextmanager
async def running_worker(role: str, launch: Launch) -> AsyncIterator[Worker]:
    """Have a worker that is ready for the length of a `with`; ends it by its process id, with SIGTERM.

    Raises:
        DemoError: it did not become ready, or did not drain cleanly; shows the end of its log.
    """
    worker = _start(role, launch)
    try:
        await _wait_until_ready(worker)
        yield worker
    except BaseException:
        await _stop(worker)
        raise
    if (status := await _stop(worker)) != 0:
        raise _failed(worker, f"ended with {status} instead of 0")


def _start(role: str, launch: Launch) -> Worker:
    log_file = launch.log_folder / f"{role}.log"
    command = [sys.executable, "-m", "inferq", "worker", "--models", str(launch.models_folder)]
    command += ["--role", role, "--admin-port", "0", "--set", "log.format=json"]
    with log_file.open("wb") as log:
        # In a session of its own: Ctrl-C is for the demo alone, which then lets its workers drain.
        process = subprocess.Popen(
            command,
            env=launch.environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return Worker(role, process, log_file)


async def _wait_until_ready(worker: Worker) -> None:
    give_up_s = time.monotonic() + _READY_LIMIT_S
    while not await asyncio.to_thread(_is_ready, worker):
        if worker.process.poll() is not None:
            raise _failed(worker, f"ended with {worker.process.returncode} before it was ready")
        if time.monotonic() > give_up_s:
            raise _failed(worker, f"was not ready within {_READY_LIMIT_S:.0f} s")
        await asyncio.sleep(_POLL_S)


def _is_ready(worker: Worker) -> bool:
    listening = worker.event("admin.listening")
    if listening is None:
        return False
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    # Not ready is a status of 503, which is an error to urllib; not listening any more is one as well.
    with contextlib.suppress(OSError), opener.open(f"http://{listening['host']}:{listening['port']}/readyz", timeout=5):
        return True
    return False


async def _stop(worker: Worker) -> int:
    if worker.process.poll() is None:
        worker.process.send_signal(signal.SIGTERM)
    try:
        return await asyncio.to_thread(worker.process.wait, _STOP_LIMIT_S)
    except subprocess.TimeoutExpired:
        worker.process.kill()
        return worker.process.wait()


def _failed(worker: Worker, what: str) -> DemoError:
    tail = worker.log_file.read_text(encoding="utf-8", errors="replace").splitlines()[-8:]
    return DemoError("\n".join([f"the {worker.role}-role worker {what}; the end of {worker.log_file}:", *tail]))
