"""What a saboteur can do, each as a context: the fault holds inside and is undone on the way out, also when cancelled.

A fault names the part that it needs for itself, so that two faults never undo each other: a broker that is being
restarted is not restarted, and a proxy that holds confirms back is not healed by somebody else.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from inferq_schemas import lane_queue

if TYPE_CHECKING:
    import random
    from collections.abc import AsyncIterator, Callable, Mapping
    from contextlib import AbstractAsyncContextManager

    from tests.chaos.fleet import Member
    from tests.chaos.ledger import Ledger
    from tests.chaos.load import Mix
    from tests.chaos.proxy import Proxy, Way
    from tests.chaos.servers import Broker, Cache
    from tests.chaos.work import Kind

    Harm: TypeAlias = "Callable[[Arena, str, random.Random], AbstractAsyncContextManager[None]]"


_EMPTY_LIMIT_S = 20.0


@dataclass(slots=True)
class Arena:
    """All that can be harmed.

    Attributes:
        links: every proxy by name: `<whose>.broker` or `<whose>.redis`.
        side_model: the model whose queue may be deleted while it is empty.
    """

    broker: Broker
    cache: Cache
    workers: Mapping[str, Member]
    links: Mapping[str, Proxy]
    mix: Mix
    ledger: Ledger
    side_model: str


@contextlib.asynccontextmanager
async def signalled(arena: Arena, target: str, number: signal.Signals) -> AsyncIterator[None]:
    arena.workers[target].send(number)
    yield


def killed(arena: Arena, target: str, _: random.Random) -> AbstractAsyncContextManager[None]:
    return signalled(arena, target, signal.SIGKILL)


def terminated(arena: Arena, target: str, _: random.Random) -> AbstractAsyncContextManager[None]:
    return signalled(arena, target, signal.SIGTERM)


@contextlib.asynccontextmanager
async def storm(arena: Arena, _target: str, chance: random.Random) -> AsyncIterator[None]:
    """SIGTERM to every worker within a second, as a careless deployment does; some get a second one, which forces."""
    for member in arena.workers.values():
        member.send(signal.SIGTERM)
        await asyncio.sleep(chance.uniform(0, 0.5))
        if chance.random() < 0.3:
            member.send(signal.SIGTERM)
    yield


@contextlib.asynccontextmanager
async def frozen(arena: Arena, target: str, _: random.Random) -> AsyncIterator[None]:
    member = arena.workers[target]
    member.send(signal.SIGSTOP)
    try:
        yield
    finally:
        member.send(signal.SIGCONT)


@contextlib.asynccontextmanager
async def clock_jumped(arena: Arena, target: str, chance: random.Random) -> AsyncIterator[None]:
    """A worker's wall clock jumps ahead or back, and later to the right time again, unless the worker has ended."""
    member = arena.workers[target]
    if not member.clock_jumps:
        member = next(other for other in arena.workers.values() if other.clock_jumps)
    there, back = chance.sample([signal.SIGUSR1, signal.SIGUSR2], 2)
    process = member.process
    member.send(there)
    try:
        yield
    finally:
        if member.process is process:
            member.send(back)


@contextlib.asynccontextmanager
async def broker_stopped(arena: Arena, _target: str, _: random.Random) -> AsyncIterator[None]:
    try:
        await arena.broker.stop()
        yield
    finally:
        await arena.broker.start()


@contextlib.asynccontextmanager
async def broker_killed(arena: Arena, _target: str, _: random.Random) -> AsyncIterator[None]:
    await arena.broker.kill()
    try:
        yield
    finally:
        await arena.broker.start()


def alarm(kind: str) -> Harm:
    @contextlib.asynccontextmanager
    async def harm(arena: Arena, _target: str, _: random.Random) -> AsyncIterator[None]:
        try:
            await arena.broker.alarm(kind, raised=True)
            yield
        finally:
            await arena.broker.alarm(kind, raised=False)

    return harm


