"""Looks after the jobs of one batch from the moment it is handed to the device until its run is over.

While it waits for the device, jobs whose deadline passes are told at once. While it runs much longer than it should,
jobs are handed to a CPU worker at the last moment at which that can still answer in time; whoever answers first is
right.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Iterator

    from inferq_worker.device import Run
    from inferq_worker.hand import Hand
    from inferq_worker.scheduling import Batch, Clock
    from inferq_worker.scheduling.clock import Timer
    from inferq_worker.triage import Triage
    from inferq_worker.work import WorkItem

_OVERRUN = 2.0
"""A run that lasts so many times its p95 may hang."""


class Attendant:
    """Attends to one batch, inside a `with` block.

    Args:
        run: the batch's place on the device.
        p95_s: what 95 % of such runs do not exceed, in seconds; None = not known.
        hand: the jobs in hand.
        triage: knows the CPU workers.
        clock: monotonic seconds, and timers.
    """

    def __init__(
        self, batch: Batch[WorkItem], run: Run, *, p95_s: float | None, hand: Hand, triage: Triage, clock: Clock
    ) -> None:
        self._batch = batch
        self._run = run
        self._overrun_s = _OVERRUN * (p95_s or 0.0)
        self._hand = hand
        self._triage = triage
        self._clock = clock
        self._timer: Timer | None = None
        self._past_saving: set[int] = set()

    def __enter__(self) -> Self:
        """From now on."""
        self._run.on_begun = self._look
        self._look()
        return self

    def __exit__(self, *_: object) -> None:
        """The run is over."""
        self._run.on_begun = None
        self._cancel()

    def _look(self) -> None:
        """Do what is due, and come again when the next thing will be."""
        act = self._tell_expired if self._run.began_s is None else self._rescue
        next_s = act(self._clock.now())
        self._cancel()
        if next_s is not None:
            self._timer = self._clock.call_at(next_s, self._look)

    def _tell_expired(self, now_s: float) -> float | None:
        next_s = None
        for number, item in self._in_hand():
            if item.deadline_s is None or item.serve_late:
                continue
            if item.deadline_s <= now_s:
                self._run.leave_out(number)
                self._hand.expired(item)
            else:
                next_s = item.deadline_s if next_s is None else min(next_s, item.deadline_s)
        return next_s

    def _rescue(self, now_s: float) -> float | None:
        next_s = None
        suspicious_s = (self._run.began_s or now_s) + self._overrun_s
        for number, item in self._in_hand():
            chance_s = self._triage.last_chance_s(item)
            if chance_s is None or number in self._past_saving:
                continue
            due_s = max(suspicious_s, chance_s)
            if due_s > now_s:
                next_s = due_s if next_s is None else min(next_s, due_s)
            elif self._triage.rescues(item, reason="overrun"):
                self._hand.leave(item)
            else:
                self._past_saving.add(number)
        return next_s

    def _in_hand(self) -> Iterator[tuple[int, WorkItem]]:
        return ((number, item) for number, item in enumerate(self._batch.items) if item in self._hand)

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
