"""Many jobs at once: reads a source, bundles, keeps a bounded number under way, yields answers as they come.

A job takes a place in the window before it is sent and gives it back when its answer is taken, so neither a fast source
nor a slow reader fills the memory. One task owns all others; ending the generator ends them.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from inferq.answers import Answer, failed_answer, to_answer
from inferq.bundles import Bundler, cut, jobs_per_bundle
from inferq.errors import BrokerForbids, ClientClosed, InferqError, UnknownModel
from inferq.jobs import Item, answer_limit_s, build_job, job_bytes
from inferq_schemas import Result

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Sequence

    from inferq.courier import Courier
    from inferq.jobs import Inputs, JobOptions
    from inferq.waiters import Pending
    from inferq_schemas import Job

    Source: TypeAlias = "Iterable[Inputs | Item] | AsyncIterable[Inputs | Item]"

__all__ = ["JobStream", "StreamOptions", "Window"]

_LINGER_S: Final = 0.02
"""How long a bundle that is not full waits for a slow source."""
_FATAL: Final = (UnknownModel, BrokerForbids, ClientClosed)
"""Errors that meet every job of the stream alike: they end it instead of failing job after job."""


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """How a stream is cut and bounded.

    Attributes:
        bundle_jobs: most jobs a message, >= 1.
        window_jobs: most jobs without an answer that was taken, >= 1.
        window_bytes: the same in bytes of inputs; one job alone may exceed it.
        patience_s: how long a message whose jobs have no deadline waits for room in the queue.
        result_ttl_s: how long answers that may come late are waited for after the deadline.
    """

    bundle_jobs: int
    window_jobs: int
    window_bytes: int
    patience_s: float
    result_ttl_s: float


@dataclass(frozen=True, slots=True)
class _Entry:
    index: int
    job: Job
    size: int


@dataclass(frozen=True, slots=True)
class _Finished:
    index: int
    job_id: str
    size: int
    outcome: Result | InferqError


@dataclass(frozen=True, slots=True)
class _End:
    error: BaseException | None


class Window:
    """Counts what is under way, in jobs and bytes, and makes the source wait.

    Args:
        max_jobs: >= 1.
        max_bytes: > 0; a job larger than this passes when it is alone.
    """

    def __init__(self, max_jobs: int, max_bytes: int) -> None:
        self._max_jobs = max_jobs
        self._max_bytes = max_bytes
        self._freed = asyncio.Event()
        self.jobs = 0
        self.bytes = 0

    def has_room(self, size: int) -> bool:
        """Whether a job of that many bytes may start now."""
        return self.jobs == 0 or (self.jobs < self._max_jobs and self.bytes + size <= self._max_bytes)

    async def enter(self, size: int) -> None:
        """Wait for room and take it."""
        while not self.has_room(size):
            self._freed.clear()
            await self._freed.wait()
        self.jobs += 1
        self.bytes += size

    def leave(self, size: int) -> None:
        """Give the room back."""
        self.jobs -= 1
        self.bytes -= size
        self._freed.set()


class JobStream:
    """One run over one source; make a new one for the next.

    Args:
        courier: sends and receives.
        model: all jobs are of this model.
        common: what holds for all jobs that do not say otherwise.
        options: bounds.
    """

    def __init__(self, courier: Courier, model: str, common: JobOptions, options: StreamOptions) -> None:
        self._courier = courier
        self._model = model
        self._common = common
        self._options = options
        self._max_jobs = jobs_per_bundle(common.lane, options.bundle_jobs)
        self._window = Window(options.window_jobs, options.window_bytes)
        self._bundler: Bundler[_Entry] = Bundler(self._max_jobs)
        self._first_sent = False
        self._proven = asyncio.Event()
        # At most as many as the window has places, and the end.
        self._finished: asyncio.Queue[_Finished | _End] = asyncio.Queue()

    async def answers(self, source: Source) -> AsyncGenerator[Answer, None]:
        """Yield one answer per job, in order of completion.

        Raises:
            UnknownModel, BrokerForbids, ClientClosed: at once; what is under way is forgotten.
            Exception: what the source raised, after the answers of what was read before.
        """
        working = asyncio.create_task(self._work(source))
        try:
            while not isinstance(finished := await self._finished.get(), _End):
                answer = await self._answer(finished)
                self._window.leave(finished.size)
                yield answer
            if finished.error is not None:
                raise finished.error
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)

    async def _answer(self, finished: _Finished) -> Answer:
        if isinstance(finished.outcome, Result):
            return await to_answer(finished.outcome, self._courier.store, job_id=finished.job_id, index=finished.index)
        return failed_answer(finished.job_id, finished.outcome, finished.index)

    async def _work(self, source: Source) -> None:
        error: BaseException | None = None
        try:
            async with asyncio.TaskGroup() as group:
                error = await self._feed(source, group)
        except* Exception as failed:  # noqa: BLE001 - handed to the reader, who would wait for ever otherwise
            error = _first(failed)
        self._finished.put_nowait(_End(error))

    async def _feed(self, source: Source, group: asyncio.TaskGroup) -> Exception | None:
        """Read the source to its end; returns what it raised."""
        index = 0
        try:
            async for item in _items(source):
                if item is None:
                    self._flush(group)
                    continue
                await self._take(index, item, group)
                index += 1
        except Exception as error:  # noqa: BLE001 - the source is the caller's; its error is raised to him, later
            return error
        finally:
            self._flush(group)
        return None

    async def _take(self, index: int, item: Inputs | Item, group: asyncio.TaskGroup) -> None:
        item = item if isinstance(item, Item) else Item(item)
        job_id = str(uuid.uuid4()) if item.id is None else item.id
        try:
            now_ms = time.time_ns() // 1_000_000
            job = build_job(self._model, item.inputs, item.options(self._common), now_ms=now_ms, job_id=job_id)
        except InferqError as error:
            await self._enter(0, group)
            self._finished.put_nowait(_Finished(index, job_id, 0, error))
            return
        size = job_bytes(job)
        await self._enter(size, group)
        for full in self._bundler.add(_Entry(index, job, size), self._bundled_bytes(job)):
            self._start(full, group)
            # A source that never waits would keep the answers out.
            await asyncio.sleep(0)

    def _bundled_bytes(self, job: Job) -> int:
        return job_bytes(job, claims=self._courier.store is not None)

    async def _enter(self, size: int, group: asyncio.TaskGroup) -> None:
        if not self._window.has_room(size):
            # What is collected must leave, or the room would never come.
            self._flush(group)
        await self._window.enter(size)

    def _flush(self, group: asyncio.TaskGroup) -> None:
        if len(self._bundler):
            self._start(self._bundler.flush(), group)

    def _start(self, entries: Sequence[_Entry], group: asyncio.TaskGroup) -> None:
        group.create_task(self._run(entries))

    async def _run(self, entries: Sequence[_Entry]) -> None:
        """Send these jobs and stay until each is answered or given up."""
        waits: list[Pending] = []
        jobs = await asyncio.gather(*(self._courier.prepare(entry.job) for entry in entries))
        try:
            for entry, job in zip(entries, jobs, strict=True):
                waits += self._expect(entry, job)
            async with self._courier.hinted(*(wait.id for wait in waits)):
                await self._send_and_wait(waits)
            await self._courier.tidy(wait.job for wait in waits if wait.job is not None and _answered(wait))
        finally:
            for wait in waits:
                self._courier.waiters.forget(wait)

    def _expect(self, entry: _Entry, job: Job) -> list[Pending]:
        try:
            wait = self._courier.waiters.add(job.id, job=job, lane=self._common.lane)
        except InferqError as error:
            self._finished.put_nowait(_Finished(entry.index, job.id, entry.size, error))
            return []
        wait.answer.add_done_callback(lambda answer: self._done(entry, answer))
        return [wait]

    def _done(self, entry: _Entry, answer: asyncio.Future[Result]) -> None:
        if answer.cancelled():
            return
        error = answer.exception()
        if error is not None and not isinstance(error, InferqError):
            error = InferqError(repr(error))
        outcome = answer.result() if error is None else error
        self._finished.put_nowait(_Finished(entry.index, entry.job.id, entry.size, outcome))

    async def _send_and_wait(self, waits: Sequence[Pending]) -> None:
        jobs = [wait.job for wait in waits if wait.job is not None]
        if not jobs:
            return
        limit_s = self._limit_s(jobs)
        # Large inputs that could not go to Redis after all may need several messages.
        messages = {_correlation_id(message): message for message in cut(jobs, self._max_jobs)}
        with contextlib.ExitStack() as names, contextlib.suppress(TimeoutError):
            for correlation_id, message in messages.items():
                names.enter_context(self._courier.waiters.correlated(correlation_id, message))
            async with asyncio.timeout(limit_s):
                async with asyncio.TaskGroup() as group:
                    for correlation_id, message in messages.items():
                        group.create_task(self._send(message, correlation_id))
                await asyncio.wait([wait.answer for wait in waits])
        await self._courier.give_up(waits, limit_s)

    async def _send(self, jobs: Sequence[Job], correlation_id: str) -> None:
        # The first message goes alone, so that a wrong model is noticed before the window is full of messages.
        if self._first_sent:
            await self._proven.wait()
        self._first_sent = True
        try:
            await self._courier.send(
                jobs, lane=self._common.lane, patience_s=self._options.patience_s, correlation_id=correlation_id
            )
        except _FATAL:
            raise
        except InferqError as error:
            for job in jobs:
                self._courier.waiters.fail(job.id, error)
        # Not after a fatal error, which ends the others while they wait.
        self._proven.set()

    def _limit_s(self, jobs: Sequence[Job]) -> float | None:
        now_ms = time.time_ns() // 1_000_000
        limits = [answer_limit_s(job, now_ms=now_ms, late_s=self._options.result_ttl_s) for job in jobs]
        finite = [limit_s for limit_s in limits if limit_s is not None]
        return max(finite) if len(finite) == len(limits) else None


def _correlation_id(jobs: Sequence[Job]) -> str:
    return jobs[0].id if len(jobs) == 1 else str(uuid.uuid4())


def _first(error: BaseException) -> BaseException:
    """The first error of nested groups; the others were cancelled because of it, or say the same."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _answered(wait: Pending) -> bool:
    return wait.answer.done() and not wait.answer.cancelled() and wait.answer.exception() is None


async def _items(source: Source) -> AsyncIterator[Inputs | Item | None]:
    """The source's items; None when a slow one has paused."""
    if isinstance(source, Mapping):
        raise TypeError(
            "infer_many takes an iterable of jobs; this is one job's inputs: use infer, or wrap it in a list"
        )
    if isinstance(source, AsyncIterable):
        async with contextlib.aclosing(_with_pauses(source)) as items:
            async for item in items:
                yield item
    else:
        for item in source:
            yield item


async def _with_pauses(source: AsyncIterable[Any]) -> AsyncGenerator[Any, None]:
    iterator = aiter(source)
    coming = asyncio.ensure_future(_next(iterator))
    try:
        while True:
            done, _ = await asyncio.wait({coming}, timeout=_LINGER_S)
            if not done:
                yield None
                await asyncio.wait({coming})
            try:
                item = coming.result()
            except StopAsyncIteration:
                return
            yield item
            coming = asyncio.ensure_future(_next(iterator))
    finally:
        coming.cancel()
        await asyncio.gather(coming, return_exceptions=True)
        close = getattr(iterator, "aclose", None)
        if close is not None:
            await close()


async def _next(iterator: AsyncIterator[Any]) -> Any:
    return await anext(iterator)
