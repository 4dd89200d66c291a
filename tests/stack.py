"""A real RabbitMQ and Redis for the tests: in containers, as a private pair, or (INFERQ_STACK=environment) given ones.

`tests/conftest.py` makes fixtures of it. The private pair ends when its standard input does, so it cannot outlive the
test run, not even one that is killed.
"""

import contextlib
import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

PROJECT_FOLDER = Path(__file__).resolve().parents[1]
if str(PROJECT_FOLDER) not in sys.path:
    sys.path.append(str(PROJECT_FOLDER))

from infra.local import docker, given, lifecycle, rabbitmq, redis  # noqa: E402 - found through the line above
from infra.local.errors import StackError  # noqa: E402 - the same
from infra.local.management import Management  # noqa: E402 - the same

_CONTAINERS_READY_LIMIT_S = 50.0


class StackMissingError(Exception):
    """No broker and Redis could be had; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Stack:
    """Where the broker and Redis of this test run are; credentials included."""

    broker_url: str
    management_url: str
    redis_url: str

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> "Stack | None":
        """Read the addresses, None unless all three are there."""
        names = ("INFERQ_BROKER__URL", "INFERQ_BROKER__MANAGEMENT_URL", "INFERQ_REDIS__URL")
        values = [environment.get(name, "") for name in names]
        return cls(*values) if all(values) else None


@dataclass(frozen=True, slots=True)
class Broker:
    """A vhost of its own on the broker of the stack.

    Attributes:
        url: AMQP address of the vhost, credentials included.
        management_url: of the whole broker, credentials included.
        vhost: its name.
    """

    url: str
    management_url: str
    vhost: str

    @property
    def management(self) -> Management:
        """The management API of the whole broker."""
        return Management(self.management_url)

    def load(self, definitions: Mapping[str, Any]) -> None:
        """Import definitions made for this vhost: `broker.load(Topology(models).definitions(broker.vhost))`."""
        self.management.load(definitions)

    def queue(self, name: str) -> dict[str, Any]:
        """What the management API knows of a queue; message counts lag by up to a second."""
        found: dict[str, Any] = self.management.call("GET", f"/api/queues/{quote(self.vhost, safe='')}/{quote(name)}")
        return found


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
    management = Management(stack.management_url)
    parts = urlsplit(stack.broker_url)
    name = f"test-{secrets.token_hex(6)}"
    management.call("PUT", f"/api/vhosts/{name}", {})
    everything = {"configure": ".*", "write": ".*", "read": ".*"}
    management.call("PUT", f"/api/permissions/{name}/{parts.username or 'guest'}", everything)
    try:
        yield Broker(parts._replace(path=f"/{name}").geturl(), stack.management_url, name)
    finally:
        management.call("DELETE", f"/api/vhosts/{name}")


@contextlib.contextmanager
def _private_pair() -> Iterator[Stack]:
    """The pair that `infra/local` runs from installed binaries."""
    with _held_pair() as environment:
        stack = Stack.from_environment(environment)
        assert stack is not None
        yield stack


@dataclass(frozen=True, slots=True)
class TlsStack:
    """A private pair whose second ports speak TLS, and ask for a certificate of the test's own authority."""

    stack: Stack
    amqps_port: int
    rediss_port: int


@contextlib.contextmanager
def tls_stack(folder: Path) -> Iterator[TlsStack]:
    """Have a pair with TLS for the length of a `with`.

    Args:
        folder: with `ca.pem`, `server.pem` and `server.key`.

    Raises:
        StackMissingError: the servers are not installed.
    """
    with _held_pair("--tls", str(folder)) as environment:
        stack = Stack.from_environment(environment)
        assert stack is not None
        ports = (int(environment[f"INFERQ_STACK_{name}_PORT"]) for name in ("AMQPS", "REDISS"))
        yield TlsStack(stack, *ports)


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
