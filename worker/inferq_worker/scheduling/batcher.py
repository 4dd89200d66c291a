"""The waiting around a policy: wakes on arrivals and timers, hands batches out, reports expiry at any time."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Generic, TypeVar

from inferq_worker.scheduling.batch import Batch, Entry, Policy

if TYPE_CHECKING:
    from collections.abc import Callable

    from inferq_worker.scheduling.clock import Clock, Timer

T = TypeVar("T", bound=Entry)


class Batcher(Generic[T]):
    """Hands out the batches of a policy as devices ask for them.

    The window opens when a job arrives, not when a device asks, so work that queued up behind a long run leaves at
    once. Any number of devices may wait in `next_batch`.

    Args:
        policy: decides; holds the jobs.
        clock: monotonic seconds and timers.
        on_expired: told of every job whose deadline passed while it waited; it is no longer held then.
        on_given_up: told of every job that the policy gave up before its deadline; None = as expired.
    """

    def __init__(
        self,
        policy: Policy[T],
        clock: Clock,
        on_expired: Callable[[T], None],
        on_given_up: Callable[[T], None] | None = None,
    ) -> None:
        self._policy = policy
        self._clock = clock
        self._on_expired = on_expired
        self._on_given_up = on_given_up or on_expired
        self._changed = asyncio.Event()
        self._timer: Timer | None = None
        self._timer_s = float("inf")
        self._closed = False

    def add(self, item: T) -> None:
        """Take a job in; the caller has made sure that the batcher is not closed."""
        self._policy.add(item)
        if item.deadline_s is not None:
            self._arm(item.deadline_s)
        self._changed.set()

    def discard(self, item: T) -> bool:
        """Forget a waiting job; False if it has left already."""
        return self._policy.discard(item)

    async def next_batch(self, start_s: Callable[[], float] | None = None) -> Batch[T] | None:
        """Wait for the next batch.

        Args:
            start_s: says when a batch handed out now will begin to run, if that is later than now.

        Returns:
            A batch, or None once the batcher is closed, and then for ever.

        Cancelling the call loses nothing: jobs are taken only after the last await.
        """
        while not self._closed:
            self._changed.clear()
            batch = self._poll(free=True, start_s=None if start_s is None else start_s())
            if batch is not None:
                self._keep_rest(batch)
                return batch
            await self._changed.wait()
        return None

    def close(self) -> tuple[T, ...]:
        """End: every waiting `next_batch` returns None. Returns the jobs that had not left."""
        self._closed = True
        self._changed.set()
        if self._timer is not None:
            self._timer.cancel()
        return self._policy.drain()

    def __len__(self) -> int:
        """How many jobs wait."""
        return len(self._policy)

    def _poll(self, *, free: bool, start_s: float | None = None) -> Batch[T] | None:
        poll = self._policy.poll(self._clock.now(), free=free, start_s=start_s)
        for item in poll.expired:
            self._on_expired(item)
        for item in poll.given_up:
            self._on_given_up(item)
        if poll.wake_s is not None:
            self._arm(poll.wake_s)
        return poll.batch

    def _keep_rest(self, batch: Batch[T]) -> None:
        """What is left of a large job waits again before anybody else is chosen, while this step of it runs."""
        for item in reversed(batch.items):
            rest = item.rest()
            if rest is not None:
                self.add(rest)

    def _arm(self, when_s: float) -> None:
        if when_s >= self._timer_s:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_s = when_s
        self._timer = self._clock.call_at(when_s, self._ring)

    def _ring(self) -> None:
        self._timer, self._timer_s = None, float("inf")
        if not self._closed:
            self._poll(free=False)
            self._changed.set()
