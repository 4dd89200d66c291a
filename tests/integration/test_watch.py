"""Waiting for outcomes in Redis while the connection to it is lost again and again under concurrent subscriptions."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from pydantic import SecretStr
from redis.asyncio import Redis
from tests.chaos.proxy import Proxy
from tests.chaos.servers import port_of, with_port
from tests.e2e.worker_process import until
from tests.stack import Stack

from inferq.keys import done_channel, result_key
from inferq.lookup import Lookup
from inferq.outcome import Outcome
from inferq.settings import RedisSettings
from inferq.waiters import Waiters

pytestmark = [pytest.mark.stack, pytest.mark.timeout(60)]


@pytest.fixture
async def link(stack: Stack) -> AsyncIterator[Proxy]:
    async with Proxy(port_of(stack.redis_url)) as proxy:
        yield proxy


@pytest.fixture
async def lookup(
    stack: Stack, link: Proxy, redis_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Lookup]:
    # Hints or nothing: the slow beat would hide that they stopped.
    monkeypatch.setattr("inferq.watch._RECHECK_S", 600)
    url = SecretStr(with_port(stack.redis_url, link.port))
    settings = RedisSettings(url=url, prefix=redis_prefix, socket_timeout_s=1, connect_timeout_s=1)
    async with Lookup(settings, Waiters()) as made:
        yield made


async def answer(stack: Stack, prefix: str, job_id: str) -> None:
    async with Redis.from_url(stack.redis_url) as redis:
        await redis.set(result_key(prefix, job_id), Outcome.cancelled(job_id).encode())
        await redis.publish(done_channel(prefix, job_id), b"")


async def test_hints_come_again_after_the_connection_was_lost_under_concurrent_subscriptions(
    stack: Stack, link: Proxy, lookup: Lookup, redis_prefix: str
) -> None:
    stop = asyncio.Event()

    async def come_and_go(n: int) -> None:
        while not stop.is_set():
            async with lookup.hinted(f"busy-{n}"):
                await asyncio.sleep(0)

    busy = [asyncio.create_task(come_and_go(n)) for n in range(20)]
    for _ in range(20):
        await until(lambda: link.connections, "it is connected")
        link.cut()
        await asyncio.sleep(0)
    stop.set()
    await asyncio.gather(*busy)

    waiting = asyncio.create_task(lookup.wait("late", timeout_s=20))
    await until(lambda: _subscribed(stack, redis_prefix, "late"), "it asks for a hint")
    await answer(stack, redis_prefix, "late")
    found = await waiting

    assert found.result.error is not None
    assert found.result.error.code == "cancelled"


async def _subscribed(stack: Stack, prefix: str, job_id: str) -> bool:
    channel = done_channel(prefix, job_id)
    async with contextlib.aclosing(Redis.from_url(stack.redis_url)) as redis:
        return dict(await redis.pubsub_numsub(channel)).get(channel.encode()) == 1
