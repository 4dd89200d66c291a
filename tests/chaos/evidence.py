"""Gathers what is left when a run has come to rest: outcomes in Redis, messages in parking and in queues.

Talks to the broker and to Redis themselves, past every proxy.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import aio_pika
import msgpack
from redis.asyncio import Redis
from tests.chaos.checker import Parked
from tests.chaos.ledger import likeness

from inferq.keys import result_key
from inferq.outcome import decode_outcome
from inferq_schemas import PARKING_QUEUE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from aio_pika.abc import AbstractIncomingMessage
    from tests.chaos.fleet import Member
    from tests.chaos.ledger import Entry
    from tests.chaos.servers import Broker, Cache
    from tests.chaos.work import Work

_CHUNK = 500
_AT_REST_S = 6.0  # longer than the counts of a quorum queue lag (its tick, five seconds)
_LOOK_S = 0.5


async def come_to_rest(broker: Broker, workers: Sequence[Member], limit_s: float) -> dict[str, int]:
    """Wait until no queue but parking holds a message and no worker a delivery, for six seconds on end.

    Returns:
        What is not at rest when `limit_s` is over, messages by queue or worker; empty if all is.
    """
    give_up_s = time.monotonic() + limit_s
    quiet_since_s: float | None = None
    while True:
        left = await _left(broker, workers)
        now_s = time.monotonic()
        quiet_since_s = None if left else (quiet_since_s or now_s)
        if (quiet_since_s is not None and now_s - quiet_since_s >= _AT_REST_S) or now_s > give_up_s:
            return left
        await asyncio.sleep(_LOOK_S)


async def _left(broker: Broker, workers: Sequence[Member]) -> dict[str, int]:
    queues = {str(queue["name"]): int(str(queue.get("messages", -1))) for queue in await broker.queues()}
    hands = {member.name: await member.in_hand() for member in workers}
    return {name: count for name, count in {**queues, **hands}.items() if count and name != PARKING_QUEUE}


async def outcomes(cache: Cache, prefix: str, works: Mapping[str, Work]) -> dict[str, Entry]:
    """Every stored outcome of these jobs, as entries like those of the ledger."""
    found: dict[str, Entry] = {}
    ids = list(works)
    async with Redis.from_url(cache.url) as client:
        for at in range(0, len(ids), _CHUNK):
            some = ids[at : at + _CHUNK]
            stored = await client.mget([result_key(prefix, job_id) for job_id in some])
            for job_id, raw in zip(some, stored, strict=True):
                if isinstance(raw, bytes):
                    found[job_id] = _entry(raw, works[job_id])
    return found


def _entry(raw: bytes, work: Work) -> Entry:
    result = decode_outcome(raw).result
    right = work.is_right(result.outputs["y"].to_numpy()) if result.ok else None
    code = "ok" if result.error is None else result.error.code
    return {"t": time.time(), "e": "outcome", "code": code, "right": right, "likeness": likeness(result)}


async def parked(broker: Broker) -> list[Parked]:
    """Everything in parking, as an operator reads it. Takes it from there."""
    return [
        Parked(
            tuple(job_ids(message.body)),
            str(message.headers.get("inferq-reason", "")),
            str(message.headers.get("inferq-message", "")),
        )
        async for message in _drained(broker, PARKING_QUEUE)
    ]


async def waiting(broker: Broker) -> frozenset[str]:
    """Ids of the jobs that are still in a queue of ours. Takes them from there."""
    names = [str(queue["name"]) for queue in await broker.queues()]
    lanes = [name for name in names if name.startswith("inferq.") and name != PARKING_QUEUE]
    return frozenset(
        [job_id for name in lanes async for message in _drained(broker, name) for job_id in job_ids(message.body)]
    )


async def _drained(broker: Broker, queue: str) -> AsyncIterator[AbstractIncomingMessage]:
    async with await aio_pika.connect(broker.url) as connection:
        channel = await connection.channel()
        source = await channel.get_queue(queue, ensure=False)
        while (message := await source.get(fail=False)) is not None:
            await message.ack()
            yield message


def job_ids(body: bytes) -> list[str]:
    """Ids in a message body; empty where it cannot be read."""
    try:
        content: Any = msgpack.unpackb(body)
    except (ValueError, msgpack.UnpackException):
        return []
    jobs = content if isinstance(content, list) else [content]
    return [str(job["id"]) for job in jobs if isinstance(job, dict) and "id" in job]
