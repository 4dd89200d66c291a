"""Jobs by deadline, with removal for free: entries of jobs that no longer wait are skipped and swept."""

from __future__ import annotations

import heapq
from itertools import count
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet

T = TypeVar("T")
_SLACK = 64


class DeadlineHeap(Generic[T]):
    """Earliest deadline first over the jobs that are still in `waiting`.

    A job that leaves is not searched for; its entry goes when it comes up, or in a sweep once the dead outnumber the
    living. The sweep matters: an entry holds its job, and a job holds its message body.

    Args:
        waiting: the live set of waiting jobs, owned by the policy.
    """

    def __init__(self, waiting: AbstractSet[T]) -> None:
        self._waiting = waiting
        self._heap: list[tuple[float, int, T]] = []
        self._order = count()

    def push(self, deadline_s: float, item: T) -> None:
        """Add a job of `waiting`; equal deadlines keep the order of arrival."""
        if len(self._heap) > 2 * len(self._waiting) + _SLACK:
            self._heap = [entry for entry in self._heap if entry[2] in self._waiting]
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, (deadline_s, next(self._order), item))

    def first(self) -> tuple[float, T] | None:
        """Earliest deadline and its job, or None."""
        while self._heap and self._heap[0][2] not in self._waiting:
            heapq.heappop(self._heap)
        return (self._heap[0][0], self._heap[0][2]) if self._heap else None
