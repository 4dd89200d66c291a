"""The broker and the Redis that a saboteur may end, stop and start again: those of the local stack's run folder."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from infra.local import docker, lifecycle, rabbitmq, redis
from infra.local.errors import StackError
from infra.local.management import Management
from infra.local.processes import FOLDER_VARIABLE
from redis.asyncio import Redis
from tests.chaos.hosting import Container, Process

from inferq_schemas import ModelTopology, Topology

if TYPE_CHECKING:
    import signal
    from collections.abc import Callable, Mapping

    from tests.chaos.hosting import Host

_NO_DISK_HAS_BYTES = "1000000000000000"
_REDIS_OPTIONS = ("--appendonly", "yes", "--appendfsync", "always")


class Broker:
    """The RabbitMQ node.

    Args:
        control: runs rabbitmqctl.
    """

    def __init__(self, host: Host, control: Callable[..., str], *, url: str, management_url: str) -> None:
        self._host = host
        self._control = control
        self.url = url
        self.management_url = management_url

    @property
    def management(self) -> Management:
        """The management API."""
        return Management(self.management_url)

    async def kill(self) -> None:
        """End it without a warning."""
        await self._host.kill()

    async def stop(self) -> None:
        """End it as an operator does.

        By rabbitmqctl and not by SIGTERM, which not every image's first process hands on to the node.
        """
        try:
            await self.control("stop_app")
        finally:
            await self._host.kill()

    async def start(self) -> None:
        """Start it again, with its data."""
        await self._host.start()

    async def control(self, *words: str) -> None:
        """Run rabbitmqctl."""
        await asyncio.to_thread(self._control, *words)

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
        """What the management API says of every queue; a quorum queue's counts lag by up to five seconds."""
        found: list[Mapping[str, object]] = await asyncio.to_thread(self.management.call, "GET", "/api/queues/%2F")
        return found


class Cache:
    """The Redis, keeping an append-only file while it runs here.

    Args:
        forget: deletes its files while it is not running.
    """

    def __init__(self, host: Host, forget: Callable[[], None], *, url: str) -> None:
        self._host = host
        self._forget = forget
        self.url = url
        self.port = port_of(url)

    async def keep_data(self) -> None:
        """Write every command to disk before it is answered, so that a restart forgets nothing."""
        await self.configure({"appendonly": "yes", "appendfsync": "always"})

    async def send(self, number: signal.Signals) -> None:
        """Signal it."""
        await self._host.send(number)

    async def kill(self) -> None:
        """End it without a warning."""
        await self._host.kill()

    async def start(self, *, with_data: bool) -> None:
        """Start it again, with its data or without."""
        if not with_data:
            await asyncio.to_thread(self._forget)
        await self._host.start()
        await self.keep_data()  # a container starts as its configuration says

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
        StackError: there is none, or it is not ours to kill.
    """
    folder = _run_folder()
    urls = [os.environ[f"INFERQ_{name}"] for name in ("BROKER__URL", "BROKER__MANAGEMENT_URL", "REDIS__URL")]
    project = lifecycle.project_of(folder)
    return _processes(folder, *urls) if project is None else _containers(project, *urls)


def _processes(folder: Path, broker_url: str, management_url: str, redis_url: str) -> tuple[Broker, Cache]:
    node = Process(folder, "rabbitmq", partial(rabbitmq.launch, folder))
    store = Process(folder, "redis", partial(redis.launch, folder, port_of(redis_url), *_REDIS_OPTIONS))
    broker = Broker(node, partial(rabbitmq.control, folder), url=broker_url, management_url=management_url)
    return broker, Cache(store, partial(_delete_data, folder / "redis"), url=redis_url)


def _containers(project: str, broker_url: str, management_url: str, redis_url: str) -> tuple[Broker, Cache]:
    node, store = docker.Service(project, "rabbitmq"), docker.Service(project, "redis")
    node_host = Container(node, partial(rabbitmq.serves, port_of(broker_url), management_url))
    store_host = Container(store, partial(redis.answers, port_of(redis_url)))
    broker = Broker(node_host, partial(node.run, "rabbitmqctl"), url=broker_url, management_url=management_url)
    return broker, Cache(store_host, store.empty_folder, url=redis_url)


def keep_logs(target: Path) -> None:
    """Copy what both servers logged to a folder: the stack takes theirs with it."""
    folder = _run_folder()
    for log in [*folder.glob("*.log"), *folder.glob("rabbitmq/log/*.log")]:
        shutil.copy(log, target / f"server-{log.name}")
    if project := lifecycle.project_of(folder):
        for name in ("rabbitmq", "redis"):
            (target / f"server-{name}.log").write_text(docker.Service(project, name).output())
        docker.Service(project, "rabbitmq").save("/var/log/rabbitmq", target / "server-rabbitmq")


def _run_folder() -> Path:
    folder = Path(os.environ.get(FOLDER_VARIABLE, ""))
    if folder.name and (lifecycle.project_of(folder) or (folder / "rabbitmq.pid").exists()):
        return folder
    raise StackError("needs a broker and a Redis of its own: python3 infra/local/stack.py run -- python -m tests.chaos")


def _delete_data(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file() and re.search(r"aof|rdb", path.name):
            path.unlink()


def port_of(url: str) -> int:
    """The port of an address with one."""
    found = re.search(r":(\d+)(?:/|$)", url)
    if found is None:
        raise ValueError(f"no port in {url!r}")
    return int(found[1])


def with_port(url: str, port: int) -> str:
    """The same address at another port."""
    return re.sub(r":\d+(?=/|$)", f":{port}", url)
