"""How many bytes are in hand: messages, and inputs fetched from Redis.

Above the limit bulk lanes pause, until half of it is free again; and no input is fetched that would exceed it.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from inferq_worker.work import Delivery, Request


class Held:
    """Counts the bytes of unsettled deliveries, and of the fetched inputs of their jobs.

    Args:
        max_bytes: limit of all, for pressure; and of the fetched inputs by themselves, for `reserve`.
        on_pressure: called with True when the limit is passed, with False when half of it is free again.
    """

    def __init__(self, max_bytes: int, on_pressure: Callable[[bool], None]) -> None:
        self._max_bytes = max_bytes
        self._on_pressure = on_pressure
        self._pressed = False
        self._fetched_bytes = 0
        self._turn = asyncio.Lock()
        self._freed = asyncio.Event()
        self.bytes = 0
        self.deliveries = 0

    def take(self, delivery: Delivery) -> None:
        """A delivery has come in."""
        self.bytes += len(delivery.body)
        self.deliveries += 1
        self._watch()

    def leave(self, delivery: Delivery) -> None:
        """A delivery is out of our hands."""
        self.bytes -= len(delivery.body)
        self.deliveries -= 1
        self._watch()

    async def reserve(self, request: Request, payload_bytes: int) -> None:
        """Wait, in turn, until so many bytes may be fetched for a job; they count until `release`.

        A job larger than the limit goes when it is the only one. Only fetched bytes are waited for: jobs that have
        theirs run and leave, while messages may be in hand that themselves wait here.
        """
        async with self._turn:
            while self._fetched_bytes and self._fetched_bytes + payload_bytes > self._max_bytes:
                self._freed.clear()
                await self._freed.wait()
            request.payload_bytes += payload_bytes
            self._count(payload_bytes)

    def release(self, request: Request) -> None:
        """A job has its answer: its fetched inputs are gone."""
        if request.payload_bytes:
            self._count(-request.payload_bytes)
            request.payload_bytes = 0
            self._freed.set()

    def _count(self, payload_bytes: int) -> None:
        self._fetched_bytes += payload_bytes
        self.bytes += payload_bytes
        self._watch()

    def _watch(self) -> None:
        pressed = self.bytes > (self._max_bytes // 2 if self._pressed else self._max_bytes)
        if pressed != self._pressed:
            self._pressed = pressed
            self._on_pressure(pressed)
