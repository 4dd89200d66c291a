"""A client by the contract alone: publishes any bytes, and keeps every reply, so that a test can count them."""

import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import aio_pika
import msgpack
import numpy as np
from aio_pika.abc import AbstractChannel, AbstractConnection, AbstractIncomingMessage
from tests.e2e.worker_process import CLIENT, Site, until

from inferq.keys import result_key
from inferq.outcome import Outcome, decode_outcome
from inferq_schemas import CONTENT_TYPE, JOBS_EXCHANGE, PARKING_QUEUE, Result, Tensor, decode_results

OWN = "own"


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def tensor(array: np.ndarray) -> dict[str, Any]:
    """A tensor as it goes over the wire."""
    made = Tensor.from_numpy(array)
    return {"dtype": made.dtype, "shape": list(made.shape), "data": made.data}


def job(model: str, x: np.ndarray, **fields: Any) -> dict[str, Any]:
    """A job of one input `x` as it goes over the wire: sent now, with 60 s of time, unless `fields` say other.

    A field that is None is left out.
    """
    times = {"sent_unix_ms": now_ms(), "deadline_unix_ms": now_ms() + 60_000}
    made = {"v": 1, "id": secrets.token_hex(8), "model": model, "inputs": {"x": tensor(x)}, **times, **fields}
    return {key: value for key, value in made.items() if value is not None}


@dataclass(slots=True)
class RawClient:
    """A caller with a reply queue, and beside it an administrator who looks into queues.

    Attributes:
        channel: the caller's.
        admin: the administrator's; also for what only a broker or a worker would do.
        replies: every result that came, with the correlation id of its message.
        parking: what it took from parking.
    """

    site: Site
    channel: AbstractChannel
    connection: AbstractConnection
    admin: AbstractChannel
    reply_to: str
    replies: list[tuple[str | None, Result]] = field(default_factory=list)
    parking: list[AbstractIncomingMessage] = field(default_factory=list)

    async def take(self, message: AbstractIncomingMessage) -> None:
        self.replies += [(message.correlation_id, result) for result in decode_results(message.body)]

    async def listen(
        self,
        queue: str,
        take: Callable[[AbstractIncomingMessage], Awaitable[None]] | None = None,
        *,
        arguments: Mapping[str, Any] | None = None,
    ) -> None:
        """Have a reply queue; without `take` nobody reads it."""
        made = await self.channel.declare_queue(queue, exclusive=True, arguments=dict(arguments or {}))
        if self.site.reply_exchange:
            await made.bind(self.site.reply_exchange, queue)
        if take is not None:
            await made.consume(take, no_ack=True)

    async def publish(
        self,
        content: Any,
        routing_key: str,
        *,
        exchange: str = JOBS_EXCHANGE,
        reply_to: str | None = OWN,
        expiration_ms: int | None = None,
        content_type: str | None = CONTENT_TYPE,
        headers: Mapping[str, Any] | None = None,
        correlation_id: str | None = None,
    ) -> str:
        """Publish a job, a bundle or plain bytes; returns the correlation id."""
        body = content if isinstance(content, bytes) else msgpack.packb(content)
        name = correlation_id or secrets.token_hex(8)
        message = aio_pika.Message(
            body,
            correlation_id=name,
            reply_to=self.reply_to if reply_to == OWN else reply_to,
            content_type=content_type,
            delivery_mode=2,
            expiration=None if expiration_ms is None else expiration_ms / 1000,
            headers=dict(headers or {}),
        )
        channel = self.channel if exchange == JOBS_EXCHANGE else self.admin
        target = await channel.get_exchange(exchange, ensure=False)
        await target.publish(message, routing_key, timeout=30)
        return name

    def results(self, correlation_id: str) -> list[Result]:
        """Replies so far to one message."""
        return [result for name, result in self.replies if name == correlation_id]

    async def reply(self, correlation_id: str, limit_s: float = 40.0) -> Result:
        """Wait for the first reply to a message."""
        await until(lambda: self.results(correlation_id), f"a reply to {correlation_id}", limit_s)
        return self.results(correlation_id)[0]

    async def ask(self, content: Any, routing_key: str, **options: Any) -> Result:
        """Publish and wait for the first reply."""
        return await self.reply(await self.publish(content, routing_key, **options))

    async def depth(self, *queues: str) -> int:
        """Messages that are ready in these queues, as the broker itself says."""
        channel = await self.connection.channel()
        try:
            counts = [(await channel.declare_queue(name, passive=True)).declaration_result for name in queues]
        finally:
            await channel.close()
        return sum(count.message_count or 0 for count in counts)

    async def parked(self, job_id: str, limit_s: float = 30.0) -> AbstractIncomingMessage:
        """Wait for a job in parking, and take it from there."""

        async def look() -> AbstractIncomingMessage | None:
            await self.empty_parking()
            return next((one for one in self.parking if one.headers.get("inferq-job") == job_id), None)

        found: AbstractIncomingMessage = await until(look, f"job {job_id} is parked", limit_s)
        return found

    async def empty_parking(self) -> list[AbstractIncomingMessage]:
        """Take all that lies in parking; returns what this client took so far."""
        queue = await self.admin.get_queue(PARKING_QUEUE, ensure=False)
        while (message := await queue.get(fail=False)) is not None:
            await message.ack()
            self.parking.append(message)
        return self.parking

    async def outcome(self, job_id: str, limit_s: float = 30.0) -> Outcome:
        """Wait for a job's stored outcome."""
        async with contextlib.aclosing(self.site.redis()) as redis:
            key = result_key(self.site.prefix, job_id)
            raw = await until(lambda: redis.get(key), f"an outcome of {job_id} is stored", limit_s)
        return decode_outcome(raw)


@contextlib.asynccontextmanager
async def raw_client(site: Site) -> AsyncIterator[RawClient]:
    """Have a client for the length of a `with`."""
    tls = site.broker.tls_context
    async with (
        await aio_pika.connect(site.amqp_url(CLIENT), ssl_context=tls) as caller,
        await aio_pika.connect(site.broker.url, ssl_context=tls) as connection,
    ):
        channel, admin = [await one.channel(on_return_raises=True) for one in (caller, connection)]
        client = RawClient(site, channel, connection, admin, f"reply.{secrets.token_hex(8)}")
        await client.listen(client.reply_to, client.take)
        yield client
