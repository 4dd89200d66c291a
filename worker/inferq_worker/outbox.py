"""Answers that need no run: refusals, expiries, outcomes that were stored before. Also what goes back unanswered."""

from __future__ import annotations

from typing import TYPE_CHECKING

from inferq_schemas import Result
from inferq_worker.work import Answer

if TYPE_CHECKING:
    from inferq.outcome import Outcome
    from inferq_schemas import Job
    from inferq_worker.answer import Answerer
    from inferq_worker.errors import WorkError
    from inferq_worker.finish import Finisher
    from inferq_worker.tasks import Tasks
    from inferq_worker.work import Request, WorkItem


class Outbox:
    """Collects answers of one turn of the event loop and sends them together.

    A thousand jobs that expire at once make one round trip to the store, not a thousand.
    """

    def __init__(self, finisher: Finisher, answerer: Answerer, tasks: Tasks) -> None:
        self._finisher = finisher
        self._answerer = answerer
        self._tasks = tasks
        self._waiting: list[Answer] = []

    def refuse(
        self, request: Request, error: WorkError, job_id: str, *, job: Job | None = None, digest: bytes | None = None
    ) -> None:
        """Answer a job that was not admitted; without id or digest nothing is stored."""
        result = Result.failed(job_id, error.code, error.message, fallback=self._answerer.is_fallback)
        digest = job.digest() if job is not None else digest
        self._send(Answer((request,), result, digest, keep=error.keep, job=job))

    def fail(self, item: WorkItem, error: WorkError) -> None:
        """Answer an admitted job that will not run."""
        self._send(self._answerer.failure(item, error))

    def repeat(self, item: WorkItem, outcome: Outcome) -> None:
        """Answer a job whose outcome is stored already."""
        self._send(self._finisher.from_store(item, outcome))

    def give_back(self, request: Request) -> None:
        """Return a job's message to its queue, once its other jobs are done with."""
        request.delivery.goes_back = True
        self._finisher.settle(request)

    def _send(self, answer: Answer) -> None:
        self._waiting.append(answer)
        if len(self._waiting) == 1:
            self._tasks.spawn(self._flush())

    async def _flush(self) -> None:
        answers, self._waiting = self._waiting, []
        await self._finisher.finish(answers, None)
