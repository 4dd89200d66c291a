"""Cuts a stream of jobs into messages. Pure: no socket, no clock.

A bundle escapes most of AMQP's cost per message, but it must stay well under the body limit, and a bundle that waits
for company must not wait for jobs that cannot come.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Generic, TypeVar

from inferq.jobs import job_bytes
from inferq_schemas import BUNDLE_LANES, DEFAULT_LIMITS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from inferq_schemas import Job

__all__ = ["BUNDLE_BYTES", "Bundler", "cut", "jobs_per_bundle"]

T = TypeVar("T")

BUNDLE_BYTES: Final = DEFAULT_LIMITS.body_bytes // 2
"""Where a bundle is cut, by the estimate of `job_bytes`; a larger single job still travels, alone."""


def jobs_per_bundle(lane: str, wanted: int) -> int:
    """How many jobs a message of that lane may carry, at most `wanted`; 1 in lanes that take no bundles."""
    return min(wanted, DEFAULT_LIMITS.bundle_jobs) if lane in BUNDLE_LANES else 1


class Bundler(Generic[T]):
    """Collects jobs, or whatever stands for them, until a message is full.

    Args:
        max_jobs: jobs a message, >= 1.
        max_bytes: estimated bytes a message, > 0.
    """

    def __init__(self, max_jobs: int, max_bytes: int = BUNDLE_BYTES) -> None:
        self._max_jobs = max_jobs
        self._max_bytes = max_bytes
        self._jobs: list[T] = []
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._jobs)

    def add(self, job: T, size: int) -> Iterator[tuple[T, ...]]:
        """Take a job of about `size` bytes; yields the bundles that are complete now, none to two of them."""
        if self._jobs and self._bytes + size > self._max_bytes:
            yield self.flush()
        self._jobs.append(job)
        self._bytes += size
        if len(self._jobs) >= self._max_jobs or self._bytes >= self._max_bytes:
            yield self.flush()

    def flush(self) -> tuple[T, ...]:
        """Give what was collected, possibly nothing, and start anew."""
        jobs = tuple(self._jobs)
        self._jobs.clear()
        self._bytes = 0
        return jobs


def cut(jobs: Iterable[Job], max_jobs: int) -> Iterator[tuple[Job, ...]]:
    """Cut jobs of one model, all there already, into messages of at most `max_jobs`, in order."""
    bundler: Bundler[Job] = Bundler(max_jobs)
    for job in jobs:
        yield from bundler.add(job, job_bytes(job))
    if len(bundler):
        yield bundler.flush()
