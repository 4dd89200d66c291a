"""Waiting jobs by deadline, in sorted blocks: expiry is a cut at the front, admission asks for the rows before."""

from __future__ import annotations

from bisect import bisect_left, insort
from itertools import chain, count
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Generic, TypeVar

from inferq_worker.scheduling.batch import Entry

if TYPE_CHECKING:
    from collections.abc import Iterator

T = TypeVar("T", bound=Entry)
_NEVER_S = float("inf")
_rows_of: attrgetter[int] = attrgetter("rows")
_rows_left_of: itemgetter[int] = itemgetter(3)
_BLOCK_JOBS = 512
"""A block that grows beyond is halved. Moving the tail of a block costs less than finding the place in it."""


class DeadlineQueue(Generic[T]):
    """Jobs in the order in which they are due; equal times keep the order of arrival, and what has begun goes first.

    A place is found by bisection, first among the blocks and then within one. A single list would move its whole tail
    at every insertion, which at a hundred thousand waiting jobs costs more than all the rest of a scheduler's step.

    Args:
        order: numbers from 1 upwards in order of arrival, where several queues share one; None = its own.
    """

    def __init__(self, order: Iterator[int] | None = None) -> None:
        self._blocks: list[list[tuple[float, int, T, int]]] = []
        self._lasts: list[tuple[float, int, T, int]] = []
        self._block_rows: list[int] = []
        self._places: dict[T, tuple[float, int, T, int]] = {}
        self._order = count(1) if order is None else order
        self.rows = 0

    def __len__(self) -> int:
        """How many jobs wait."""
        return len(self._places)

    def __contains__(self, item: object) -> bool:
        """Whether the job waits here."""
        return item in self._places

    def __iter__(self) -> Iterator[T]:
        """Jobs in order."""
        return (place[2] for block in self._blocks for place in block)

    def places(self) -> Iterator[tuple[float, int, T, int]]:
        """When each job is due, its number, the job, its rows left, in order; the queue must not change meanwhile."""
        return chain.from_iterable(self._blocks)

    def add(self, item: T, due_s: float) -> None:
        """Take a job in that is due at `due_s`, monotonic seconds."""
        # The number is unique, so that two jobs are never compared. Of several large jobs that are due at one time,
        # the one that has begun goes first: in turns, all of them would end late.
        number = -next(self._order) if item.started else next(self._order)
        place = self._places[item] = (due_s, number, item, rows_left := item.rows_left)
        self.rows += item.rows
        lasts = self._lasts
        index = bisect_left(lasts, place)
        if index < len(lasts):
            block = self._blocks[index]
            insort(block, place)
        elif lasts:
            index -= 1
            block = self._blocks[index]
            block.append(place)
            lasts[index] = place
        else:
            self._blocks, self._lasts, self._block_rows = [[place]], [place], [rows_left]
            return
        self._block_rows[index] += rows_left
        if len(block) > _BLOCK_JOBS:
            self._halve(index)

    def remove(self, item: T) -> bool:
        """Take a job out; False if it does not wait here."""
        place = self._places.pop(item, None)
        if place is None:
            return False
        index = bisect_left(self._lasts, place)
        block = self._blocks[index]
        del block[bisect_left(block, place)]
        self.rows -= item.rows
        self._block_rows[index] -= place[3]
        if block:
            self._lasts[index] = block[-1]
        else:
            self._drop(index)
        return True

    def cut(self, jobs: int) -> list[T]:
        """Take the first `jobs` jobs out, or all there are."""
        items: list[T] = []
        while self._blocks and len(items) < jobs:
            block = self._blocks[0]
            taken = block[: jobs - len(items)]
            items += [place[2] for place in taken]
            if len(taken) == len(block):
                self._drop(0)
            else:
                del block[: len(taken)]
                self._block_rows[0] -= _rows(taken)
        for item in items:
            del self._places[item]
        self.rows -= sum(map(_rows_of, items))
        return items

    def due_s(self, index: int) -> float:
        """When the job at this place is due; 0 is the first."""
        for block in self._blocks:
            if index < len(block):
                return block[index][0]
            index -= len(block)
        raise IndexError(index)

    def first(self) -> tuple[float, int]:
        """When the first job is due, and its number: smaller ones go first. There must be one."""
        return self._blocks[0][0][:2]

    def first_due_s(self) -> float:
        """When the first job is due; infinity if none waits."""
        return self._blocks[0][0][0] if self._blocks else _NEVER_S

    def rows_by(self, due_s: float) -> int:
        """Rows left of the jobs that are due by `due_s`: what a new job that is due then finds before itself."""
        bound = (due_s, _NEVER_S)
        index = bisect_left(self._lasts, bound)
        rows = sum(self._block_rows[:index]) if index else 0
        if index < len(self._blocks):
            block, block_rows = self._blocks[index], self._block_rows[index]
            jobs = bisect_left(block, bound)
            # One row each is the usual case. Otherwise they are summed up: a large job makes a mean useless.
            rows += jobs if block_rows == len(block) else _rows_of_first(block, jobs, block_rows)
        return rows

    def _halve(self, index: int) -> None:
        block = self._blocks[index]
        front, back = block[: len(block) // 2], block[len(block) // 2 :]
        self._blocks[index : index + 1] = [front, back]
        self._lasts[index : index + 1] = [front[-1], back[-1]]
        self._block_rows[index : index + 1] = [_rows(front), _rows(back)]

    def _drop(self, index: int) -> None:
        del self._blocks[index], self._lasts[index], self._block_rows[index]


def _rows_of_first(block: list[tuple[float, int, T, int]], jobs: int, block_rows: int) -> int:
    """Rows left of the first jobs of a block that has so many."""
    if 2 * jobs <= len(block):
        return _rows(block[:jobs])
    return block_rows - _rows(block[jobs:])


def _rows(places: list[tuple[float, int, T, int]]) -> int:
    return sum(map(_rows_left_of, places))
