"""The plain policy: a batch leaves when it is full, when its oldest job has waited, or just before a deadline."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Generic, TypeVar

from inferq_worker.scheduling.batch import Batch, CloseReason, Entry, Poll, RowLimit, row_limit
from inferq_worker.scheduling.deadlines import DeadlineHeap

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator

T = TypeVar("T", bound=Entry)
_NEVER_S = float("inf")
_SLACK = 64
_BULK_TURN = 10
"""Every tenth batch is led by the lane of the highest rank: its guaranteed share of 10 %."""


class _Bucket(Generic[T]):
    """Waiting jobs of one shape: first come first served within a lane, lanes by rank."""

    def __init__(self, waiting: set[T]) -> None:
        self._waiting = waiting
        self._lanes: dict[int, deque[T]] = {}
        self.deadlines = DeadlineHeap(waiting)
        self.rows = 0

    def add(self, item: T) -> None:
        lane = self._lanes.setdefault(item.lane_rank, deque())
        if len(lane) > 2 * len(self._waiting) + _SLACK:
            # Jobs that expire behind one that waits on would keep their message bodies for as long as it waits.
            lane = self._lanes[item.lane_rank] = deque(one for one in lane if one in self._waiting)
        if item.started:
            lane.appendleft(item)
        else:
            lane.append(item)
        self.rows += item.rows
        if item.deadline_s is not None:
            self.deadlines.push(item.deadline_s, item)

    def lanes(self, *, bulk_first: bool = False) -> Iterator[deque[T]]:
        """Lanes that hold jobs, in the order in which they are served; their heads are waiting."""
        for rank in sorted(self._lanes, reverse=bulk_first):
            lane = self._lanes[rank]
            while lane and lane[0] not in self._waiting:
                lane.popleft()
            if lane:
                yield lane


class SizeOrTimeout(Generic[T]):
    """Size-or-timeout batching that honours deadlines in the window, with lanes and shape buckets.

    Args:
        max_rows: largest batch, in rows, for all buckets or by bucket; a job with more leaves by itself.
        max_bytes: largest batch, in payload bytes, unless a single job is larger.
        max_wait_s: longest a job waits for company while a device is free; 0 = take what is here now.
        predict_s: bucket, rows -> expected run seconds, None while unknown; a batch closes early enough for a deadline.
        margin_s: kept between the expected end of a run and the deadline.
    """

    def __init__(
        self,
        *,
        max_rows: RowLimit,
        max_bytes: int,
        max_wait_s: float,
        predict_s: Callable[[Hashable, int], float | None],
        margin_s: float = 0.002,
    ) -> None:
        self._max_rows = row_limit(max_rows)
        self._max_bytes = max_bytes
        self._max_wait_s = max_wait_s
        self._predict_s = predict_s
        self._margin_s = margin_s
        self._waiting: set[T] = set()
        self._buckets: dict[Hashable, _Bucket[T]] = {}
        self._suspects = DeadlineHeap(self._waiting)
        self._expiry = DeadlineHeap(self._waiting)
        self._batches = 0
        self._last_arrival_s = -_NEVER_S
        self._was_quiet = False
        self._last_was_solo = False

    def __len__(self) -> int:
        """How many jobs wait."""
        return len(self._waiting)

    def add(self, item: T) -> None:
        """Take a job in. The first after a quiet spell of `max_wait_s` does not wait for company."""
        if not item.started:
            if not self._waiting:
                self._was_quiet = item.arrived_s - self._last_arrival_s >= self._max_wait_s
            self._last_arrival_s = item.arrived_s
        self._waiting.add(item)
        if item.deadline_s is not None and not item.serve_late:
            self._expiry.push(item.deadline_s, item)
        if item.alone:
            self._suspects.push(_NEVER_S if item.deadline_s is None else item.deadline_s, item)
            return
        bucket = self._buckets.get(item.bucket)
        if bucket is None:
            bucket = self._buckets[item.bucket] = _Bucket(self._waiting)
        bucket.add(item)

    def discard(self, item: T) -> bool:
        """Forget a waiting job; what queues and heaps still hold of it is skipped."""
        if item not in self._waiting:
            return False
        self._waiting.remove(item)
        if not item.alone:
            self._take_rows(item.bucket, item.rows)
        return True

    def drain(self) -> tuple[T, ...]:
        """Give up everything that waits, oldest first."""
        left = tuple(sorted(self._waiting, key=lambda item: item.arrived_s))
        self._waiting.clear()
        self._buckets.clear()
        return left

    def poll(self, now_s: float, *, free: bool, start_s: float | None = None) -> Poll[T]:
        """Report expired jobs; with a free device also the batch that is due, or when one will be."""
        del start_s  # this policy does not look ahead
        expired = self._expire(now_s)
        batch, due_s = self._choose(now_s) if free else (None, _NEVER_S)
        first = self._expiry.first()
        wake_s = min(due_s, first[0] if first else _NEVER_S)
        return Poll(batch, expired, None if wake_s == _NEVER_S else wake_s)

    def _expire(self, now_s: float) -> tuple[T, ...]:
        expired = []
        while (first := self._expiry.first()) is not None and first[0] <= now_s:
            self.discard(first[1])
            expired.append(first[1])
        return tuple(expired)

    def _choose(self, now_s: float) -> tuple[Batch[T] | None, float]:
        """The batch that leaves now, or when one will. Suspects get at most every second run while others wait."""
        suspect = self._suspects.first()
        if suspect is not None and not (self._last_was_solo and self._buckets):
            self._last_was_solo = True
            self._waiting.remove(suspect[1])
            return Batch((suspect[1],), "solo", suspect[1].arrived_s), _NEVER_S
        due = [(*self._due(key, bucket), key) for key, bucket in self._buckets.items()]
        if not due:
            return None, _NEVER_S
        due_s, reason, key = min(due, key=lambda entry: entry[0])
        if suspect is not None:
            # It waits for one ordinary batch, but that one must not keep it beyond its own window.
            due_s = min(due_s, suspect[1].arrived_s + self._max_wait_s)
        if due_s > now_s:
            return None, due_s
        return self._compose(key, reason), _NEVER_S

    def _due(self, key: Hashable, bucket: _Bucket[T]) -> tuple[float, CloseReason]:
        opened_s = min(lane[0].arrived_s for lane in bucket.lanes())
        if bucket.rows >= self._max_rows(key):
            return opened_s, "full"
        if self._was_quiet:
            return opened_s, "idle"
        wait_s = opened_s + self._max_wait_s
        first = bucket.deadlines.first()
        if first is not None:
            latest_s = first[0] - (self._predict_s(key, bucket.rows + 1) or 0.0) - self._margin_s
            if latest_s < wait_s:
                return latest_s, "deadline"
        return wait_s, "wait"

    def _compose(self, key: Hashable, reason: CloseReason) -> Batch[T]:
        self._batches += 1
        max_rows = self._max_rows(key)
        items: list[T] = []
        rows = payload_bytes = 0
        for lane in self._buckets[key].lanes(bulk_first=self._batches % _BULK_TURN == 0):
            while lane:
                item = lane[0]
                if item not in self._waiting:
                    lane.popleft()
                    continue
                if items and (rows + item.rows > max_rows or payload_bytes + item.payload_bytes > self._max_bytes):
                    break
                items.append(lane.popleft())
                self._waiting.remove(item)
                rows += item.rows
                payload_bytes += item.payload_bytes
        self._take_rows(key, rows)
        self._last_was_solo = self._was_quiet = False
        return Batch(tuple(items), reason, min(item.arrived_s for item in items))

    def _take_rows(self, key: Hashable, rows: int) -> None:
        bucket = self._buckets[key]
        bucket.rows -= rows
        if not bucket.rows:
            del self._buckets[key]
