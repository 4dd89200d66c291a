"""What any batching policy must keep whatever happens, for property tests: a model of what waits and where it went."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st
from tests.scheduled_jobs import Job

if TYPE_CHECKING:
    from inferq_worker.scheduling import Batch, Policy

JOB = st.fixed_dictionaries(
    {
        "rows": st.integers(1, 6),
        "later_rows": st.sampled_from([0, 0, 0, 5, 9]),
        "payload_bytes": st.integers(1, 150),
        "bucket": st.integers(0, 2),
        "lane_rank": st.integers(0, 1),
        "left_ms": st.none() | st.integers(-1, 60),
        "alone": st.booleans(),
        "serve_late": st.booleans(),
    }
)
STEPS = st.lists(
    st.tuples(st.just("add"), JOB)
    | st.tuples(st.just("discard"), st.integers(0, 50))
    | st.tuples(st.just("poll"), st.booleans(), st.integers(0, 10))
    | st.tuples(st.just("pass"), st.integers(0, 15)),
    max_size=80,
)


class PolicyModel:
    """Everything that was added and where it went; fails on a job that is lost, doubled, kept, or in bad company."""

    def __init__(self, policy: Policy[Job], *, max_rows: int, max_bytes: int, max_wait_s: float) -> None:
        self.now_s = 0.0
        self.policy = policy
        self.max_rows, self.max_bytes, self.max_wait_s = max_rows, max_bytes, max_wait_s
        self.waiting: dict[Job, None] = {}
        self.solo_last = False

    def goes_through(self, steps: list[tuple[Any, ...]]) -> None:
        """Do all that, then close."""
        for kind, *values in steps:
            if kind == "add":
                self.add(**values[0])
            elif kind == "discard":
                self.discard(values[0])
            elif kind == "poll":
                self.poll(free=values[0], start_s=self.now_s + values[1] / 1000)
            else:
                self.now_s += values[0] / 1000
        assert sorted(map(id, self.policy.drain())) == sorted(map(id, self.waiting))
        assert len(self.policy) == 0

    def empties(self, jobs: list[dict[str, Any]]) -> None:
        """With a free device everything leaves in the end."""
        for fields in jobs:
            self.add(**fields)
        for _ in range(8 * len(jobs) + 2):
            self.poll(free=True)
            self.now_s += self.max_wait_s
        assert not self.waiting

    def add(self, left_ms: int | None, later_rows: int, **fields: Any) -> None:
        deadline_s = None if left_ms is None else self.now_s + left_ms / 1000
        if later_rows:
            # As in the worker, where a step that is not the last fills its batch.
            fields["rows"] = self.max_rows
        self.put(Job(arrived_s=self.now_s, deadline_s=deadline_s, later_rows=later_rows, **fields))

    def put(self, job: Job) -> None:
        self.policy.add(job)
        self.waiting[job] = None

    def discard(self, index: int) -> None:
        if self.waiting:
            job = list(self.waiting)[index % len(self.waiting)]
            assert self.policy.discard(job)
            assert not self.policy.discard(job)
            del self.waiting[job]

    def poll(self, *, free: bool, start_s: float | None = None) -> None:
        poll = self.policy.poll(self.now_s, free=free, start_s=start_s)
        for job in (*poll.expired, *poll.given_up):
            del self.waiting[job]
            assert job.deadline_s is not None
            assert not job.serve_late
        assert all(job.deadline_s is not None and job.deadline_s <= self.now_s for job in poll.expired)
        assert all(job.deadline_s is not None and job.deadline_s > self.now_s for job in poll.given_up)
        assert free or not poll.given_up
        for job in self.waiting:
            assert job.serve_late or job.deadline_s is None or job.deadline_s > self.now_s
        if poll.batch is not None:
            assert free
            self.check(poll.batch, max(self.now_s, start_s or 0.0))
            self.take(poll.batch)
        elif free and self.waiting:
            # Nobody may wait longer than the window while a device is free, and the policy says when to ask again.
            assert poll.wake_s is not None
            assert self.now_s < poll.wake_s <= min(job.arrived_s for job in self.waiting) + self.max_wait_s + 1e-9
        assert len(self.policy) == len(self.waiting)

    def take(self, batch: Batch[Job]) -> None:
        """The batch leaves; what is left of its large jobs waits again."""
        for job in batch.items:
            del self.waiting[job]
            rest = job.rest()
            if rest is not None:
                self.put(rest)

    def check(self, batch: Batch[Job], start_s: float) -> None:
        del start_s
        assert batch.items
        assert len(set(batch.items)) == len(batch.items)
        assert batch.opened_s == min(job.arrived_s for job in batch.items)
        if batch.reason == "solo":
            assert [job.alone for job in batch.items] == [True]
            assert not (self.solo_last and any(not job.alone for job in self.waiting))
        else:
            assert not any(job.alone for job in batch.items)
            assert len({job.bucket for job in batch.items}) == 1
        if len(batch.items) > 1:
            assert batch.rows <= self.max_rows
            assert sum(job.payload_bytes for job in batch.items) <= self.max_bytes
        self.solo_last = batch.reason == "solo"
