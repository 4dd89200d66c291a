"""The jobs in hand: admitted, waiting or running; and the ways in which one leaves without a run."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from inferq_worker.errors import WorkError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from inferq_worker.observe.metrics import Metrics
    from inferq_worker.outbox import Outbox
    from inferq_worker.scheduling import Policy
    from inferq_worker.triage import Triage
    from inferq_worker.work import Request, WorkItem


class Hand:
    """Knows every admitted job by its id until its outcome is on its way.

    Args:
        policy: holds the jobs that wait.
        outbox: answers that need no run.
        triage: finds a CPU worker for a job that the scheduler gave up.

    Attributes:
        draining: nothing is taken any more.
        watchers: called after every job that is taken.
    """

    def __init__(self, *, policy: Policy[WorkItem], outbox: Outbox, triage: Triage, metrics: Metrics) -> None:
        self._policy = policy
        self._outbox = outbox
        self._triage = triage
        self._metrics = metrics
        self._items: dict[str, WorkItem] = {}
        self._lanes_seen: set[tuple[str, str]] = set()
        self.draining = False
        self.watchers: set[Callable[[], None]] = set()

    def __len__(self) -> int:
        """Jobs in hand."""
        return len(self._items)

    def take(self, item: WorkItem) -> None:
        """Admitted, and waiting."""
        self._items[item.job.id] = item
        for watcher in self.watchers:
            watcher()

    def items(self) -> list[WorkItem]:
        """All of them, oldest first."""
        return list(self._items.values())

    def find(self, job_id: str) -> WorkItem | None:
        """The job of this id, if it is in hand."""
        return self._items.get(job_id)

    def jobs_of(self, model: str) -> list[WorkItem]:
        """The jobs of one model, by arrival."""
        return [item for item in self._items.values() if item.job.model == model]

    def leave(self, item: WorkItem) -> None:
        """Its outcome is on its way: no other step of it need run."""
        if item in self:
            del self._items[item.job.id]
            if item.steps.waiting is not None:
                self._policy.discard(item.waiting)

    def __contains__(self, item: WorkItem) -> bool:
        """Whether the job, of which this may be any step, still needs an outcome."""
        held = self._items.get(item.job.id)
        return held is item or (held is not None and held.steps is item.steps)

    def gone(self, items: Sequence[WorkItem]) -> list[int]:
        """Numbers of those that need no outcome any more. May be asked from any thread."""
        return [number for number, item in enumerate(items) if item not in self]

    def expired(self, item: WorkItem) -> None:
        """Its deadline passed while it waited."""
        self._metrics.deadline_missed(item.job.model, item.lane, "compose")
        waited_ms = (time.monotonic() - item.arrived_s) * 1000
        self.fail(
            item, WorkError("deadline_exceeded", f"deadline passed after {waited_ms:.0f} ms in the worker's queue")
        )

    def given_up(self, item: WorkItem) -> None:
        """It has time left, but no run could answer it without making many others late."""
        self._triage.doubts(item)
        if item.deadline_s is not None and self._triage.rescues(item, reason="deadline"):
            self.leave(item)
            return
        self._metrics.deadline_missed(item.job.model, item.lane, "compose")
        left_ms = ((item.deadline_s or 0.0) - time.monotonic()) * 1000
        message = f"{left_ms:.0f} ms left, and no batch that is large enough to keep up could answer in that time"
        self.fail(item, WorkError("deadline_exceeded", message))

    def fail(self, item: WorkItem, error: WorkError) -> None:
        """Answer it with an error."""
        self.leave(item)
        self._outbox.fail(item, error)

    def give_back(self, item: WorkItem) -> None:
        """Return it to its queue."""
        self.leave(item)
        for request in item.requests:
            self._outbox.give_back(request)

    def attach(self, item: WorkItem, request: Request) -> None:
        """The job has come once more: that delivery waits for the same answer."""
        if not any(known is request for known in item.requests):
            item.requests.append(request)

    def observe(self) -> None:
        """Record what is held of each lane now, and for how long."""
        now_s = time.monotonic()
        held: dict[tuple[str, str], list[WorkItem]] = {lane: [] for lane in self._lanes_seen}
        for item in self._items.values():
            held.setdefault((item.job.model, item.lane), []).append(item)
        for (model, lane), items in held.items():
            self._lanes_seen.add((model, lane))
            rows, payload_bytes = sum(item.open_rows for item in items), sum(item.payload_bytes for item in items)
            self._metrics.held(model, lane, jobs=len(items), rows=rows, payload_bytes=payload_bytes)
            oldest_s = min((item.arrived_s for item in items), default=now_s)
            self._metrics.oldest_job_age(model, lane, now_s - oldest_s)
