"""The permission table, cell by cell, on a real broker and a real Redis: what a role may do, and nothing else."""

import asyncio
import contextlib
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import redis
from aiormq.channel import Channel
from aiormq.exceptions import ChannelAccessRefused, ChannelLockedResource
from infra.local import install, processes
from infra.local import redis as local_redis
from infra.local.errors import StackError
from infra.local.management import Management
from pydantic import SecretStr
from redis.exceptions import AuthenticationError, NoPermissionError
from tests.hardened import USERS, HardenedSite, hardened_site
from tests.stack import Stack, redis_options

from inferq.amqp import BrokerRefuses, Link, properties
from inferq.redis_access import REDIS_USERS, acl_lines
from inferq.settings import BrokerSettings
from inferq_schemas import ModelTopology

CLIENT, GPU, CPU, OPERATOR, TOPOLOGY, MONITORING = USERS
LANE, FALLBACK, DEAD, PARKING = "inferq.iris.bulk", "inferq.iris.fallback", "inferq.dead", "inferq.parking"
WORKERS = {GPU, CPU}


@pytest.fixture(scope="module")
def site(secure_stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HardenedSite]:
    with hardened_site(secure_stack, tmp_path_factory.mktemp("hardened"), [ModelTopology("iris")]) as hardened:
        # A queue of another model, which nobody but the topology's user may touch.
        arguments = {"durable": True, "arguments": {"x-queue-type": "quorum"}}
        hardened.broker.management.call("PUT", f"/api/queues/{hardened.broker.vhost}/inferq.bert.bulk", arguments)
        yield hardened


@contextlib.asynccontextmanager
async def linked(site: HardenedSite, user: str) -> AsyncIterator[Link]:
    link = Link(site.broker_settings(user), name=user)
    life = asyncio.create_task(link.run())
    try:
        await link.wait_up(10)
        yield link
    finally:
        life.cancel()
        await asyncio.gather(life, return_exceptions=True)


def publish(exchange: str, key: str) -> Callable[[Channel], Awaitable[Any]]:
    return lambda channel: channel.basic_publish(
        b"x", exchange=exchange, routing_key=key, properties=properties(), mandatory=False
    )


def read(queue: str) -> Callable[[Channel], Awaitable[Any]]:
    return lambda channel: channel.basic_get(queue, no_ack=True)


def declare(queue: str) -> Callable[[Channel], Awaitable[Any]]:
    return lambda channel: channel.queue_declare(queue, durable=True, arguments={"x-queue-type": "quorum"})


def bind(queue: str, exchange: str, key: str) -> Callable[[Channel], Awaitable[Any]]:
    async def bind_and_unbind(channel: Channel) -> None:
        await channel.queue_bind(queue, exchange, routing_key=key)
        await channel.queue_unbind(queue, exchange, routing_key=key)

    return bind_and_unbind


async def reply_queue(channel: Channel) -> None:
    await channel.queue_declare("reply.mine", exclusive=True)
    await channel.queue_bind("reply.mine", "inferq.replies", routing_key="reply.mine")
    await channel.basic_get("reply.mine")


# A queue and an exchange that share a name share their permissions: whoever publishes to the exchange inferq.parking
# may bind the queue inferq.parking, and whoever reads the queue inferq.dead may bind to the exchange inferq.dead.
TABLE: dict[str, tuple[Callable[[Channel], Awaitable[Any]], set[str]]] = {
    "send a job": (publish("inferq.jobs", "iris.bulk"), {CLIENT, GPU, CPU, OPERATOR}),
    "send a job of a model that is not listed": (publish("inferq.jobs", "bert.bulk"), {OPERATOR}),
    "send past the lanes": (publish("inferq.jobs", "iris.fallback"), set()),
    "send with a wildcard": (publish("inferq.jobs", "iris.*"), set()),
    "send with three words": (publish("inferq.jobs", "iris.bulk.x"), set()),
    "divert a job": (publish("inferq.fallback", "iris.bulk"), WORKERS),
    "divert a job of another model": (publish("inferq.fallback", "bert.bulk"), set()),
    "park a job": (publish("inferq.parking", "iris.bulk"), WORKERS | {TOPOLOGY}),
    "bury a job": (publish("inferq.dead", "iris.bulk"), {TOPOLOGY}),
    "answer": (publish("inferq.replies", "reply.x"), WORKERS),
    "write to a lane through the default exchange": (publish("", LANE), set()),
    "write to a reply queue through the default exchange": (publish("", "reply.x"), set()),
    "write to the broker's own exchanges": (publish("amq.topic", "iris.bulk"), set()),
    "read a lane": (read(LANE), {GPU}),
    "read a lane of another model": (read("inferq.bert.bulk"), set()),
    "read the fallback queue": (read(FALLBACK), WORKERS),
    "read dead letters": (read(DEAD), WORKERS | {OPERATOR, TOPOLOGY}),
    "read parked jobs": (read(PARKING), {OPERATOR, TOPOLOGY}),
    "empty a lane": (lambda channel: channel.queue_purge(LANE), {GPU}),
    "have a reply queue": (reply_queue, {CLIENT}),
    "create a job queue": (declare("inferq.iris.extra"), {TOPOLOGY}),
    "create a queue with a name of one's own": (declare("mine"), set()),
    "delete a job queue": (lambda channel: channel.queue_delete("inferq.iris.extra"), {TOPOLOGY}),
    "delete dead letters": (lambda channel: channel.queue_delete(DEAD), {TOPOLOGY}),
    "create an exchange": (lambda channel: channel.exchange_declare("inferq.more", exchange_type="topic"), set()),
    "delete an exchange": (lambda channel: channel.exchange_delete("inferq.replies", if_unused=True), {TOPOLOGY}),
    "copy all jobs": (bind(PARKING, "inferq.jobs", "#"), {TOPOLOGY}),
    "copy all dead letters to parking": (bind(PARKING, "inferq.dead", "#"), WORKERS | {TOPOLOGY}),
    "hear all answers": (bind(PARKING, "inferq.replies", "reply.x"), set()),
}


