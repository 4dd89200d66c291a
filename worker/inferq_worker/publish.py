"""What leaves the worker over AMQP: replies to requesters, jobs moved on to the fallback or back, jobs parked.

Everything is confirmed. Whoever republishes strips every `x-*` header: RabbitMQ 3.10 drops a message that carries a
copied `x-death` without a word.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections import defaultdict
from typing import TYPE_CHECKING

from inferq.amqp import (
    Publisher,
    PublishFailed,
    PublishForbidden,
    PublishUnknown,
    Refused,
    Unencodable,
    Unroutable,
    properties,
)
from inferq.headers import kept, next_attempt, short, trace
from inferq_schemas import (
    ACCEPT_BUNDLE_HEADER,
    ATTEMPT_HEADER,
    DEFAULT_LIMITS,
    FALLBACK_EXCHANGE,
    JOBS_EXCHANGE,
    PARKING_EXCHANGE,
    Result,
    encode_job,
    encode_result,
    encode_results,
)
from inferq_worker.refusing import RefusingQueues

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from inferq_schemas import Job, Tensor
    from inferq_worker.observe.metrics import Metrics
    from inferq_worker.work import Delivery, Request

_log = logging.getLogger(__name__)
DIRECT_REPLY = "amq.rabbitmq.reply-to."
_BUNDLE_RESULTS = 64
_ENVELOPE_BYTES = 64 * 1024
"""Room for everything in a reply besides the data of its outputs."""
_TOLD_NOBODY = (
    "the job was answered, but its reply queue is gone and Redis could not store the answer; requeue it to have it "
    "answered again"
)
_RETRY_MIN_S, _RETRY_MAX_S = 0.1, 5.0
_REFUSED_RETRY_MAX_S = 0.5


class ReplyAllowList:
    """Which queues may be named in `reply_to`: a client must not make the worker write anywhere.

    Args:
        patterns: regular expressions matched against the whole name.
        exchange: through which answers travel; direct reply-to works through the default exchange ("") only.
    """

    def __init__(self, patterns: Sequence[str], *, exchange: str = "") -> None:
        self._exchange = exchange
        self._allowed = re.compile("|".join(f"(?:{pattern})" for pattern in patterns) or r"(?!)")

    def allows(self, reply_to: str) -> bool:
        """Whether the worker answers there; never a queue of ours."""
        never = ("inferq.", DIRECT_REPLY) if self._exchange else ("inferq.",)
        return not reply_to.startswith(never) and self._allowed.fullmatch(reply_to) is not None

    def refusal(self, reply_to: str) -> str:
        """Why not, for the log and the stored answer."""
        bind = f" and bind it to {self._exchange} under its own name" if self._exchange else ""
        return f"reply_to {reply_to[:100]!r} is not on the allow-list; name the reply queue reply.<something>{bind}"


class Replies:
    """Sends results to reply queues, those of one batch to one queue as bundles where the requester asked for it."""

    def __init__(self, publisher: Publisher, metrics: Metrics, *, exchange: str = "") -> None:
        self._publisher = publisher
        self._metrics = metrics
        self._exchange = exchange
        self._refusing = RefusingQueues()

    async def send(self, answers: Iterable[tuple[Request, Result]]) -> list[tuple[Request, bool]]:
        """Publish and wait until each reply is confirmed, or its requester is known to be gone.

        Returns:
            Each request and whether its reply was confirmed. False: the queue is gone, or has taken nothing for two
            seconds, or the delivery went stale meanwhile (it comes again and is answered then).
        """
        singles: list[tuple[Request, Result]] = []
        bundles: dict[str, list[tuple[Request, Result]]] = defaultdict(list)
        for request, result in answers:
            if request.reply_to is None:
                continue
            # An answer without id speaks of its whole message, which only that message's correlation id tells.
            if result.id and request.delivery.headers.get(ACCEPT_BUNDLE_HEADER) == "bundle":
                bundles[request.reply_to].append((request, result))
            else:
                singles.append((request, result))
        sends = [self._send_or_log([pair]) for pair in singles]
        for group in bundles.values():
            sends += [
                self._send_or_log(group[at : at + _BUNDLE_RESULTS]) for at in range(0, len(group), _BUNDLE_RESULTS)
            ]
        return [pair for pairs in await asyncio.gather(*sends) for pair in pairs]

    async def _send_or_log(self, pairs: Sequence[tuple[Request, Result]]) -> list[tuple[Request, bool]]:
        """One reply that cannot be made must not keep the others, and the worker, from going on."""
        try:
            return await self._send(pairs)
        except Exception:  # noqa: BLE001 - logged whole
            _log.exception("a reply of %d results could not be sent", len(pairs))
            self._metrics.reply("failed")
            return [(request, False) for request, _ in pairs]

    async def _send(self, pairs: Sequence[tuple[Request, Result]]) -> list[tuple[Request, bool]]:
        pairs = [(request, sendable(result)) for request, result in pairs]
        bodies = [encode_result(result) for _, result in pairs]
        if len(pairs) > 1 and sum(map(len, bodies)) > DEFAULT_LIMITS.body_bytes // 2:
            middle = len(pairs) // 2
            return await self._send(pairs[:middle]) + await self._send(pairs[middle:])
        body = bodies[0] if len(pairs) == 1 else encode_results([result for _, result in pairs])
        confirmed = await self._deliver(pairs[0][0].delivery, body, [request.delivery for request, _ in pairs])
        return [(request, confirmed) for request, _ in pairs]

    async def _deliver(self, delivery: Delivery, body: bytes, deliveries: Sequence[Delivery]) -> bool:
        reply_to, delay_s = delivery.reply_to or "", _RETRY_MIN_S
        while not self._refusing.closed(reply_to, time.monotonic()):
            try:
                await self._publish(delivery, reply_to, body)
            except Unroutable:
                self._refusing.took(reply_to)
                self._metrics.reply("returned")
                return False
            except Unencodable as error:
                _log.warning("no reply can be sent to %.80r: %s", reply_to, error)
                break
            except PublishUnknown:
                # Not known to have arrived: again, until the broker has taken the job away from us.
                if not await self._may_repeat(deliveries):
                    break
            except (Refused, PublishForbidden):
                if self._refusing.refused(reply_to, time.monotonic()):
                    break
                delay_s = min(delay_s, _REFUSED_RETRY_MAX_S)
            else:
                self._refusing.took(reply_to)
                self._metrics.reply("confirmed")
                return True
            await asyncio.sleep(delay_s)
            delay_s = min(delay_s * 2, _RETRY_MAX_S)
        self._metrics.reply("failed")
        return False

    async def _publish(self, delivery: Delivery, reply_to: str, body: bytes) -> None:
        await self._publisher.publish(
            body,
            exchange=self._exchange,
            routing_key=reply_to,
            properties=properties(correlation_id=short(delivery.correlation_id), headers=trace(delivery.headers)),
            mandatory=not reply_to.startswith(DIRECT_REPLY),
            patient=True,
        )

    async def _may_repeat(self, deliveries: Sequence[Delivery]) -> bool:
        """Wait while the broker takes no messages: what is published then lies in its socket and arrives afterwards."""
        while ours := not all(one.stale for one in deliveries):
            if not await self._publisher.blocked():
                break
            await asyncio.sleep(_RETRY_MAX_S)
        return ours


class Mover:
    """Moves jobs between our own queues: publish with confirm first, settle afterwards."""

    def __init__(self, publisher: Publisher, metrics: Metrics) -> None:
        self._publisher = publisher
        self._metrics = metrics

    async def blocked(self) -> bool:
        """Whether the broker takes no messages for now, so that trying again would only multiply them."""
        return await self._publisher.blocked()

    async def park(self, delivery: Delivery, job: Job | None, result: Result, *, bare: bool = False) -> None:
        """Put a job that failed for reasons other than its caller's into parking, with the reason in its headers.

        `bare` leaves out the sender's headers and address; so does a message that cannot be written with them.

        Raises:
            PublishFailed: it is not known to be parked; the delivery must not be acknowledged.
        """
        error = result.error
        headers, dropped = ({}, len(delivery.headers)) if bare else kept(delivery.headers)
        note = f" ({dropped} headers of the sender were left out)" if dropped else ""
        headers |= {
            "inferq-reason": error.code if error else "internal",
            "inferq-message": (error.message if error else _TOLD_NOBODY)[:500] + note,
            "inferq-job": result.id,
            "inferq-parked-unix-ms": int(time.time() * 1000),
        }
        try:
            await self._publisher.publish(
                delivery.body if job is None else encode_job(job),
                exchange=PARKING_EXCHANGE,
                routing_key=delivery.routing_key,
                properties=properties(
                    correlation_id=None if bare else short(delivery.correlation_id),
                    reply_to=None if bare else delivery.reply_to,
                    headers=headers,
                ),
                patient=True,
            )
        except Unencodable:
            if bare:
                raise
            await self.park(delivery, job, result, bare=True)
            return
        self._metrics.parked(delivery.routing_key.partition(".")[0], error.code if error else "internal")

    async def pass_on(
        self,
        delivery: Delivery,
        body: bytes,
        *,
        exchange: str,
        expiration_ms: int | None,
        why: Mapping[str, object] | None = None,
        bare: bool = False,
    ) -> None:
        """Publish a job to `inferq.fallback` or `inferq.jobs` under its routing key, one attempt further.

        `why` are headers for people who look at the message. `bare` leaves out the sender's headers and the time limit.

        Raises:
            Unroutable: no queue there takes it (no CPU role for this model).
            PublishFailed: not known to have arrived.
        """
        if exchange not in (FALLBACK_EXCHANGE, JOBS_EXCHANGE):
            raise ValueError(f"jobs are not passed on to {exchange!r}")
        headers, _ = ({}, 0) if bare else kept(delivery.headers)
        headers |= {ATTEMPT_HEADER: next_attempt(delivery.headers), **(why or {})}
        await self._publisher.publish(
            body,
            exchange=exchange,
            routing_key=delivery.routing_key,
            properties=properties(
                correlation_id=short(delivery.correlation_id),
                reply_to=delivery.reply_to,
                expiration_ms=None if bare else expiration_ms,
                headers=headers,
            ),
            patient=True,
        )


def sendable(result: Result) -> Result:
    """The result, or `too_large` where its outputs do not fit in a message (Redis away, or very many outputs)."""
    payload_bytes = sum(_packed_bytes(tensor) for tensor in result.outputs.values())
    if payload_bytes < DEFAULT_LIMITS.body_bytes - _ENVELOPE_BYTES:
        return result
    message = f"outputs of {payload_bytes} bytes do not fit in a reply of {DEFAULT_LIMITS.body_bytes}"
    return Result.failed(result.id, "too_large", message, served_by=result.served_by)


def _packed_bytes(tensor: Tensor) -> int:
    """At most so many bytes in msgpack, which gives each text a head of up to five."""
    return tensor.payload_bytes + (5 * len(tensor.data) if isinstance(tensor.data, tuple) else 0)


__all__ = ["DIRECT_REPLY", "Mover", "PublishFailed", "Replies", "ReplyAllowList"]
