"""Gets a message of jobs into its queue, or says what is known about it.

A full queue and a blocked broker are waited out with backoff, as long as the jobs can wait; a publish without confirm
is unknown and done again with the same job ids, which workers deduplicate. Waits for no answer.
"""

from __future__ import annotations

import asyncio
import random
import time
from typing import TYPE_CHECKING, Final, NoReturn

from inferq.amqp import PublishFailed, PublishForbidden, PublishUnknown, Refused, Unencodable, Unroutable, properties
from inferq.errors import BrokerBlocked, BrokerForbids, JobTooLarge, NotSent, QueueFull, SendUnknown, UnknownModel
from inferq.jobs import expiration_ms
from inferq_schemas import (
    ACCEPT_BUNDLE_HEADER,
    DEFAULT_LANES,
    JOBS_EXCHANGE,
    ContractError,
    encode_bundle,
    encode_job,
    routing_key,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from inferq.amqp import Link, Properties, Publisher
    from inferq_schemas import Job

__all__ = ["JobSender", "encode_jobs"]

_BACKOFF_MIN_S: Final = 0.05
_BACKOFF_MAX_S: Final = 2.0
_BLOCKED_POLL_S: Final = 0.1
"""aiormq tells nobody when the broker unblocks a connection, so it is asked."""
_FORBIDDEN_TRIES: Final = 2
"""A channel that the broker closed fails all publishes on it, also those that were not to blame."""


def encode_jobs(jobs: Sequence[Job]) -> bytes:
    """The message body: a lone job as a map, several as a bundle.

    Raises:
        JobTooLarge: above the body limit.
    """
    try:
        return encode_job(jobs[0]) if len(jobs) == 1 else encode_bundle(jobs)
    except ContractError as error:
        raise JobTooLarge(
            f"job {jobs[0].id}: {error.message}; send fewer rows a job, or configure Redis, which takes large inputs",
        ) from error


class JobSender:
    """Publishes jobs through one publisher.

    Args:
        link: the publisher's connection, asked whether the broker blocks it.
        publisher: confirms or says why not.
        publish_timeout_s: longest wait for one confirm, in seconds.
        cpu_reserve_ratio: share of the time left that `expiration` keeps for the CPU fallback.
    """

    def __init__(self, link: Link, publisher: Publisher, *, publish_timeout_s: float, cpu_reserve_ratio: float) -> None:
        self._link = link
        self._publisher = publisher
        self._publish_timeout_s = publish_timeout_s
        self._cpu_reserve_ratio = cpu_reserve_ratio

    async def send(
        self, jobs: Sequence[Job], *, lane: str, correlation_id: str, reply_to: str | None, give_up_s: float
    ) -> None:
        """Publish jobs of one model as one message and wait for the confirm.

        Args:
            jobs: at least one, all of one model.
            lane: the model's lane.
            correlation_id: comes back with every reply to this message.
            reply_to: reply queue; None = the answer is looked up in Redis.
            give_up_s: monotonic time after which trying again makes no sense. The first try is always made.

        Raises:
            UnknownModel: no such queue.
            QueueFull: refused until `give_up_s`.
            BrokerBlocked: blocked until `give_up_s`.
            SendUnknown: no confirm until `give_up_s`.
            BrokerForbids: the broker closed the channel over it.
            JobTooLarge: above the body limit; nothing was sent.
        """
        body = encode_jobs(jobs)
        key = routing_key(jobs[0].model, lane)
        forbidden = 0
        delay_s = _BACKOFF_MIN_S
        uncertain = False
        while True:
            await self._wait_unblocked(give_up_s, uncertain=uncertain)
            try:
                await self._publisher.publish(
                    body,
                    exchange=JOBS_EXCHANGE,
                    routing_key=key,
                    properties=self._properties(jobs, correlation_id, reply_to),
                    timeout_s=self._confirm_limit_s(give_up_s),
                )
            except PublishFailed as error:
                forbidden += isinstance(error, PublishForbidden)
                uncertain = uncertain or isinstance(error, PublishUnknown)
                pause_s = delay_s * random.uniform(0.5, 1.5)  # noqa: S311 - jitter, not a secret
                hopeless = isinstance(error, (Unroutable, Unencodable)) or forbidden >= _FORBIDDEN_TRIES
                if hopeless or time.monotonic() + pause_s > give_up_s:
                    _raise_final(error, jobs, lane, uncertain=uncertain)
            else:
                return
            await asyncio.sleep(pause_s)
            delay_s = min(delay_s * 2, _BACKOFF_MAX_S)

    def _properties(self, jobs: Sequence[Job], correlation_id: str, reply_to: str | None) -> Properties:
        return properties(
            correlation_id=correlation_id,
            reply_to=reply_to,
            expiration_ms=expiration_ms(
                jobs, now_ms=time.time_ns() // 1_000_000, cpu_reserve_ratio=self._cpu_reserve_ratio
            ),
            headers={ACCEPT_BUNDLE_HEADER: "bundle"} if reply_to is not None and len(jobs) > 1 else None,
        )

    def _confirm_limit_s(self, give_up_s: float) -> float:
        return max(0.05, min(self._publish_timeout_s, give_up_s - time.monotonic()))

    async def _wait_unblocked(self, give_up_s: float, *, uncertain: bool) -> None:
        while await self._link.blocked():
            if time.monotonic() > give_up_s:
                known = "may be queued all the same" if uncertain else "was not sent"
                raise BrokerBlocked(
                    "the broker takes no messages (a memory or disk alarm: see `rabbitmqctl status`), "
                    f"and did not recover in time; the job {known}",
                )
            await asyncio.sleep(_BLOCKED_POLL_S)


def _raise_final(error: PublishFailed, jobs: Sequence[Job], lane: str, *, uncertain: bool) -> NoReturn:
    final = _final(error, jobs[0].model, lane)
    if uncertain and isinstance(final, NotSent):
        # An earlier try got no confirm, so "certainly not queued" would be a lie.
        raise SendUnknown(
            f"{final}; an earlier try was not confirmed, so the job may be queued all the same"
        ) from error
    raise final from error


def _mend_of_unknown(model: str, lane: str) -> str:
    if lane in DEFAULT_LANES:
        return f"check the model's name, or add the model with `inferq topology add-model {model}`"
    return (
        f"check the lane (the default lanes are {', '.join(DEFAULT_LANES)}) and the model's name, or add them with "
        f"`inferq topology add-model {model} --lanes {','.join((*DEFAULT_LANES, lane))}`"
    )


def _final(error: PublishFailed, model: str, lane: str) -> NotSent | SendUnknown:
    queue = f"model {model!r}, lane {lane!r}"
    match error:
        case Unroutable():
            return UnknownModel(f"no queue for model {model!r} in lane {lane!r}: {_mend_of_unknown(model, lane)}")
        case Refused():
            return QueueFull(
                f"the queue of {queue} stayed full: send more slowly, start workers, or raise its max-length-bytes",
            )
        case Unencodable():
            return NotSent(f"no message can be made of the job: {error}")
        case PublishForbidden():
            return BrokerForbids(
                f"the broker closed the channel on publishing to {JOBS_EXCHANGE!r}: {error}; "
                "create the exchange with `inferq topology apply`, or let this user write to it",
            )
        case _:
            return SendUnknown(f"{error}; the job may be queued or not, sending it again with the same id is safe")
