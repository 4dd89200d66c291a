"""The nouns that flow through the worker, in the order in which they appear: Delivery, Request, WorkItem, Answer."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import TYPE_CHECKING, TypeAlias

from inferq_worker.runtime.collate import join

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

    import numpy as np

    from inferq_schemas import Job, Result
    from inferq_worker.runtime import RowError
    from inferq_worker.settle import Settler

Feeds: TypeAlias = "Mapping[str, np.ndarray]"
WINDOW_MIN, WINDOW_MAX = 4, 2000
"""Messages of a lane that are in hand at once, at least and at most."""


@dataclass(frozen=True, slots=True)
class Lane:
    """One queue that this worker consumes.

    Args:
        model: model name.
        name: lane name; `fallback` for the CPU role's queue, whose messages keep the routing key of their first lane.
        rank: 0 is served first; a higher rank tops batches up and has a guaranteed share.
        window: messages that may be unsettled at once, at the start (prefetch).
        window_rows: rows that the window aims at; the prefetch follows the rows seen in a message.
        window_max: messages that the window never exceeds, however small they are.
    """

    model: str
    name: str
    rank: int
    queue: str
    window: int
    window_rows: int
    window_max: int = WINDOW_MAX


@dataclass(slots=True, eq=False)
class Delivery:
    """One AMQP message in hand. Settled once, through the channel that brought it, when its last job has its answer.

    Args:
        settler: ledger of the channel that brought it.
        tag: delivery tag on that channel.
        received_s: monotonic seconds.
        received_unix_ms: wall clock, for deadlines.
        deaths: reasons in `x-death`, newest first (`expired`, `delivery_limit`, `rejected`, `maxlen`).
        open_requests: jobs of this message that are not answered yet.
        goes_back: give it back to the queue instead of acknowledging it (drain).
    """

    lane: Lane
    settler: Settler
    tag: int
    body: bytes
    routing_key: str
    redelivered: bool
    content_type: str | None
    reply_to: str | None
    correlation_id: str | None
    headers: Mapping[str, object]
    received_s: float
    received_unix_ms: int
    deaths: tuple[str, ...] = ()
    open_requests: int = 0
    goes_back: bool = False

    @property
    def stale(self) -> bool:
        """Whether its channel is gone: the broker delivers it again, to us or to another worker."""
        return self.settler.stale


@dataclass(slots=True, eq=False)
class Request:
    """One job's claim on a delivery: where its answer goes.

    Args:
        payload_bytes: of its inputs that were fetched from Redis.
        settled: done with; its delivery counts it no longer.
    """

    delivery: Delivery
    lane: str
    payload_bytes: int = 0
    settled: bool = False

    @property
    def reply_to(self) -> str | None:
        """Reply queue, already checked against the allow-list, or None."""
        return self.delivery.reply_to


@dataclass(slots=True, eq=False)
class Steps:
    """What the steps of one job have in common.

    Args:
        outputs: of the steps that are done, by their first row; steps may end in any order.
        done_rows: rows of those.
        run_s: seconds that they ran.
        waiting: the step that the scheduler holds, or held last, if one has left before it.
    """

    outputs: dict[int, Feeds] = field(default_factory=dict)
    done_rows: int = 0
    run_s: float = 0.0
    waiting: WorkItem | None = None


@dataclass(slots=True, eq=False)
class WorkItem:
    """One admitted job, or a step of it.

    A job with more rows than a batch goes in steps: the scheduler sees the rows of the next step, jobs that are due
    earlier run between two steps, and the last one shares its batch. While a step runs, the next one waits in the
    job's place already. Its answer is joined again.

    Args:
        requests: who waits for the answer; a redelivery or a duplicate attaches itself here.
        inputs: name -> array `(all rows, ...)`, read-only views of the message body; shared scalars have shape `()`.
        step_rows: most rows of one step.
        bucket: jobs of equal bucket can share a batch (same model, names, types and inner shapes).
        digest: 16 bytes over the job's content.
        arrived_s: monotonic seconds.
        deadline_s: monotonic seconds, None = none.
        alone: it stood in a run that never ended, so it runs by itself.
        first_row: of this step, among the job's rows.
        steps: shared by all steps of the job.
        rows: of this step.
        all_rows: of the job.
        rows_left: of this step and all that follow it.
    """

    job: Job
    requests: list[Request]
    inputs: Feeds
    step_rows: int
    payload_bytes: int
    bucket: Hashable
    digest: bytes
    lane_rank: int
    arrived_s: float
    deadline_s: float | None
    alone: bool = False
    first_row: int = 0
    steps: Steps = field(default_factory=Steps)
    rows: int = field(init=False)
    all_rows: int = field(init=False)
    rows_left: int = field(init=False)

    def __post_init__(self) -> None:
        """As many rows as a step may have."""
        self.all_rows = self.job.rows
        self.rows_left = self.all_rows - self.first_row
        self.rows = min(self.step_rows, self.rows_left)

    @property
    def started(self) -> bool:
        """Whether a step of it came before this one."""
        return self.first_row > 0

    @property
    def waiting(self) -> WorkItem:
        """The step of this job that the scheduler holds, if it holds any."""
        return self.steps.waiting or self

    @property
    def open_rows(self) -> int:
        """Rows of the job that have not been run."""
        return self.all_rows - self.steps.done_rows

    @property
    def feeds(self) -> Feeds:
        """Inputs of this step: views `(rows, ...)`."""
        if self.rows == self.all_rows:
            return self.inputs
        rows = slice(self.first_row, self.first_row + self.rows)
        return {name: array[rows] if array.ndim else array for name, array in self.inputs.items()}

    def rest(self) -> WorkItem | None:
        """The next step, once this one has been chosen to run; None after the last."""
        last = self.rows == self.rows_left
        self.steps.waiting = None if last else replace(self, first_row=self.first_row + self.rows)
        return self.steps.waiting

    def done(self, outputs: Feeds, run_s: float) -> Feeds | RowError | None:
        """Take in what came of this step: the whole answer if all others are done, else None; an error if they differ.

        Args:
            outputs: name -> array `(rows, ...)`.
            run_s: seconds that it ran.
        """
        steps = self.steps
        steps.done_rows += self.rows
        steps.run_s += run_s
        if self.rows == self.all_rows:
            return outputs
        steps.outputs[self.first_row] = outputs
        if self.open_rows:
            return None
        return join([part for _, part in sorted(steps.outputs.items(), key=itemgetter(0))])

    @property
    def lane(self) -> str:
        """Lane that its sender chose."""
        return self.requests[0].lane

    @property
    def serve_late(self) -> bool:
        """Whether it is run although its deadline has passed."""
        return self.job.late == "serve"

    @property
    def stale(self) -> bool:
        """Whether every delivery of it is gone."""
        if len(self.requests) == 1:
            return self.requests[0].delivery.stale
        return all(request.delivery.stale for request in self.requests)


@dataclass(slots=True, eq=False)
class Answer:
    """A terminal answer on its way to the store, the requesters, and (for what operators should see) to parking.

    Args:
        requests: who gets it.
        result: what they get, unless the store already holds another outcome.
        digest: of the job; None when the job could not be read.
        keep: whether it becomes the stored outcome.
        job: for parking; None parks the original body.
        from_store: it was read back from the store: the job came again.
    """

    requests: tuple[Request, ...]
    result: Result
    digest: bytes | None = None
    keep: bool = True
    job: Job | None = None
    from_store: bool = False
