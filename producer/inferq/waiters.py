"""Who waits for which answer. No socket: answers are handed in, by whichever way they came.

The first answer to an id wins; later ones find nobody and are ignored, because delivery is at least once.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from inferq.errors import InvalidJob

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from inferq_schemas import Job, Result

__all__ = ["Pending", "Waiters"]


@dataclass(frozen=True, slots=True, eq=False)
class Pending:
    """One wait for one answer.

    Attributes:
        id: job id.
        answer: resolves to the result; fails when the client gives up on it or is closed.
        job: what to publish again when the reply queue was lost; None when the answer does not come that way.
        lane: where the job was published.
    """

    id: str
    answer: asyncio.Future[Result]
    job: Job | None = None
    lane: str = ""


class Waiters:
    """All waits of one client, by job id."""

    def __init__(self) -> None:
        self._by_id: dict[str, list[Pending]] = {}
        self._ids_of: dict[str, frozenset[str]] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    @property
    def ids(self) -> Collection[str]:
        """Ids that somebody waits for; a live view."""
        return self._by_id.keys()

    def sent_jobs(self) -> tuple[Pending, ...]:
        """Waits whose answer was to come through the reply queue."""
        return tuple(
            pending
            for waits in self._by_id.values()
            for pending in waits
            if pending.job is not None and not pending.answer.done()
        )

    def add(self, job_id: str, *, job: Job | None = None, lane: str = "") -> Pending:
        """Start to wait; end with `forget`, whatever happens.

        Raises:
            InvalidJob: this client has sent a job of that id already and still waits for its answer, so the answers
                could not be told apart.
        """
        waits = self._by_id.setdefault(job_id, [])
        if job is not None and any(other.job is not None for other in waits):
            raise InvalidJob(f"job id {job_id!r} is under way already; wait for its answer or use another id")
        pending = Pending(job_id, asyncio.get_running_loop().create_future(), job, lane)
        waits.append(pending)
        return pending

    def forget(self, pending: Pending) -> None:
        """Stop to wait; a late answer will find nobody. Harmless when done twice."""
        waits = self._by_id.get(pending.id, [])
        if pending in waits:
            waits.remove(pending)
        if not waits:
            self._by_id.pop(pending.id, None)
        pending.answer.cancel()

    @contextlib.contextmanager
    def waiting(self, job_id: str, *, job: Job | None = None, lane: str = "") -> Iterator[Pending]:
        """`add` now and `forget` at the end."""
        pending = self.add(job_id, job=job, lane=lane)
        try:
            yield pending
        finally:
            self.forget(pending)

    def correlate(self, correlation_id: str, jobs: Collection[Job]) -> None:
        """Like `correlated`, for as long as anybody waits for one of the jobs."""
        self._ids_of = {name: ids for name, ids in self._ids_of.items() if not ids.isdisjoint(self._by_id)}
        self._ids_of[correlation_id] = frozenset(job.id for job in jobs)

    @contextlib.contextmanager
    def correlated(self, correlation_id: str, jobs: Collection[Job]) -> Iterator[None]:
        """Remember which ids a message holds, for an answer that names only its message."""
        self._ids_of[correlation_id] = frozenset(job.id for job in jobs)
        try:
            yield
        finally:
            self._ids_of.pop(correlation_id, None)

    def resolve(self, result: Result, correlation_id: str | None = None) -> bool:
        """Hand an answer in.

        Args:
            result: the answer. Without an id it speaks of the whole message: the body could not be read.
            correlation_id: of the message it came in.

        Returns:
            Whether anybody waited for it.
        """
        if result.id:
            return self._finish(result.id, lambda answer: answer.set_result(result))
        ids = self._ids_of.get(correlation_id or "", frozenset({correlation_id or ""}))
        # A list: every id gets the answer, not only the first.
        found = [self._finish(job_id, lambda answer: answer.set_result(result)) for job_id in ids]
        return any(found)

    def fail(self, job_id: str, error: Exception) -> bool:
        """Tell those who wait for `job_id` that no answer will come; returns whether there were any."""
        return self._finish(job_id, lambda answer: answer.set_exception(error))

    def fail_all(self, error: Exception) -> None:
        """Tell everybody, because the client ends."""
        for job_id in tuple(self._by_id):
            self.fail(job_id, error)

    def _finish(self, job_id: str, settle: Callable[[asyncio.Future[Result]], None]) -> bool:
        open_waits = [pending for pending in self._by_id.get(job_id, ()) if not pending.answer.done()]
        for pending in open_waits:
            settle(pending.answer)
        return bool(open_waits)
