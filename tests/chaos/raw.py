"""A publisher by the contract alone, with a durable reply queue of its own: every reply is written down as it comes.

No client library stands between the worker and the ledger, so nothing is deduplicated before it is counted. It sends
what services in other languages send: singles and bundles, both lanes, with and without deadlines, some jobs twice,
some with a clock that is wrong.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from typing import TYPE_CHECKING, Any, TypeAlias

import aio_pika
import msgpack
from aio_pika.exceptions import AMQPError, ChannelInvalidStateError, DeliveryError

from inferq_schemas import CONTENT_TYPE, JOBS_EXCHANGE, Tensor, decode_results

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aio_pika.abc import AbstractChannel, AbstractIncomingMessage
    from tests.chaos.ledger import Ledger
    from tests.chaos.load import Mix
    from tests.chaos.work import Work

Job: TypeAlias = "dict[str, Any]"
_ERRORS = (AMQPError, ChannelInvalidStateError, OSError, RuntimeError, TimeoutError, asyncio.IncompleteReadError)
_CONFIRM_LIMIT_S, _TRIES = 10.0, 12
_RETRY_MIN_S, _RETRY_MAX_S = 0.5, 5.0
_RECONNECT_S = 0.5
_LOOK_S = 0.2
_TWICE_SHARE, _SKEWED_SHARE = 0.05, 0.05
_SKEWS_MS = (-30_000, -3_000, 3_000, 30_000)
_BUNDLE = 8


class RawPublisher:
    """Publishes, and keeps every reply.

    Args:
        url: through its own proxy.
        skewed: whether some jobs carry the times of a clock that is wrong.
    """

    def __init__(self, mix: Mix, ledger: Ledger, url: str, *, skewed: bool) -> None:
        self._mix = mix
        self._ledger = ledger
        self._url = url
        self._skewed = skewed
        self._works: dict[str, Work] = {}
        self._channel: asyncio.Future[AbstractChannel] = asyncio.get_running_loop().create_future()
        self.reply_to = f"reply.chaos-{mix.run}"

    async def run(self) -> None:
        """Send until the mix stops."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._singles(group))
            group.create_task(self._bundles(group))

    async def listen(self) -> None:
        """Stay connected and write down replies, until cancelled."""
        while True:
            with contextlib.suppress(*_ERRORS):
                await self._live()
            if self._channel.done():
                self._channel = asyncio.get_running_loop().create_future()
            await asyncio.sleep(_RECONNECT_S)

    async def _live(self) -> None:
        connection = await aio_pika.connect(self._url, timeout=5, heartbeat=5)
        try:
            channel = await connection.channel(on_return_raises=True)
            queue = await channel.declare_queue(self.reply_to, durable=True, arguments={"x-queue-type": "quorum"})
            await queue.consume(self._take)
            self._channel.set_result(channel)
            while not (channel.is_closed or connection.is_closed):
                await asyncio.sleep(_LOOK_S)
        finally:
            with contextlib.suppress(*_ERRORS):
                async with asyncio.timeout(5):
                    await connection.close()

    async def _take(self, message: AbstractIncomingMessage) -> None:
        for result in decode_results(message.body):
            self._ledger.answered("reply", result, self._works.get(result.id), again=message.redelivered)
        with contextlib.suppress(*_ERRORS):
            await message.ack()

    async def _singles(self, group: asyncio.TaskGroup) -> None:
        chance = self._mix.chance
        async for _ in self._mix.ticks(25):
            model = await self._mix.model()
            lane = chance.choice(("interactive", "bulk"))
            deadline_s = self._mix.deadline_s() if lane == "interactive" else self._mix.bulk_deadline_s()
            job = self._job(self._mix.work(), model, lane, deadline_s)
            group.create_task(self._publish([job], model, lane))
            if chance.random() < _TWICE_SHARE:
                group.create_task(self._publish([job], model, lane))

    async def _bundles(self, group: asyncio.TaskGroup) -> None:
        async for _ in self._mix.ticks(4):
            model = await self._mix.model()
            jobs = [
                self._job(self._mix.work(rows=1), model, "bulk", self._mix.bulk_deadline_s()) for _ in range(_BUNDLE)
            ]
            group.create_task(self._publish(jobs, model, "bulk"))

    def _job(self, work: Work, model: str, lane: str, deadline_s: float | None) -> Job:
        """A job as it goes over the wire, noted as sent."""
        job_id = self._mix.job_id("raw", work)
        skewed = self._skewed and self._mix.chance.random() < _SKEWED_SHARE
        skew_ms = self._mix.chance.choice(_SKEWS_MS) if skewed else 0
        now_ms = time.time_ns() // 1_000_000 + skew_ms
        x = Tensor.from_numpy(work.x)
        job = {"v": 1, "id": job_id, "model": model, "sent_unix_ms": now_ms}
        job["inputs"] = {"x": {"dtype": x.dtype, "shape": list(x.shape), "data": x.data}}
        if deadline_s is not None:
            job["deadline_unix_ms"] = now_ms + int(deadline_s * 1000)
        self._works[job_id] = work
        self._ledger.sent(
            job_id, work, sender="raw", model=model, lane=lane, deadline_s=deadline_s, skew_ms=skew_ms or None
        )
        return job

    async def _publish(self, jobs: Sequence[Job], model: str, lane: str) -> None:
        """Publish until it is confirmed, as a caller that must not lose a job does; the ids stay the same."""
        ids = [job["id"] for job in jobs]
        body = msgpack.packb(jobs[0] if len(jobs) == 1 else jobs)
        delay_s = _RETRY_MIN_S
        for _ in range(_TRIES):
            try:
                async with asyncio.timeout(_CONFIRM_LIMIT_S):
                    await self._publish_once(body, f"{model}.{lane}", bundle=len(jobs) > 1)
            except DeliveryError as error:
                self._note("refused", ids, error)
            except _ERRORS as error:
                self._note("unknown", ids, error)
            else:
                self._note("confirmed", ids)
                return
            await asyncio.sleep(delay_s * self._mix.chance.uniform(0.5, 1.5))
            delay_s = min(delay_s * 2, _RETRY_MAX_S)
        for job_id in ids:
            self._ledger.gave_up(job_id)

    async def _publish_once(self, body: bytes, key: str, *, bundle: bool) -> None:
        channel = await asyncio.shield(self._channel)
        message = aio_pika.Message(
            body,
            correlation_id=secrets.token_hex(8),
            reply_to=self.reply_to,
            content_type=CONTENT_TYPE,
            delivery_mode=aio_pika.DeliveryMode.PERSISTENT,
            message_id=secrets.token_hex(8),
            headers={"inferq-accept": "bundle"} if bundle else {},
        )
        exchange = await channel.get_exchange(JOBS_EXCHANGE, ensure=False)
        await exchange.publish(message, key)

    def _note(self, event: str, ids: Sequence[str], error: Exception | None = None) -> None:
        why = {} if error is None else {"why": f"{type(error).__name__}: {error}"[:200]}
        for job_id in ids:
            self._ledger.write(event, job_id, **why)
