"""Puts a chaos run together: proxies, workers, senders and saboteur, in the order start, harm, come to rest, judge."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import subprocess
import time
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from infra.local.processes import FOLDER_VARIABLE
from pydantic import SecretStr
from tests.chaos import evidence, fleet
from tests.chaos.checker import Evidence, Verdict, check
from tests.chaos.fleet import Member
from tests.chaos.harm import Arena
from tests.chaos.ledger import History, Ledger
from tests.chaos.load import Mix, Senders, new_run
from tests.chaos.proxy import Proxy
from tests.chaos.raw import RawPublisher
from tests.chaos.saboteur import Saboteur, plan
from tests.chaos.servers import of_environment, port_of, with_port
from tests.chaos.work import Kind, Work, write_model
from tests.e2e.worker_process import Site
from tests.stack import PROJECT_FOLDER
from tests.stack import Broker as Vhost

from inferq.settings import BrokerSettings, ClientSettings, RedisSettings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine, Iterable, Sequence
    from pathlib import Path

MODEL, SIDE_MODEL = "chaos", "side"
_PREFIX = "chaos"
_READY_LIMIT_S = 60.0
_SENDERS_LIMIT_S = 90.0
_REST_LIMIT_S = 60.0
_DRAIN_LIMIT_S = 40.0
_MOST_WAITING = 1000
_KNOBS = {
    # Shorter than the defaults, so that a run of minutes sees many rounds of loss and recovery.
    "BROKER__HEARTBEAT_S": "5",
    "BROKER__PUBLISH_TIMEOUT_S": "5",
    "REDIS__SOCKET_TIMEOUT_S": "1",
    "REDIS__CONNECT_TIMEOUT_S": "1",
    "REDIS__REPLIED_TTL_S": "3600",
    "DRAIN__LIMIT_S": "20",
}
_NEW_KNOBS = {"RUNTIME__RUN_LIMIT_S": "3"}
"""Not for an older revision, which refuses knobs that it does not know."""
_OTHER_SETTINGS = {"BATCHING__POLICY": "size_or_timeout", "BATCHING__MAX_ROWS": "8", "LANES__INTERACTIVE_WINDOW": "32"}


@dataclass(frozen=True, slots=True)
class Options:
    """What a run is made of.

    Attributes:
        seconds: of load, with faults in it.
        kinds: faults to draw from.
        rate: 1.0 = about 150 jobs a second.
        folder: for ledger, logs and models; exists.
        old: git revision that the second worker runs instead of the working tree; None = the same code.
    """

    seed: int
    seconds: float
    kinds: Sequence[str]
    rate: float
    folder: Path
    old: str | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended."""

    verdict: Verdict
    injected: dict[str, int]
    not_injected: list[str]
    ends: dict[str, int]
    load_s: float

    @property
    def failed(self) -> bool:
        """Whether a promise was broken, or the saboteur could not do its work."""
        return self.verdict.failed or bool(self.not_injected)


