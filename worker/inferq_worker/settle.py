"""Settles every delivery once, through the channel that brought it. Acks are coalesced, stale ones dropped."""

from __future__ import annotations

import asyncio
from enum import Enum
from typing import TYPE_CHECKING

from inferq.amqp import CONNECTION_ERRORS, loss_is_an_error

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aiormq.channel import Channel

    from inferq_worker.observe.metrics import Metrics


class Fate(Enum):
    """What a delivery waits for, or what has been decided about it."""

    OPEN = "open"
    ACK = "ack"
    BACK = "back"
    DEAD = "dead"


class Settler:
    """The ledger of one channel's open deliveries.

    Decisions of one turn of the event loop go out together: one `multiple` ack for the contiguous done prefix, single
    frames for the rest. A tag is settled once; settling it twice, or after a `multiple` covered it, would make the
    broker close the channel.

    Args:
        channel: the consuming channel. Once it is closed, settling is a counted no-op: the broker redelivers.
    """

    def __init__(self, channel: Channel, metrics: Metrics) -> None:
        self._channel = channel
        self._metrics = metrics
        self._fates: dict[int, Fate] = {}
        self._flushing: asyncio.Task[None] | None = None
        self._empty = asyncio.Event()
        self._empty.set()

    def __len__(self) -> int:
        """How many deliveries are open."""
        return len(self._fates)

    @property
    def stale(self) -> bool:
        """Whether the channel is gone, and with it the right to settle."""
        return bool(self._channel.is_closed)

    def open(self, tag: int) -> None:
        """A delivery has arrived; tags arrive in ascending order."""
        self._fates[tag] = Fate.OPEN
        self._empty.clear()

    def ack(self, tag: int) -> None:
        """The delivery is answered for good."""
        self._decide(tag, Fate.ACK)

    def give_back(self, tag: int) -> None:
        """Return the delivery to its queue (drain only: on most brokers this counts as an attempt)."""
        self._decide(tag, Fate.BACK)

    def reject(self, tag: int) -> None:
        """Dead-letter the delivery through its queue's dead-letter exchange."""
        self._decide(tag, Fate.DEAD)

    async def flushed(self) -> None:
        """Wait until every decision so far has been handed to the connection."""
        while self._flushing is not None and not self._flushing.done():
            await asyncio.shield(self._flushing)

    async def emptied(self) -> None:
        """Wait until nothing is open and every decision has been handed to the connection, or the channel is gone."""
        await self._empty.wait()
        await self.flushed()

    def _decide(self, tag: int, fate: Fate) -> None:
        if self.stale:
            self._fates.clear()
            self._empty.set()
            self._metrics.stale_ack()
            return
        if self._fates.get(tag) is not Fate.OPEN:
            raise RuntimeError(f"delivery {tag} is settled twice")
        self._fates[tag] = fate
        if self._flushing is None or self._flushing.done():
            self._flushing = asyncio.get_running_loop().create_task(self._flush())

    async def _flush(self) -> None:
        await asyncio.sleep(0)
        try:
            while decided := {tag: fate for tag, fate in self._fates.items() if fate is not Fate.OPEN}:
                prefix = self._acked_prefix()
                for tag in decided:
                    del self._fates[tag]
                await self._send(prefix, decided)
                self._metrics.acked(sum(fate is Fate.ACK for fate in decided.values()))
        except CONNECTION_ERRORS:
            self._metrics.stale_ack()
        if not self._fates:
            self._empty.set()

    def _acked_prefix(self) -> int:
        prefix = 0
        for tag, fate in self._fates.items():
            if fate is not Fate.ACK:
                break
            prefix = tag
        return prefix

    async def _send(self, prefix: int, decided: Mapping[int, Fate]) -> None:
        with loss_is_an_error():
            if prefix:
                await self._channel.basic_ack(prefix, multiple=True, wait=False)
            for tag, fate in decided.items():
                if tag <= prefix:
                    continue
                if fate is Fate.ACK:
                    await self._channel.basic_ack(tag, wait=False)
                else:
                    await self._channel.basic_nack(tag, requeue=fate is Fate.BACK, wait=False)
