"""What became of the jobs of a run that broke off: asks Redis and the parking queue, sends nothing.

What is stored and was never fetched is fetched and becomes part of the run's output.
"""

from __future__ import annotations

import collections
import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from inferq.answers import to_answer
from inferq.submission import is_final

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from inferq.parking import Parked
    from inferq.results import ResultStore
    from inferq.sources import Numbered
    from inferq.submission import Submission

__all__ = ["Account", "reconcile"]

_AT_ONCE: Final = 64
_SHOWN_IDS: Final = 5


@dataclass(slots=True)
class Account:
    """Where the records without an answer are.

    Attributes:
        fetched: answers that were stored and not fetched, by "ok" or error code; they are in the output now.
        unfit: records that are no job; they fail without being sent.
        parked: in the parking queue without a stored answer, by reason.
        unknown: nowhere: under way, never sent, or answered so long ago that the answer has expired.
        examples: ids of a few of the unknown ones.
    """

    fetched: collections.Counter[str] = field(default_factory=collections.Counter)
    unfit: int = 0
    parked: collections.Counter[str] = field(default_factory=collections.Counter)
    unknown: int = 0
    examples: list[str] = field(default_factory=list)

    @property
    def failed(self) -> int:
        """Jobs that have a terminal answer or a place, and no outputs."""
        return self.fetched.total() - self.fetched["ok"] + self.unfit + self.parked.total()


async def reconcile(submission: Submission, store: ResultStore, parked: Mapping[str, Parked]) -> Account:
    """Account for every record that the checkpoint does not have.

    Args:
        submission: the run; takes the answers that are found.
        store: where outcomes are.
        parked: the parked messages by job id.

    Raises:
        StoreUnavailable: Redis did not answer; what was found before is in the output.
    """
    account = Account()
    records = submission.open_records()
    while batch := list(itertools.islice(records, _AT_ONCE)):
        await _fetch(batch, submission, store, parked, account)
    account.unfit = submission.tally.failed - (account.fetched.total() - account.fetched["ok"])
    return account


async def _fetch(
    batch: Iterable[tuple[Numbered, str]],
    submission: Submission,
    store: ResultStore,
    parked: Mapping[str, Parked],
    account: Account,
) -> None:
    results = {result.id: result for result in await store.read([job_id for _, job_id in batch])}
    for numbered, job_id in batch:
        if job_id in results:
            answer = await to_answer(results[job_id], store, job_id=job_id)
            if is_final(answer):
                submission.finish(numbered, answer)
                account.fetched["ok" if answer.error is None else answer.error.code] += 1
                continue
        if job_id in parked:
            account.parked[parked[job_id].reason] += 1
            continue
        account.unknown += 1
        if len(account.examples) < _SHOWN_IDS:
            account.examples.append(job_id)