@pytest.mark.parametrize("user", USERS)
async def test_on_the_broker_a_role_may_do_its_work_and_nothing_else(site: HardenedSite, user: str) -> None:
    allowed = set()
    async with linked(site, user) as link:
        for what, (action, _) in TABLE.items():
            channel = await link.channel()
            try:
                await action(channel)
            except (ChannelAccessRefused, ChannelLockedResource):
                continue
            allowed.add(what)
            await channel.close()
    assert allowed == {what for what, (_, users) in TABLE.items() if user in users}
    if user == TOPOLOGY:
        done = await site.inferq("topology", "apply")
        assert done.returncode == 0, done.stdout + done.stderr


async def test_nobody_has_the_password_of_another(site: HardenedSite) -> None:
    settings = site.broker_settings(CLIENT).model_copy(update={"password_file": site.passwords / GPU})
    await _is_refused(settings, CLIENT)


async def test_nobody_gets_in_as_the_servers_default_user(site: HardenedSite) -> None:
    parts = urlsplit(site.broker.url)
    url = SecretStr(f"amqps://{parts.hostname}:{parts.port}{parts.path}")
    await _is_refused(site.broker_settings(CLIENT).model_copy(update={"url": url, "password_file": None}), "guest")
    place = f"rediss://{site.redis_url.rpartition('@')[2]}"
    with redis.Redis.from_url(place, **redis_options(site.tls)) as client, pytest.raises(AuthenticationError):
        client.ping()


async def _is_refused(settings: BrokerSettings, user: str) -> None:
    link = Link(settings, name="test")
    life = asyncio.create_task(link.run())
    with pytest.raises(BrokerRefuses, match=f"does not let user '{user}' in"):
        await link.wait_up(10)
    life.cancel()
    await asyncio.gather(life, return_exceptions=True)


async def test_the_topologys_user_does_the_whole_work_of_its_commands(site: HardenedSite) -> None:
    for words in (("add-model", "extra"), ("remove-model", "extra"), ("apply", "--model", "iris")):
        done = await site.inferq("topology", *words)
        assert done.returncode == 0, done.stdout + done.stderr
    assert (await site.inferq("topology", "check", "--model", "iris")).returncode == 0


@pytest.mark.parametrize(
    ("user", "sees", "may_set_policies"),
    [
        (CLIENT, False, False),
        (GPU, False, False),
        (CPU, False, False),
        (OPERATOR, True, False),
        (TOPOLOGY, True, True),
        (MONITORING, True, False),
    ],
)
def test_the_management_api_tells_and_does_what_the_role_needs(
    site: HardenedSite, user: str, sees: bool, may_set_policies: bool
) -> None:
    place = site.broker.management_url.rpartition("@")[2]
    api = Management(f"https://{user}:{site.password(user)}@{place}", tls=site.broker.tls_context)
    vhost = site.broker.vhost
    policy = {"pattern": "^x$", "definition": {"max-length": 1}, "apply-to": "queues"}
    assert _works(lambda: api.call("GET", f"/api/queues/{vhost}")) is sees
    assert _works(lambda: api.call("PUT", f"/api/policies/{vhost}/p", policy)) is may_set_policies
    if may_set_policies:
        api.call("DELETE", f"/api/policies/{vhost}/p")
    assert not _works(lambda: api.call("PUT", "/api/users/evil", {"password": "x", "tags": "administrator"}))
    assert not _works(lambda: api.call("PUT", f"/api/permissions/{vhost}/{user}", {}))


def _works(call: Callable[[], object]) -> bool:
    try:
        call()
    except StackError:
        return False
    return True


