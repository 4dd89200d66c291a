"""What the CPU workers of a model could do for a job: their speed and number, and what waits for them already.

CPU workers publish service time and lanes with every heartbeat; the depth of the fallback queue is a passive count of
the broker; what this worker diverted since that count is multiplied by the number of GPU workers, so that all of them
together do not divert into the same gap at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgpack

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
    """The CPU workers of one model, as seen by a GPU worker; absent workers mean no diversion."""

    run_s: float = 0.0
    lanes: int = 0
    queued_jobs: int = 0
    held_jobs: int = 0
    gpu_workers: int = 1
    diverted_since: int = 0
    _seen: dict[str, tuple[int, float]] = field(default_factory=dict)

    def update(self, workers: dict[str, CpuWorker], *, gpu_workers: int, queued_jobs: int | None, now_s: float) -> None:
        """Take a new picture in.

        Args:
            workers: by worker id, as stored.
            gpu_workers: workers that divert to this pool, this one included.
            queued_jobs: depth of the fallback queue; None if it could not be counted, and the old one stands.
            now_s: monotonic seconds.
        """
        for worker, entry in workers.items():
            if worker not in self._seen or self._seen[worker][0] != entry.beat:
                self._seen[worker] = (entry.beat, now_s)
        self._seen = {worker: seen for worker, seen in self._seen.items() if worker in workers}
        fresh = [entry for worker, entry in workers.items() if now_s - self._seen[worker][1] < STALE_AFTER_S]
        self.lanes = sum(entry.lanes for entry in fresh)
        self.held_jobs = sum(entry.held_jobs for entry in fresh)
        self.run_s = max((entry.run_s for entry in fresh), default=0.0)
        self.gpu_workers = max(1, gpu_workers)
        if queued_jobs is not None:
            self.queued_jobs = queued_jobs
            self.diverted_since = 0

    def finish_s(self, rows: int, now_s: float) -> float | None:
        """When a CPU worker would answer a job diverted now, monotonic seconds; None if there is none."""
        if not self.lanes:
            return None
        before = self.queued_jobs + self.held_jobs + self.diverted_since * self.gpu_workers
        return now_s + HOP_S + (before // self.lanes) * self.run_s + self.run_s * rows

    def diverted(self) -> None:
        """One job was diverted."""
        self.diverted_since += 1
