"""Carries jobs out and answers in: two connections, the reply queue, Redis, and the tasks that keep them alive.

Publishes on one connection and consumes on the other, because a broker in alarm stops reading from those that publish.
When the reply queue is lost, every job under way is looked up or sent again, with the same id. Knows no arrays.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
import uuid
from typing import TYPE_CHECKING, Any, Final, Literal

from inferq.amqp import BrokerUnreachable, Link, Publisher
from inferq.bundles import cut, jobs_per_bundle
from inferq.errors import AnswerTimeout, BrokerUnavailable, ClientClosed, InferqError, StoreUnavailable
from inferq.lookup import Lookup
from inferq.replies import ReplyQueue
from inferq.sender import JobSender
from inferq.waiters import Waiters
from inferq_schemas import DEFAULT_LIMITS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Sequence

    from inferq.results import ResultStore
    from inferq.settings import ClientSettings
    from inferq.waiters import Pending
    from inferq_schemas import Job, Result

__all__ = ["Courier", "ReplyMode"]

ReplyMode = Literal["queue", "redis", "both"]
"""Where answers are awaited; "both" is the reply queue, with Redis for answers that got lost on the way."""

_log = logging.getLogger(__name__)
_RESEND_AT_ONCE: Final = 16


class Courier:
    """The connections of one client.

    Args:
        settings: where everything is.
        reply: None = "both" if Redis answers when the client opens, else "queue".
    """

    def __init__(self, settings: ClientSettings, reply: ReplyMode | None) -> None:
        self._settings = settings
        self._wanted_reply = reply
        self.waiters = Waiters()
        self.lookup: Lookup | None = None
        broker = settings.broker
        name = f"inferq-client {socket.gethostname()} {os.getpid()}"
        self._out = Link(broker, name=f"{name} publish")
        # Its losses show as those of the reply queue, and its failures to connect as those of the other.
        self._in = Link(broker, name=f"{name} replies", log_level=logging.INFO)
        self._sender = JobSender(
            self._out,
            Publisher(self._out, timeout_s=broker.publish_timeout_s),
            publish_timeout_s=broker.publish_timeout_s,
            cpu_reserve_ratio=settings.client.cpu_reserve_ratio,
        )
        self._moved = asyncio.Event()
        self._replies = ReplyQueue(
            self._in,
            on_result=self.waiters.resolve,
            on_moved=self._moved.set,
            timeout_s=broker.connect_timeout_s,
            exchange=broker.reply_exchange,
        )
        self.uses_reply_queue = reply != "redis"
        self._life: asyncio.Task[None] | None = None

    @property
    def store(self) -> ResultStore | None:
        """Redis; None when this client works without it."""
        return None if self.lookup is None else self.lookup.store

    async def open(self) -> None:
        """Connect; harmless when open already.

        Raises:
            BrokerUnavailable: not within `broker.connect_timeout_s`, or at once if the broker does not let us in.
            StoreUnavailable: the reply mode needs Redis, and it does not answer.
        """
        if self._life is not None:
            return
        try:
            await self._open_redis()
            self._life = asyncio.create_task(self._live(), name="inferq-client")
            self._life.add_done_callback(self._ended)
            timeout_s = self._settings.broker.connect_timeout_s
            await self._out.wait_up(timeout_s)
            if self.uses_reply_queue:
                await self._replies.address(timeout_s)
        except BrokerUnreachable as error:
            await self.close()
            raise BrokerUnavailable(str(error)) from error
        except BaseException:
            await self.close()
            raise

    async def _open_redis(self) -> None:
        if self._wanted_reply == "queue":
            return
        self.lookup = Lookup(self._settings.redis, self.waiters)
        try:
            await self.lookup.store.ping()
        except StoreUnavailable as error:
            if self._wanted_reply is not None:
                raise
            _log.warning("working without Redis: %s", error)
            await self.lookup.close()
            self.lookup = None

    async def close(self) -> None:
        """Close the connections; who still waits gets `ClientClosed`. Harmless when done twice."""
        life, self._life = self._life, None
        if life is not None:
            life.cancel()
            await asyncio.gather(life, return_exceptions=True)
        self.waiters.fail_all(ClientClosed("the client was closed before the answer came"))
        lookup, self.lookup = self.lookup, None
        if lookup is not None:
            await lookup.close()

    async def _live(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._out.run())
            if self.uses_reply_queue:
                group.create_task(self._in.run())
                group.create_task(self._replies.run())
                group.create_task(self._recover())
            if self.lookup is not None:
                group.create_task(self.lookup.run())

    def _ended(self, life: asyncio.Task[None]) -> None:
        if life.cancelled() or life.exception() is None:
            return
        _log.error("the client broke and cannot be used any more", exc_info=life.exception())
        self.waiters.fail_all(ClientClosed(f"the client broke: {life.exception()!r}; open a new one"))

    def check_open(self) -> None:
        """Raise `ClientClosed` unless the client can work."""
        if self._life is None or self._life.done():
            raise ClientClosed("the client is not open: use `async with Client(...)`, or await `open()` first")

    async def prepare(self, job: Job) -> Job:
        """Move large inputs to Redis, where there is one; otherwise, and in its absence, they travel in the message."""
        if self.store is None:
            return job
        try:
            return await self.store.leave_inputs(job, now_ms=time.time_ns() // 1_000_000)
        except StoreUnavailable as error:
            _log.warning("job %s carries its large inputs itself: %s", job.id, error)
            return job

    async def tidy(self, jobs: Iterable[Job]) -> None:
        """Give back the Redis memory of answered jobs."""
        if self.store is not None:
            for job in jobs:
                await self.store.drop_inputs(job)

    async def send(
        self,
        jobs: Sequence[Job],
        *,
        lane: str,
        patience_s: float | None = None,
        correlation_id: str | None = None,
        wants_reply: bool = True,
    ) -> None:
        """Publish one message of jobs; raises what `JobSender.send` raises, and `BrokerUnavailable`.

        Args:
            jobs: of one model.
            lane: the model's lane.
            patience_s: how long jobs without a deadline wait for room; None = the publish time-out.
            correlation_id: None = the job's id.
            wants_reply: False leaves the answer in Redis only.
        """
        self.check_open()
        patience_s = self._settings.broker.publish_timeout_s if patience_s is None else patience_s
        left_s = _room_wait_s(jobs, patience_s, now_ms=time.time_ns() // 1_000_000)
        give_up_s = time.monotonic() + left_s
        reply_to = await self._replies.address(left_s) if wants_reply and self.uses_reply_queue else None
        await self._sender.send(
            jobs, lane=lane, correlation_id=correlation_id or jobs[0].id, reply_to=reply_to, give_up_s=give_up_s
        )

    async def ask(self, job: Job, *, lane: str, limit_s: float | None) -> Result:
        """Send one job and wait for its answer.

        Cancelling forgets the wait; the job itself goes on.

        Raises:
            AnswerTimeout: no answer within `limit_s` (None = no limit).
            InferqError: as `send`.
        """
        with self.waiters.waiting(job.id, job=job, lane=lane) as pending:
            async with self.hinted(job.id):
                sending = asyncio.create_task(self.send((job,), lane=lane))
                try:
                    return await _answer(pending, sending, limit_s)
                except TimeoutError:
                    return await self._last_look(pending, limit_s)
                finally:
                    sending.cancel()
                    await asyncio.gather(sending, return_exceptions=True)

    @contextlib.asynccontextmanager
    async def hinted(self, *job_ids: str) -> AsyncIterator[None]:
        """In Redis mode: hear at once when these jobs are answered. Replies need no such hint."""
        if self.uses_reply_queue or self.lookup is None:
            yield
        else:
            async with self.lookup.hinted(*job_ids):
                yield

    async def _last_look(self, pending: Pending, limit_s: float | None) -> Result:
        await self.give_up([pending], limit_s)
        return pending.answer.result()

    async def give_up(self, waits: Sequence[Pending], limit_s: float | None) -> None:
        """Look for the answers once more in Redis; waits that are open after that fail with `AnswerTimeout`."""
        still_open = [pending for pending in waits if not pending.answer.done()]
        if still_open and self.lookup is not None:
            await self.lookup.last_look([pending.id for pending in still_open])
        for pending in still_open:
            if not pending.answer.done():
                pending.answer.set_exception(_timed_out(pending.id, limit_s))

    async def _recover(self) -> None:
        """After the reply queue moved: answers from Redis first, the rest is sent again under the new address."""
        while True:
            await self._moved.wait()
            self._moved.clear()
            lost = self.waiters.sent_jobs()
            if lost and self.lookup is not None:
                await self.lookup.last_look([pending.id for pending in lost])
            groups: dict[tuple[str, str], list[Job]] = {}
            for pending in self.waiters.sent_jobs():
                if pending.job is not None:
                    groups.setdefault((pending.job.model, pending.lane), []).append(pending.job)
            gate = asyncio.Semaphore(_RESEND_AT_ONCE)
            async with asyncio.TaskGroup() as group:
                for (_, lane), jobs in groups.items():
                    for message in cut(jobs, jobs_per_bundle(lane, DEFAULT_LIMITS.bundle_jobs)):
                        group.create_task(self._resend(message, lane, gate))

    async def _resend(self, jobs: Sequence[Job], lane: str, gate: asyncio.Semaphore) -> None:
        correlation_id = jobs[0].id if len(jobs) == 1 else str(uuid.uuid4())
        # For a worker that refuses the bundle as a whole: its answer names no job.
        self.waiters.correlate(correlation_id, jobs)
        async with gate:
            try:
                await self.send(jobs, lane=lane, correlation_id=correlation_id)
            except InferqError as error:
                _log.warning("%d jobs could not be sent again after the reply queue was lost: %s", len(jobs), error)
                # With Redis the first sending can still bring the answer; without it nobody would.
                if self.lookup is None:
                    for job in jobs:
                        self.waiters.fail(job.id, error)


async def _answer(pending: Pending, sending: asyncio.Task[None], limit_s: float | None) -> Result:
    async with asyncio.timeout(limit_s):
        # An answer ends the sending: a try without confirm may have arrived all the same.
        either: set[asyncio.Future[Any]] = {sending, pending.answer}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not pending.answer.done():
            sending.result()
        return await asyncio.shield(pending.answer)


def _timed_out(job_id: str, limit_s: float | None) -> AnswerTimeout:
    return AnswerTimeout(
        f"no answer to job {job_id} within {limit_s or 0:g} s; it may still come: "
        f"`client.result({job_id!r}, timeout_s=30)` looks in Redis, as does `inferq result {job_id}` in a shell",
    )


def _room_wait_s(jobs: Sequence[Job], patience_s: float, *, now_ms: int) -> float:
    """How long it makes sense to wait for room: until the last deadline, or `patience_s` where there is none."""
    deadlines_ms = [job.deadline_unix_ms for job in jobs if job.deadline_unix_ms is not None]
    if len(deadlines_ms) < len(jobs):
        return patience_s
    return max(0.0, (max(deadlines_ms) - now_ms) / 1000)
