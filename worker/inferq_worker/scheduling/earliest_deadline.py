"""Earliest deadline first with window early drop: under overload it gives up a few jobs to keep the batches large.

The window is that of Nexus (SOSP'19) and Symphony (arXiv 2308.07470): the first jobs in deadline order ride together if
the earliest of them survives the run of the whole target batch; a job that does not is given up, because serving it
would need a batch so small that many behind it would be late. Around it: lanes with a guaranteed bulk share, shape
buckets, ageing of jobs without deadline, suspects alone.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Generic, TypeVar

from inferq_worker.scheduling.batch import Batch, CloseReason, Entry, Poll
from inferq_worker.scheduling.deadline_queue import DeadlineQueue
from inferq_worker.scheduling.target import TargetRows

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator

T = TypeVar("T", bound=Entry)
_NEVER_S = float("inf")
_SLACK = 64


class _Bucket(Generic[T]):
    """Waiting jobs of one shape, in three orders: urgent and bulk by deadline, undated by the time they are due to age.

    Undated jobs belong to the bulk class: last, but an old one precedes a bulk job with a later deadline.
    """

    def __init__(self) -> None:
        self.urgent: DeadlineQueue[T] = DeadlineQueue()
        self.bulk: DeadlineQueue[T] = DeadlineQueue()
        self.undated: DeadlineQueue[T] = DeadlineQueue()
        self.arrivals: deque[T] = deque()

    def __len__(self) -> int:
        return len(self.urgent) + len(self.bulk) + len(self.undated)

    @property
    def rows(self) -> int:
        return self.urgent.rows + self.bulk.rows + self.undated.rows

    def queues(self) -> tuple[DeadlineQueue[T], DeadlineQueue[T], DeadlineQueue[T]]:
        return (self.urgent, self.bulk, self.undated)

    def add(self, item: T, due_s: float) -> None:
        dated = self.bulk if item.lane_rank else self.urgent
        (self.undated if item.deadline_s is None else dated).add(item, due_s)
        self.arrivals.append(item)
        if len(self.arrivals) > 2 * len(self) + _SLACK:
            # A job that waits long must not keep all that came and left after it in memory.
            self.arrivals = deque(item for item in self.arrivals if self._waits(item))

    def remove(self, item: T) -> bool:
        return any(queue.remove(item) for queue in self.queues())

    def opened_s(self) -> float:
        """Arrival of the job that has waited longest."""
        while not self._waits(self.arrivals[0]):
            self.arrivals.popleft()
        return self.arrivals[0].arrived_s

    def _waits(self, item: T) -> bool:
        return item in self.urgent or item in self.bulk or item in self.undated

    def first_due_s(self) -> float:
        return min(self.urgent.first_due_s(), self.bulk.first_due_s())


class EarliestDeadline(Generic[T]):
    """Deadline-ordered batching that stays near the device's capacity under overload.

    Args:
        max_rows: largest batch, in rows; a job with more leaves by itself.
        max_bytes: largest batch, in payload bytes, unless a single job is larger.
        max_wait_s: longest a job waits for company while a device is free.
        predict_s: bucket, rows -> expected run seconds, padding included; None while nothing is known.
        margin_s: kept between the expected end of a run and a deadline: what follows the run, and timer slack.
        bulk_share: rows that bulk jobs get under overload, as a share of all; 0..1.
        ageing_s: a job without deadline precedes jobs that are due later than this after its arrival.
    """

    def __init__(
        self,
        *,
        max_rows: int,
        max_bytes: int,
        max_wait_s: float,
        predict_s: Callable[[Hashable, int], float | None],
        margin_s: float = 0.001,
        bulk_share: float = 0.1,
        ageing_s: float = 60.0,
    ) -> None:
        self._max_rows = max_rows
        self._max_bytes = max_bytes
        self._max_wait_s = max_wait_s
        self._predict_s = predict_s
        self._margin_s = margin_s
        self._bulk_share = bulk_share
        self._ageing_s = ageing_s
        self._buckets: dict[Hashable, _Bucket[T]] = {}
        self._suspects: DeadlineQueue[T] = DeadlineQueue()
        self._target = TargetRows(max_rows)
        self._waiting = 0
        self._bulk_credit_rows = 0.0
        self._last_arrival_s = -_NEVER_S
        self._was_quiet = False
        self._last_was_solo = False

    def __len__(self) -> int:
        """How many jobs wait."""
        return self._waiting

    def add(self, item: T) -> None:
        """Take a job in."""
        if not self._waiting:
            self._was_quiet = item.arrived_s - self._last_arrival_s >= self._max_wait_s
        self._last_arrival_s = item.arrived_s
        self._waiting += 1
        due_s = item.arrived_s + self._ageing_s if item.deadline_s is None else item.deadline_s
        if item.alone:
            self._suspects.add(item, due_s)
            return
        if item.deadline_s is not None and not item.lane_rank:
            self._target.saw(item.deadline_s - item.arrived_s)
        bucket = self._buckets.get(item.bucket)
        if bucket is None:
            bucket = self._buckets[item.bucket] = _Bucket()
        bucket.add(item, due_s)

    def discard(self, item: T) -> bool:
        """Forget a waiting job; False if it is not waiting here."""
        bucket = self._buckets.get(item.bucket)
        removed = self._suspects.remove(item) or (bucket is not None and bucket.remove(item))
        if removed:
            self._left(item.bucket, 1)
        return removed

    def drain(self) -> tuple[T, ...]:
        """Give up everything that waits, oldest first."""
        queues = [self._suspects, *(queue for bucket in self._buckets.values() for queue in bucket.queues())]
        left = sorted((item for queue in queues for item in queue), key=lambda item: item.arrived_s)
        self._buckets.clear()
        self._suspects = DeadlineQueue()
        self._waiting = 0
        return tuple(left)

    def rows_ahead(self, due_s: float) -> int:
        """Rows of urgent jobs that are due before `due_s`, and so run before a new job that is due then."""
        rows = 0.0
        for waiting in self._buckets.values():
            queue = waiting.urgent
            if len(queue):
                rows += queue.rank(due_s) * queue.rows / len(queue)
        return round(rows)

    def target_rows(self, bucket: Hashable) -> int:
        """The batch that is aimed at: the largest of which two fit into the tightest usual deadline."""
        return self._target.rows(lambda rows: self._predict_s(bucket, rows))

    def poll(self, now_s: float, *, free: bool, start_s: float | None = None) -> Poll[T]:
        """Report expired jobs; with a device about to be free also the batch that is due, or when one will be.

        Args:
            now_s: monotonic seconds.
            free: whether somebody is ready to take a batch.
            start_s: when its run will begin, if later than now.
        """
        expired = self._expire(now_s)
        given_up: list[T] = []
        batch, due_s = self._choose(now_s, max(now_s, start_s or now_s), given_up) if free else (None, _NEVER_S)
        wake_s = min(due_s, self._next_expiry_s())
        return Poll(batch, expired, None if wake_s == _NEVER_S else wake_s, tuple(given_up))

    def _queues(self) -> Iterator[DeadlineQueue[T]]:
        yield self._suspects
        for bucket in self._buckets.values():
            yield bucket.urgent
            yield bucket.bulk

    def _expire(self, now_s: float) -> tuple[T, ...]:
        if self._next_expiry_s() > now_s:
            return ()
        expired = []
        for queue in list(self._queues()):
            while queue.first_due_s() <= now_s:
                item = queue.cut(1)[0]
                if _droppable(item):
                    expired.append(item)
                    self._left(item.bucket, 1)
                else:
                    self._age(item, queue, now_s)
        return tuple(expired)

    def _age(self, item: T, queue: DeadlineQueue[T], now_s: float) -> None:
        """A late job that is served all the same: it waits like one without deadline, so that it delays no other."""
        due_s = now_s + self._ageing_s
        if queue is self._suspects:
            queue.add(item, due_s)
        else:
            self._buckets[item.bucket].undated.add(item, due_s)

    def _next_expiry_s(self) -> float:
        return min((queue.first_due_s() for queue in self._queues()), default=_NEVER_S)

    def _choose(self, now_s: float, start_s: float, given_up: list[T]) -> tuple[Batch[T] | None, float]:
        if len(self._suspects) and not (self._last_was_solo and self._buckets):
            return self._solo(), _NEVER_S
        while self._buckets:
            due = [(*self._due(key, bucket), key) for key, bucket in self._buckets.items()]
            due_s, reason, key = min(due, key=lambda entry: entry[0])
            if due_s > now_s:
                return None, due_s
            batch = self._compose(key, start_s, reason, given_up)
            if batch is not None:
                return batch, _NEVER_S
        return None, _NEVER_S

    def _solo(self) -> Batch[T]:
        item = self._suspects.cut(1)[0]
        self._waiting -= 1
        self._last_was_solo = True
        return Batch((item,), "solo", item.arrived_s)

    def _due(self, key: Hashable, bucket: _Bucket[T]) -> tuple[float, CloseReason]:
        opened_s = bucket.opened_s()
        rows, target = bucket.rows, self.target_rows(key)
        if rows >= target:
            return opened_s, "full"
        if self._was_quiet:
            return opened_s, "idle"
        wait_s = opened_s + self._max_wait_s
        latest_s = bucket.first_due_s() - self._run_s(key, rows + 1) - self._margin_s
        return (latest_s, "deadline") if latest_s < wait_s else (wait_s, "wait")

    def _run_s(self, key: Hashable, rows: int) -> float:
        return self._predict_s(key, rows) or 0.0

    def _compose(self, key: Hashable, start_s: float, reason: CloseReason, given_up: list[T]) -> Batch[T] | None:
        """Build the batch of a bucket; None if all that is left of it had to be given up."""
        bucket, target = self._buckets[key], self.target_rows(key)
        bulk_leads = self._bulk_is_owed(bucket, target)
        for queue in (bucket.urgent, bucket.bulk):
            given_up += self._give_up(key, queue, start_s, target)
        ready_s, limit_rows = start_s + self._margin_s, self._free_rows(key, target)
        taking: _Taking[T] = _Taking(limit_rows, self._max_bytes, lambda rows: ready_s + self._run_s(key, rows))
        urgent, bulk = (bucket.urgent,), self._bulk_order(bucket)
        for queue in (*bulk, *urgent) if bulk_leads else (*urgent, *bulk):
            taking.take(queue)
        items = tuple(taking.items)
        if items:
            bulk_rows = sum(item.rows for item in items if item.lane_rank)
            self._bulk_credit_rows += self._bulk_share * taking.rows - bulk_rows
            self._bulk_credit_rows = max(-target, min(self._bulk_credit_rows, 2.0 * target))
            self._last_was_solo = False
        self._was_quiet = False
        opened_s = min((item.arrived_s for item in items), default=start_s)
        self._left(key, len(items))
        return Batch(items, reason, opened_s) if items else None

    def _free_rows(self, key: Hashable, target: int) -> int:
        """The target, and the rows of padding that a run of that size computes anyway."""
        rows, target_s = target, self._run_s(key, target)
        while rows < self._max_rows and self._run_s(key, rows + 1) <= target_s:
            rows += 1
        return rows

    def _bulk_is_owed(self, bucket: _Bucket[T], target: int) -> bool:
        waiting = len(bucket.bulk) + len(bucket.undated)
        return waiting > 0 and (not len(bucket.urgent) or self._bulk_credit_rows >= target)

    def _bulk_order(self, bucket: _Bucket[T]) -> tuple[DeadlineQueue[T], DeadlineQueue[T]]:
        if bucket.undated.first_due_s() < bucket.bulk.first_due_s():
            return bucket.undated, bucket.bulk
        return bucket.bulk, bucket.undated

    def _give_up(self, key: Hashable, queue: DeadlineQueue[T], start_s: float, target: int) -> list[T]:
        """The window: cut the head off while it cannot survive the run of the batch that the rest allows."""
        index, rows = 0, queue.rows
        while index < len(queue):
            due_s, item = queue.at(index)
            if due_s >= start_s + self._run_s(key, min(target, rows)) + self._margin_s:
                break
            index, rows = index + 1, rows - item.rows
        hopeless = []
        for item in queue.cut(index):
            if _droppable(item):
                hopeless.append(item)
            else:
                self._age(item, queue, start_s)
        self._left(key, len(hopeless))
        return hopeless

    def _left(self, key: Hashable, jobs: int) -> None:
        self._waiting -= jobs
        bucket = self._buckets.get(key)
        if bucket is not None and not len(bucket):
            del self._buckets[key]


class _Taking(Generic[T]):
    """A batch being filled: stops at the row and byte limits, and before it would make its earliest job late."""

    def __init__(self, max_rows: int, max_bytes: int, finish_s: Callable[[int], float]) -> None:
        self._max_rows = max_rows
        self._max_bytes = max_bytes
        self._finish_s = finish_s
        self._tightest_s = _NEVER_S
        self._payload_bytes = 0
        self.items: list[T] = []
        self.rows = 0

    def take(self, queue: DeadlineQueue[T]) -> None:
        """Fill up from the front of a queue."""
        taken = 0
        while taken < len(queue):
            item = queue.at(taken)[1]
            if self.items and not self._fits(item):
                break
            taken += 1
            self.items.append(item)
            self.rows += item.rows
            self._payload_bytes += item.payload_bytes
            if _droppable(item) and item.deadline_s is not None:
                self._tightest_s = min(self._tightest_s, item.deadline_s)
        queue.cut(taken)

    def _fits(self, item: T) -> bool:
        rows = self.rows + item.rows
        if rows > self._max_rows or self._payload_bytes + item.payload_bytes > self._max_bytes:
            return False
        return self._finish_s(rows) <= self._tightest_s


def _droppable(item: Entry) -> bool:
    return item.deadline_s is not None and not item.serve_late
