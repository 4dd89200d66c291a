"""The parking queue: look at all of it, then go to the messages that are meant. Takes nothing out by itself."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Self

from inferq.browse import Browser
from inferq.parking import key_of, parked
from inferq_schemas import PARKING_QUEUE

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence
    from types import TracebackType

    from aiormq.abc import DeliveredMessage

    from inferq.browse import Held
    from inferq.parking import Parked
    from inferq.settings import BrokerSettings

__all__ = ["ParkingQueue"]


class ParkingQueue:
    """The parked messages of a broker; use it with `async with`.

    Args:
        settings: where the broker is.
        limits: of one pass over the queue, as `Browser.walk` takes them.
    """

    def __init__(self, settings: BrokerSettings, **limits: Any) -> None:
        self._browser = Browser(settings, PARKING_QUEUE)
        self._limits = limits

    async def __aenter__(self) -> Self:
        await self._browser.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._browser.__aexit__(kind, error, trace)

    async def scan(self) -> list[Parked]:
        """All parked messages in their order, without their bodies. Leaves the queue as it is.

        Raises:
            BrowseError: it does not exist, somebody else reads it, or the connection was lost.
        """
        count = await self._browser.ready()
        found: list[Parked] = []

        def note(message: DeliveredMessage) -> bool:
            found.append(parked(message))
            return False

        async with contextlib.aclosing(self._browser.walk(count, note)) as messages:
            async for _ in messages:
                pass
        return found

    async def each(self, wanted: Sequence[Parked], *, count: int) -> AsyncGenerator[tuple[Held, Parked], None]:
        """Yield these messages of a `scan` one by one, for as long as it takes; what has gone is left out.

        What is parked meanwhile is not looked at: a job that fails again would go round for ever. Close the iterator to
        give back what was not taken out.

        Args:
            wanted: which.
            count: messages that the scan found in all.

        Raises:
            BrowseError: the connection was lost; everything not taken out is in the queue.
        """
        left: dict[str, list[Parked]] = defaultdict(list)
        for message in wanted:
            left[message.key].append(message)
        before = None
        while left and (now := sum(map(len, left.values()))) != before:
            before = now
            walk = self._browser.walk(count, lambda message: key_of(message) in left, **self._limits)
            async with contextlib.aclosing(walk) as messages:
                async for held in messages:
                    if (summary := _take(left, held)) is not None:
                        yield held, summary
                        count -= held.taken_out
                    if not left:
                        return


def _take(left: dict[str, list[Parked]], held: Held) -> Parked | None:
    key = key_of(held.message)
    if key not in left:
        return None
    summary = left[key].pop()
    if not left[key]:
        del left[key]
    return summary
