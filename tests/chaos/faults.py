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
from typing import TYPE_CHECKING, Final

from tests.chaos.work import Kind

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

__all__ = ["FAULTS", "NOT_BY_DEFAULT", "Arena", "Fault"]

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


@dataclass(frozen=True, slots=True)
class Fault:
    """A kind of fault.

    Attributes:
        about: one line for people.
        on: which part it needs: `worker`, `broker`, `redis`, `link.broker`, `link.redis` or `load`.
        hold_s: shortest and longest time that it holds.
        harm: does it to the target of that name.
        weight: how often it is drawn, against the others.
    """

    about: str
    on: str
    hold_s: tuple[float, float]
    harm: Callable[[Arena, str, random.Random], AbstractAsyncContextManager[None]]
    weight: float = 1.0


@contextlib.asynccontextmanager
async def _signalled(arena: Arena, target: str, number: signal.Signals) -> AsyncIterator[None]:
    arena.workers[target].send(number)
    yield


def _killed(arena: Arena, target: str, _: random.Random) -> AbstractAsyncContextManager[None]:
    return _signalled(arena, target, signal.SIGKILL)


def _terminated(arena: Arena, target: str, _: random.Random) -> AbstractAsyncContextManager[None]:
    return _signalled(arena, target, signal.SIGTERM)


@contextlib.asynccontextmanager
async def _storm(arena: Arena, _target: str, chance: random.Random) -> AsyncIterator[None]:
    """SIGTERM to every worker within a second, as a careless deployment does; some get a second one, which forces."""
    for member in arena.workers.values():
        member.send(signal.SIGTERM)
        await asyncio.sleep(chance.uniform(0, 0.5))
        if chance.random() < 0.3:
            member.send(signal.SIGTERM)
    yield


@contextlib.asynccontextmanager
async def _frozen(arena: Arena, target: str, _: random.Random) -> AsyncIterator[None]:
    member = arena.workers[target]
    member.send(signal.SIGSTOP)
    try:
        yield
    finally:
        member.send(signal.SIGCONT)


def _broker_ended(number: signal.Signals) -> Callable[[Arena, str, random.Random], AbstractAsyncContextManager[None]]:
    @contextlib.asynccontextmanager
    async def harm(arena: Arena, _target: str, _: random.Random) -> AsyncIterator[None]:
        await arena.broker.end(number)
        try:
            yield
        finally:
            await arena.broker.start()

    return harm


def _alarm(kind: str) -> Callable[[Arena, str, random.Random], AbstractAsyncContextManager[None]]:
    @contextlib.asynccontextmanager
    async def harm(arena: Arena, _target: str, _: random.Random) -> AsyncIterator[None]:
        try:
            await arena.broker.alarm(kind, raised=True)
            yield
        finally:
            await arena.broker.alarm(kind, raised=False)

    return harm


@contextlib.asynccontextmanager
async def _queue_deleted(arena: Arena, _target: str, _: random.Random) -> AsyncIterator[None]:
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


def _redis_ended(*, with_data: bool) -> Callable[[Arena, str, random.Random], AbstractAsyncContextManager[None]]:
    @contextlib.asynccontextmanager
    async def harm(arena: Arena, _target: str, _: random.Random) -> AsyncIterator[None]:
        since = time.time()
        await arena.cache.end(signal.SIGKILL)
        try:
            yield
        finally:
            await arena.cache.start(with_data=with_data)
            if not with_data:
                arena.ledger.write("lost_data", since=round(since, 4))

    return harm


@contextlib.asynccontextmanager
async def _redis_full(arena: Arena, _target: str, _: random.Random) -> AsyncIterator[None]:
    kept = {name: await arena.cache.value(name) for name in ("maxmemory", "maxmemory-policy")}
    await arena.cache.configure({"maxmemory-policy": "noeviction", "maxmemory": "1mb"})
    try:
        yield
    finally:
        # The limit first: with the old policy under the small one Redis would evict outcomes.
        await arena.cache.configure({"maxmemory": kept["maxmemory"]})
        await arena.cache.configure({"maxmemory-policy": kept["maxmemory-policy"]})


@contextlib.asynccontextmanager
async def _redis_frozen(arena: Arena, _target: str, _: random.Random) -> AsyncIterator[None]:
    arena.cache.send(signal.SIGSTOP)
    try:
        yield
    finally:
        arena.cache.send(signal.SIGCONT)


@contextlib.asynccontextmanager
async def _cut(arena: Arena, target: str, _: random.Random) -> AsyncIterator[None]:
    """Every connection is reset; new ones are refused for as long as it holds."""
    link = arena.links[target]
    link.refuses = True
    link.cut()
    try:
        yield
    finally:
        link.heal()


@contextlib.asynccontextmanager
async def _half_open(arena: Arena, target: str, _: random.Random) -> AsyncIterator[None]:
    """The server sees the connections end; the client does not, and finds out by its heartbeat."""
    arena.links[target].lose_server()
    try:
        yield
    finally:
        arena.links[target].heal()


