"""Walks through a queue of ours without taking anything out of it: what is not acknowledged goes back to its place.

Messages are held on one channel, so that each is seen once; its close returns them in order (also when the process is
killed). Counts as a delivery of each message: only for queues whose delivery limit lets them be looked at for ever.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import time
from typing import TYPE_CHECKING, Any, Final, Self

from aiormq.exceptions import ChannelNotFoundEntity

from inferq.amqp import CONNECTION_ERRORS, BrokerUnreachable, Link, describe, loss_is_an_error

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterator
    from types import TracebackType

    from aiormq.abc import DeliveredMessage
    from aiormq.channel import Channel

    from inferq.settings import BrokerSettings

__all__ = ["MOST_MESSAGES", "BrowseError", "Browser"]

MOST_MESSAGES: Final = 65_535
"""Most messages that AMQP lets a consumer hold, and so the most of a queue that can be looked at."""
_LIMIT_BYTES: Final = 64 * 2**20
_LIMIT_S: Final = 600.0
_SILENCE_S: Final = 15.0
"""Nothing comes although messages should be there: somebody else holds them, or they are gone."""


class BrowseError(Exception):
    """The queue cannot be walked through, or not to its end; everything not acknowledged is in it still."""


class Browser:
    """One connection that reads a queue; use it with `async with`.

    Args:
        settings: where the broker is.
        queue: its name.
    """

    def __init__(self, settings: BrokerSettings, queue: str) -> None:
        self._settings = settings
        self._queue = queue
        self._link = Link(settings, name=f"inferq browse {queue}", log_level=logging.DEBUG)
        self._life: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._life = asyncio.create_task(self._link.run())
        try:
            await self._link.wait_up(self._settings.connect_timeout_s)
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._life is not None:
            self._life.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._life

    async def ready(self) -> int:
        """How many messages can be read now.

        Raises:
            BrowseError: it does not exist, the broker cannot be asked, or somebody else reads it, so that a walk would
                see only a part of it.
        """
        with self._translated():
            channel = await self._link.channel(confirms=False)
            declared = await channel.queue_declare(self._queue, passive=True)
            await channel.close()
        if declared.consumer_count:
            raise BrowseError(
                f"somebody else reads {self._queue} now ({declared.consumer_count} consumers), perhaps another "
                "`inferq dead`: try again when that has ended"
            )
        return declared.message_count or 0

    async def walk(
        self,
        count: int,
        wanted: Callable[[DeliveredMessage], bool],
        *,
        limit_bytes: int = _LIMIT_BYTES,
        limit_s: float = _LIMIT_S,
    ) -> AsyncGenerator[Held, None]:
        """Yield those of the first messages that are wanted, in their order; close the iterator to give all back.

        May end early: at a limit, and when no more come for some seconds.

        Args:
            count: how many messages to look at, from `ready`; at most `MOST_MESSAGES`.
            wanted: called with each as it comes; the bodies of others are not kept.
            limit_bytes: look at no more once bodies of so many bytes wait to be handled.
            limit_s: yield no more after so many seconds: RabbitMQ takes back what is held for half an hour.

        Raises:
            BrowseError: the connection or channel was lost; what was not acknowledged is in the queue.
        """
        ends_s = time.monotonic() + limit_s
        with self._translated():
            channel = await self._link.channel(confirms=False)
            try:
                inbox = _Inbox(min(count, MOST_MESSAGES), wanted, limit_bytes)
                # One consumer with all: what several held would come back in the order of the consumers.
                with loss_is_an_error():
                    await channel.basic_qos(prefetch_count=MOST_MESSAGES)
                    await channel.basic_consume(self._queue, inbox.put)
                while time.monotonic() < ends_s and (message := await inbox.get(channel.closing)) is not None:
                    yield Held(channel, message)
            finally:
                with contextlib.suppress(*CONNECTION_ERRORS), loss_is_an_error():
                    await channel.close()

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except ChannelNotFoundEntity as error:
            raise BrowseError(f"queue {self._queue} does not exist: run `inferq topology apply`") from error
        except CONNECTION_ERRORS as error:
            reason = self._link.last_error if isinstance(error, BrokerUnreachable) else describe(error)
            raise BrowseError(f"reading {self._queue} broke off ({reason}); nothing is lost") from error


class _Inbox:
    """What the broker delivers, on its way to the reader.

    Args:
        count: messages to look at.
        wanted: which are kept.
        limit_bytes: nothing is kept any more once so much waits.
    """

    def __init__(self, count: int, wanted: Callable[[DeliveredMessage], bool], limit_bytes: int) -> None:
        self._left = count
        self._wanted = wanted
        self._limit_bytes = limit_bytes
        self._waiting_bytes = 0
        self._full = False
        self._changed = asyncio.Event()
        self._messages: collections.deque[DeliveredMessage] = collections.deque()

    async def put(self, message: DeliveredMessage) -> None:
        """Take one delivery."""
        self._changed.set()
        if self._full or self._left <= 0:
            return
        self._left -= 1
        if self._wanted(message):
            self._messages.append(message)
            self._waiting_bytes += len(message.body)
            self._full = self._waiting_bytes >= self._limit_bytes

    async def get(self, closing: asyncio.Future[Any]) -> DeliveredMessage | None:
        """The next wanted message; None if there is none any more, or nothing came for some seconds."""
        while not self._messages:
            if self._full or self._left <= 0:
                return None
            self._changed.clear()
            coming = asyncio.ensure_future(self._changed.wait())
            try:
                await asyncio.wait([coming, closing], timeout=_SILENCE_S, return_when=asyncio.FIRST_COMPLETED)
            finally:
                coming.cancel()
            if closing.done():
                raise ConnectionError("the broker closed the channel")
            if not self._changed.is_set():
                return None
        message = self._messages.popleft()
        self._waiting_bytes -= len(message.body)
        return message


class Held:
    """A message that is ours until the walk ends.

    Attributes:
        message: as the broker delivered it.
        taken_out: whether it was.
    """

    def __init__(self, channel: Channel, message: DeliveredMessage) -> None:
        self.message = message
        self.taken_out = False
        self._channel = channel

    async def take_out(self) -> None:
        """Acknowledge it: it leaves the queue for good."""
        assert self.message.delivery_tag is not None  # noqa: S101 - every delivery has one
        # Not waited for: RabbitMQ answers no settlement. The channel's orderly close comes after it.
        await self._channel.basic_ack(self.message.delivery_tag, wait=False)
        self.taken_out = True
