"""Looks answers up in Redis: one store, one watch, for as many waits as there are. Needs no broker."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Self

from inferq.answers import to_answer
from inferq.errors import AnswerTimeout, StoreUnavailable
from inferq.results import ResultStore, check_id
from inferq.waiters import Waiters
from inferq.watch import OutcomeWatch

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from types import TracebackType

    from inferq.answers import Answer
    from inferq.settings import RedisSettings
    from inferq_schemas import Result

__all__ = ["Lookup"]


class Lookup:
    """Waits for stored outcomes.

    Use it with `async with` on its own, or give `run` to an owner of tasks and call `close` at the end.

    Args:
        settings: where Redis is.
        waiters: shared with whoever else brings answers in; None = its own.
    """

    def __init__(self, settings: RedisSettings, waiters: Waiters | None = None) -> None:
        self.waiters = Waiters() if waiters is None else waiters
        self.store = ResultStore(settings)
        self._watch = OutcomeWatch(self.store, wanted=self.waiters.ids, on_result=self.waiters.resolve)
        self._running: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._running = asyncio.create_task(self.run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
        await self.close()

    async def run(self) -> None:
        """Read outcomes for everybody who waits; ends only by cancellation."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch.run())
            group.create_task(self._watch.listen())

    async def close(self) -> None:
        """Close the connections."""
        await self._watch.close()
        await self.store.close()

    @contextlib.asynccontextmanager
    async def hinted(self, *job_ids: str) -> AsyncIterator[None]:
        """Hear at once when these jobs are answered, instead of at the slow beat; enter it after adding the waits."""
        try:
            for job_id in job_ids:
                await self._watch.subscribe(job_id)
            yield
        finally:
            for job_id in job_ids:
                await self._watch.unsubscribe(job_id)

    async def wait(self, job_id: str, *, timeout_s: float | None) -> Answer:
        """Wait until the job has an outcome.

        Args:
            job_id: of a job that any client sent.
            timeout_s: seconds, >= 0; 0 looks once, None waits for ever.

        Returns:
            The answer; a failed job has `error` set.

        Raises:
            AnswerTimeout: no outcome by then.
            StoreUnavailable: Redis could not be asked.
            InvalidJob: that is no job id.
        """
        check_id(job_id)
        with self.waiters.waiting(job_id) as pending:
            result = None
            if timeout_s != 0:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(timeout_s), self.hinted(job_id):
                        result = await pending.answer
            # A last look decides: the hint may have been lost, and the beat may have missed the end.
            result = result or await self._read_one(job_id)
        if result is None:
            waited = f" within {timeout_s:g} s" if timeout_s else ""
            raise AnswerTimeout(
                f"no outcome of job {job_id}{waited}: it is under way, was never sent, or its outcome has expired; "
                f"wait for it with `client.result({job_id!r}, timeout_s=30)`, or `inferq result {job_id} --wait 30`",
            )
        return await to_answer(result, self.store, job_id=job_id)

    async def last_look(self, job_ids: list[str]) -> None:
        """Read these outcomes once more and hand them in; without Redis nothing happens."""
        with contextlib.suppress(StoreUnavailable):
            for result in await self.store.read(job_ids):
                self.waiters.resolve(result)

    async def _read_one(self, job_id: str) -> Result | None:
        found = await self.store.read([job_id])
        return found[0] if found else None
