"""Exact numbers of messages and consumers of queues, by passive declaration.

The management API's numbers lag by seconds, which is too long before a queue is deleted.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aiormq.exceptions import ChannelNotFoundEntity

from inferq.amqp import Link, loss_is_an_error

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

    from aiormq.channel import Channel

    from inferq.settings import BrokerSettings


@dataclass(frozen=True, slots=True)
class Count:
    """What is in a queue now.

    Attributes:
        ready: messages waiting; those that a consumer holds are not among them.
        consumers: who reads it.
    """

    ready: int
    consumers: int


async def count_queues(broker: BrokerSettings, queues: Iterable[str]) -> dict[str, Count]:
    """Count existing queues, by name.

    Raises:
        BrokerUnreachable: no connection within `connect_timeout_s`.
    """
    async with _connected(broker) as link:
        channel = await link.channel()
        return {queue: await _count(channel, queue) for queue in queues}


async def count_existing(broker: BrokerSettings, queues: Iterable[str]) -> dict[str, Count]:
    """Count those of the queues that exist, by name.

    Raises:
        BrokerUnreachable: as `count_queues`.
    """
    found = {}
    async with _connected(broker) as link:
        for queue in queues:
            with contextlib.suppress(ChannelNotFoundEntity):
                # The broker closes the channel over a missing queue.
                found[queue] = await _count(await link.channel(), queue)
    return found


async def _count(channel: Channel, queue: str) -> Count:
    with loss_is_an_error():
        declared = await channel.queue_declare(queue, passive=True)
    return Count(declared.message_count or 0, declared.consumer_count or 0)


@contextlib.asynccontextmanager
async def _connected(broker: BrokerSettings) -> AsyncIterator[Link]:
    # Whoever asks is told by the error.
    link = Link(broker, name="inferq count", log_level=logging.DEBUG)
    life = asyncio.create_task(link.run())
    try:
        await link.wait_up(broker.connect_timeout_s)
        yield link
    finally:
        life.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await life
