"""What the CPU workers of a model could do for a job: their speed and number, and what waits for them already.

CPU workers publish service time and lanes with every heartbeat; the depth of the fallback queue is a passive count of
the broker; what this worker diverted since that count is multiplied by the number of GPU workers, so that all of them
together do not divert into the same gap at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgpack

if TYPE_CHECKING:
    from collections.abc import Mapping

STALE_AFTER_S = 5.0
HOP_S = 0.01
"""Through the broker to a CPU worker and back, seconds (measured hop of 9 to 31 ms includes dead-lettering)."""


@dataclass(frozen=True, slots=True)
class CpuWorker:
    """What one CPU worker says of itself.

    Attributes:
        run_s: seconds that it takes for one row of the model, p95.
        lanes: runs at a time.
        held_jobs: jobs that it has in hand; the broker's count of its queue does not see them.
        beat: counts up with every heartbeat, so that a stale entry shows without comparing clocks.
    """

    run_s: float
    lanes: int
    held_jobs: int
    beat: int

    def encode(self) -> bytes:
        """As it stands in the store."""
        return bytes(msgpack.packb([self.run_s, self.lanes, self.held_jobs, self.beat]))

    @classmethod
    def decode(cls, raw: bytes) -> CpuWorker:
        """Read a stored entry."""
        run_s, lanes, held_jobs, beat = msgpack.unpackb(raw)
        return cls(run_s, lanes, held_jobs, beat)


@dataclass(slots=True)
class CpuPool:
    """The CPU workers of one model, as seen by a GPU worker; absent workers mean no diversion.

    A worker counts for `STALE_AFTER_S` after its latest beat was seen, by this process's own clock: also while the
    store cannot be asked, so that nothing is diverted to workers of which nobody knows whether they still live.
    """

    queued_jobs: int = 0
    gpu_workers: int = 1
    diverted_since: int = 0
    _seen: dict[str, tuple[CpuWorker, float]] = field(default_factory=dict)

    def update(
        self, workers: Mapping[str, CpuWorker], *, gpu_workers: int, queued_jobs: int | None, now_s: float
    ) -> None:
        """Take a new picture in.

        Args:
            workers: by worker id, as stored.
            gpu_workers: workers that divert to this pool, this one included.
            queued_jobs: depth of the fallback queue; None if it could not be counted, and the old one stands.
            now_s: monotonic seconds.
        """
        self._seen = {worker: self._beat(worker, entry, now_s) for worker, entry in workers.items()}
        self.gpu_workers = max(1, gpu_workers)
        if queued_jobs is not None:
            self.queued_jobs = queued_jobs
            self.diverted_since = 0

    def lives(self, now_s: float) -> bool:
        """Whether a CPU worker serves the fallback queue, as far as is known."""
        return any(entry.lanes for entry in self._fresh(now_s))

    def finish_s(self, rows: int, now_s: float) -> float | None:
        """When a CPU worker would answer a job diverted now, monotonic seconds; None if there is none."""
        fresh = self._fresh(now_s)
        lanes = sum(entry.lanes for entry in fresh)
        if not lanes:
            return None
        run_s = max(entry.run_s for entry in fresh)
        held_jobs = sum(entry.held_jobs for entry in fresh)
        before = self.queued_jobs + held_jobs + self.diverted_since * self.gpu_workers
        return now_s + HOP_S + (before // lanes) * run_s + run_s * rows

    def diverted(self) -> None:
        """One job was diverted."""
        self.diverted_since += 1

    def _fresh(self, now_s: float) -> list[CpuWorker]:
        return [entry for entry, seen_s in self._seen.values() if now_s - seen_s < STALE_AFTER_S]

    def _beat(self, worker: str, entry: CpuWorker, now_s: float) -> tuple[CpuWorker, float]:
        """The entry, and when its beat was first seen."""
        known = self._seen.get(worker)
        return entry, now_s if known is None or known[0].beat != entry.beat else known[1]