@contextlib.asynccontextmanager
async def _stalled(arena: Arena, target: str, ways: Callable[[Proxy], tuple[Way, ...]]) -> AsyncIterator[None]:
    for way in ways(arena.links[target]):
        way.flows.clear()
    try:
        yield
    finally:
        arena.links[target].heal()


def _silent(arena: Arena, target: str, _: random.Random) -> AbstractAsyncContextManager[None]:
    return _stalled(arena, target, lambda link: (link.to_server, link.to_client))


def _confirms_withheld(arena: Arena, target: str, _: random.Random) -> AbstractAsyncContextManager[None]:
    """What the client sends arrives; what the broker says to it does not."""
    return _stalled(arena, target, lambda link: (link.to_client,))


@contextlib.asynccontextmanager
async def _slow(arena: Arena, target: str, chance: random.Random) -> AsyncIterator[None]:
    link = arena.links[target]
    for way in (link.to_server, link.to_client):
        way.delay_s = chance.uniform(0.02, 0.3)
    try:
        yield
    finally:
        link.heal()


@contextlib.asynccontextmanager
async def _lossy(arena: Arena, target: str, chance: random.Random) -> AsyncIterator[None]:
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
async def _channels_closed(arena: Arena, target: str, _: random.Random) -> AsyncIterator[None]:
    arena.links[target].close_channels()
    yield


def _rows(kind: Kind, count: int) -> Callable[[Arena, str, random.Random], AbstractAsyncContextManager[None]]:
    @contextlib.asynccontextmanager
    async def harm(arena: Arena, _target: str, _: random.Random) -> AsyncIterator[None]:
        arena.mix.due.extend([kind] * count)
        yield

    return harm


FAULTS: Final[Mapping[str, Fault]] = {
    "worker_kill": Fault("a worker is killed (SIGKILL)", "worker", (0, 0), _killed, 2),
    "worker_freeze": Fault("a worker stands still (SIGSTOP), then goes on", "worker", (1, 20), _frozen),
    "worker_term": Fault("a worker is asked to end (SIGTERM)", "worker", (0, 0), _terminated),
    "term_storm": Fault("all workers are asked to end at once, some twice", "worker", (0, 0), _storm, 0.5),
    "broker_restart": Fault(
        "the broker is stopped cleanly and started again", "broker", (0, 5), _broker_ended(signal.SIGTERM), 0.7
    ),
    "broker_kill": Fault(
        "the broker is killed and started again", "broker", (0, 5), _broker_ended(signal.SIGKILL), 0.7
    ),
    "memory_alarm": Fault("the broker's memory alarm blocks publishers", "broker", (3, 15), _alarm("memory"), 0.7),
    "disk_alarm": Fault("the broker's disk alarm blocks publishers", "broker", (3, 15), _alarm("disk"), 0.7),
    "queue_deleted": Fault(
        "an empty queue is deleted under its consumers and made again", "broker", (0, 3), _queue_deleted
    ),
    "redis_restart": Fault(
        "Redis is killed and comes back with its data", "redis", (0, 6), _redis_ended(with_data=True)
    ),
    "redis_lost": Fault("Redis is killed and comes back empty", "redis", (0, 6), _redis_ended(with_data=False), 0.7),
    "redis_full": Fault("Redis refuses every write, out of memory", "redis", (2, 10), _redis_full),
    "redis_freeze": Fault("Redis stands still (SIGSTOP), then goes on", "redis", (1, 8), _redis_frozen),
    "link_cut": Fault("connections to the broker are reset, new ones refused", "link.broker", (0, 5), _cut, 2),
    "link_half_open": Fault(
        "the broker sees connections end, the other side does not", "link.broker", (15, 20), _half_open
    ),
    "link_silent": Fault("connections to the broker stay open and carry nothing", "link.broker", (2, 20), _silent),
    "link_slow": Fault("the way to the broker is slow", "link.broker", (3, 10), _slow),
    "link_lossy": Fault("the way to the broker pauses and breaks", "link.broker", (3, 10), _lossy),
    "confirms_withheld": Fault(
        "what is sent to the broker arrives, its confirms do not", "link.broker", (2, 15), _confirms_withheld, 1.5
    ),
    "channel_closed": Fault("the broker closes channels (406)", "link.broker", (0, 0), _channels_closed, 1.5),
    "redis_link_cut": Fault("connections to Redis are reset, new ones refused", "link.redis", (0, 5), _cut),
    "redis_link_silent": Fault("connections to Redis stay open and carry nothing", "link.redis", (1, 8), _silent),
    "redis_link_slow": Fault("the way to Redis is slow", "link.redis", (3, 10), _slow),
    "row_fails": Fault("rows that make the model fail", "load", (0, 0), _rows(Kind.FAIL, 5)),
    "row_kills": Fault("a row that ends the process that runs it", "load", (0, 0), _rows(Kind.KILL, 1)),
    "row_hangs": Fault("a row whose run never ends", "load", (0, 0), _rows(Kind.HANG, 1)),
    "clock_skew": Fault("some senders' clocks are wrong, all along", "", (0, 0), _rows(Kind.RIGHT, 0), 0),
}
NOT_BY_DEFAULT: Final = frozenset({"row_hangs"})
"""`all` leaves these out: a worker without a run limit never comes back from them."""
