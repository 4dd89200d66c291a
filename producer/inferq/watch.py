"""Waits for outcomes in Redis, for all of a client's jobs at once.

One pub/sub connection hears hints, one loop reads. A hint only makes the loop read earlier: every id is read again
after each (re)subscription and at a slow beat, so a lost hint, or a lost reply, costs seconds and never an answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Final

from inferq.errors import StoreUnavailable
from inferq.keys import done_channel
from inferq.redis_pools import REDIS_ERRORS

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection

    from inferq.redis_pools import Subscriber
    from inferq.results import ResultStore
    from inferq_schemas import Result

__all__ = ["OutcomeWatch"]

_log = logging.getLogger(__name__)
_RECHECK_S: Final = 2.0
_RETRY_S: Final = 0.5


class OutcomeWatch:
    """Reads outcomes of the ids that are waited for and hands them in.

    Args:
        store: where outcomes are.
        wanted: ids that somebody waits for, a live view.
        on_result: called with each outcome found; must not block.
    """

    def __init__(self, store: ResultStore, *, wanted: Collection[str], on_result: Callable[[Result], object]) -> None:
        self._store = store
        self._wanted = wanted
        self._on_result = on_result
        self._hinted: set[str] = set()
        self._wake = asyncio.Event()
        self._ids: dict[str, str] = {}
        self._subscriber: Subscriber | None = None
        self._using = asyncio.Lock()
        self._asked = asyncio.Event()
        self.last_error: str | None = None

    async def run(self) -> None:
        """Read at every hint and at the slow beat; ends only by cancellation."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_RECHECK_S):
                    await self._wake.wait()
            hinted = self._take_hints()
            await self._read([job_id for job_id in hinted or tuple(self._wanted) if job_id in self._wanted])

    async def listen(self) -> None:
        """Keep a subscriber alive from the first `subscribe` on, and hear hints; ends only by cancellation.

        Nobody else connects it: redis-py lets whoever finds a lost connection restore it, and two at a time would read
        each other's answers. A lost subscriber is left, and its successor subscribes to all that is asked for.
        """
        await self._asked.wait()
        while True:
            try:
                await self._hear_all(await self._connected())
            except REDIS_ERRORS as error:
                self._failed(self._store.problem(error))
            finally:
                await self.close()
            await asyncio.sleep(_RETRY_S)

    async def subscribe(self, job_id: str) -> None:
        """Ask to be hinted about a job. The id is read once the subscription stands, so nothing falls in between.

        Without Redis this does nothing: the slow beat goes on, and the next connection subscribes.
        """
        channel = done_channel(self._store.prefix, job_id)
        self._ids[channel] = job_id
        self._asked.set()
        await self._tell(lambda subscriber: subscriber.subscribe(channel))

    async def unsubscribe(self, job_id: str) -> None:
        """End `subscribe`. Harmless when there was none."""
        channel = done_channel(self._store.prefix, job_id)
        if self._ids.pop(channel, None) is not None:
            await self._tell(lambda subscriber: subscriber.unsubscribe(channel))

    async def close(self) -> None:
        """Close the pub/sub connection."""
        async with self._using:
            subscriber, self._subscriber = self._subscriber, None
            if subscriber is not None:
                with contextlib.suppress(*REDIS_ERRORS):
                    await subscriber.aclose()  # type: ignore[no-untyped-call]  # untyped upstream

    async def _connected(self) -> Subscriber:
        async with self._using:
            self._subscriber = subscriber = self._store.subscriber()
            # A channel that nobody publishes on comes first: redis-py checks the health of a subscriber without any
            # channel before it sends, and that would read beside the reader.
            await subscriber.subscribe(f"{self._store.prefix}:hints", *self._ids)
        return subscriber

    async def _tell(self, command: Callable[[Subscriber], Awaitable[None]]) -> None:
        """Send through a subscriber that is up; what one that is down would be told, its successor finds in `_ids`."""
        async with self._using:
            subscriber = self._subscriber
            if subscriber is not None and subscriber.connected:
                with contextlib.suppress(*REDIS_ERRORS):
                    await command(subscriber)

    def _take_hints(self) -> tuple[str, ...]:
        self._wake.clear()
        hinted = tuple(self._hinted)
        self._hinted.clear()
        return hinted

    async def _read(self, ids: list[str]) -> None:
        if not ids:
            return
        try:
            results = await self._store.read(ids)
        except StoreUnavailable as error:
            self._failed(str(error))
            await asyncio.sleep(_RETRY_S)
            return
        self.last_error = None
        for result in results:
            self._on_result(result)

    async def _hear_all(self, subscriber: Subscriber) -> None:
        while subscriber.connected:
            message = await subscriber.get_message(timeout=None)
            if message is None or message["type"] not in {"subscribe", "message"}:
                continue
            job_id = self._ids.get(message["channel"].decode())
            if job_id is not None:
                self._hinted.add(job_id)
                self._wake.set()
        raise ConnectionError("lost")

    def _failed(self, problem: str) -> None:
        if self.last_error is None:
            _log.warning("outcomes cannot be read for now: %s", problem)
        self.last_error = problem
