"""Who rides in the next batch, and who is given up because serving it would cost many others their deadline.

The window is that of Nexus (SOSP'19) and Symphony (arXiv 2308.07470): the first jobs in deadline order ride together if
the earliest of them survives the run of the whole target batch. Heads that do not are given up only when the smaller
batch that they need would make somebody behind them late; while there is time for it, it is run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from inferq_worker.scheduling.batch import Entry
from inferq_worker.scheduling.target import largest

if TYPE_CHECKING:
    from collections.abc import Callable

    from inferq_worker.scheduling.bucket import Bucket
    from inferq_worker.scheduling.deadline_queue import DeadlineQueue

T = TypeVar("T", bound=Entry)
_LOOK_AHEAD_BATCHES = 16
"""A longer backlog counts as overload."""


class Device(NamedTuple):
    """What a batch can expect of the device.

    Attributes:
        start_s: when its run begins, monotonic seconds.
        margin_s: kept between the expected end of a run and a deadline.
        run_s: rows -> expected run seconds; of more than a batch, those of all its steps.
        target_rows: the size that is aimed at.
        next_due_s: the earliest deadline among urgent jobs that cannot ride, being of another shape.
    """

    start_s: float
    margin_s: float
    run_s: Callable[[int], float]
    target_rows: int
    next_due_s: float = float("inf")

    def finish_s(self, rows: int) -> float:
        """The earliest deadline that a batch of `rows` rows meets."""
        return self.start_s + self.run_s(rows) + self.margin_s


class Window(NamedTuple):
    """Of one queue: how many jobs to give up, and how many rows may ride so that the next one is in time."""

    hopeless_jobs: int
    limit_rows: int


def window(queue: DeadlineQueue[T], device: Device) -> Window:
    """Place the window on a queue."""
    heads, rows = 0, queue.rows
    impossible = True
    for due_s, _, item, rows_left in queue.places():
        if due_s >= device.finish_s(max(rows_left, min(device.target_rows, rows))):
            break
        if impossible and due_s >= device.finish_s(rows_left):
            impossible = False
            spared = _small_batch(queue, heads, due_s, device)
            if spared:
                return Window(heads, spared)
        heads, rows = heads + 1, rows - item.rows
    return Window(heads, device.target_rows)


def _small_batch(queue: DeadlineQueue[T], first: int, due_s: float, device: Device) -> int:
    """Rows of the largest batch that saves the job at `first`, or 0 if somebody behind it would become late by it."""
    rows = largest(lambda rows: device.finish_s(rows) <= due_s, device.target_rows)
    mean_rows = queue.rows / len(queue)
    place = first + max(1.0, rows / mean_rows)
    finish_s = device.finish_s(rows)
    if device.next_due_s < finish_s + device.run_s(device.target_rows):
        return 0
    for _ in range(_LOOK_AHEAD_BATCHES):
        if place >= len(queue):
            return rows
        finish_s += device.run_s(device.target_rows)
        if queue.due_s(int(place)) < finish_s:
            return 0
        place += max(1.0, device.target_rows / mean_rows)
    return 0


class Filling(Generic[T]):
    """A batch being filled: stops at the row and byte limits, and before it would make one of its jobs late.

    Args:
        limit_rows: most rows, unless the first job alone has more.
        max_bytes: most payload bytes, with the same exception.
        device: tells when the run would end.

    Attributes:
        items: who rides.
        rows: theirs.
        patient_rows: those of them that are bulk's.
    """

    def __init__(self, limit_rows: int, max_bytes: int, device: Device) -> None:
        self._limit_rows = limit_rows
        self._max_bytes = max_bytes
        self._device = device
        self._payload_bytes = 0
        self.items: list[T] = []
        self.rows = 0
        self.patient_rows = 0

    def take(self, bucket: Bucket[T], queue: DeadlineQueue[T]) -> None:
        """Fill up from the front of one of the bucket's queues."""
        if self.rows >= self._limit_rows or not len(queue):
            return
        taken, rows, size = 0, self.rows, self._payload_bytes
        limit_rows, max_bytes, hurried = self._limit_rows, self._max_bytes, False
        for due_s, _, item, _ in queue.places():
            if not hurried and droppable(item):
                limit_rows, hurried = min(limit_rows, self._in_time(due_s)), True
            if (rows + item.rows > limit_rows or size + item.payload_bytes > max_bytes) and (taken or self.items):
                break
            taken += 1
            rows += item.rows
            size += item.payload_bytes
        if taken:
            self.patient_rows += 0 if queue is bucket.urgent else rows - self.rows
            self._limit_rows, self.rows, self._payload_bytes = limit_rows, rows, size
            self.items += bucket.cut(queue, taken)

    def _in_time(self, due_s: float) -> int:
        if self._device.finish_s(self._limit_rows) <= due_s:
            return self._limit_rows
        return largest(lambda rows: self._device.finish_s(rows) <= due_s, self._limit_rows)


def droppable(item: Entry) -> bool:
    """Whether a job leaves without a run once its deadline cannot be met."""
    return item.deadline_s is not None and not item.serve_late
