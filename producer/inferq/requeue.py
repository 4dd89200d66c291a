"""Sends parked jobs back to their lanes: the outcome deleted, the job published and confirmed, the parked copy removed.

In this order, so that a crash in between leaves a job twice and never not at all. A job that is there twice runs twice
at most: its id and its stored outcome are one.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from inferq.amqp import PublishForbidden, Refused, Unencodable, Unroutable, properties
from inferq.headers import kept, short
from inferq.jobs import INTERACTIVE_LANE, expiration_ms
from inferq.parking import REQUEUES_HEADER, readable_jobs
from inferq_schemas import (
    ACCEPT_BUNDLE_HEADER,
    JOBS_EXCHANGE,
    ContractError,
    encode_bundle,
    encode_job,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from aiormq.abc import DeliveredMessage

    from inferq.amqp import Properties, Publisher
    from inferq.parking import Parked
    from inferq.results import ResultStore
    from inferq_schemas import Job

__all__ = ["NewDeadline", "Requeuer", "Stays", "why_it_stays"]


class Stays(Exception):  # noqa: N818 - reads as what it says
    """This message stays parked; the message says why, and the mend."""


@dataclass(frozen=True, slots=True)
class NewDeadline:
    """What becomes of the jobs' deadlines.

    Attributes:
        kind: "own" = as it was; "none" = without; "new" = `seconds` from now.
        seconds: > 0, for "new".
    """

    kind: Literal["own", "none", "new"] = "own"
    seconds: float = 0.0

    def apply(self, job: Job, now_ms: int) -> Job:
        """The job as it is sent again now."""
        if self.kind == "own":
            return job
        deadline_ms = None if self.kind == "none" else now_ms + max(1, round(self.seconds * 1000))
        return job.model_copy(update={"deadline_unix_ms": deadline_ms, "sent_unix_ms": now_ms})


def why_it_stays(message: Parked, deadline: NewDeadline, now_ms: int) -> str | None:
    """Why a message cannot be sent back, as far as it can be told without Redis; None if it can."""
    if message.problem is not None:
        return f"no readable job ({message.problem}): it can only be dropped"
    if deadline.kind == "own" and message.expired(now_ms):
        return "its deadline has passed, it would only expire again: give --deadline-s N or --no-deadline"
    if deadline.kind == "none" and message.lane == INTERACTIVE_LANE:
        return f"lane {INTERACTIVE_LANE} requires a deadline: give --deadline-s N"
    return None


class Requeuer:
    """Sends single messages back.

    Args:
        publisher: of a connection of its own.
        store: where outcomes and large inputs are.
        deadline: what becomes of deadlines.
        cpu_reserve_ratio: as in `expiration_ms`.
    """

    def __init__(
        self, publisher: Publisher, store: ResultStore, deadline: NewDeadline, *, cpu_reserve_ratio: float
    ) -> None:
        self._publisher = publisher
        self._store = store
        self._deadline = deadline
        self._cpu_reserve_ratio = cpu_reserve_ratio

    async def send(self, message: DeliveredMessage, summary: Parked) -> None:
        """Publish the jobs of a parked message to their lane, and wait for the confirm; remove it only after that.

        Raises:
            Stays: it was not sent; its outcomes are as they were.
            PublishFailed: unknown, or nothing can be published at all: its outcomes are gone, the message must stay.
            StoreUnavailable: Redis did not answer; it was not sent.
        """
        now_ms = time.time_ns() // 1_000_000
        if reason := why_it_stays(summary, self._deadline, now_ms):
            raise Stays(reason)
        jobs = [self._deadline.apply(job, now_ms) for job in readable_jobs(message.body)]
        body = _body(jobs)
        for job in jobs:
            if not await self._store.hold_inputs(job, now_ms=now_ms):
                raise Stays(
                    f"inputs of job {job.id} that were kept in Redis have expired: its sender must send it anew"
                )
        forgotten = await self._store.forget([job.id for job in jobs])
        try:
            await self._publisher.publish(
                body,
                exchange=JOBS_EXCHANGE,
                routing_key=summary.routing_key,
                properties=self._properties(jobs, message, now_ms),
            )
        except PublishForbidden:
            await self._store.remember(forgotten)
            raise
        except (Unroutable, Refused, Unencodable) as error:
            await self._store.remember(forgotten)
            raise Stays(str(error)) from error

    def _properties(self, jobs: Sequence[Job], message: DeliveredMessage, now_ms: int) -> Properties:
        old = message.header.properties
        return properties(
            correlation_id=short(old.correlation_id),
            reply_to=short(old.reply_to),
            expiration_ms=expiration_ms(jobs, now_ms=now_ms, cpu_reserve_ratio=self._cpu_reserve_ratio),
            headers=fresh_headers(old.headers or {}),
        )


def fresh_headers(headers: Mapping[str, object]) -> dict[str, object]:
    """The sender's headers, as at the first attempt: without the broker's, and without what workers wrote into them."""
    found, _ = kept(headers)
    senders = {
        name: value for name, value in found.items() if name == ACCEPT_BUNDLE_HEADER or not name.startswith("inferq-")
    }
    before = headers.get(REQUEUES_HEADER)
    return senders | {REQUEUES_HEADER: (before if isinstance(before, int) and 0 <= before < 1_000_000 else 0) + 1}


def _body(jobs: Sequence[Job]) -> bytes:
    try:
        return encode_job(jobs[0]) if len(jobs) == 1 else encode_bundle(jobs)
    except ContractError as error:
        raise Stays(f"cannot be written again: {error.message}") from error
