"""A real RabbitMQ and Redis for the tests: in containers, as a private pair, or (INFERQ_STACK=environment) given ones.

`tests/conftest.py` makes fixtures of it. The private pair ends when its standard input does, so it cannot outlive the
test run, not even one that is killed.
"""

import contextlib
import json
import os
import secrets
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from redis import Redis

PROJECT_FOLDER = Path(__file__).resolve().parents[1]
if str(PROJECT_FOLDER) not in sys.path:
    sys.path.append(str(PROJECT_FOLDER))

from infra.local import docker, given, lifecycle, rabbitmq, redis, tls  # noqa: E402 - found through the line above
from infra.local.errors import StackError  # noqa: E402 - the same
from infra.local.management import Management  # noqa: E402 - the same

_CONTAINERS_READY_LIMIT_S = 50.0


class StackMissingError(Exception):
    """No broker and Redis could be had; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Stack:
    """Where the broker and Redis of this test run are; the administrator's credentials included.

    Attributes:
        tls: where they speak TLS only, the folder with `ca.pem`, `server.pem` and `server.key`.
    """

    broker_url: str
    management_url: str
    redis_url: str
    tls: Path | None = None

    @property
    def tls_context(self) -> ssl.SSLContext | None:
        """For the test's own connections."""
        return None if self.tls is None else tls.context(self.tls)

    @property
    def redis_options(self) -> dict[str, Any]:
        """What the library needs beside `redis_url`."""
        return redis_options(self.tls)

    @property
    def management(self) -> Management:
        """The management API, as administrator."""
        return Management(self.management_url, tls=self.tls_context)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> "Stack | None":
        """Read the addresses, None unless all three are there."""
        names = ("INFERQ_BROKER__URL", "INFERQ_BROKER__MANAGEMENT_URL", "INFERQ_REDIS__URL")
        broker, management, cache = (environment.get(name, "") for name in names)
        return cls(broker, management, cache) if broker and management and cache else None


@dataclass(frozen=True, slots=True)
class Broker:
    """A vhost of its own on the broker of the stack.

    Attributes:
        url: AMQP address of the vhost, credentials included.
        management_url: of the whole broker, credentials included.
        vhost: its name.
        tls: as of the stack.
    """

    url: str
    management_url: str
    vhost: str
    tls: Path | None = None

    @property
    def tls_context(self) -> ssl.SSLContext | None:
        """For the test's own connections."""
        return None if self.tls is None else tls.context(self.tls)

    @property
    def management(self) -> Management:
        """The management API of the whole broker."""
        return Management(self.management_url, tls=self.tls_context)

    def load(self, definitions: Mapping[str, Any]) -> None:
        """Import definitions made for this vhost: `broker.load(Topology(models).definitions(broker.vhost))`."""
        self.management.load(definitions)

    def queue(self, name: str) -> dict[str, Any]:
        """What the management API knows of a queue; message counts lag by up to a second."""
        found: dict[str, Any] = self.management.call("GET", f"/api/queues/{quote(self.vhost, safe='')}/{quote(name)}")
        return found


def redis_options(folder: Path | None) -> dict[str, Any]:
    """Options of the Redis library for an administrator's connection; `folder` as `Stack.tls`."""
    if folder is None:
        return {}
    files = {"ca_certs": "ca.pem", "certfile": "server.pem", "keyfile": "server.key"}
    return {"ssl_check_hostname": False, **{f"ssl_{name}": str(folder / file) for name, file in files.items()}}


@contextlib.contextmanager
def running_stack() -> Iterator[Stack]:
    """Have a stack for the length of a `with`.

    Raises:
        StackMissingError: none could be had.
        StackError: INFERQ_STACK=environment, and the addresses are not whole or nothing answers there.
    """
    kind = lifecycle.wanted_kind(os.environ)
    if kind == "environment":
        yield _given_stack()
        return
    with contextlib.ExitStack() as owned:
        owned.enter_context(_addresses_set_aside())
        if kind == "docker":
            yield _containers_only(owned)
            return
        containers = _containers_or_none(owned) if kind != "binaries" and docker.answers() else None
        yield containers or owned.enter_context(_private_pair())


def _given_stack() -> Stack:
    stack = Stack.from_environment({**os.environ, **given.addresses(os.environ)})
    if stack is None:
        raise StackError("INFERQ_STACK=environment: the tests need INFERQ_BROKER__MANAGEMENT_URL as well")
    return stack


@contextlib.contextmanager
def _addresses_set_aside() -> Iterator[None]:
    """No test, and no command that a test starts, finds its way to a broker that happens to be exported."""
    aside = {name: os.environ.pop(name) for name in given.set_aside(os.environ)}
    try:
        yield
    finally:
        os.environ.update(aside)


@contextlib.contextmanager
def own_vhost(stack: Stack) -> Iterator[Broker]:
    """Have a fresh vhost for the length of a `with`; it is deleted with everything in it."""
    management = stack.management
    parts = urlsplit(stack.broker_url)
    name = f"test-{secrets.token_hex(6)}"
    management.call("PUT", f"/api/vhosts/{name}", {})
    everything = {"configure": ".*", "write": ".*", "read": ".*"}
    management.call("PUT", f"/api/permissions/{name}/{parts.username or 'guest'}", everything)
    try:
        yield Broker(parts._replace(path=f"/{name}").geturl(), stack.management_url, name, stack.tls)
    finally:
        management.call("DELETE", f"/api/vhosts/{name}")


