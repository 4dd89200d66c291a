"""`inferq submit --reconcile`: says where each record of a run is. What is looked at stands in `inferq.reconcile`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from inferq.amqp import BrokerUnreachable
from inferq.browse import BrowseError
from inferq.counts import count_existing
from inferq.parking_queue import ParkingQueue
from inferq.reconcile import Account, reconcile
from inferq.results import ResultStore
from inferq_schemas import DEAD_QUEUE, fallback_queue, lane_queue

if TYPE_CHECKING:
    from collections.abc import Mapping

    from inferq.parking import Parked
    from inferq.settings import ClientSettings
    from inferq.submission import Submission

__all__ = ["Reconciliation", "report"]

_EXIT_FAILED, _EXIT_UNKNOWN = 1, 3


class Reconciliation:
    """One look at where the records of a run are.

    Args:
        settings: where broker and Redis are.
        model: of the run.
        lane: of the run.

    Attributes:
        account: what was found; None until then.
        waiting: messages in the queues where an unknown job may still be, by queue; only if there is one.
    """

    def __init__(self, settings: ClientSettings, model: str, lane: str) -> None:
        self._settings = settings
        self._queues = [lane_queue(model, lane), fallback_queue(model), DEAD_QUEUE]
        self.account: Account | None = None
        self.waiting: Mapping[str, int] = {}

    async def run(self, submission: Submission) -> None:
        """Find out, and bring the answers found into the output.

        Raises:
            StoreUnavailable: Redis did not answer.
        """
        store = ResultStore(self._settings.redis)
        try:
            await store.ping()
            self.account = await reconcile(submission, store, await self._parked())
        finally:
            await store.close()
        if self.account.unknown:
            self.waiting = await self._waiting()

    @property
    def status(self) -> int:
        """Exit status."""
        if self.account is None or self.account.unknown:
            return _EXIT_UNKNOWN
        return _EXIT_FAILED if self.account.failed else 0

    async def _parked(self) -> dict[str, Parked]:
        try:
            async with ParkingQueue(self._settings.broker) as queue:
                return {job_id: message for message in await queue.scan() for job_id in message.job_ids}
        except (BrokerUnreachable, BrowseError) as error:
            print(f"inferq: what is parked cannot be seen and counts as unknown: {error}", file=sys.stderr)
            return {}

    async def _waiting(self) -> dict[str, int]:
        try:
            counts = await count_existing(self._settings.broker, self._queues)
        except BrokerUnreachable:
            return {}
        return {queue: count.ready for queue, count in counts.items() if count.ready}


def report(account: Account, *, before: int, waiting: Mapping[str, int]) -> list[str]:
    """What was found, in lines for a person.

    Args:
        account: what was found.
        before: records that were answered before.
        waiting: messages by queue.
    """
    fetched, ok = account.fetched.total(), account.fetched["ok"]
    failed = {code: count for code, count in account.fetched.items() if code != "ok"}
    parts = [f"{before:,} answered before", f"{fetched:,} fetched now ({ok:,} ok{_named(failed, ', ')})"]
    parts += [f"{account.unfit:,} no job (invalid_input)"] if account.unfit else []
    parts.append(f"{account.parked.total():,} parked{_named(account.parked, ' (', ')')}")
    lines = [", ".join([*parts, f"{account.unknown:,} unknown"])]
    if account.parked:
        lines.append(
            "parked without a stored answer: `inferq dead show ID` says why, `inferq dead requeue ID` runs it again"
        )
    if account.unknown:
        lines.append(
            f"unknown, such as {', '.join(account.examples)}: under way, never sent, or answered longer ago than "
            "answers are kept (redis.result_ttl_s, redis.replied_ttl_s)"
        )
        lines += [f"{queue} holds {count:,} messages, perhaps theirs" for queue, count in waiting.items()]
        lines.append("the same command without --reconcile sends what is unknown or parked again, under the same ids")
    return lines


def _named(counts: Mapping[str, int], before: str, after: str = "") -> str:
    words = ", ".join(f"{name} {count:,}" for name, count in sorted(counts.items()))
    return f"{before}{words}{after}" if words else ""
