"""The client's reply queue: where answers come in, under a new name after every loss.

Exclusive and auto-deleted, so the broker forgets it with the connection. Whoever published with the old name is told
by `on_moved`, because those answers have nowhere to go any more. Matches nothing: results are handed to `on_result`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from typing import TYPE_CHECKING, Final

from inferq.amqp import CONNECTION_ERRORS, describe, loss_is_an_error
from inferq.errors import BrokerUnavailable
from inferq_schemas import ContractError, decode_results

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiormq.abc import AbstractChannel, DeliveredMessage

    from inferq.amqp import Link
    from inferq_schemas import Result

__all__ = ["ReplyQueue"]

_log = logging.getLogger(__name__)
_RETRY_MIN_S: Final = 0.05
_RETRY_MAX_S: Final = 2.0


class ReplyQueue:
    """Keeps one reply queue alive on a link of its own.

    Args:
        link: connection that only consumes; publishing on it would stop the answers under a memory alarm.
        on_result: called with each result and the correlation id of its message; must not block.
        on_moved: called after the queue came back under a new name; must not block.
        timeout_s: longest wait for the broker's answer to a declaration, in seconds.
        exchange: through which the answers come; "" = the default exchange, where a queue needs no binding.
    """

    def __init__(
        self,
        link: Link,
        *,
        on_result: Callable[[Result, str | None], object],
        on_moved: Callable[[], None],
        timeout_s: float,
        exchange: str = "",
    ) -> None:
        self._link = link
        self._on_result = on_result
        self._on_moved = on_moved
        self._timeout_s = timeout_s
        self._exchange = exchange
        self._ready = asyncio.Event()
        self._name = ""
        self._moves = 0

    async def run(self) -> None:
        """Declare, consume, and again whenever the queue is lost; ends only by cancellation."""
        delay_s = _RETRY_MIN_S
        while True:
            await self._link.up.wait()
            try:
                await self._serve()
                delay_s = _RETRY_MIN_S
            except CONNECTION_ERRORS as error:
                _log.warning("the reply queue cannot be had: %s", describe(error))
            finally:
                self._ready.clear()
            await asyncio.sleep(delay_s)
            delay_s = min(delay_s * 2, _RETRY_MAX_S)

    async def address(self, timeout_s: float) -> str:
        """The queue's name, once it consumes.

        Raises:
            BrokerUnavailable: not within `timeout_s`.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self._ready.wait()
        except TimeoutError:
            reason = self._link.last_error or "the broker did not answer"
            raise BrokerUnavailable(f"no reply queue within {timeout_s:g} s: {reason}") from None
        return self._name

    async def _serve(self) -> None:
        lost = asyncio.Event()
        channel = await self._link.channel(confirms=False)
        try:
            channel.on_consumer_cancel_callbacks.add(lambda _: lost.set())
            closing = channel.closing
            closing.add_done_callback(lambda _: lost.set())
            with loss_is_an_error():
                self._name = await self._declare(channel)
            self._ready.set()
            self._moves += 1
            if self._moves > 1:
                self._on_moved()
            await lost.wait()
            self._ready.clear()
            _log.warning("reply queue %s is lost", self._name)
        finally:
            with contextlib.suppress(*CONNECTION_ERRORS), loss_is_an_error():
                await asyncio.wait_for(channel.close(), self._timeout_s)

    async def _declare(self, channel: AbstractChannel) -> str:
        name = f"reply.{uuid.uuid4()}"
        await channel.queue_declare(name, exclusive=True, auto_delete=True, timeout=self._timeout_s)
        if self._exchange:
            await channel.queue_bind(name, self._exchange, routing_key=name, timeout=self._timeout_s)
        # Not acknowledged: the client bounds what is under way, and a lost answer is asked for again by job id.
        await channel.basic_consume(name, self._receive, no_ack=True, timeout=self._timeout_s)
        return name

    async def _receive(self, message: DeliveredMessage) -> None:
        properties = message.header.properties
        correlation_id = properties.correlation_id
        try:
            results = decode_results(message.body)
        except ContractError as error:
            _log.warning("an answer (correlation id %s) cannot be read: %s", correlation_id, error.message)
            return
        for result in results:
            self._on_result(result, correlation_id)
