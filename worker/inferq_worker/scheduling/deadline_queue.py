"""Waiting jobs by deadline, in a sorted list: expiry is a cut at the front, and admission can ask for a rank."""

from __future__ import annotations

from bisect import bisect_left, insort
from itertools import count
from typing import TYPE_CHECKING, Generic, TypeVar

from inferq_worker.scheduling.batch import Entry

if TYPE_CHECKING:
    from collections.abc import Iterator

T = TypeVar("T", bound=Entry)


class DeadlineQueue(Generic[T]):
    """Jobs in the order in which they are due; equal times keep the order of arrival.

    Finding a place costs log n comparisons; the list moves its tail in one block, which at ten thousand waiting jobs
    is still below a microsecond, because new jobs are mostly due last.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[float, int, T]] = []
        self._keys: dict[T, tuple[float, int]] = {}
        self._order = count()
        self.rows = 0

    def __len__(self) -> int:
        """How many jobs wait."""
        return len(self._entries)

    def __contains__(self, item: object) -> bool:
        """Whether the job waits here."""
        return item in self._keys

    def add(self, item: T, due_s: float) -> None:
        """Take a job in that is due at `due_s`, monotonic seconds."""
        key = (due_s, next(self._order))
        self._keys[item] = key
        insort(self._entries, (*key, item))
        self.rows += item.rows

    def remove(self, item: T) -> bool:
        """Take a job out; False if it does not wait here."""
        key = self._keys.pop(item, None)
        if key is None:
            return False
        del self._entries[bisect_left(self._entries, key)]
        self.rows -= item.rows
        return True

    def cut(self, jobs: int) -> list[T]:
        """Take the first `jobs` jobs out."""
        items = [entry[2] for entry in self._entries[:jobs]]
        del self._entries[:jobs]
        for item in items:
            del self._keys[item]
            self.rows -= item.rows
        return items

    def at(self, index: int) -> tuple[float, T]:
        """When the job at this place is due, and the job."""
        due_s, _, item = self._entries[index]
        return due_s, item

    def first_due_s(self) -> float:
        """When the first job is due; infinity if none waits."""
        return self._entries[0][0] if self._entries else float("inf")

    def rank(self, due_s: float) -> int:
        """How many jobs are due before `due_s`."""
        return bisect_left(self._entries, (due_s,))

    def __iter__(self) -> Iterator[T]:
        """Jobs in order."""
        return (entry[2] for entry in self._entries)
