"""What is done to parked messages, one after the other, at a bounded rate: sent back, or deleted."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import time
from typing import TYPE_CHECKING, Protocol, Self

from inferq.amqp import Link, Publisher
from inferq.requeue import Requeuer, Stays, why_it_stays
from inferq.results import ResultStore

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from inferq.browse import Held
    from inferq.parking import Parked
    from inferq.parking_queue import ParkingQueue
    from inferq.requeue import NewDeadline
    from inferq.settings import ClientSettings

__all__ = ["Action", "Drop", "Requeue", "Work"]


class Action(Protocol):
    """What is done to a message, and its word for it; opened for the length of a `with`."""

    done: str

    def why_not(self, message: Parked, now_ms: int) -> str | None:
        """Why it cannot be done, as far as can be told before; None if it can."""

    async def do(self, held: Held, message: Parked) -> None:
        """Do it; the message may leave the queue once this returns. Raises `Stays` if it cannot be done."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Drop:
    """Deletes messages."""

    done = "dropped"

    def why_not(self, message: Parked, now_ms: int) -> str | None:
        """Anything can be deleted."""
        del message, now_ms
        return None

    async def do(self, held: Held, message: Parked) -> None:
        """All that is needed is that it leaves the queue."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return


class Requeue:
    """Sends messages back to their lanes, over a connection of its own: an alarm of the broker stops publishers.

    Args:
        settings: where broker and Redis are.
        deadline: what becomes of the jobs' deadlines.
    """

    done = "requeued"

    def __init__(self, settings: ClientSettings, deadline: NewDeadline) -> None:
        self._settings = settings
        self._deadline = deadline

    def why_not(self, message: Parked, now_ms: int) -> str | None:
        """As far as can be told from the message."""
        return why_it_stays(message, self._deadline, now_ms)

    async def do(self, held: Held, message: Parked) -> None:
        """Delete its outcome, publish it."""
        await self._requeuer.send(held.message, message)

    async def __aenter__(self) -> Self:
        broker = self._settings.broker
        self._link = Link(broker, name="inferq dead requeue", log_level=logging.DEBUG)
        self._life = asyncio.create_task(self._link.run())
        self._store = ResultStore(self._settings.redis)
        self._requeuer = Requeuer(
            Publisher(self._link, timeout_s=broker.publish_timeout_s),
            self._store,
            self._deadline,
            cpu_reserve_ratio=self._settings.client.cpu_reserve_ratio,
        )
        try:
            await self._link.wait_up(broker.connect_timeout_s)
            await self._store.ping()
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._life.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._life
        await self._store.close()


class Work:
    """One command's work on the messages that are meant.

    Args:
        action: what is done to each.
        rate_per_s: most messages a second.
        tell: called with each message, what became of it, and why.

    Attributes:
        parked: messages in the queue at the start.
        wanted: of these, the ones that are meant.
        done: messages that left the queue.
        stays: why others did not, and how many.
        gone: meant, and not there any more.
    """

    def __init__(self, action: Action, *, rate_per_s: float, tell: Callable[[Parked, str, str], None]) -> None:
        self.action = action
        self._pace_s = 1 / rate_per_s
        self._tell = tell
        self._todo: list[Parked] = []
        self._next_s = 0.0
        self.parked = 0
        self.wanted = 0
        self.done = 0
        self.stays: collections.Counter[str] = collections.Counter()
        self.gone = 0

    @property
    def possible(self) -> int:
        """How many of those that are meant can be handled, as far as can be told before."""
        return len(self._todo)

    @property
    def left(self) -> bool:
        """Whether something that was meant was not handled."""
        return self.done < self.wanted

    def meant(self, messages: Sequence[Parked], parked: int, now_ms: int) -> None:
        """Take in what is meant, and say which of it cannot be handled."""
        self.parked, self.wanted = parked, len(messages)
        for message in messages:
            if (reason := self.action.why_not(message, now_ms)) is None:
                self._todo.append(message)
            else:
                self._stayed(message, reason)

    def tell_what_would_be_done(self) -> None:
        """Tell of each message that can be handled, and handle none."""
        for message in self._todo:
            self._tell(message, f"would be {self.action.done}", "")

    async def do(self, queue: ParkingQueue) -> None:
        """Handle one message after the other; each leaves the queue only once the action is through with it."""
        if not self._todo:
            return
        handled = 0
        async with self.action, contextlib.aclosing(queue.each(self._todo, count=self.parked)) as messages:
            async for held, message in messages:
                await self._pace()
                handled += 1
                try:
                    await self.action.do(held, message)
                except Stays as reason:
                    self._stayed(message, str(reason))
                    continue
                await held.take_out()
                self.done += 1
                self._tell(message, self.action.done, "")
        self.gone = len(self._todo) - handled

    def _stayed(self, message: Parked, reason: str) -> None:
        # Ids differ from message to message; what is left is the kind of the reason.
        self.stays[reason.replace(message.job_ids[0], "ID") if message.job_ids else reason] += 1
        self._tell(message, "stays parked", reason)

    async def _pace(self) -> None:
        now_s = time.monotonic()
        await asyncio.sleep(max(0.0, self._next_s - now_s))
        self._next_s = max(now_s, self._next_s) + self._pace_s
