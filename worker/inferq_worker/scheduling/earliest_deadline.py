"""Earliest deadline first with window early drop: under overload it gives up a few jobs to keep the batches large.

Who rides is decided in `window`, how large a batch should be in `target`. Here: when a batch leaves, which bucket goes
first, lanes with a guaranteed bulk share, ageing of jobs without deadline, suspects alone.
"""

from __future__ import annotations

from functools import partial
from itertools import chain, count
from operator import attrgetter
from typing import TYPE_CHECKING, Generic, TypeVar

from inferq_worker.scheduling.batch import Batch, CloseReason, Entry, Poll, RowLimit, row_limit
from inferq_worker.scheduling.bucket import Bucket
from inferq_worker.scheduling.deadline_queue import DeadlineQueue
from inferq_worker.scheduling.target import TargetRows
from inferq_worker.scheduling.window import Device, Filling, droppable, window

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator

T = TypeVar("T", bound=Entry)
_NEVER_S = float("inf")
_arrived_s_of: attrgetter[float] = attrgetter("arrived_s")
_FORGET_AFTER_S = 10.0
"""Without an urgent job for so long, batches need not be ready for one."""
_MOST_TARGETS = 256


class EarliestDeadline(Generic[T]):
    """Deadline-ordered batching that stays near the device's capacity under overload.

    A step costs log n of the waiting jobs; polling also looks at every bucket that has some.

    Args:
        max_rows: largest batch, in rows, for all buckets or by bucket; a job with more leaves by itself.
        max_bytes: largest batch, in payload bytes, unless a single job is larger.
        max_wait_s: longest a job waits for company while a device is free.
        predict_s: bucket, rows -> expected run seconds, padding included, of more than a batch those of all steps; None
            while nothing is known.
        margin_s: kept between the expected end of a run and a deadline, or who knows it at the moment: what follows the
            run, and what may come later than expected.
        bulk_share: rows that bulk jobs get under overload, as a share of all; 0..1.
        ageing_s: a job without deadline precedes bulk jobs that are due later than this after its arrival.
    """

    def __init__(
        self,
        *,
        max_rows: RowLimit,
        max_bytes: int,
        max_wait_s: float,
        predict_s: Callable[[Hashable, int], float | None],
        margin_s: float | Callable[[], float] = 0.001,
        bulk_share: float = 0.1,
        ageing_s: float = 60.0,
    ) -> None:
        self._max_rows = row_limit(max_rows)
        self._max_bytes = max_bytes
        self._max_wait_s = max_wait_s
        self._predict_s = predict_s
        self._margin_now_s = margin_s if callable(margin_s) else lambda: margin_s
        self._bulk_share = bulk_share
        self._ageing_s = ageing_s
        self._buckets: dict[Hashable, Bucket[T]] = {}
        self._suspects: DeadlineQueue[T] = DeadlineQueue()
        self._numbers = count(1)
        self._target = TargetRows()
        self._targets: dict[Hashable, tuple[int, int]] = {}
        self._waiting = 0
        self._bulk_credit_rows = 0.0
        self._last_arrival_s = self._last_urgent_s = -_NEVER_S
        self._was_quiet = False
        self._last_was_solo = False

    def __len__(self) -> int:
        """How many jobs wait."""
        return self._waiting

    def add(self, item: T) -> None:
        """Take a job in. The first after a quiet spell of `max_wait_s` does not wait for company."""
        arrived_s, deadline_s, started = item.arrived_s, item.deadline_s, item.started
        if not started:
            if not self._waiting:
                self._was_quiet = arrived_s - self._last_arrival_s >= self._max_wait_s
            self._last_arrival_s = arrived_s
        self._waiting += 1
        due_s = arrived_s + self._ageing_s if deadline_s is None else deadline_s
        if item.alone:
            self._suspects.add(item, due_s)
            return
        if deadline_s is not None and not item.lane_rank and not started:
            self._last_urgent_s = arrived_s
            if self._target.saw(deadline_s - arrived_s):
                self._targets.clear()
        key = item.bucket
        if key not in self._buckets:
            self._buckets[key] = Bucket(self._numbers)
        self._buckets[key].add(item, due_s)

    def discard(self, item: T) -> bool:
        """Forget a waiting job; False if it is not waiting here."""
        bucket = self._buckets.get(item.bucket)
        removed = self._suspects.remove(item) or (bucket is not None and bucket.remove(item))
        if removed:
            self._left(item.bucket, 1)
        return removed

    def drain(self) -> tuple[T, ...]:
        """Give up everything that waits, oldest first."""
        waiting = chain(self._suspects, *self._buckets.values())
        left = sorted(waiting, key=_arrived_s_of)
        self._buckets.clear()
        self._suspects = DeadlineQueue()
        self._waiting = 0
        return tuple(left)

    def rows_ahead(self, due_s: float) -> dict[Hashable, int]:
        """Rows by bucket that run before a new job due at `due_s`: all that is left of urgent jobs due by then."""
        return {key: rows for key, bucket in self._buckets.items() if (rows := bucket.urgent.rows_by(due_s))}

    def target_rows(self, bucket: Hashable) -> int:
        """The batch that is aimed at: the size at which the most jobs are answered in time."""
        # The limit moves with what is learned of the device's memory.
        limit_rows = self._max_rows(bucket)
        of_limit, target = self._targets.get(bucket, (0, 0))
        if of_limit != limit_rows:
            target = self._target.rows(partial(self._predict_s, bucket), limit_rows)
            if len(self._targets) >= _MOST_TARGETS:
                # Shapes come from clients; what is not remembered is only computed again.
                self._targets.clear()
            if self._predict_s(bucket, 1) is not None:
                self._targets[bucket] = limit_rows, target
        return target

    def poll(self, now_s: float, *, free: bool, start_s: float | None = None) -> Poll[T]:
        """Report expired jobs; with a device about to be free also the batch that is due, or when one will be.

        Args:
            now_s: monotonic seconds.
            free: whether somebody is ready to take a batch.
            start_s: when its run will begin, if later than now.
        """
        expired = self._expire(now_s)
        given_up: list[T] = []
        batch, due_s = None, _NEVER_S
        if free:
            batch, due_s = self._choose(now_s, now_s if start_s is None else max(now_s, start_s), given_up)
        wake_s = min(due_s, self._next_expiry_s())
        return Poll(batch, expired, None if wake_s == _NEVER_S else wake_s, tuple(given_up))

    def _next_expiry_s(self) -> float:
        next_s = self._suspects.first_due_s()
        for bucket in self._buckets.values():
            next_s = min(next_s, bucket.urgent.first_due_s(), bucket.bulk.first_due_s())
        return next_s

    def _expire(self, now_s: float) -> tuple[T, ...]:
        if self._next_expiry_s() > now_s:
            return ()
        expired: list[T] = []
        while self._suspects.first_due_s() <= now_s:
            self._drop_suspect(now_s, expired)
        for key, bucket in list(self._buckets.items()):
            for queue in (bucket.urgent, bucket.bulk):
                while queue.first_due_s() <= now_s:
                    self._drop_heads(key, queue, 1, now_s, expired)
        return tuple(expired)

    def _drop_suspect(self, now_s: float, dropped: list[T]) -> None:
        """The first suspect cannot be in time; one without deadline, or whose answer is welcome late, stays."""
        item = self._suspects.cut(1)[0]
        if droppable(item):
            dropped.append(item)
            self._waiting -= 1
        else:
            self._suspects.add(item, now_s + self._ageing_s)

    def _drop_heads(self, key: Hashable, queue: DeadlineQueue[T], jobs: int, now_s: float, dropped: list[T]) -> None:
        """The first jobs cannot be in time; those that are served all the same wait like undated ones from now on."""
        bucket = self._buckets[key]
        for _ in range(jobs):
            if droppable(next(iter(queue))):
                dropped += bucket.cut(queue, 1)
                self._waiting -= 1
            else:
                bucket.make_undated(queue, now_s + self._ageing_s)
        self._left(key, 0)

    def _choose(self, now_s: float, start_s: float, given_up: list[T]) -> tuple[Batch[T] | None, float]:
        """The batch that leaves now, or when one will."""
        self._forget(now_s)
        while self._waiting:
            if len(self._suspects) and not (self._last_was_solo and self._buckets):
                batch = self._solo(start_s, given_up)
            else:
                due_s, reason, key = self._most_urgent(now_s, start_s)
                if len(self._suspects):
                    # A suspect waits for one ordinary batch, but that one must not keep it beyond its own window.
                    due_s = min(due_s, min(map(_arrived_s_of, self._suspects)) + self._max_wait_s)
                if due_s > now_s:
                    return None, due_s
                batch = self._compose(key, start_s, reason, given_up)
            if batch is not None:
                return batch, _NEVER_S
        return None, _NEVER_S

    def _forget(self, now_s: float) -> None:
        if now_s - self._last_urgent_s > _FORGET_AFTER_S and self._target.forget():
            self._targets.clear()

    def _solo(self, start_s: float, given_up: list[T]) -> Batch[T] | None:
        item = next(iter(self._suspects))
        finish_s = start_s + self._run_s(item.bucket, item.rows_left) + self._margin_now_s()
        if droppable(item) and self._suspects.first_due_s() < finish_s:
            self._drop_suspect(start_s, given_up)
            return None
        self._suspects.cut(1)
        self._waiting -= 1
        self._last_was_solo = True
        return Batch((item,), "solo", item.arrived_s)

    def _most_urgent(self, now_s: float, start_s: float) -> tuple[float, CloseReason, Hashable]:
        """When and why the next bucket is due, and which: of several that are due now, the one that is served first.

        While one is due, another one may not wait for company if its first job would not survive the run of that one.
        """
        states = [(*self._due(key, bucket), key) for key, bucket in self._buckets.items()]
        due = [state for state in states if state[0] <= now_s]
        if not due:
            return min(states, key=lambda state: state[0])
        first = min(due, key=lambda state: self._precedence(state[2]))
        if len(due) == len(states):
            return first
        busy_s = start_s + self._run_s(first[2], min(self._buckets[first[2]].rows, self.target_rows(first[2])))
        hurried: list[tuple[float, CloseReason, Hashable]] = [
            (now_s, "deadline", key) for due_s, _, key in states if due_s > now_s and self._latest_s(key) < busy_s
        ]
        return min((first, *hurried), key=lambda state: self._precedence(state[2]))

    def _precedence(self, key: Hashable) -> tuple[int, tuple[float, int]]:
        """Class, then deadline. Not the time since when it is due: a bulk backlog has always been due longest.

        Of equal deadlines, that of the job that has begun, or else came first.
        """
        bucket = self._buckets[key]
        if self._bulk_is_owed(key, bucket):
            return 0, bucket.patient()[0].first()
        if len(bucket.urgent):
            return 1, bucket.urgent.first()
        return 2, bucket.patient()[0].first()

    def _due(self, key: Hashable, bucket: Bucket[T]) -> tuple[float, CloseReason]:
        opened_s, rows = bucket.opened_s(), bucket.rows
        if rows >= self.target_rows(key):
            return opened_s, "full"
        if self._was_quiet:
            return opened_s, "idle"
        wait_s = opened_s + self._max_wait_s
        latest_s = self._latest_s(key)
        return (latest_s, "deadline") if latest_s < wait_s else (wait_s, "wait")

    def _latest_s(self, key: Hashable) -> float:
        """When a batch with one more row must start to be in time for the first job."""
        bucket = self._buckets[key]
        return bucket.first_due_s() - self._run_s(key, bucket.rows + 1) - self._margin_now_s()

    def _run_s(self, key: Hashable, rows: int) -> float:
        return self._predict_s(key, rows) or 0.0

    def _compose(self, key: Hashable, start_s: float, reason: CloseReason, given_up: list[T]) -> Batch[T] | None:
        """Build the batch of a bucket; None if its jobs had to be given up."""
        bucket, target = self._buckets[key], self.target_rows(key)
        others = (other.urgent.first_due_s() for other in self._buckets.values() if other is not bucket)
        run_s = partial(self._run_s, key)
        # Where all who wait can ride, nobody rides in another's place: only who is certain to be late is given up.
        margin_s = self._margin_now_s() if bucket.rows > target else 0.0
        device = Device(start_s, margin_s, run_s, target, min(others, default=_NEVER_S))
        limits = {queue: self._give_up(key, queue, device, given_up) for queue in (bucket.urgent, bucket.bulk)}
        self._was_quiet = False
        if not len(bucket):
            return None
        order = tuple(self._order(key, bucket))
        limit_rows = limits.get(next(queue for queue in order if len(queue)), target)
        filling: Filling[T] = Filling(limit_rows, self._max_bytes, device)
        for queue in order:
            filling.take(bucket, queue)
        self._account(filling, target)
        self._last_was_solo = False
        self._left(key, len(filling.items))
        return Batch(tuple(filling.items), reason, min(map(_arrived_s_of, filling.items)))

    def _give_up(self, key: Hashable, queue: DeadlineQueue[T], device: Device, given_up: list[T]) -> int:
        """Cut off the heads that have no place in the window; returns how many rows of this queue may ride."""
        chosen = window(queue, device)
        if chosen.hopeless_jobs:
            self._drop_heads(key, queue, chosen.hopeless_jobs, device.start_s, given_up)
        return chosen.limit_rows

    def _order(self, key: Hashable, bucket: Bucket[T]) -> Iterator[DeadlineQueue[T]]:
        owed = self._bulk_is_owed(key, bucket)
        if not owed:
            yield bucket.urgent
        yield from bucket.patient()
        if owed:
            yield bucket.urgent

    def _bulk_is_owed(self, key: Hashable, bucket: Bucket[T]) -> bool:
        return len(bucket) > len(bucket.urgent) and self._bulk_credit_rows >= self.target_rows(key)

    def _account(self, filling: Filling[T], target: int) -> None:
        """Every row that runs earns bulk its share; what bulk rows run spends it. Neither is saved up for long."""
        change = self._bulk_share * filling.rows - filling.patient_rows
        self._bulk_credit_rows = max(-target, min(self._bulk_credit_rows + change, 2.0 * target))

    def _left(self, key: Hashable, jobs: int) -> None:
        self._waiting -= jobs
        bucket = self._buckets.get(key)
        if bucket is not None and not len(bucket):
            del self._buckets[key]