@contextlib.asynccontextmanager
async def queue_deleted(arena: Arena, _target: str, _: random.Random) -> AsyncIterator[None]:
    """The side model's queue is deleted under its consumers and made again.

    What lies in a deleted queue is lost by the operator's own act, so nothing may: the side model gets no jobs first,
    until each that it got is answered. If that takes too long nothing is deleted, and the ledger says so.
    """
    gate = arena.mix.models[arena.side_model]
    gate.clear()
    try:
        give_up_s = time.monotonic() + _EMPTY_LIMIT_S
        while arena.ledger.waiting(arena.side_model) and time.monotonic() < give_up_s:
            await asyncio.sleep(0.1)
        if arena.ledger.waiting(arena.side_model):
            arena.ledger.write("spared", why="the side model's jobs were not all answered in time")
            yield
            return
        await arena.broker.delete_queue(lane_queue(arena.side_model, "interactive"))
        try:
            yield
        finally:
            await arena.broker.make_queues((arena.side_model,))
    finally:
        gate.set()


def redis_ended(*, with_data: bool) -> Harm:
    @contextlib.asynccontextmanager
    async def harm(arena: Arena, _target: str, _: random.Random) -> AsyncIterator[None]:
        since = time.time()
        await arena.cache.kill()
        try:
            yield
        finally:
            await arena.cache.start(with_data=with_data)
            if not with_data:
                arena.ledger.write("lost_data", since=round(since, 4))

    return harm


@contextlib.asynccontextmanager
async def redis_full(arena: Arena, _target: str, _: random.Random) -> AsyncIterator[None]:
    kept = {name: await arena.cache.value(name) for name in ("maxmemory", "maxmemory-policy")}
    await arena.cache.configure({"maxmemory-policy": "noeviction", "maxmemory": "1mb"})
    try:
        yield
    finally:
        # The limit first: with the old policy under the small one Redis would evict outcomes.
        await arena.cache.configure({"maxmemory": kept["maxmemory"]})
        await arena.cache.configure({"maxmemory-policy": kept["maxmemory-policy"]})


@contextlib.asynccontextmanager
async def redis_frozen(arena: Arena, _target: str, _: random.Random) -> AsyncIterator[None]:
    await arena.cache.send(signal.SIGSTOP)
    try:
        yield
    finally:
        await arena.cache.send(signal.SIGCONT)


@contextlib.asynccontextmanager
async def cut(arena: Arena, target: str, _: random.Random) -> AsyncIterator[None]:
    """Every connection is reset; new ones are refused for as long as it holds."""
    link = arena.links[target]
    link.refuses = True
    link.cut()
    try:
        yield
    finally:
        link.heal()


@contextlib.asynccontextmanager
async def half_open(arena: Arena, target: str, _: random.Random) -> AsyncIterator[None]:
    """The server sees the connections end; the client does not, and finds out by its heartbeat."""
    arena.links[target].lose_server()
    try:
        yield
    finally:
        arena.links[target].heal()


@contextlib.asynccontextmanager
async def stalled(arena: Arena, target: str, ways: Callable[[Proxy], tuple[Way, ...]]) -> AsyncIterator[None]:
    for way in ways(arena.links[target]):
        way.flows.clear()
    try:
        yield
    finally:
        arena.links[target].heal()


def silent(arena: Arena, target: str, _: random.Random) -> AbstractAsyncContextManager[None]:
    return stalled(arena, target, lambda link: (link.to_server, link.to_client))


def confirms_withheld(arena: Arena, target: str, _: random.Random) -> AbstractAsyncContextManager[None]:
    """What the client sends arrives; what the broker says to it does not."""
    return stalled(arena, target, lambda link: (link.to_client,))


@contextlib.asynccontextmanager
async def slow(arena: Arena, target: str, chance: random.Random) -> AsyncIterator[None]:
    link = arena.links[target]
    for way in (link.to_server, link.to_client):
        way.delay_s = chance.uniform(0.02, 0.3)
    try:
        yield
    finally:
        link.heal()


@contextlib.asynccontextmanager
async def lossy(arena: Arena, target: str, chance: random.Random) -> AsyncIterator[None]:
    """What loss looks like above TCP: pauses, and now and then a reset."""
    link = arena.links[target]
    for way in (link.to_server, link.to_client):
        way.delay_s = chance.uniform(0.005, 0.05)
        way.reset_share = chance.uniform(0.002, 0.02)
    try:
        yield
    finally:
        link.heal()


@contextlib.asynccontextmanager
async def channels_closed(arena: Arena, target: str, _: random.Random) -> AsyncIterator[None]:
    arena.links[target].close_channels()
    yield


def rows(kind: Kind, count: int) -> Harm:
    @contextlib.asynccontextmanager
    async def harm(arena: Arena, _target: str, _: random.Random) -> AsyncIterator[None]:
        arena.mix.due.extend([kind] * count)
        yield

    return harm
