"""Poison: which redelivered jobs stood in a run that never ended, and what follows. Pure: the store has the records."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import msgpack

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable


class Verdict(Enum):
    """What to do with a redelivered job."""

    CLEAR = "clear"
    """It was in no unfinished run (a drain, a lost connection): batch it as usual."""
    ALONE = "alone"
    """It stood in one unfinished run, with others or by itself: run it by itself. One death may have any cause."""
    WAIT = "wait"
    """A suspect that runs alone in a worker that may still live: ask again when that worker's heartbeat has lapsed."""
    PARK = "park"
    """A suspect that ran alone and ended its worker: the second death that it was there for."""


@dataclass(frozen=True, slots=True)
class RunRecord:
    """A run in progress, as the store keeps it until the run ends.

    Args:
        key: `<worker>/<number>`, unique.
        worker: id of the process that runs it; new at every start.
        ids: jobs of the run.
        started_unix_ms: wall clock; old records are swept.
    """

    key: str
    worker: str
    ids: frozenset[str]
    started_unix_ms: int

    def encode(self) -> bytes:
        """The value under `key` in the store's hash of running records."""
        return bytes(msgpack.packb([self.worker, sorted(self.ids), self.started_unix_ms]))

    @classmethod
    def decode(cls, key: str, raw: bytes) -> RunRecord:
        """Read a stored record."""
        worker, ids, started_unix_ms = msgpack.unpackb(raw)
        return cls(key, worker, frozenset(ids), started_unix_ms)


def judge(job_id: str, records: Iterable[RunRecord], alive: Collection[str], me: str) -> Verdict:
    """Decide about a redelivered job that this process does not hold.

    Args:
        job_id: the job.
        records: runs that have not ended.
        alive: worker ids with a current heartbeat.
        me: this worker's id; own records are runs that this process knows to be over or under way.
    """
    suspect = [record for record in records if job_id in record.ids and record.worker != me]
    # Deaths are counted by worker: a job that goes in steps can stand in two records of the same one.
    if len({record.worker for record in suspect}) == 1:
        return Verdict.ALONE
    solo = [record for record in suspect if len(record.ids) == 1]
    if any(record.worker not in alive for record in solo):
        return Verdict.PARK
    if solo:
        return Verdict.WAIT
    return Verdict.ALONE if suspect else Verdict.CLEAR
