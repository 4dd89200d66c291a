"""A worker in a few lines, by the contract alone: decodes jobs, doubles their inputs, stores the outcome, replies."""

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import cast

import aio_pika
import numpy as np
from aio_pika.abc import AbstractChannel, AbstractIncomingMessage
from redis.asyncio import Redis

from inferq.keys import done_channel, input_key, is_at, output_key, result_key
from inferq.outcome import Outcome, decode_outcome
from inferq_schemas import (
    ACCEPT_BUNDLE_HEADER,
    Job,
    RejectedJob,
    Result,
    ServedBy,
    Tensor,
    decode_jobs,
    encode_result,
    encode_results,
    lane_queue,
)

LARGE_BYTES = 256 * 2**10


@dataclass
class FakeWorker:
    """What it saw, and the switches of a test.

    Attributes:
        go: answers are held back until it is set.
        seen: every job, as often as it came.
        messages: number of messages, which bundles make smaller than the number of jobs.
        fails: job id to error code.
    """

    redis: Redis | None = None
    prefix: str = "inferq"
    go: asyncio.Event = field(default_factory=asyncio.Event)
    seen: list[Job] = field(default_factory=list)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    messages: int = 0
    fails: Mapping[str, str] = field(default_factory=dict)
    properties: list[AbstractIncomingMessage] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.go.set()

    async def handle(self, channel: AbstractChannel, message: AbstractIncomingMessage) -> None:
        self.messages += 1
        self.properties.append(message)
        jobs = decode_jobs(message.body)
        self.seen += [job for job in jobs if isinstance(job, Job)]
        self.arrived.set()
        await self.go.wait()
        results = [await self._result(job, hint=message.reply_to is None) for job in jobs]
        if message.reply_to is not None:
            await self._reply(channel, message, results)
        await message.ack()

    async def _reply(self, channel: AbstractChannel, message: AbstractIncomingMessage, results: list[Result]) -> None:
        assert message.reply_to is not None
        bundled = message.headers.get(ACCEPT_BUNDLE_HEADER) == "bundle"
        bodies = [encode_results(results)] if bundled else [encode_result(result) for result in results]
        for body in bodies:
            reply = aio_pika.Message(body, correlation_id=message.correlation_id, content_type="application/msgpack")
            with contextlib.suppress(aio_pika.exceptions.PublishError):
                await channel.default_exchange.publish(reply, routing_key=message.reply_to, timeout=10)

    async def _result(self, job: Job | RejectedJob, *, hint: bool) -> Result:
        if isinstance(job, RejectedJob):
            return Result.failed(job.id, job.error.code, job.error.message)
        result = await self._compute(job)
        if self.redis is None:
            return result
        record = Outcome(job.digest(), result).encode()
        stored = await self.redis.set(result_key(self.prefix, job.id), record, nx=True, get=True, ex=60)
        if hint:
            await self.redis.publish(done_channel(self.prefix, job.id), b"")
        return result if stored is None else decode_outcome(cast("bytes", stored)).result

    async def _compute(self, job: Job) -> Result:
        if job.id in self.fails:
            return Result.failed(job.id, self.fails[job.id], "as the test wants")  # type: ignore[arg-type]  # any text
        outputs = {}
        for name, tensor in job.inputs.items():
            doubled = (await self._input(job, name, tensor)).to_numpy() * 2
            outputs[f"{name}2"] = await self._output(job, f"{name}2", Tensor.from_numpy(np.asarray(doubled)))
        served = ServedBy(job.model, "1", "gpu", "CPUExecutionProvider", "fake")
        return Result(job.id, "ok", outputs=outputs, served_by=served)

    async def _input(self, job: Job, name: str, tensor: Tensor) -> Tensor:
        if tensor.ref is None:
            return tensor
        assert is_at(tensor.ref, input_key(self.prefix, job.id, name))
        assert self.redis is not None
        data = cast("bytes", await self.redis.get(tensor.ref))
        return Tensor(dtype=tensor.dtype, shape=tensor.shape, data=data)

    async def _output(self, job: Job, name: str, tensor: Tensor) -> Tensor:
        if self.redis is None or tensor.payload_bytes <= LARGE_BYTES:
            return tensor
        assert isinstance(tensor.data, bytes)
        key = output_key(self.prefix, job.id, name)
        await self.redis.set(key, tensor.data, ex=60)
        return Tensor(dtype=tensor.dtype, shape=tensor.shape, ref=key)


@contextlib.asynccontextmanager
async def fake_worker(
    url: str,
    model: str,
    *,
    redis_url: str | None = None,
    prefix: str = "inferq",
    lanes: tuple[str, ...] = ("interactive", "bulk"),
) -> AsyncIterator[FakeWorker]:
    """Serve the lanes of one model for the length of a `with`."""
    redis = None if redis_url is None else Redis.from_url(redis_url)
    worker = FakeWorker(redis, prefix)
    connection = await aio_pika.connect(url)
    try:
        channel = await connection.channel(on_return_raises=True)
        await channel.set_qos(prefetch_count=100)
        for lane in lanes:
            queue = await channel.get_queue(lane_queue(model, lane))
            await queue.consume(functools.partial(worker.handle, channel))
        yield worker
    finally:
        worker.go.set()
        await connection.close()
        if redis is not None:
            await redis.aclose()
