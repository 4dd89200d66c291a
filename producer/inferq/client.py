"""The client: arrays in, arrays out, over a queue. What a service imports.

Here stands only what callers see; building jobs, carrying them and streaming many are modules of their own.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any, Final, Literal, Self

from pydantic import SecretStr

from inferq.answers import Answer, to_answer
from inferq.configuration import load_settings
from inferq.courier import Courier, ReplyMode
from inferq.errors import StoreUnavailable
from inferq.jobs import INTERACTIVE_LANE, JobOptions, answer_limit_s, build_job
from inferq.settings import BrokerSettings, ClientSettings, RedisSettings
from inferq.stream import JobStream, StreamOptions

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping
    from types import TracebackType

    from inferq.jobs import Deadline, Inputs
    from inferq.lookup import Lookup
    from inferq.stream import Source
    from inferq_schemas import Job, Scalar

__all__ = ["Client"]

_WINDOW_BYTES: Final = 128 * 2**20
_PATIENCE_S: Final = 300.0


class Client:
    """Asks models for answers.

    One client serves any number of concurrent calls; make one per process and event loop, not one per call::

        async with Client() as client:
            answer = await client.infer("iris", {"x": np.array([[5.1, 3.5, 1.4, 0.2]], np.float32)})
            print(answer.outputs["label"])

    Args:
        settings: None = read as every inferq program reads them (inferq.toml, environment, secrets).
        broker_url: overrides `broker.url`.
        redis_url: overrides `redis.url`.
        reply: where answers are awaited. "queue": the client's own reply queue, and Redis is never asked. "redis":
            Redis only. "both": the reply queue, and Redis for answers lost on the way and for large tensors. None =
            "both" if Redis answers at the start, else "queue".
    """

    def __init__(
        self,
        settings: ClientSettings | None = None,
        *,
        broker_url: str | None = None,
        redis_url: str | None = None,
        reply: ReplyMode | None = None,
    ) -> None:
        self._settings = _with_urls(
            load_settings(ClientSettings) if settings is None else settings, broker_url, redis_url
        )
        self._reply = reply
        self._courier = Courier(self._settings, reply)

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def open(self) -> None:
        """Connect. Harmless when open already; after this, lost connections come back by themselves.

        Raises:
            BrokerUnavailable: no broker within `broker.connect_timeout_s`, or at once if it refuses user or vhost.
            StoreUnavailable: `reply` needs Redis, and it does not answer.
        """
        await self._courier.open()

    async def close(self) -> None:
        """Close all connections; calls that still wait raise `ClientClosed`. Harmless when done twice."""
        await self._courier.close()

    async def infer(  # noqa: PLR0913 - keyword-only options of a job, all with defaults
        self,
        model: str,
        inputs: Inputs,
        *,
        deadline_s: Deadline = "default",
        lane: str = INTERACTIVE_LANE,
        id: str | None = None,  # noqa: A002 - the contract's own word
        version: str | None = None,
        fallback: Literal["allow", "never"] = "allow",
        late: Literal["drop", "serve"] = "drop",
        force: bool = False,
        params: Mapping[str, Scalar] | None = None,
    ) -> Answer:
        """Ask for one answer and wait for it.

        Args:
            model: model name.
            inputs: name to array of shape (n, ...), the same n >= 1 in all. Arrays keep their dtype; plain Python
                floats become float32, ints int64.
            deadline_s: seconds from now until the answer is of no use; "default" = `client.deadline_s`; None = never,
                not in the interactive lane.
            lane: "interactive", "bulk", or another that the model has.
            id: None = a new one. The same id with the same content is answered once and from memory after that.
            version: pins a version of the model; None = what the roll-out decides.
            fallback: "never" = only a GPU worker may answer.
            late: "serve" = answer even when the deadline cannot be met.
            force: run again although the id has an outcome.
            params: for the model's hooks.

        Returns:
            The answer, whose outputs have n rows, in the order of the inputs' rows.

        Raises:
            JobFailed: answered with a failure; has `code`, `message` and `result`.
            NotSent: certainly in no queue: `InvalidJob`, `UnknownModel`, `QueueFull`, `BrokerUnavailable`, ...
            SendUnknown: perhaps in the queue (`BrokerBlocked` among them); ask again with the same id.
            AnswerTimeout: no answer a little after the deadline; it may still come, `result(id)` looks.

        Cancelling the call forgets the answer; it does not stop the job (`cancel` does).
        """
        options = self._options(lane, deadline_s, version, fallback, late, force=force, params=params)
        job = await self._job(model, inputs, options, id)
        late_s = self._settings.redis.result_ttl_s
        limit_s = answer_limit_s(job, now_ms=_now_ms(), late_s=late_s)
        result = await self._courier.ask(job, lane=lane, limit_s=limit_s)
        await self._courier.tidy([job])
        return _raise_if_failed(await to_answer(result, self._courier.store, job_id=job.id))

    async def submit(  # noqa: PLR0913 - keyword-only options of a job, all with defaults
        self,
        model: str,
        inputs: Inputs,
        *,
        deadline_s: Deadline = "default",
        lane: str = INTERACTIVE_LANE,
        id: str | None = None,  # noqa: A002 - the contract's own word
        version: str | None = None,
        fallback: Literal["allow", "never"] = "allow",
        late: Literal["drop", "serve"] = "drop",
        force: bool = False,
        params: Mapping[str, Scalar] | None = None,
    ) -> str:
        """Send a job and do not wait; the answer is kept in Redis for `redis.result_ttl_s`. Arguments as in `infer`.

        Returns:
            The job's id, for `result`, from this process or any other.

        Raises:
            NotSent, SendUnknown: as in `infer`.
        """
        options = self._options(lane, deadline_s, version, fallback, late, force=force, params=params)
        job = await self._job(model, inputs, options, id)
        await self._courier.send((job,), lane=lane, wants_reply=False)
        return job.id

    async def result(self, id: str, *, timeout_s: float | None) -> Answer:  # noqa: A002 - the contract's own word
        """Wait for the answer to a job that was sent before, by anybody.

        Args:
            id: job id.
            timeout_s: seconds; 0 looks once, None waits for ever.

        Raises:
            JobFailed: answered with a failure.
            AnswerTimeout: no outcome by then.
            AnswerLost: answered, but outputs that were kept apart are gone.
            StoreUnavailable: Redis does not answer, or this client works without it.
        """
        return _raise_if_failed(await self._lookup("result").wait(id, timeout_s=timeout_s))

    async def cancel(self, id: str) -> bool:  # noqa: A002 - the contract's own word
        """Cancel a job that has no outcome yet: it will not run any more, unless it runs just now.

        It stores the outcome "cancelled" under the id, which workers find before they run a job. So a job can be
        cancelled that waits in a queue which nobody reads, or that is not sent yet; and an id that no job ever has is
        "cancelled" just as well, because nobody can tell which ids are under way.

        Returns:
            True if its outcome is "cancelled"; False if it has another outcome already.

        Raises:
            StoreUnavailable: Redis does not answer, or this client works without it.
        """
        return await self._lookup("cancel").store.cancel(id)

    async def infer_many(  # noqa: PLR0913 - keyword-only options of a stream, all with defaults
        self,
        model: str,
        items: Source,
        *,
        lane: str = "bulk",
        bundle_jobs: int | None = None,
        window_jobs: int | None = None,
        window_bytes: int = _WINDOW_BYTES,
        deadline_s: Deadline = None,
        version: str | None = None,
        fallback: Literal["allow", "never"] = "allow",
        late: Literal["drop", "serve"] = "drop",
        force: bool = False,
        params: Mapping[str, Scalar] | None = None,
        patience_s: float = _PATIENCE_S,
    ) -> AsyncGenerator[Answer, None]:
        """Ask for many answers; yields them as they come, `index` says which.

        Args:
            model: model name.
            items: one item a job, from an iterable or an async iterable, read as the window allows: a mapping of
                arrays as in `infer`, or an `Item` with id, params or deadline of its own. A plain iterable is read on
                the event loop; use an async one where reading waits.
            lane: only lanes that allow bundles ("bulk") get several jobs in one message.
            bundle_jobs: most jobs a message; None = `client.bundle_jobs`.
            window_jobs: most jobs under way; None = `client.window_jobs`.
            window_bytes: most bytes of inputs under way.
            deadline_s: seconds from sending, for each job; None = never.
            version: as in `infer`.
            fallback: as in `infer`.
            late: as in `infer`.
            force: as in `infer`.
            params: as in `infer`, for all items that have none.
            patience_s: how long jobs without a deadline wait for room in a full queue before they fail.

        Yields:
            One answer per item. A job that failed, wherever, has `error` set; nothing is raised for it.

        Raises:
            UnknownModel, BrokerForbids, ClientClosed: no job of this call can succeed.
            Exception: what `items` raised, after the answers of what was read before.

        Leaving the loop early forgets what is under way; close the generator (`contextlib.aclosing`) to do it at once.
        """
        options = self._options(lane, deadline_s, version, fallback, late, force=force, params=params)
        self._courier.check_open()
        client = self._settings.client
        bounds = StreamOptions(
            bundle_jobs=client.bundle_jobs if bundle_jobs is None else bundle_jobs,
            window_jobs=client.window_jobs if window_jobs is None else window_jobs,
            window_bytes=window_bytes,
            patience_s=patience_s,
            result_ttl_s=self._settings.redis.result_ttl_s,
        )
        async with contextlib.aclosing(JobStream(self._courier, model, options, bounds).answers(items)) as answers:
            async for answer in answers:
                yield answer

    def _options(
        self,
        lane: str,
        deadline_s: Deadline,
        version: str | None,
        fallback: Literal["allow", "never"],
        late: Literal["drop", "serve"],
        *,
        force: bool,
        params: Mapping[str, Scalar] | None,
    ) -> JobOptions:
        return JobOptions(
            lane=lane,
            deadline_s=self._settings.client.deadline_s if deadline_s == "default" else deadline_s,
            version=version,
            fallback=fallback,
            late=late,
            force=force,
            params=params or {},
        )

    async def _job(self, model: str, inputs: Inputs, options: JobOptions, job_id: str | None) -> Job:
        self._courier.check_open()
        job = build_job(model, inputs, options, now_ms=_now_ms(), job_id=job_id)
        return await self._courier.prepare(job)

    def _lookup(self, purpose: str) -> Lookup:
        self._courier.check_open()
        if self._courier.lookup is None:
            raise StoreUnavailable(
                f"{purpose} needs Redis, and this client works without it: set redis.url, and reply='both' or 'redis'",
            )
        return self._courier.lookup


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _raise_if_failed(answer: Answer) -> Answer:
    if answer.error is not None:
        raise answer.error
    return answer


def _with_urls(settings: ClientSettings, broker_url: str | None, redis_url: str | None) -> ClientSettings:
    """The same settings with other addresses, checked like any."""
    sections: dict[str, Any] = {}
    if broker_url is not None:
        fields = settings.broker.model_dump() | {"url": SecretStr(broker_url)}
        sections["broker"] = BrokerSettings.model_validate(fields)
    if redis_url is not None:
        fields = settings.redis.model_dump() | {"url": SecretStr(redis_url)}
        sections["redis"] = RedisSettings.model_validate(fields)
    return settings.model_copy(update=sections) if sections else settings