R, I, O, D = "{p}:{{j}}:result", "{p}:{{j}}:in:x", "{p}:{{j}}:out:y", "{p}:{{j}}:done"  # noqa: E741 - as in the keys
R_CLIENT, R_GPU, R_CPU, R_OPERATOR, R_MONITORING = REDIS_USERS
R_WORKERS = {R_GPU, R_CPU}
COMMANDS: dict[str, set[str]] = {
    f"MGET {R}": {R_CLIENT, R_GPU, R_CPU, R_OPERATOR},
    f"SET {R} v NX GET EX 9": {R_CLIENT, R_GPU, R_CPU, R_OPERATOR},
    f"DEL {R}": R_WORKERS,
    f"UNLINK {R}": set(),
    f"GETDEL {R}": {R_OPERATOR},
    f"EXPIRE {R} 9": R_WORKERS,
    f"SET {I} v EX 9": {R_CLIENT},
    f"GET {I}": set(),
    f"MGET {I}": R_WORKERS,
    f"UNLINK {I}": {R_CLIENT},
    f"EXISTS {I}": {R_OPERATOR},
    f"SET {O} v EX 9": R_WORKERS,
    f"GET {O}": {R_CLIENT, R_OPERATOR},
    f"DEL {O}": set(),
    f"PUBLISH {D} x": R_WORKERS,
    "PUBLISH other x": set(),
    "PUBLISH {p}:other x": set(),
    "HSET {p}:running a b": R_WORKERS,
    "HGETALL {p}:running": R_WORKERS | {R_OPERATOR},
    "DEL {p}:running": set(),
    "SET {p}:worker:w 1 EX 9": R_WORKERS,
    "HSET {p}:cpu:m w v": {R_CPU},
    "HGETALL {p}:cpu:m": {R_GPU, R_OPERATOR},
    "SADD {p}:gpu:m w": {R_GPU},
    "HKEYS {p}:cpu:m": {R_CPU},
    "HSET {p}:paused m v": {R_OPERATOR},
    "HGETALL {p}:paused": R_WORKERS | {R_CLIENT, R_OPERATOR},
    "HDEL {p}:paused m": {R_OPERATOR},
    "GET other:{{j}}:result": set(),
    "MGET {p}2:{{j}}:result": set(),
    "SET {p} v": set(),
    "KEYS *": set(),
    "SCAN 0": set(),
    "RANDOMKEY": set(),
    "FLUSHALL": set(),
    "FLUSHDB": set(),
    "CONFIG GET *": set(),
    "ACL LIST": set(),
    "ACL SETUSER evil on nopass +@all": set(),
    "CLIENT LIST": set(),
    "CLIENT KILL TYPE normal": set(),
    "EVAL return(1) 0": set(),
    "FUNCTION LIST": set(),
    "MODULE LIST": set(),
    "REPLICAOF 127.0.0.1 1": set(),
    "SAVE": set(),
    "SHUTDOWN NOSAVE": set(),
    "MONITOR": set(),
    "PSUBSCRIBE *": set(),
    "SUBSCRIBE {p}:other": set(),
    f"SUBSCRIBE {D}": {R_CLIENT, R_OPERATOR},
    "SUBSCRIBE {p}:hints": {R_CLIENT, R_OPERATOR},
    "PUBLISH {p}:hints x": set(),
    "RENAME {p}:running x": set(),
    f"COPY {R} {O}": set(),
    f"DUMP {R}": set(),
    "INFO server": {R_MONITORING},
    "PING": set(REDIS_USERS),
}


@pytest.mark.parametrize("user", REDIS_USERS)
def test_in_redis_a_role_may_do_its_work_and_nothing_else(site: HardenedSite, user: str) -> None:
    allowed = {command for command in COMMANDS if _redis_takes(site, user, command)}
    assert allowed == {command for command, users in COMMANDS.items() if user in users}


def _redis_takes(site: HardenedSite, user: str, command: str) -> bool:
    url = f"rediss://{user}:{site.password(user)}@{site.redis_url.rpartition('@')[2]}"
    options = redis_options(site.tls)
    # A connection each: a subscriber may not do anything else.
    with redis.Redis.from_url(url, driver_info=None, socket_timeout=5, protocol=2, **options) as client:
        try:
            client.execute_command(*command.format(p=site.prefix).split())
        except NoPermissionError:
            return False
    return True


def test_the_acl_file_is_one_that_redis_loads(site: HardenedSite, tmp_path: Path) -> None:
    (port,) = processes.free_ports(1)
    file = tmp_path / "users.acl"
    file.write_text("\n".join(acl_lines("p", password_hashes={})) + "\n")
    command = [install.find("redis-server"), "--port", str(port), "--bind", "127.0.0.1", "--aclfile", str(file)]
    with subprocess.Popen([*command, "--save", "", "--dir", tmp_path], stdout=subprocess.DEVNULL) as server:
        try:
            processes.wait_until(lambda: local_redis.answers(port), what="Redis", limit_s=10, servers=[server])
        finally:
            server.kill()
