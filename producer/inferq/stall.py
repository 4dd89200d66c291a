"""Says why nothing is answered, when nothing is: once for each reason, however long it lasts.

Looks only after some seconds without progress, and on a connection of its own, so that it costs nothing otherwise.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final

from inferq.amqp import CONNECTION_ERRORS, BrokerUnreachable, describe
from inferq.counts import count_queues
from inferq.errors import StoreUnavailable
from inferq.parking import printable
from inferq.pauses import Pauses, in_force
from inferq.results import ResultStore

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from inferq.settings import ClientSettings

__all__ = ["tell_when_stalled", "why_nothing_comes"]

_AFTER_S: Final = 5.0


async def tell_when_stalled(
    answered: Callable[[], int],
    under_way: Callable[[], int],
    reason: Callable[[], Awaitable[str]],
    tell: Callable[[str], object],
    *,
    after_s: float = _AFTER_S,
) -> None:
    """Watch until cancelled.

    Args:
        answered: jobs answered so far.
        under_way: jobs that wait for their answer; while it is 0 there is nothing to wait for.
        reason: why nothing comes, asked for at every `after_s` without progress.
        tell: gets each reason once, until there is progress again.
        after_s: seconds without progress before anything is said.
    """
    told: set[str] = set()
    before = answered()
    while True:
        await asyncio.sleep(after_s)
        now = answered()
        if now != before or not under_way():
            told.clear()
        elif (text := await reason()) not in told and answered() == now:
            told.add(text)
            tell(text)
        before = now


async def why_nothing_comes(settings: ClientSettings, queue: str) -> str:
    """What is known from outside about a queue whose jobs are not answered, in a few words."""
    try:
        count = (await count_queues(settings.broker, [queue]))[queue]
    except (BrokerUnreachable, *CONNECTION_ERRORS) as error:
        return f"the broker cannot be asked: {error if isinstance(error, BrokerUnreachable) else describe(error)}"
    if not count.consumers:
        return await _why_not_consumed(settings, queue)
    store = ResultStore(settings.redis)
    try:
        await store.ping()
    except StoreUnavailable as error:
        return f"workers keep their answers back while Redis is away: {error}"
    finally:
        await store.close()
    return f"the workers that consume {queue}; their logs and /status say what they do"


async def _why_not_consumed(settings: ClientSettings, queue: str) -> str:
    _, model, lane = queue.split(".")
    try:
        async with Pauses(settings.redis) as pauses:
            pause = in_force(await pauses.read(), model, lane, time.time_ns() // 1_000_000)
    except StoreUnavailable:
        pause = None
    if pause is None:
        return f"no worker consumes {queue}"
    return f"{pause.target} was paused by {printable(pause.by)}{': ' if pause.why else ''}{printable(pause.why)}"
