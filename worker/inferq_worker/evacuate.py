"""What becomes of the jobs of a model that must not be run for now: a CPU worker in time, or back to their queue."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from inferq_worker.breakers import Breakers
    from inferq_worker.hand import Hand
    from inferq_worker.scheduling import Batcher
    from inferq_worker.triage import Triage
    from inferq_worker.work import WorkItem


class Evacuation:
    """Takes jobs aside while their model's breaker is open; one that is packed for the device already is run.

    Args:
        breakers: say which models may be run, and tell when one opens.
        batcher: where jobs wait that leave then.
        hand: the jobs in hand.
        triage: knows the CPU workers.
    """

    def __init__(self, breakers: Breakers, batcher: Batcher[WorkItem], hand: Hand, triage: Triage) -> None:
        self._breakers = breakers
        self._batcher = batcher
        self._hand = hand
        self._triage = triage
        breakers.on_open(self._evacuate)

    def takes(self, item: WorkItem) -> bool:
        """Whether the job must not be run now; it is taken care of then."""
        if self._breakers.allows(item.job.model):
            return False
        self._take(item)
        return True

    def _evacuate(self, model: str) -> None:
        for item in self._hand.jobs_of(model):
            if self._batcher.discard(item):
                self._take(item)

    def _take(self, item: WorkItem) -> None:
        model = item.job.model
        if self._triage.rescues(item, reason="breaker", patience_until_s=self._breakers.retry_s(model)):
            self._hand.leave(item)
        else:
            # In hand until then: a delivery of the same job joins it, and a CPU worker may still be found for it.
            self._hand.take(item)
            self._breakers.when_paused(model, partial(self._give_back, item))

    def _give_back(self, item: WorkItem) -> None:
        if item in self._hand:
            self._hand.give_back(item)
