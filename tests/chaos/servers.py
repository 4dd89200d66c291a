"""The broker and the Redis that a saboteur may end, stop and start again: those of the local stack's run folder.

`stack.py run` owns the folder and ends whatever is alive in it, also what was started here, however the driver ends.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

from infra.local import rabbitmq, redis
from infra.local.errors import StackError
from infra.local.management import Management
from infra.local.processes import FOLDER_VARIABLE, Identity
from redis.asyncio import Redis

from inferq_schemas import ModelTopology, Topology

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Mapping

_STOP_LIMIT_S = 30.0
_NO_DISK_HAS_BYTES = "1000000000000000"


class Server:
    """One server process of the run folder, known by its recorded identity."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self._name = name
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def identity(self) -> Identity:
        """The process that runs, or ran last."""
        found = Identity.read(self.folder / f"{self._name}.pid")
        if found is None:
            raise StackError(f"{self.folder} has no record of {self._name}")
        return found

    def send(self, number: signal.Signals) -> None:
        """Signal it."""
        self.identity.send(number)

    async def end(self, number: signal.Signals) -> None:
        """End it and wait until it is gone; what does not end in time is killed."""
        identity = self.identity
        identity.send(number)
        give_up_s = time.monotonic() + _STOP_LIMIT_S
        while identity.alive():
            if time.monotonic() > give_up_s:
                identity.send(signal.SIGKILL)
            await asyncio.sleep(0.05)
        if self._child is not None:
            await asyncio.to_thread(self._child.wait)

    def collected_by(self, child: subprocess.Popen[bytes]) -> None:
        """It is a child of this process now, which has to see it off."""
        self._child = child


class Broker(Server):
    """The private RabbitMQ node."""

    def __init__(self, folder: Path, url: str, management_url: str) -> None:
        super().__init__(folder, "rabbitmq")
        self.url = url
        self.management_url = management_url

    @property
    def management(self) -> Management:
        """The management API."""
        return Management(self.management_url)

    async def start(self) -> None:
        """Start it again, with its data."""
        self.collected_by(await asyncio.to_thread(rabbitmq.launch, self.folder))

    async def control(self, *words: str) -> None:
        """Run rabbitmqctl."""
        await asyncio.to_thread(rabbitmq.control, self.folder, *words)

    async def alarm(self, kind: str, *, raised: bool) -> None:
        """Raise or clear the alarm of `memory` or `disk`, which blocks every publisher."""
        if kind == "memory":
            await self.control("set_vm_memory_high_watermark", "0.000001" if raised else "0.4")
        else:
            await self.control("set_disk_free_limit", _NO_DISK_HAS_BYTES if raised else "100MB")

    async def make_queues(self, models: tuple[str, ...]) -> None:
        """Create the queues of models; what is there already stays."""
        definitions = Topology(ModelTopology(name) for name in models).definitions("/")
        await asyncio.to_thread(self.management.load, definitions)

    async def delete_queue(self, name: str) -> None:
        """Delete a queue with whatever is in it; its consumers are cancelled by the broker."""
        await asyncio.to_thread(self.management.call, "DELETE", f"/api/queues/%2F/{name}")

    async def queues(self) -> list[Mapping[str, object]]:
        """What the management API says of every queue; counts lag by up to a second."""
        found: list[Mapping[str, object]] = await asyncio.to_thread(self.management.call, "GET", "/api/queues/%2F")
        return found


class Cache(Server):
    """The private Redis, keeping an append-only file while it runs here."""

    def __init__(self, folder: Path, url: str) -> None:
        super().__init__(folder, "redis")
        self.url = url
        self.port = int(url.rpartition(":")[2].partition("/")[0])

    async def keep_data(self) -> None:
        """Write every command to disk before it is answered, so that a restart forgets nothing."""
        await self.configure({"appendonly": "yes", "appendfsync": "always"})

    async def start(self, *, with_data: bool) -> None:
        """Start it again, with its data or without."""
        if not with_data:
            await asyncio.to_thread(self._forget)
        options = ("--appendonly", "yes", "--appendfsync", "always")
        self.collected_by(await asyncio.to_thread(redis.launch, self.folder, self.port, *options))

    def _forget(self) -> None:
        for path in sorted((self.folder / "redis").rglob("*"), reverse=True):
            if path.is_file() and re.search(r"aof|rdb", path.name):
                path.unlink()

    async def configure(self, settings: Mapping[str, str]) -> None:
        """CONFIG SET, on a connection of its own."""
        async with Redis.from_url(self.url) as client:
            for name, value in settings.items():
                await client.config_set(name, value)

    async def value(self, name: str) -> str:
        """CONFIG GET."""
        async with Redis.from_url(self.url) as client:
            return str((await client.config_get(name))[name])


def of_environment() -> tuple[Broker, Cache]:
    """The pair that this process was started on by `stack.py run`.

    Raises:
        StackError: there is none, or it is in containers, which are not ours to kill.
    """
    folder = os.environ.get(FOLDER_VARIABLE, "")
    if not folder or not (Path(folder) / "rabbitmq.pid").exists():
        raise StackError("needs a private pair of its own: INFERQ_STACK=binaries stack.py run -- python -m tests.chaos")
    broker_url, management_url, redis_url = (
        os.environ[f"INFERQ_{name}"] for name in ("BROKER__URL", "BROKER__MANAGEMENT_URL", "REDIS__URL")
    )
    return Broker(Path(folder), broker_url, management_url), Cache(Path(folder), redis_url)


def port_of(url: str) -> int:
    """The port of an address with one."""
    found = re.search(r":(\d+)(?:/|$)", url)
    if found is None:
        raise ValueError(f"no port in {url!r}")
    return int(found[1])


def with_port(url: str, port: int) -> str:
    """The same address at another port."""
    return re.sub(r":\d+(?=/|$)", f":{port}", url)
