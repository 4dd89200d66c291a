"""Workers as an operator runs them: the installed command in processes of their own, watched through their admin port.

Every process is ended by its pid, and dies with the test run should that be killed. Logs lie in the test's folder.
"""

import asyncio
import inspect
import itertools
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
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pydantic import SecretStr
from redis.asyncio import Redis
from tests.stack import Broker, redis_options

from inferq.settings import BrokerSettings, ClientOptions, ClientSettings, RedisSettings, ServerSection

READY_LIMIT_S = 60.0
EXIT_LIMIT_S = 60.0
COMMAND = ("-m", "inferq")
CLIENT = "inferq-client"
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


def user_of(words: Sequence[str]) -> str:
    """As whom a command of `inferq` logs in where everybody has a user: see `inferq_schemas.access`."""
    match words[0]:
        case "worker":
            return "inferq-cpu" if ("--role", "cpu") in itertools.pairwise(words) else "inferq-gpu"
        case "topology":
            return "inferq-topology"
        case "dead" | "pause" | "resume":
            return "inferq-operator"
        case _:
            return CLIENT


@dataclass(frozen=True, slots=True)
class Site:
    """Where the workers and clients of a test meet: a vhost, a Redis prefix, a folder for models and logs.

    Here everybody is the administrator and nothing is encrypted; `tests.hardened` has the other kind.

    Attributes:
        broker: the vhost, as administrator.
        redis_url: as administrator.
        prefix: of the keys.
        folder: the test's own.
    """

    broker: Broker
    redis_url: str
    prefix: str
    folder: Path

    @property
    def reply_exchange(self) -> str:
        """Through which answers travel to reply queues; "" = the default one."""
        return self.broker_settings(CLIENT).reply_exchange

    def broker_settings(self, user: str) -> BrokerSettings:
        """How a user's programs reach the broker."""
        del user
        management_url = SecretStr(self.broker.management_url)
        return BrokerSettings(url=SecretStr(self.broker.url), management_url=management_url, reconnect_max_s=1)

    def redis_settings(self, user: str) -> RedisSettings:
        """How a user's programs reach Redis."""
        del user
        return RedisSettings(url=SecretStr(self.redis_url), prefix=self.prefix)

    def amqp_url(self, user: str) -> str:
        """The broker's address for a user's program in another language, password included."""
        del user
        return self.broker.url

    def make_queues(self, model: str) -> None:
        """Have a model's queues before a worker starts; here workers make those of `--model` themselves."""

    def knobs(self, user: str) -> dict[str, str]:
        """The settings of a user's programs as their environment has them, names without `INFERQ_`."""
        return _as_knobs("BROKER", self.broker_settings(user)) | _as_knobs("REDIS", self.redis_settings(user))

    def environment(self, user: str, **knobs: str) -> dict[str, str]:
        """The environment of a user's command: nothing of ours leaks in. `knobs` are names without `INFERQ_`."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("INFERQ_")}
        given = _unless_elsewhere(self.knobs(user), knobs) | knobs
        return kept | {f"INFERQ_{name}": value for name, value in given.items() if value}

    def client_settings(self, *, cpu_reserve_ratio: float = 0.3) -> ClientSettings:
        """Settings of a client that asks here."""
        return ClientSettings(
            broker=self.broker_settings(CLIENT).model_copy(update={"reconnect_min_s": 0.05}),
            redis=self.redis_settings(CLIENT),
            client=ClientOptions(deadline_s=120, cpu_reserve_ratio=cpu_reserve_ratio),
        )

    def redis(self) -> Redis:
        """A connection of the test's own, as administrator; the caller closes it."""
        return Redis.from_url(self.redis_url, **redis_options(self.broker.tls))

    async def inferq(self, *arguments: str, **knobs: str) -> subprocess.CompletedProcess[str]:
        """Run a command of `inferq` to its end."""
        return await asyncio.to_thread(
            subprocess.run,
            [sys.executable, *COMMAND, *arguments],
            env=self.environment(user_of(arguments), **knobs),
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


OpenSite = Callable[[Path], AbstractContextManager[Site]]
"""Opens a site for the length of a `with`, its folder given."""


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
        words = ["worker", "--admin-port", "0", *map(str, arguments)]
        settings = {"RUNTIME__PROVIDER": "cpu", "LOG__FORMAT": "json", **(knobs or {})}
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [*_dies_with_parent(), sys.executable, *program, *words],
                env=site.environment(user_of(words), **settings),
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
        for option, value in itertools.pairwise(map(str, arguments)):
            if option == "--model":
                self.site.make_queues(_model_name(value))
        name = f"worker-{len(self.started) + 1}"
        worker = WorkerProcess(self.site, *arguments, name=name, program=program, knobs=knobs)
        self.started.append(worker)
        return worker

    async def ready(self, *arguments: str | Path, program: Sequence[str] = COMMAND, **knobs: str) -> WorkerProcess:
        """Start a worker and wait until it is ready."""
        return await self.start(*arguments, program=program, **knobs).ready()

    def close(self) -> None:
        """End all of them by pid; pytest shows what is printed here for a test that failed.

        Whatever a test does, no worker asks the broker for more than its user may.
        """
        for worker in self.started:
            if worker.returncode is None:
                worker.process.kill()
            worker.process.wait()
            print(f"--- {worker.log_path.name}, exit status {worker.returncode}")  # noqa: T201 - pytest shows it
            print(worker.log()[-6000:])  # noqa: T201 - pytest shows it
        logged = [line for worker in self.started for line in worker.log().splitlines()]
        assert [line for line in logged if "refused for user" in line] == []


def _as_knobs(section: str, settings: ServerSection) -> dict[str, str]:
    """What was set of a section, and its login in clear: passwords stand in files or in the url."""
    values = {name: getattr(settings, name) for name in settings.model_fields_set}
    return {
        f"{section}__{name.upper()}": str(value.get_secret_value() if isinstance(value, SecretStr) else value)
        for name, value in values.items()
    }


def _unless_elsewhere(given: Mapping[str, str], knobs: Mapping[str, str]) -> dict[str, str]:
    """Leave login and certificates out where a test sends a command to another server."""
    login = {name.upper() for name in ServerSection.model_fields}
    elsewhere = {
        section
        for section in ("BROKER", "REDIS")
        if _place(knobs.get(f"{section}__URL", "")) not in {"", _place(given[f"{section}__URL"])}
    }
    return {
        name: value
        for name, value in given.items()
        if not (name.partition("__")[0] in elsewhere and name.partition("__")[2] in login)
    }


def _place(url: str) -> str:
    return urlsplit(url).netloc.rpartition("@")[2]


def _model_name(argument: str) -> str:
    """Of a `--model`: `FILE` or `NAME=FILE`."""
    name, given, _ = argument.partition("=")
    return name if given else Path(argument).stem


def _dies_with_parent() -> list[str]:
    """Have the kernel end the worker with the test run, where the system has the command for it."""
    return ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
