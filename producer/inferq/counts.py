"""Exact numbers of messages and consumers of queues, by passive declaration.

The management API's numbers lag by seconds, which is too long before a queue is deleted.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from inferq.amqp import Link

if TYPE_CHECKING:
    from collections.abc import Iterable

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
    # Whoever asks is told by the error.
    link = Link(broker, name="inferq count", log_level=logging.DEBUG)
    life = asyncio.create_task(link.run())
    try:
        await link.wait_up(broker.connect_timeout_s)
        channel = await link.channel()
        found = {}
        for queue in queues:
            declared = await channel.queue_declare(queue, passive=True)
            found[queue] = Count(declared.message_count or 0, declared.consumer_count or 0)
        return found
    finally:
        life.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await life
