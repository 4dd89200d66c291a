"""Judges jobs that come a second time: batch as usual, run alone, or park because they ended a worker by themselves."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, TypeAlias

from inferq_worker.errors import StoreUnavailable, WorkError
from inferq_worker.poison import RunRecord, Verdict, judge

if TYPE_CHECKING:
    from inferq_worker.observe.metrics import Metrics
    from inferq_worker.store import Store

Runs: TypeAlias = "tuple[list[RunRecord], frozenset[str]]"
_ASK_AGAIN_S = 1.0


class Redelivered:
    """Asks the store for unfinished runs, once for a burst of redeliveries.

    Args:
        store: keeps the running records.
        worker: this process; its own records do not count.
    """

    def __init__(self, store: Store, worker: str, metrics: Metrics) -> None:
        self._store = store
        self._worker = worker
        self._metrics = metrics
        self._next: asyncio.Task[Runs] | None = None

    async def runs_alone(self, job_id: str, model: str) -> bool:
        """Whether the job must run by itself.

        With Redis away nobody can tell, and the job runs alone: slower, never wrong.

        Raises:
            WorkError: `inference_failed`: the job ran alone and its worker did not survive it.
        """
        while True:
            try:
                records, alive = await self._runs()
            except StoreUnavailable:
                return True
            verdict = judge(job_id, records, alive, self._worker)
            if verdict is Verdict.PARK:
                with contextlib.suppress(StoreUnavailable):
                    await self._store.forget_runs(job_id, records)
                raise WorkError("inference_failed", "the job ran by itself and ended the process that ran it")
            if verdict is Verdict.ALONE:
                self._metrics.suspect(model)
            if verdict is not Verdict.WAIT:
                return verdict is Verdict.ALONE
            await asyncio.sleep(_ASK_AGAIN_S)

    async def _runs(self) -> Runs:
        """Share a look-up that has not begun yet; one that has begun may have missed our record."""
        if self._next is None:
            self._next = asyncio.create_task(self._ask())
        return await asyncio.shield(self._next)

    async def _ask(self) -> Runs:
        await asyncio.sleep(0)
        self._next = None
        return await self._store.runs()