class ChaosRun:
    """One run on the pair of this process's environment, which is its own to kill."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._broker, self._cache = of_environment()
        self._links: dict[str, Proxy] = {}
        self._workers: dict[str, Member] = {}
        gates = {MODEL: asyncio.Event(), SIDE_MODEL: asyncio.Event()}
        for gate in gates.values():
            gate.set()
        chance = random.Random(options.seed)  # noqa: S311 - load, not secrets
        self._broken: list[str] = []
        self._mix = Mix(new_run(), chance, options.rate, gates)

    async def run(self) -> Outcome:
        """Do it all; whatever happens, every worker is ended and every fault undone on return."""
        await self._cache.keep_data()
        await self._broker.make_queues((MODEL, SIDE_MODEL))
        async with AsyncExitStack() as owned:
            ledger = owned.enter_context(Ledger(self._options.folder / "ledger.jsonl"))
            await self._open_links(owned)
            self._make_workers()
            keeping = await owned.enter_async_context(_background(member.run() for member in self._workers.values()))
            await self._wait_ready()
            arena = Arena(
                self._broker, self._cache, self._workers, self._links, self._mix, ledger, side_model=SIDE_MODEL
            )
            self._mix.crowded = lambda: ledger.waiting() > _MOST_WAITING
            saboteur = Saboteur(arena, self._mix.stopping)
            load_s, left = await self._load(ledger, saboteur)
            for member in self._workers.values():
                member.retire()
            await asyncio.wait(keeping, timeout=_DRAIN_LIMIT_S)
        verdict = check(History.read(ledger.path), await self._evidence(left))
        ends = sum((member.ends for member in self._workers.values()), start=Counter())
        return Outcome(verdict, dict(saboteur.injected), saboteur.failed, dict(ends), load_s)

    async def _open_links(self, owned: AsyncExitStack) -> None:
        ports = {"broker": port_of(self._broker.url), "redis": self._cache.port}
        for whose in ("worker-1", "worker-2", "worker-cpu", "clients", "raw"):
            for service, port in ports.items():
                if (whose, service) != ("raw", "redis"):
                    proxy = Proxy(port, amqp=service == "broker", seed=self._options.seed)
                    self._links[f"{whose}.{service}"] = await owned.enter_async_context(proxy)

    def _make_workers(self) -> None:
        model = write_model(self._options.folder, MODEL)
        serve = ["--model", str(model), "--model", f"{SIDE_MODEL}={model}"]
        vhost = Vhost(self._broker.url, self._broker.management_url, "/")
        site = Site(vhost, self._cache.url, _PREFIX, self._options.folder)
        programs = {"worker-2": fleet.program_of(_checked_out(self._options))} if self._options.old else {}
        # By this mark `stack.py` finds what is left of a run that was killed.
        mark = {"STACK_FOLDER": os.environ[FOLDER_VARIABLE]}
        for name, arguments, knobs in (
            ("worker-1", serve, {}),
            ("worker-2", serve, _OTHER_SETTINGS),
            ("worker-cpu", [*serve, "--role", "cpu"], {}),
        ):
            own = {"BROKER__URL": self._url(f"{name}.broker"), "REDIS__URL": self._url(f"{name}.redis")}
            links = (self._links[f"{name}.broker"], self._links[f"{name}.redis"])
            program = programs.get(name, fleet.PROGRAM)
            common = _KNOBS | ({} if name in programs else _NEW_KNOBS)
            self._workers[name] = Member(
                site, name, arguments, {**common, **knobs, **own, **mark}, *links, program=program
            )

    def _url(self, link: str) -> str:
        url = self._broker.url if link.endswith(".broker") else self._cache.url
        return with_port(url, self._links[link].port)

    async def _wait_ready(self) -> None:
        ready = await asyncio.gather(*(member.ready(_READY_LIMIT_S) for member in self._workers.values()))
        if not all(ready):
            raise RuntimeError(f"the workers did not get ready; see their logs in {self._options.folder}")

    async def _load(self, ledger: Ledger, saboteur: Saboteur) -> tuple[float, dict[str, int]]:
        """Send and sabotage for the time of the run, then wait until senders have their answers and all is at rest.

        Returns:
            Seconds of load, and what did not come to rest in time.
        """
        senders = Senders(self._mix, ledger, self._client_settings())
        raw = RawPublisher(self._mix, ledger, self._url("raw.broker"), skewed="clock_skew" in self._options.kinds)
        planned = plan(
            seed=self._options.seed,
            seconds=self._options.seconds,
            kinds=self._options.kinds,
            workers=list(self._workers),
            links=list(self._links),
        )
        started_s = time.monotonic()
        async with _background([raw.listen(), senders.run(), raw.run()]) as tasks:
            _, *sending = tasks
            sabotage = asyncio.create_task(saboteur.run(planned))
            tasks.append(sabotage)
            await asyncio.sleep(self._options.seconds)
            self._mix.stopping.set()
            load_s = time.monotonic() - started_s
            await sabotage
            await asyncio.wait(sending, timeout=_SENDERS_LIMIT_S)
            senders.give_up()
            left = await evidence.come_to_rest(self._broker, list(self._workers.values()), _REST_LIMIT_S)
            self._broken = [repr(task.exception())[:300] for task in tasks if _broke(task)]
        return load_s, left

    def _client_settings(self) -> ClientSettings:
        return ClientSettings(
            broker=BrokerSettings(
                url=SecretStr(self._url("clients.broker")), reconnect_max_s=1, heartbeat_s=5, publish_timeout_s=5
            ),
            redis=RedisSettings(
                url=SecretStr(self._url("clients.redis")), prefix=_PREFIX, socket_timeout_s=1, connect_timeout_s=1
            ),
        )

    async def _evidence(self, left: dict[str, int]) -> Evidence:
        history = History.read(self._options.folder / "ledger.jsonl")
        works = {
            job_id: Work(told.sent["n"], told.sent["rows"], Kind(told.sent["kind"]))
            for job_id, told in history.jobs.items()
        }
        logs = [path for member in self._workers.values() for path in member.logs]
        crashes = fleet.crashes(self._workers.values(), kills="row_kills" in self._options.kinds)
        return Evidence(
            outcomes=await evidence.outcomes(self._cache, _PREFIX, works),
            parked=await evidence.parked(self._broker),
            waiting=await evidence.waiting(self._broker),
            unsettled=left,
            unstored=frozenset(fleet.unstored_jobs(logs)),
            crashes=crashes + Counter(self._broken),
        )


def _broke(task: asyncio.Task[None]) -> bool:
    """Whether a sender ended with an error, which the client library never should bring about."""
    return task.done() and not task.cancelled() and task.exception() is not None


def _checked_out(options: Options) -> Path:
    """The packages of another revision, in the run's folder."""
    target = options.folder / "old"
    target.mkdir()
    archive = options.folder / "old.tar"
    packages = ("schemas", "producer", "worker")
    command = ["git", "archive", "--output", str(archive), str(options.old), *packages]
    subprocess.run(command, cwd=PROJECT_FOLDER, check=True)
    shutil.unpack_archive(archive, target, filter="data")
    return target


@contextlib.asynccontextmanager
async def _background(coroutines: Iterable[Coroutine[Any, Any, None]]) -> AsyncIterator[list[asyncio.Task[None]]]:
    """Have these run for the length of a `with`."""
    tasks = [asyncio.create_task(one) for one in coroutines]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
