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
    from collections.abc import Callable, Collection

    from redis.asyncio.client import PubSub

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
        self._pubsub: PubSub | None = None
        self._subscribing = asyncio.Lock()
        self._subscribed = asyncio.Event()
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
        """Hear hints, from the first subscription on; ends only by cancellation."""
        await self._subscribed.wait()
        while True:
            try:
                await self._hear()
            except REDIS_ERRORS as error:
                # redis-py connects and subscribes again by itself at the next read.
                self._failed(self._store.problem(error))
                await asyncio.sleep(_RETRY_S)

    async def subscribe(self, job_id: str) -> None:
        """Ask to be hinted about a job. The id is read once the subscription stands, so nothing falls in between.

        Without Redis this fails quietly: the slow beat goes on.
        """
        channel = done_channel(self._store.prefix, job_id)
        self._ids[channel] = job_id
        if self._pubsub is None:
            self._pubsub = self._store.pubsub()
        with contextlib.suppress(*REDIS_ERRORS):
            # The first one connects; two at a time would each take a connection.
            async with self._subscribing:
                await self._pubsub.subscribe(channel)
        self._subscribed.set()

    async def unsubscribe(self, job_id: str) -> None:
        """End `subscribe`. Harmless when there was none."""
        channel = done_channel(self._store.prefix, job_id)
        if self._ids.pop(channel, None) is not None and self._pubsub is not None:
            with contextlib.suppress(*REDIS_ERRORS):
                await self._pubsub.unsubscribe(channel)

    async def close(self) -> None:
        """Close the pub/sub connection."""
        pubsub, self._pubsub = self._pubsub, None
        if pubsub is not None:
            with contextlib.suppress(*REDIS_ERRORS):
                await pubsub.aclose()  # type: ignore[no-untyped-call]  # untyped upstream

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

    async def _hear(self) -> None:
        pubsub = self._pubsub
        # The first subscription may have failed, and then there is no connection to read from.
        if pubsub is None or getattr(pubsub, "connection", None) is None:
            raise ConnectionError("not subscribed")
        message = await pubsub.get_message(timeout=None)
        if message is None or message["type"] not in {"subscribe", "message"}:
            return
        job_id = self._ids.get(message["channel"].decode())
        if job_id is not None:
            self._hinted.add(job_id)
            self._wake.set()

    def _failed(self, problem: str) -> None:
        if self.last_error is None:
            _log.warning("outcomes cannot be read for now: %s", problem)
        self.last_error = problem
