"""The client's view of Redis: outcomes to read, large tensors to leave and fetch, a cancellation to write.

Knows keys and records; waits for nothing (that is `watch`). Redis errors leave as `StoreUnavailable`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from hashlib import blake2b
from typing import TYPE_CHECKING, Final, cast

from pydantic import ValidationError

from inferq.errors import AnswerLost, InvalidJob, StoreUnavailable
from inferq.keys import input_key, is_at, output_key, result_key
from inferq.outcome import Outcome, decode_outcome
from inferq.redis_pools import REDIS_ERRORS, Subscriber, open_redis, redis_problem
from inferq_schemas import DEFAULT_LIMITS, ID_PATTERN, ContractError, Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from inferq.settings import RedisSettings
    from inferq_schemas import Job, Result

__all__ = ["ResultStore", "check_id"]

_log = logging.getLogger(__name__)
_ID: Final = re.compile(ID_PATTERN)
_READ_RETRIES: Final = 3
_READ_IDS: Final = 64
"""Outcomes a command: an outcome may be megabytes, and one command has one time-out."""
_CLAIM_MARGIN_S: Final = 600
_CLAIM_TTL_WITHOUT_DEADLINE_S: Final = 86_400


class ResultStore:
    """Outcomes and claim checks of one client.

    Args:
        settings: address, prefix, time-outs.
    """

    def __init__(self, settings: RedisSettings) -> None:
        self._settings = settings
        self._prefix = settings.prefix
        self._redis = open_redis(settings, retries=_READ_RETRIES)
        self._once = open_redis(settings, retries=0, max_connections=2)

    async def ping(self) -> None:
        """Raise `StoreUnavailable` unless Redis answers now; does not retry."""
        with self._translated("answer a ping", first=True):
            await self._once.ping()

    async def close(self) -> None:
        """Close the pools. Harmless when done twice."""
        for client in (self._redis, self._once):
            with contextlib.suppress(*REDIS_ERRORS):
                await client.aclose()

    def subscriber(self) -> Subscriber:
        """A subscriber with a connection of its own; connects at its first subscription."""
        return Subscriber(self._redis.connection_pool)

    @property
    def prefix(self) -> str:
        """First part of every key."""
        return self._prefix

    def problem(self, error: BaseException) -> str:
        """What went wrong with Redis, for people."""
        return redis_problem(error, self._settings)

    @contextlib.contextmanager
    def _translated(self, purpose: str, *, first: bool = False) -> Iterator[None]:
        try:
            yield
        except REDIS_ERRORS as error:
            problem = redis_problem(error, self._settings, first=first)
            raise StoreUnavailable(f"Redis could not {purpose} ({problem})") from error

    async def read(self, job_ids: Sequence[str]) -> tuple[Result, ...]:
        """The outcomes that are there, of those asked for; an unreadable one counts as absent and is logged."""
        found = []
        for start in range(0, len(job_ids), _READ_IDS):
            ids = job_ids[start : start + _READ_IDS]
            with self._translated("read outcomes"):
                values = await self._redis.mget([result_key(self._prefix, job_id) for job_id in ids])
            pairs = zip(ids, cast("list[bytes | None]", values), strict=True)
            found += [_result(job_id, raw) for job_id, raw in pairs if raw is not None]
        return tuple(result for result in found if result is not None)

    async def cancel(self, job_id: str) -> bool:
        """Store the outcome "cancelled" unless there is one already.

        Returns:
            True if the job is cancelled: now or before. False if it has another outcome.

        Raises:
            StoreUnavailable: Redis did not answer; whether the job is cancelled is not known.
            InvalidJob: that is no job id.
        """
        check_id(job_id)
        record = Outcome.cancelled(job_id).encode()
        with self._translated(f"cancel job {job_id}"):
            stored = await self._once.set(
                result_key(self._prefix, job_id), record, nx=True, get=True, ex=self._settings.result_ttl_s
            )
        if stored is None:
            return True
        result = _result(job_id, cast("bytes", stored))
        return result is not None and result.error is not None and result.error.code == "cancelled"

    async def leave_inputs(self, job: Job, *, now_ms: int) -> Job:
        """Move inputs above the claim-check limit to Redis; returns the job with references in their place.

        The bytes outlive the deadline by some minutes (a day where there is none).
        """
        large = {
            name: tensor
            for name, tensor in job.inputs.items()
            if isinstance(tensor.data, bytes) and tensor.payload_bytes > DEFAULT_LIMITS.claim_check_bytes
        }
        if not large:
            return job
        ttl_s = _claim_ttl_s(job, now_ms)
        refs = dict(job.inputs)
        with self._translated("keep large inputs"):
            for name, tensor in large.items():
                data = cast("bytes", tensor.data)
                key = input_key(self._prefix, job.id, name, await asyncio.to_thread(_mark_of, data))
                await self._redis.set(key, data, ex=ttl_s)
                refs[name] = Tensor(dtype=tensor.dtype, shape=tensor.shape, ref=key)
        return job.model_copy(update={"inputs": refs})

    async def drop_inputs(self, job: Job) -> None:
        """Give back what `leave_inputs` took, once the job is answered; the keys' TTL does it otherwise."""
        keys = [tensor.ref for tensor in job.inputs.values() if tensor.ref is not None]
        if keys:
            with contextlib.suppress(*REDIS_ERRORS):
                await self._redis.unlink(*keys)

    async def forget(self, job_ids: Sequence[str]) -> dict[str, tuple[bytes, int]]:
        """Delete stored outcomes, so that the jobs run again.

        Returns:
            What was deleted, for `remember`: by job id the record and the milliseconds that it still had.

        Raises:
            StoreUnavailable: Redis did not answer; some may be deleted.
        """
        pipe = self._redis.pipeline(transaction=False)
        for job_id in job_ids:
            key = result_key(self._prefix, job_id)
            pipe.pttl(key)
            pipe.getdel(key)
        with self._translated("delete outcomes"):
            replies = await pipe.execute()
        pairs = zip(job_ids, replies[::2], replies[1::2], strict=True)
        return {job_id: (raw, left_ms) for job_id, left_ms, raw in pairs if raw is not None}

    async def remember(self, forgotten: Mapping[str, tuple[bytes, int]]) -> None:
        """Put deleted outcomes back where none was stored meanwhile; without Redis nothing happens."""
        for job_id, (raw, left_ms) in forgotten.items():
            with contextlib.suppress(*REDIS_ERRORS):
                await self._once.set(result_key(self._prefix, job_id), raw, nx=True, px=max(1, left_ms))

    async def hold_inputs(self, job: Job, *, now_ms: int) -> bool:
        """Keep the inputs that were left here for as long as the job may need them; False if one has expired."""
        # The job's own keys, whatever its body names: workers read no others.
        own = {name: input_key(self._prefix, job.id, name) for name, one in job.inputs.items() if one.ref is not None}
        keys = [str(job.inputs[name].ref) if is_at(job.inputs[name].ref, key) else key for name, key in own.items()]
        ttl_s = _claim_ttl_s(job, now_ms)
        with self._translated(f"look for the inputs of job {job.id}"):
            # GT: never shorter than it was.
            await asyncio.gather(*(self._redis.expire(key, ttl_s, gt=True) for key in keys))
            return not keys or await self._redis.exists(*keys) == len(keys)

    async def fetch_output(self, job_id: str, name: str, tensor: Tensor) -> Tensor:
        """Resolve an output that was kept apart.

        Raises:
            AnswerLost: the bytes are gone, do not fit, or the reference is not of this job.
            StoreUnavailable: Redis did not answer.
        """
        key = output_key(self._prefix, job_id, name)
        if not is_at(tensor.ref, key):
            raise AnswerLost(f"output {name!r} of job {job_id} refers to {tensor.ref!r}, not to its own {key!r}")
        with self._translated(f"fetch output {name!r} of job {job_id}"):
            data = await self._redis.get(str(tensor.ref))
        if data is None:
            raise AnswerLost(f"output {name!r} of job {job_id} was kept in Redis and has expired; run the job again")
        try:
            return Tensor(dtype=tensor.dtype, shape=tensor.shape, data=cast("bytes", data))
        except ValidationError as error:
            raise AnswerLost(f"output {name!r} of job {job_id} is damaged: {error.errors()[0]['msg']}") from error


def _mark_of(data: bytes) -> str:
    """The same for the same contents: a job that is sent again is the same job."""
    return blake2b(data, digest_size=16).hexdigest()


def check_id(job_id: str) -> None:
    """Raise `InvalidJob` unless it is a job id: keys are made of it, and another text could name another's key."""
    if not _ID.fullmatch(job_id):
        raise InvalidJob(f"{job_id[:128]!r} is no job id: it must match {ID_PATTERN}")


def _claim_ttl_s(job: Job, now_ms: int) -> int:
    if job.deadline_unix_ms is None:
        return _CLAIM_TTL_WITHOUT_DEADLINE_S
    return max(0, job.deadline_unix_ms - now_ms) // 1000 + _CLAIM_MARGIN_S


def _result(job_id: str, raw: bytes) -> Result | None:
    try:
        return decode_outcome(raw).result
    except ContractError as error:
        _log.warning("the stored outcome of job %s cannot be read: %s", job_id, error.message)
        return None
