"""Looks after jobs from the moment their batch is handed to the device until its run is over.

While a batch waits for the device, jobs whose deadline passes are told at once. When a run lasts much longer than it
should, it may hang, and every job in hand is then given to a CPU worker at the last moment at which that can still
answer in time: those of the run, and those behind it. Whoever answers first is right.
"""

from __future__ import annotations

from collections import deque
from operator import attrgetter
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Callable

    from inferq_worker.device import Run
    from inferq_worker.hand import Hand
    from inferq_worker.scheduling import Batch, Batcher, Clock
    from inferq_worker.scheduling.clock import Timer
    from inferq_worker.triage import Triage
    from inferq_worker.work import WorkItem


_deadline_s_of: attrgetter[float] = attrgetter("deadline_s")


class Attendant:
    """Attends to one batch, inside a `with` block.

    Args:
        run: the batch's place on the device.
        hand: the jobs in hand.
        batcher: where those wait that are in no batch.
        triage: knows the CPU workers.
        clock: monotonic seconds, and timers.
    """

    def __init__(
        self,
        batch: Batch[WorkItem],
        run: Run,
        *,
        hand: Hand,
        batcher: Batcher[WorkItem],
        triage: Triage,
        clock: Clock,
    ) -> None:
        may_expire = (item for item in batch.items if item.deadline_s is not None and not item.serve_late)
        self._by_deadline = deque(sorted(may_expire, key=_deadline_s_of))
        self._run = run
        self._hand = hand
        self._batcher = batcher
        self._triage = triage
        self._clock = clock
        self._timer: Timer | None = None

    def __enter__(self) -> Self:
        """From now on."""
        self._run.on_begun = self._begun
        self._tell_expired()
        return self

    def __exit__(self, *_: object) -> None:
        """The run is over."""
        self._run.on_begun = None
        self._hand.watchers.discard(self._save)
        self._at(None, self._save)

    def _tell_expired(self) -> None:
        """It waits for the device."""
        waiting, now_s = self._by_deadline, self._clock.now()
        while waiting and _deadline_s_of(waiting[0]) <= now_s:
            item = waiting.popleft()
            if item in self._hand:
                self._hand.expired(item)
        self._at(_deadline_s_of(waiting[0]) if waiting else None, self._tell_expired)

    def _begun(self) -> None:
        """It runs."""
        self._at(self._run.suspicious_s, self._watch)

    def _watch(self) -> None:
        """It may hang."""
        self._hand.watchers.add(self._save)
        self._save()

    def _save(self) -> None:
        """Hand over the jobs that only a CPU worker can still answer in time; called again for every job that comes."""
        now_s, next_s = self._clock.now(), None
        for item in self._hand.items():
            chance_s = self._triage.last_chance_s(item)
            if chance_s is None:
                continue
            if chance_s > now_s:
                next_s = chance_s if next_s is None else min(next_s, chance_s)
            elif self._triage.rescues(item, reason="overrun"):
                self._batcher.discard(item)
                self._hand.leave(item)
        self._at(next_s, self._save)

    def _at(self, when_s: float | None, action: Callable[[], None]) -> None:
        """The one thing that is to come next."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if when_s is None else self._clock.call_at(when_s, action)