@contextlib.contextmanager
def own_prefix(stack: Stack) -> Iterator[str]:
    """Have a key prefix for the length of a `with`; its keys are deleted afterwards."""
    prefix = f"test-{secrets.token_hex(6)}"
    yield prefix
    with Redis.from_url(stack.redis_url, **stack.redis_options) as client:
        for key in client.scan_iter(f"{prefix}:*"):
            client.delete(key)


@contextlib.contextmanager
def _private_pair() -> Iterator[Stack]:
    """The pair that `infra/local` runs from installed binaries."""
    with _held_pair() as environment:
        stack = Stack.from_environment(environment)
        assert stack is not None
        yield stack


@contextlib.contextmanager
def tls_stack(folder: Path) -> Iterator[Stack]:
    """Have a pair that speaks TLS only, and asks for a certificate of the test's own authority.

    Args:
        folder: with `ca.pem`, `server.pem` and `server.key`.

    Raises:
        StackMissingError: the servers are not installed.
    """
    with _held_pair("--tls", str(folder)) as environment:
        stack = Stack.from_environment(environment)
        assert stack is not None
        yield replace(stack, tls=folder)


@contextlib.contextmanager
def _held_pair(*options: str) -> Iterator[Mapping[str, str]]:
    """A process and a session of its own: Ctrl-C must not take the servers from tests that still clean up."""
    command = [sys.executable, str(PROJECT_FOLDER / "infra" / "local" / "stack.py"), "hold", *options]
    with subprocess.Popen(
        command,
        env={**os.environ, "INFERQ_STACK": "binaries"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        assert holder.stderr is not None
        line = holder.stdout.readline()
        if not line:
            raise StackMissingError(holder.stderr.read().strip())
        try:
            yield json.loads(line)["environment"]
        finally:
            holder.stdin.close()
            holder.wait()


def _containers_only(owned: contextlib.ExitStack) -> Stack:
    """Start containers where nothing else is wanted; a run that was meant for one version never ends up on another."""
    if not docker.answers():
        raise StackMissingError("INFERQ_STACK=docker, but no Docker engine with the compose plugin answers")
    return _containers(owned)


def _containers_or_none(owned: contextlib.ExitStack) -> Stack | None:
    """Start containers, or nothing where the engine cannot get the images (no network, a pull limit)."""
    with contextlib.ExitStack() as attempt:
        try:
            stack = _containers(attempt)
        except Exception as reason:  # noqa: BLE001 - the engine's library raises many kinds, and there is another way
            print(f"no containers ({reason}); using the installed binaries", file=sys.stderr)  # noqa: T201 - pytest shows it
            return None
        owned.push(attempt.pop_all())
        return stack


def _containers(owned: contextlib.ExitStack) -> Stack:
    from testcontainers.core.container import DockerContainer  # noqa: PLC0415 - slow, and wanted only with an engine

    user, password = "inferq", secrets.token_hex(8)
    broker = DockerContainer(_image("RABBITMQ", "rabbitmq:4.1-management")).with_exposed_ports(5672, 15672)
    broker = broker.with_env("RABBITMQ_DEFAULT_USER", user).with_env("RABBITMQ_DEFAULT_PASS", password)
    for name in ("rabbitmq.conf", "enabled_plugins"):
        broker = broker.with_volume_mapping(str(rabbitmq.CONFIG_FOLDER / name), f"/etc/rabbitmq/{name}")
    cache = DockerContainer(_image("REDIS", "redis:7-bookworm")).with_exposed_ports(6379)
    for container in (broker, cache):
        owned.enter_context(container)
    host = broker.get_container_host_ip()
    amqp, management, cache_port = (
        int(container.get_exposed_port(port)) for container, port in ((broker, 5672), (broker, 15672), (cache, 6379))
    )
    stack = Stack(
        f"amqp://{user}:{password}@{host}:{amqp}/",
        f"http://{user}:{password}@{host}:{management}",
        f"redis://{host}:{cache_port}/0",
    )
    _wait_for_containers(Management(stack.management_url), host, amqp, cache_port)
    return stack


def _wait_for_containers(management: Management, host: str, amqp: int, redis_port: int) -> None:
    give_up_s = time.monotonic() + _CONTAINERS_READY_LIMIT_S
    while not (rabbitmq.speaks_amqp(amqp, host) and _answers(management) and redis.answers(redis_port, host)):
        if time.monotonic() > give_up_s:
            raise StackMissingError(f"the containers were not ready within {_CONTAINERS_READY_LIMIT_S:.0f} s")
        time.sleep(0.1)


def _answers(management: Management) -> bool:
    # RabbitMQ serves the API a moment before it has made the user, and refuses until then.
    with contextlib.suppress(StackError):
        return management.answers()
    return False


def _image(service: str, default: str) -> str:
    return os.environ.get(f"INFERQ_TEST_{service}_IMAGE") or os.environ.get(f"INFERQ_{service}_IMAGE") or default
