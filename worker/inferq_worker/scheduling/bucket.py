"""Waiting jobs of one shape, which may share a batch: by deadline, by class, and by arrival."""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice, takewhile
from typing import TYPE_CHECKING, Generic, TypeVar

from inferq_worker.scheduling.batch import Entry
from inferq_worker.scheduling.deadline_queue import DeadlineQueue

if TYPE_CHECKING:
    from collections.abc import Iterator

T = TypeVar("T", bound=Entry)


class Bucket(Generic[T]):
    """Three orders: urgent and bulk jobs by deadline, undated ones by the time from which they go first.

    Undated jobs belong to the bulk class: last, but an old one precedes a bulk job with a later deadline.

    Args:
        order: numbers the jobs of all buckets.
    """

    def __init__(self, order: Iterator[int]) -> None:
        self.urgent: DeadlineQueue[T] = DeadlineQueue(order)
        self.bulk: DeadlineQueue[T] = DeadlineQueue(order)
        self.undated: DeadlineQueue[T] = DeadlineQueue(order)
        # In order of arrival. It forgets a job at once, wherever in the order it stands; a deque would keep the jobs,
        # and with them their message bodies, that came after one that waits long and left before it.
        self._waiting: OrderedDict[T, DeadlineQueue[T]] = OrderedDict()
        self._last_arrived_s = float("-inf")

    def __len__(self) -> int:
        """How many jobs wait."""
        return len(self._waiting)

    def __iter__(self) -> Iterator[T]:
        """Jobs by arrival."""
        return iter(self._waiting)

    @property
    def rows(self) -> int:
        """Rows that wait."""
        return self.urgent.rows + self.bulk.rows + self.undated.rows

    def add(self, item: T, due_s: float) -> None:
        """Take a job in; `due_s` is its deadline, or when it goes first if it has none."""
        queue = self.undated if item.deadline_s is None else self.bulk if item.lane_rank else self.urgent
        queue.add(item, due_s)
        self._waiting[item] = queue
        if item.arrived_s < self._last_arrived_s:
            self._put_in_order(item)
        else:
            self._last_arrived_s = item.arrived_s

    def _put_in_order(self, item: T) -> None:
        """It arrived before others that wait already: a further step, or a job whose inputs had to be fetched."""
        if item.arrived_s <= self.opened_s():
            self._waiting.move_to_end(item, last=False)
            return
        others = islice(reversed(self._waiting), 1, None)
        later = list(takewhile(lambda other: other.arrived_s > item.arrived_s, others))
        for other in reversed(later):
            self._waiting.move_to_end(other)

    def remove(self, item: T) -> bool:
        """Take a job out; False if it does not wait here."""
        queue = self._waiting.pop(item, None)
        return queue is not None and queue.remove(item)

    def cut(self, queue: DeadlineQueue[T], jobs: int) -> list[T]:
        """Take the first jobs of one of the queues out."""
        items = queue.cut(jobs)
        for item in items:
            del self._waiting[item]
        return items

    def make_undated(self, queue: DeadlineQueue[T], due_s: float) -> None:
        """Let the first job of a queue wait like one without deadline; its arrival stays what it was."""
        item = queue.cut(1)[0]
        self._waiting[item] = self.undated
        self.undated.add(item, due_s)

    def opened_s(self) -> float:
        """Arrival of the job that has waited longest."""
        return next(iter(self._waiting)).arrived_s

    def first_due_s(self) -> float:
        """The earliest deadline; infinity if no job has one."""
        return min(self.urgent.first_due_s(), self.bulk.first_due_s())

    def patient(self) -> tuple[DeadlineQueue[T], DeadlineQueue[T]]:
        """The queues of the bulk class, the one that goes first in front."""
        if self.undated.first_due_s() < self.bulk.first_due_s():
            return self.undated, self.bulk
        return self.bulk, self.undated
