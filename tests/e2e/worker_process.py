"""Workers as an operator runs them: the installed command in processes of their own, watched through their admin port.

Every process is ended by its pid, and dies with the test run should that be killed. Logs lie in the test's folder.
"""

import asyncio
import inspect
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import SecretStr
from tests.stack import Broker

from inferq.settings import BrokerSettings, ClientOptions, ClientSettings, RedisSettings

READY_LIMIT_S = 60.0
EXIT_LIMIT_S = 60.0
COMMAND = ("-m", "inferq")
_NO_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))


async def until(condition: Callable[[], Any], what: str = "the condition is true", limit_s: float = 30.0) -> Any:
    """Poll a condition, plain or awaitable, until it is true; returns what it gave."""
    give_up_s = time.monotonic() + limit_s
    while True:
        value = condition()
        found = await value if inspect.isawaitable(value) else value
        if found:
            return found
        assert time.monotonic() < give_up_s, f"not within {limit_s:g} s: {what}"
        await asyncio.sleep(0.03)


@dataclass(frozen=True, slots=True)
class Site:
    """Where the workers and clients of a test meet: a vhost, a Redis prefix, a folder for models and logs."""

    broker: Broker
    redis_url: str
    prefix: str
    folder: Path

    def environment(self, **knobs: str) -> dict[str, str]:
        """The environment of a command: nothing of ours leaks in. `knobs` are names without `INFERQ_`."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("INFERQ_")}
        given = {
            "BROKER__URL": self.broker.url,
            "BROKER__MANAGEMENT_URL": self.broker.management_url,
            "BROKER__RECONNECT_MAX_S": "1",
            "REDIS__URL": self.redis_url,
            "REDIS__PREFIX": self.prefix,
            **knobs,
        }
        return kept | {f"INFERQ_{name}": value for name, value in given.items() if value}

    def client_settings(self, *, cpu_reserve_ratio: float = 0.3) -> ClientSettings:
        """Settings of a client that asks here."""
        return ClientSettings(
            broker=BrokerSettings(url=SecretStr(self.broker.url), reconnect_min_s=0.05, reconnect_max_s=1),
            redis=RedisSettings(url=SecretStr(self.redis_url), prefix=self.prefix),
            client=ClientOptions(deadline_s=120, cpu_reserve_ratio=cpu_reserve_ratio),
        )

    async def inferq(self, *arguments: str, **knobs: str) -> subprocess.CompletedProcess[str]:
        """Run a command of `inferq` to its end."""
        return await asyncio.to_thread(
            subprocess.run,
            [sys.executable, *COMMAND, *arguments],
            env=self.environment(**knobs),
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=EXIT_LIMIT_S,
            check=False,
        )

    async def add_model(self, name: str, *options: str) -> None:
        """Create a model's queues while no worker lives."""
        done = await self.inferq("topology", "add-model", name, *options)
        assert done.returncode == 0, done.stderr + done.stdout


