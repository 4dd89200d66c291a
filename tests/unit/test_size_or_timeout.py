"""When a batch leaves, why, and who is in it. Pure: the test says what time it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.policy_model import JOB, STEPS, PolicyModel
from tests.scheduled_jobs import Job

from inferq_worker.scheduling import SizeOrTimeout

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

MAX_ROWS, MAX_BYTES, MAX_WAIT_S = 4, 100, 0.010


class Policy(SizeOrTimeout[Job]):
    """The policy under test, with jobs that have come before, so that the first is not taken at once as idle."""

    def __init__(
        self, *, busy: bool = True, predict_s: Callable[[Hashable, int], float | None] | None = None, **more: Any
    ) -> None:
        limits: dict[str, Any] = {"max_rows": MAX_ROWS, "max_bytes": MAX_BYTES, "max_wait_s": MAX_WAIT_S}
        super().__init__(**(limits | more), predict_s=predict_s or (lambda _bucket, _rows: None))
        if busy:
            self.add(warmth := Job(arrived_s=-0.001))
            self.discard(warmth)

    def put(self, name: str, arrived_s: float = 0.0, **fields: Any) -> Job:
        job = Job(name, arrived_s=arrived_s, **fields)
        self.add(job)
        return job

    def leaves(self, now_s: float) -> tuple[str, str] | None:
        """Names of the jobs that leave now, and why."""
        batch = self.poll(now_s, free=True).batch
        return None if batch is None else (" ".join(job.name for job in batch.items), batch.reason)


def test_a_full_batch_leaves_at_once() -> None:
    policy = Policy()
    for name in "abcd":
        assert policy.leaves(0.0) is None
        policy.put(name)
    assert policy.leaves(0.0) == ("a b c d", "full")
    assert len(policy) == 0


def test_what_does_not_fit_stays_for_the_next_batch() -> None:
    policy = Policy()
    for name in "abcdef":
        policy.put(name)
    assert policy.leaves(0.0) == ("a b c d", "full")
    assert policy.leaves(0.0) is None
    assert policy.leaves(MAX_WAIT_S) == ("e f", "wait")


def test_the_window_opens_with_the_oldest_job_not_with_the_question() -> None:
    policy = Policy()
    policy.put("a", 0.0)
    policy.put("b", 0.006)
    poll = policy.poll(0.009, free=True)
    assert poll.batch is None
    assert poll.wake_s == pytest.approx(MAX_WAIT_S)
    assert policy.leaves(0.010) == ("a b", "wait")


def test_work_that_queued_up_behind_a_long_run_leaves_at_once() -> None:
    policy = Policy()
    policy.put("a", 0.0)
    assert policy.poll(5.0, free=False).batch is None
    assert policy.leaves(5.0) == ("a", "wait")


def test_the_batch_knows_when_its_oldest_job_came() -> None:
    policy = Policy()
    policy.put("bulk", 0.001, lane_rank=1)
    policy.put("urgent", 0.002)
    batch = policy.poll(1.0, free=True).batch
    assert batch is not None
    assert (batch.opened_s, batch.rows) == (0.001, 2)


def test_a_batch_closes_early_enough_for_its_earliest_deadline() -> None:
    policy = Policy(predict_s=lambda _bucket, rows: 0.001 * rows)
    policy.put("a", 0.0, deadline_s=1.0)
    policy.put("b", 0.0, deadline_s=0.010)
    # Two rows wait, the third is reckoned with: 10 ms - 3 ms - 2 ms margin.
    assert policy.poll(0.004, free=True).wake_s == pytest.approx(0.005)
    assert policy.leaves(0.005) == ("a b", "deadline")


def test_without_any_prediction_only_the_margin_is_kept() -> None:
    policy = Policy()
    policy.put("a", 0.0, deadline_s=0.009)
    assert policy.leaves(0.0069) is None
    assert policy.leaves(0.0071) == ("a", "deadline")


def test_a_deadline_far_away_does_not_hurry() -> None:
    policy = Policy()
    policy.put("a", 0.0, deadline_s=10.0)
    assert policy.leaves(MAX_WAIT_S) == ("a", "wait")


def test_the_first_job_after_a_quiet_spell_does_not_wait() -> None:
    policy = Policy(busy=False)
    policy.put("a", 0.0)
    assert policy.leaves(0.0) == ("a", "idle")
    policy.put("b", 0.005)
    assert policy.leaves(0.005) is None
    assert policy.leaves(0.015) == ("b", "wait")
    policy.put("c", 0.016 + MAX_WAIT_S)
    assert policy.leaves(0.016 + MAX_WAIT_S) == ("c", "idle")


def test_the_end_of_a_quiet_spell_hurries_one_batch_only() -> None:
    policy = Policy(busy=False)
    policy.put("x", 0.0, bucket="x")
    policy.put("y", 0.0, bucket="y")
    assert policy.leaves(0.0) == ("x", "idle")
    assert policy.leaves(0.0) is None
    assert policy.leaves(MAX_WAIT_S) == ("y", "wait")


def test_without_a_window_what_is_here_leaves() -> None:
    policy = Policy(max_wait_s=0.0)
    policy.put("a", 0.0)
    policy.put("b", 0.0)
    assert policy.leaves(0.0) == ("a b", "idle")


def test_expiry_is_reported_at_the_deadline_and_not_before() -> None:
    policy = Policy()
    job = policy.put("a", 0.0, deadline_s=0.5)
    poll = policy.poll(0.499, free=False)
    assert (poll.expired, poll.wake_s) == ((), 0.5)
    assert policy.poll(0.5, free=False).expired == (job,)
    assert policy.poll(0.5, free=True).batch is None


def test_a_job_whose_answer_is_welcome_late_does_not_expire() -> None:
    policy = Policy()
    policy.put("a", 0.0, deadline_s=0.001, serve_late=True)
    poll = policy.poll(2.0, free=False)
    assert (poll.expired, poll.wake_s) == ((), None)
    assert policy.leaves(2.0) == ("a", "deadline")


def test_expired_jobs_leave_room_in_their_batch() -> None:
    policy = Policy()
    for number in range(4):
        policy.put(f"dead{number}", 0.0, deadline_s=0.5)
    policy.put("a", 0.9)
    poll = policy.poll(0.905, free=True)
    assert len(poll.expired) == 4
    assert poll.batch is None
    assert policy.leaves(0.910) == ("a", "wait")


def test_jobs_of_different_shapes_do_not_mix() -> None:
    policy = Policy()
    for number, bucket in enumerate("xyxy"):
        policy.put(f"{bucket}{number}", 0.001 * number, bucket=bucket)
    assert policy.leaves(0.02) == ("x0 x2", "wait")
    assert policy.leaves(0.02) == ("y1 y3", "wait")


def test_the_shape_that_has_been_due_longest_goes_first() -> None:
    policy = Policy()
    policy.put("x", 0.000, bucket="x")
    for number in range(4):
        policy.put(f"y{number}", 0.001, bucket="y")
    assert policy.leaves(0.005) == ("y0 y1 y2 y3", "full")
    for number in range(4):
        policy.put(f"z{number}", 0.011, bucket="y")
    assert policy.leaves(0.012) == ("x", "wait")


def test_the_urgent_lane_is_served_first_and_bulk_fills_the_rest() -> None:
    policy = Policy()
    for number in range(3):
        policy.put(f"bulk{number}", 0.0, lane_rank=1)
    for number in range(3):
        policy.put(f"now{number}", 0.001, lane_rank=0)
    assert policy.leaves(0.002) == ("now0 now1 now2 bulk0", "full")


def test_bulk_leads_every_tenth_batch_however_much_is_urgent() -> None:
    policy = Policy()
    for number in range(12):
        policy.put(f"bulk{number}", 0.0, lane_rank=1)
    led_by_bulk = []
    for turn in range(1, 21):
        for number in range(8):
            policy.put(f"now{turn}.{number}", 0.0)
        left = policy.leaves(0.0)
        assert left is not None
        if left[0].startswith("bulk"):
            led_by_bulk.append(turn)
    assert led_by_bulk == [10, 20]


def test_a_job_larger_than_a_batch_leaves_by_itself() -> None:
    policy = Policy()
    policy.put("huge", 0.0, rows=9)
    policy.put("a", 0.0)
    assert policy.leaves(0.0) == ("huge", "full")
    assert policy.leaves(1.0) == ("a", "wait")


def test_bytes_limit_a_batch_as_well() -> None:
    policy = Policy()
    policy.put("a", 0.0, payload_bytes=60)
    policy.put("b", 0.0, payload_bytes=60)
    policy.put("giant", 0.0, payload_bytes=1_000)
    assert [policy.leaves(1.0) for _ in range(3)] == [("a", "wait"), ("b", "wait"), ("giant", "wait")]


def test_a_suspect_runs_alone_and_at_once() -> None:
    policy = Policy()
    policy.put("a", 0.0)
    policy.put("suspect", 0.0, alone=True)
    assert policy.leaves(0.0) == ("suspect", "solo")
    assert policy.leaves(0.010) == ("a", "wait")


def test_suspects_go_by_deadline() -> None:
    policy = Policy()
    policy.put("never", 0.0, alone=True)
    policy.put("later", 0.0, alone=True, deadline_s=9.0)
    policy.put("sooner", 0.0, alone=True, deadline_s=5.0)
    assert [policy.leaves(0.0) for _ in range(3)] == [("sooner", "solo"), ("later", "solo"), ("never", "solo")]


def test_suspects_get_at_most_every_second_run_while_others_wait() -> None:
    policy = Policy()
    for number in range(3):
        policy.put(f"s{number}", 0.0, alone=True)
    for number in range(8):
        policy.put(f"a{number}", 0.0)
    reasons = [left[1] for _ in range(5) if (left := policy.leaves(1.0)) is not None]
    assert reasons == ["solo", "full", "solo", "full", "solo"]


def test_a_suspect_whose_turn_it_is_not_yet_waits_for_the_window_of_the_others() -> None:
    policy = Policy()
    policy.put("s0", 0.0, alone=True)
    policy.put("s1", 0.0, alone=True)
    policy.put("a", 0.0)
    assert policy.leaves(0.0) == ("s0", "solo")
    assert policy.leaves(0.0) is None
    assert policy.leaves(0.010) == ("a", "wait")
    assert policy.leaves(0.010) == ("s1", "solo")


def test_a_suspect_expires_like_any_other() -> None:
    policy = Policy()
    job = policy.put("s", 0.0, alone=True, deadline_s=1.0)
    assert policy.poll(1.0, free=False).expired == (job,)
    assert len(policy) == 0


def test_a_discarded_job_is_gone() -> None:
    policy = Policy()
    first, second = policy.put("a"), policy.put("b")
    assert policy.discard(first)
    assert not policy.discard(first)
    assert policy.leaves(1.0) == ("b", "wait")
    assert not policy.discard(second)
    assert policy.poll(2.0, free=True).wake_s is None


def test_drain_gives_up_everything_oldest_first() -> None:
    policy = Policy()
    jobs = [
        policy.put("late", 0.3, bucket="x"),
        policy.put("s", 0.1, alone=True),
        policy.put("early", 0.0, lane_rank=1),
    ]
    assert policy.drain() == (jobs[2], jobs[1], jobs[0])
    assert len(policy) == 0
    assert policy.poll(9.0, free=True).batch is None


def test_a_long_wait_behind_a_busy_device_keeps_no_expired_jobs() -> None:
    policy = Policy()
    policy.put("stays")
    for number in range(5_000):
        policy.put("passes", 0.001 * number, deadline_s=0.001 * number)
        policy.poll(0.001 * number, free=False)
    assert len(policy) == 1
    kept = sum(len(lane) for bucket in policy._buckets.values() for lane in bucket._lanes.values())
    assert kept < 100


def test_a_large_job_keeps_its_place_in_its_lane_and_an_earlier_lane_runs_between_its_steps() -> None:
    policy = Policy()
    large = policy.put("large", 0.0, rows=4, later_rows=4, lane_rank=1)
    policy.put("next", 0.0, lane_rank=1)
    assert policy.leaves(0.0) == ("large", "full")
    rest = large.rest()
    assert rest is not None
    policy.add(rest)
    policy.put("urgent", 0.001, rows=4)
    assert [policy.leaves(1.0) for _ in range(3)] == [("urgent", "full"), ("large", "full"), ("next", "wait")]


# Whatever happens


def model() -> PolicyModel:
    return PolicyModel(Policy(busy=False), max_rows=MAX_ROWS, max_bytes=MAX_BYTES, max_wait_s=MAX_WAIT_S)


@settings(max_examples=150, deadline=None)
@given(STEPS)
def test_no_job_is_lost_doubled_or_in_bad_company_whatever_happens(steps: list[tuple[Any, ...]]) -> None:
    model().goes_through(steps)


@settings(max_examples=50, deadline=None)
@given(st.lists(JOB, max_size=60))
def test_a_free_device_empties_the_queue_in_the_end(jobs: list[dict[str, Any]]) -> None:
    model().empties(jobs)