class WorkerProcess:
    """One worker.

    Args:
        site: where it works.
        arguments: of `inferq worker`; the admin port is any free one.
        name: of its log.
        program: what Python runs instead of the installed command.
        knobs: further environment, names without `INFERQ_`.
    """

    def __init__(
        self,
        site: Site,
        *arguments: str | Path,
        name: str = "worker",
        program: Sequence[str] = COMMAND,
        knobs: Mapping[str, str] | None = None,
    ) -> None:
        self.log_path = site.folder / f"{name}.log"
        command = [sys.executable, *program, "worker", "--admin-port", "0", *map(str, arguments)]
        settings = {"RUNTIME__PROVIDER": "cpu", "LOG__FORMAT": "json", **(knobs or {})}
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [*_dies_with_parent(), *command],
                env=site.environment(**settings),
                cwd=site.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    @property
    def returncode(self) -> int | None:
        """Exit status, None while it lives."""
        return self.process.poll()

    def log(self) -> str:
        """All it has written."""
        return self.log_path.read_text(errors="replace")

    def events(self, message: str) -> list[dict[str, Any]]:
        """Its log lines of one kind."""
        found = []
        for line in self.log().splitlines():
            if message in line and line.startswith("{") and line.endswith("}"):
                event: dict[str, Any] = json.loads(line)
                if event.get("message") == message:
                    found.append(event)
        return found

    def get(self, page: str) -> tuple[int, str]:
        """Status and text of an admin page; 0 while nobody listens yet. A worker that has ended is an error."""
        assert self.returncode is None, f"the worker ended with {self.returncode}:\n{self.log()[-4000:]}"
        listening = self.events("admin.listening")
        if not listening:
            return 0, "not listening yet"
        try:
            with _NO_PROXY.open(f"http://127.0.0.1:{listening[0]['port']}{page}", timeout=10) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as refusal:
            with refusal:
                return refusal.code, refusal.read().decode()
        except OSError as error:
            return 0, str(error)

    async def page(self, name: str) -> tuple[int, Any]:
        """Status and decoded JSON of an admin page."""
        status, text = await asyncio.to_thread(self.get, name)
        return status, json.loads(text) if text.startswith("{") else text

    async def in_hand(self) -> int:
        """Deliveries that it has not settled; -1 when it does not say."""
        status, page = await self.page("/status")
        return sum(lane["in_hand"] for lane in page["lanes"]) if status == 200 else -1

    async def metric(self, series: str) -> float:
        """Value of one series, as /metrics names it; 0 where it does not exist."""
        _, text = await asyncio.to_thread(self.get, "/metrics")
        return next((float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(series)), 0.0)

    async def is_ready(self) -> bool:
        """Whether /readyz says so."""
        return (await self.page("/readyz"))[0] == 200

    async def ready(self, limit_s: float = READY_LIMIT_S) -> "WorkerProcess":
        """Wait until it is ready."""
        await until(self.is_ready, "the worker is ready", limit_s)
        return self

    async def exited(self, limit_s: float = EXIT_LIMIT_S) -> int:
        """Wait for its end; returns the exit status, negative for a signal."""
        await until(lambda: self.returncode is not None, "the worker has ended", limit_s)
        assert self.returncode is not None
        return self.returncode

    def send(self, number: signal.Signals) -> None:
        """Send it a signal."""
        self.process.send_signal(number)

    async def stop(self, limit_s: float = EXIT_LIMIT_S) -> int:
        """Drain it; returns the exit status."""
        self.send(signal.SIGTERM)
        return await self.exited(limit_s)

    async def kill(self) -> None:
        """End it as the kernel does when memory runs out."""
        self.process.kill()
        await self.exited()


@dataclass(slots=True)
class Workers:
    """Starts the workers of a test, and ends what is left of them."""

    site: Site
    started: list[WorkerProcess] = field(default_factory=list)

    def start(self, *arguments: str | Path, program: Sequence[str] = COMMAND, **knobs: str) -> WorkerProcess:
        """Start a worker and do not wait."""
        name = f"worker-{len(self.started) + 1}"
        worker = WorkerProcess(self.site, *arguments, name=name, program=program, knobs=knobs)
        self.started.append(worker)
        return worker

    async def ready(self, *arguments: str | Path, program: Sequence[str] = COMMAND, **knobs: str) -> WorkerProcess:
        """Start a worker and wait until it is ready."""
        return await self.start(*arguments, program=program, **knobs).ready()

    def close(self) -> None:
        """End all of them by pid; pytest shows what is printed here for a test that failed."""
        for worker in self.started:
            if worker.returncode is None:
                worker.process.kill()
            worker.process.wait()
            print(f"--- {worker.log_path.name}, exit status {worker.returncode}")  # noqa: T201 - pytest shows it
            print(worker.log()[-6000:])  # noqa: T201 - pytest shows it


def _dies_with_parent() -> list[str]:
    """Have the kernel end the worker with the test run, where the system has the command for it."""
    return ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
