"""When a batch leaves, why, who is in it, and who is given up. Pure: the test says what time it is."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fakes import FakeClock
from tests.policy_model import JOB, STEPS, PolicyModel
from tests.scheduled_jobs import Job, run_s

from inferq_worker.scheduling import Batch, Batcher
from inferq_worker.scheduling.earliest_deadline import EarliestDeadline

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

MAX_ROWS, MAX_BYTES, MAX_WAIT_S, MARGIN_S, AGEING_S = 4, 100, 0.010, 0.001, 60.0
RUN_S = run_s(1)


class Policy(EarliestDeadline[Job]):
    """The policy under test, with jobs that have come before, so that the first is not taken at once as idle."""

    def __init__(
        self, *, busy: bool = True, predict_s: Callable[[Hashable, int], float | None] | None = None, **more: Any
    ) -> None:
        limits: dict[str, Any] = {"max_rows": MAX_ROWS, "max_bytes": MAX_BYTES, "max_wait_s": MAX_WAIT_S}
        super().__init__(
            **(limits | {"margin_s": MARGIN_S, "ageing_s": AGEING_S} | more),
            predict_s=predict_s or (lambda _bucket, rows: run_s(rows)),
        )
        if busy:
            self.add(warmth := Job(arrived_s=-0.001))
            self.discard(warmth)

    def put(self, name: str, arrived_s: float = 0.0, **fields: Any) -> Job:
        job = Job(name, arrived_s=arrived_s, **fields)
        self.add(job)
        return job

    def leaves(self, now_s: float, *, start_s: float | None = None) -> tuple[str, str] | None:
        """Names of the jobs that leave now, and why."""
        batch = self.poll(now_s, free=True, start_s=start_s).batch
        return None if batch is None else (" ".join(job.name for job in batch.items), batch.reason)

    def batches(self, now_s: float) -> list[str]:
        """Names in every batch that leaves now."""
        left = []
        while (batch := self.leaves(now_s)) is not None:
            left.append(batch[0])
        return left

    def ends(self, now_s: float) -> str:
        """Names of the jobs in the order in which their last step leaves; each run ends before the next begins."""
        ended = ""
        while (batch := self.poll(now_s, free=True).batch) is not None:
            for job in batch.items:
                rest = job.rest()
                if rest is None:
                    ended += job.name
                else:
                    self.add(rest)
        return ended


def put_history(policy: Policy, allowance_s: float) -> None:
    """Let the target be that of jobs with this long to their deadline."""
    for _ in range(300):
        policy.discard(policy.put("history", -0.001, deadline_s=allowance_s - 0.001))


# When a batch leaves


def test_a_full_batch_leaves_at_once() -> None:
    policy = Policy()
    for name in "abcd":
        assert policy.leaves(0.0) is None
        policy.put(name)
    assert policy.leaves(0.0) == ("a b c d", "full")
    assert len(policy) == 0


def test_the_window_opens_with_the_oldest_job_not_with_the_question() -> None:
    policy = Policy()
    policy.put("a", 0.0)
    policy.put("b", 0.006)
    poll = policy.poll(0.009, free=True)
    assert poll.batch is None
    assert poll.wake_s == pytest.approx(MAX_WAIT_S)
    assert policy.leaves(0.010) == ("a b", "wait")


def test_the_first_job_after_a_quiet_spell_does_not_wait() -> None:
    policy = Policy(busy=False)
    policy.put("a", 0.0)
    assert policy.leaves(0.0) == ("a", "idle")
    policy.put("b", 0.005)
    assert policy.leaves(0.005) is None
    assert policy.leaves(0.015) == ("b", "wait")


def test_a_job_alone_with_a_tight_deadline_leaves_in_time() -> None:
    policy = Policy()
    policy.put("a", 0.0, deadline_s=0.010)
    poll = policy.poll(0.0, free=True)
    # Time for one more row is kept until the end, and the margin.
    assert poll.batch is None
    assert poll.wake_s == pytest.approx(0.010 - run_s(2) - MARGIN_S)
    assert policy.leaves(0.003) == ("a", "deadline")


def test_a_job_whose_deadline_leaves_no_time_to_wait_goes_at_once() -> None:
    policy = Policy()
    put_history(policy, 1.0)
    policy.put("a", 0.0, deadline_s=RUN_S + MARGIN_S + 0.0001)
    assert policy.leaves(0.0) == ("a", "deadline")


@pytest.mark.parametrize("jobs", [1, 4, 5, 8, 9, 30, 33])
def test_jobs_that_queued_up_behind_a_long_run_leave_in_as_few_batches_as_there_can_be(jobs: int) -> None:
    policy = Policy()
    for number in range(jobs):
        policy.put(str(number), 0.001 * number)
    assert policy.poll(5.0, free=False).batch is None
    assert len(policy.batches(5.0)) == -(-jobs // MAX_ROWS)


def test_before_anything_is_known_of_the_device_it_is_size_or_timeout() -> None:
    policy = Policy(predict_s=lambda _bucket, _rows: None)
    for number in range(5):
        policy.put(str(number), 0.0, deadline_s=0.009 + number)
    assert policy.leaves(0.0) == ("0 1 2 3", "full")
    assert policy.leaves(0.010) == ("4", "wait")


# Who is in it


def test_the_earliest_deadlines_go_first() -> None:
    policy = Policy()
    for name, deadline_s in (("c", 3.0), ("a", 1.0), ("e", 5.0), ("b", 2.0), ("d", 4.0)):
        policy.put(name, 0.0, deadline_s=deadline_s)
    assert policy.batches(0.010) == ["a b c d", "e"]


def test_what_does_not_fit_stays_for_the_next_batch() -> None:
    policy = Policy()
    for name, rows in (("a", 3), ("b", 2), ("c", 2)):
        policy.put(name, rows=rows)
    assert policy.batches(0.010) == ["a", "b c"]


def test_a_job_larger_than_a_batch_leaves_by_itself() -> None:
    policy = Policy()
    policy.put("huge", 0.0, rows=9, deadline_s=1.0)
    policy.put("a", 0.0, deadline_s=2.0)
    assert policy.batches(0.010) == ["huge", "a"]


def test_a_job_larger_than_a_batch_is_given_up_by_its_own_run_time() -> None:
    policy = Policy()
    huge = policy.put("huge", 0.0, rows=100, deadline_s=0.054)
    assert policy.poll(0.010, free=True).given_up == (huge,)


def test_bytes_limit_a_batch_as_well() -> None:
    policy = Policy()
    for name, size in (("a", 60), ("b", 60), ("giant", 1_000)):
        policy.put(name, payload_bytes=size)
    assert policy.batches(1.0) == ["a", "b", "giant"]


def test_padding_that_is_computed_anyway_is_filled_with_rows() -> None:
    policy = Policy(predict_s=lambda _bucket, rows: 0.010 if rows <= 4 else 0.011, max_rows=8)
    for name in "abcdefgh":
        policy.put(name, 0.0, deadline_s=0.0215)
    # Eight rows have more throughput, and two such runs do not fit; four is the largest that runs for 10 ms.
    assert policy.target_rows("b") == 4
    assert policy.leaves(0.0) == ("a b c d", "full")


def test_bulk_does_not_top_a_batch_up_beyond_what_its_urgent_job_survives() -> None:
    policy = Policy()
    put_history(policy, 1.0)
    policy.put("now", 0.0, deadline_s=run_s(2) + MARGIN_S)
    for number in range(4):
        policy.put(f"bulk{number}", 0.0, lane_rank=1, deadline_s=9.0 + number)
    assert policy.batches(0.0) == ["now bulk0"]
    assert policy.batches(0.010) == ["bulk1 bulk2 bulk3"]


def test_alternating_shapes_do_not_make_batches_of_one() -> None:
    policy = Policy()
    for number in range(16):
        policy.put(f"{'xy'[number % 2]}{number}", 0.0, bucket="xy"[number % 2], deadline_s=1.0 + number)
    assert policy.batches(0.010) == ["x0 x2 x4 x6", "y1 y3 y5 y7", "x8 x10 x12 x14", "y9 y11 y13 y15"]


def test_of_several_shapes_that_are_due_the_earliest_deadline_goes_first() -> None:
    policy = Policy()
    policy.put("old", 0.000, bucket="x", deadline_s=9.0)
    policy.put("urgent", 0.001, bucket="y", deadline_s=8.0)
    assert policy.batches(0.011) == ["urgent", "old"]


def test_a_job_does_not_wait_for_company_while_another_shape_takes_the_device_from_it() -> None:
    policy = Policy()
    policy.put("old", 0.000, bucket="x", deadline_s=9.0)
    policy.put("urgent", 0.009, bucket="y", deadline_s=0.020)
    policy.put("patient", 0.009, bucket="z", deadline_s=0.900)
    assert policy.leaves(0.009) is None
    assert policy.batches(0.011) == ["urgent", "old"]


# Who is given up


def test_a_job_that_no_run_can_answer_in_time_is_given_up() -> None:
    policy = Policy()
    hopeless = policy.put("a", 0.0, deadline_s=0.0060)
    poll = policy.poll(0.001, free=True)
    assert (poll.given_up, poll.expired, poll.batch) == ((hopeless,), (), None)
    assert len(policy) == 0
    assert policy.poll(1.0, free=True).wake_s is None


def test_under_overload_heads_that_would_force_tiny_batches_are_given_up() -> None:
    policy = Policy(max_rows=64)
    put_history(policy, 0.05)
    for number in range(5):
        policy.put(f"head{number}", 0.0, deadline_s=0.0070)
    for number in range(80):
        policy.put(f"rest{number}", -0.0230, deadline_s=0.0270)
    poll = policy.poll(0.0005, free=True)
    assert [job.name for job in poll.given_up] == [f"head{number}" for number in range(5)]
    assert poll.batch is not None
    assert poll.batch.rows == 40


def test_while_there_is_time_for_a_small_batch_nobody_is_given_up() -> None:
    policy = Policy(max_rows=64)
    put_history(policy, 0.05)
    for number in range(2):
        policy.put(f"head{number}", 0.0, deadline_s=0.0076)
    for number in range(80):
        policy.put(f"rest{number}", 0.0, deadline_s=0.0900)
    poll = policy.poll(0.0, free=True)
    assert poll.given_up == ()
    assert poll.batch is not None
    assert poll.batch.items[0].name == "head0"
    assert poll.batch.rows == 3, "three rows run for 6.5 ms"


def test_a_small_batch_must_not_cost_jobs_of_another_shape_their_deadline() -> None:
    policy = Policy(max_rows=64)
    put_history(policy, 0.05)
    head = policy.put("head", 0.0, deadline_s=0.0070)
    for number in range(40):
        policy.put(f"rest{number}", 0.0, deadline_s=0.0900)
    policy.put("other", 0.0, bucket="other", deadline_s=0.0300)
    assert policy.poll(0.0, free=True).given_up == (head,)


def test_it_counts_from_when_the_run_will_begin() -> None:
    policy = Policy()
    job = policy.put("a", 0.0, deadline_s=0.015)
    assert policy.poll(0.010, free=True, start_s=0.009).given_up == (job,), "never earlier than now"
    job = policy.put("b", 0.010, deadline_s=0.029)
    assert policy.poll(0.020, free=True, start_s=0.024).given_up == (job,)


# Expiry


def test_expiry_is_exact_also_while_no_device_is_free() -> None:
    clock, expired = FakeClock(0.0), []
    batcher = Batcher(Policy(), clock, lambda job: expired.append((clock.now(), job.name)))
    for number in (3, 1, 2):
        batcher.add(Job(str(number), deadline_s=0.1 * number))
    clock.advance(0.5)
    assert [name for _, name in expired] == ["1", "2", "3"]
    assert [at_s for at_s, _ in expired] == pytest.approx([0.1, 0.2, 0.3])
    assert len(batcher) == 0


def test_expiry_is_reported_at_the_deadline_and_not_before() -> None:
    policy = Policy()
    job = policy.put("a", 0.0, deadline_s=0.5, lane_rank=1)
    poll = policy.poll(0.499, free=False)
    assert (poll.expired, poll.wake_s) == ((), 0.5)
    assert policy.poll(0.5, free=False).expired == (job,)


def test_a_job_whose_answer_is_welcome_late_is_never_dropped_and_delays_no_other() -> None:
    policy = Policy()
    for number in range(6):
        policy.put(f"late{number}", 0.0, deadline_s=0.001, serve_late=True)
    assert policy.poll(1.0, free=False).expired == ()
    for number in range(4):
        policy.put(f"now{number}", 1.0, deadline_s=2.0)
    poll = policy.poll(1.0, free=True)
    assert poll.given_up == ()
    assert poll.batch is not None
    assert [job.name for job in poll.batch.items] == ["now0", "now1", "now2", "now3"]
    assert policy.batches(1.0) == ["late0 late1 late2 late3", "late4 late5"]


def test_a_late_job_fills_room_and_neither_shortens_the_batch_nor_is_given_up() -> None:
    policy = Policy()
    policy.put("late", 0.0, deadline_s=0.0055, serve_late=True)
    for number in range(3):
        policy.put(f"now{number}", 0.001, deadline_s=1.0)
    poll = policy.poll(0.001, free=True)
    assert poll.given_up == ()
    assert poll.batch is not None
    assert sorted(job.name for job in poll.batch.items) == ["late", "now0", "now1", "now2"]


# Lanes


def test_the_urgent_lane_is_served_first_and_bulk_fills_the_rest() -> None:
    policy = Policy()
    for number in range(3):
        policy.put(f"bulk{number}", 0.0, lane_rank=1)
        policy.put(f"now{number}", 0.001, deadline_s=9.0)
    assert policy.leaves(0.002) == ("now0 now1 now2 bulk0", "full")


@pytest.mark.parametrize("bulk_bucket", ["b", "other"])
def test_bulk_gets_a_tenth_of_the_rows_however_much_is_urgent(bulk_bucket: str) -> None:
    policy = Policy()
    for number in range(300):
        policy.put(f"bulk{number}", -100.0, lane_rank=1, bucket=bulk_bucket)
    bulk = rows = 0
    for turn in range(200):
        for number in range(8):
            policy.put(f"now{number}", 0.0, deadline_s=1_000.0 + turn)
        batch = policy.poll(0.0, free=True).batch
        assert batch is not None
        bulk += sum(job.lane_rank for job in batch.items)
        rows += batch.rows
    assert 0.09 <= bulk / rows <= 0.11


def test_a_bulk_backlog_of_another_shape_does_not_starve_urgent_jobs() -> None:
    policy = Policy()
    for number in range(100):
        policy.put(f"bulk{number}", -50.0, lane_rank=1, bucket="other")
    policy.put("now", 0.0, deadline_s=0.012)
    assert policy.leaves(0.005) == ("now", "deadline")


def test_what_bulk_does_not_use_is_not_saved_up() -> None:
    policy = Policy()
    for _ in range(1_000):
        for _ in range(4):
            policy.put("now", 0.0, deadline_s=1_000.0)
        policy.leaves(0.0)
    for number in range(100):
        policy.put(f"bulk{number}", 0.0, lane_rank=1)
        policy.put(f"now{number}", 0.0, deadline_s=1_000.0)
    led = [names.startswith("bulk") for names in policy.batches(0.0)[:10]]
    assert sum(led) == 2, "two batches at most, then its tenth"


def test_jobs_without_deadline_age_and_then_precede_bulk_that_is_due_later() -> None:
    policy = Policy()
    policy.put("undated", 0.0)
    policy.put("sooner", 0.0, lane_rank=1, deadline_s=AGEING_S - 1)
    for number in range(3):
        policy.put(f"later{number}", 0.0, lane_rank=1, deadline_s=AGEING_S + 1)
    assert policy.leaves(1.0) == ("sooner later0 later1 later2", "full")
    for number in range(4):
        policy.put(f"later{number}", 0.0, lane_rank=1, deadline_s=AGEING_S + 1)
    assert policy.batches(1.0) == ["undated later0 later1 later2", "later3"]


def test_jobs_without_deadline_are_served_under_an_endless_urgent_load() -> None:
    policy = Policy()
    policy.put("undated", 0.0)
    for turn in range(100):
        for _ in range(4):
            policy.put("now", 0.0, deadline_s=1_000.0)
        left = policy.leaves(0.001 * turn)
        assert left is not None
        if "undated" in left[0]:
            return
    pytest.fail("it was never served")


def test_bulk_batches_stay_small_only_while_urgent_jobs_come() -> None:
    policy = Policy(max_rows=64)
    put_history(policy, 0.03)
    for number in range(100):
        policy.put(str(number), 0.0, lane_rank=1)
    assert [policy.target_rows("b") for _ in range(2)] == [20, 20]
    batch = policy.poll(1.0, free=True).batch
    assert batch is not None
    assert batch.rows == 20
    batch = policy.poll(11.0, free=True).batch
    assert batch is not None
    assert batch.rows == 64


def test_a_limit_that_moves_is_followed_at_once() -> None:
    limits = {"b": 4}
    policy = Policy(max_rows=lambda bucket: limits[bucket])
    put_history(policy, 1.0)
    targets = [policy.target_rows("b")]
    for limits["b"] in (2, 4):
        targets.append(policy.target_rows("b"))
    assert targets == [4, 2, 4]


def test_rows_ahead_are_those_of_urgent_jobs_that_are_due_by_then() -> None:
    policy = Policy()
    policy.put("a", deadline_s=1.0, rows=2)
    policy.put("b", deadline_s=3.0, rows=2)
    policy.put("c", deadline_s=1.0, rows=3, bucket="other")
    policy.put("bulk", deadline_s=1.0, lane_rank=1)
    policy.put("undated")
    ahead = [policy.rows_ahead(due_s) for due_s in (0.9, 1.0, 4.0)]
    assert ahead == [{}, {"b": 2, "other": 3}, {"b": 4, "other": 3}], "of equal deadlines who came first goes first"


def test_all_the_rows_of_large_jobs_are_ahead_not_only_those_of_their_next_step() -> None:
    policy = Policy()
    policy.put("large", deadline_s=2.0, rows=4, later_rows=35)
    for number in range(5):
        policy.put(str(number), deadline_s=1.0 + number)
    assert [policy.rows_ahead(due_s)["b"] for due_s in (1.5, 2.5, 9.0)] == [1, 41, 44]
    assert policy.leaves(0.0) == ("0", "full")
    assert policy.leaves(0.0) == ("large", "full")
    assert policy.rows_ahead(9.0) == {"b": 4}, "what has left is not ahead"


@pytest.mark.parametrize("buckets", ["bbb", "bob", "oob"])
def test_large_jobs_of_one_deadline_go_one_after_the_other_in_order_of_arrival(buckets: str) -> None:
    policy = Policy()
    for name, bucket in zip("abc", buckets, strict=True):
        # One message may bring all of them, so that they arrived at the same moment.
        policy.put(name, 0.0, bucket=bucket, deadline_s=9.0, rows=4, later_rows=8)
    assert policy.ends(1.0) == "abc"


def test_a_job_due_earlier_runs_between_two_steps_and_one_of_the_same_deadline_does_not() -> None:
    policy = Policy()
    policy.put("large", 0.0, deadline_s=9.0, rows=4, later_rows=4)
    batch = policy.poll(0.0, free=True).batch
    assert batch is not None
    rest = batch.items[0].rest()
    assert rest is not None
    policy.put("same", 0.001, deadline_s=9.0)
    policy.put("sooner", 0.001, deadline_s=8.0, rows=4)
    policy.add(rest)
    assert policy.batches(0.1) == ["sooner", "large", "same"]


def test_the_next_step_of_a_large_job_is_no_arrival() -> None:
    policy = Policy()
    put_history(policy, 1.0)
    target, seen = policy.target_rows("b"), policy._target._seen
    policy.add(Job("rest", arrived_s=-5.0, deadline_s=-5.0 + 5.5, started=True))
    assert (policy.target_rows("b"), policy._target._seen) == (target, seen)
    policy.put("a", 0.001)
    assert policy.leaves(0.001) == ("rest a", "wait"), "it came long ago, and waits no more"
    policy.put("b", 0.002)
    assert policy.leaves(0.002) is None, "nor was it quiet before"


def test_a_job_that_came_before_others_but_is_added_after_them_does_not_wait_anew() -> None:
    policy = Policy()
    policy.put("oldest", 0.000)
    policy.put("latest", 0.004)
    policy.put("fetched", 0.002)
    assert policy.poll(0.004, free=True).wake_s == pytest.approx(MAX_WAIT_S)
    policy.discard(next(iter(policy._buckets["b"])))
    assert policy.poll(0.004, free=True).wake_s == pytest.approx(0.002 + MAX_WAIT_S)


def test_a_large_job_is_given_up_as_soon_as_its_remaining_steps_cannot_be_in_time() -> None:
    policy = Policy()
    hopeless = policy.put("hopeless", 0.0, deadline_s=0.030, rows=4, later_rows=50)
    policy.put("fine", 0.0, deadline_s=0.040, rows=4, later_rows=50)
    poll = policy.poll(0.0, free=True)
    assert poll.given_up == (hopeless,)
    assert poll.batch is not None
    assert poll.batch.items[0].name == "fine"


# Suspects


def test_a_suspect_runs_alone_and_at_once() -> None:
    policy = Policy()
    policy.put("a", 0.0)
    policy.put("suspect", 0.0, alone=True)
    assert policy.leaves(0.0) == ("suspect", "solo")
    assert policy.leaves(0.010) == ("a", "wait")


def test_suspects_go_by_deadline_and_at_most_every_second_run_while_others_wait() -> None:
    policy = Policy()
    for name, deadline_s in (("never", None), ("later", 9.0), ("sooner", 5.0)):
        policy.put(name, 0.0, alone=True, deadline_s=deadline_s)
    for number in range(8):
        policy.put(f"a{number}", 0.0)
    assert policy.batches(1.0) == ["sooner", "a0 a1 a2 a3", "later", "a4 a5 a6 a7", "never"]


def test_a_suspect_is_not_forgotten_when_all_others_had_to_be_given_up() -> None:
    policy = Policy()
    policy.put("s0", 0.0, alone=True)
    policy.put("s1", 0.0, alone=True)
    policy.put("hopeless", 0.0, deadline_s=0.006)
    assert policy.leaves(0.001) == ("s0", "solo")
    assert policy.leaves(0.001) == ("s1", "solo")


def test_a_suspect_expires_and_is_given_up_like_any_other() -> None:
    policy = Policy()
    expired = policy.put("s0", 0.0, alone=True, deadline_s=1.0)
    hopeless = policy.put("s1", 0.0, alone=True, deadline_s=1.001)
    policy.put("s2", 0.0, alone=True, deadline_s=1.001, serve_late=True)
    poll = policy.poll(1.0, free=True)
    assert (poll.expired, poll.given_up) == ((expired,), (hopeless,))
    assert poll.batch is not None
    assert [job.name for job in poll.batch.items] == ["s2"]
    assert len(policy) == 0


# Leaving otherwise


def test_a_discarded_job_is_gone() -> None:
    policy = Policy()
    first, second = policy.put("a"), policy.put("b", deadline_s=5.0)
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
        policy.put("early", 0.0, lane_rank=1, deadline_s=9.0),
    ]
    assert policy.drain() == (jobs[2], jobs[1], jobs[0])
    assert len(policy) == 0
    assert policy.poll(9.0, free=True).batch is None


def test_a_job_that_waits_long_keeps_nothing_that_came_and_left_after_it() -> None:
    policy = Policy()
    policy.put("stays", serve_late=True)
    for number in range(2_000):
        policy.put("passes", 0.001 * number, deadline_s=0.001 * number, bucket=("b", number % 3))
        policy.discard(policy.put("passes too", 0.001 * number))
        policy.poll(0.001 * number, free=False)
    assert len(policy) == 1
    gc.collect()
    assert sum(isinstance(one, Job) and one.name.startswith("passes") for one in gc.get_objects()) <= 1
    assert list(policy._buckets) == ["b"]


def test_shapes_that_were_seen_once_are_not_remembered_for_ever() -> None:
    policy = Policy()
    for number in range(3_000):
        policy.put("a", 0.0, bucket=number)
        policy.leaves(1.0)
    assert not policy._buckets
    assert len(policy._targets) <= 256


# Whatever happens


class Model(PolicyModel):
    """Besides, a batch leaves only if it is expected to be in time for every job in it that is not welcome late."""

    def __init__(self) -> None:
        super().__init__(Policy(busy=False), max_rows=MAX_ROWS, max_bytes=MAX_BYTES, max_wait_s=MAX_WAIT_S)

    def check(self, batch: Batch[Job], start_s: float) -> None:
        super().check(batch, start_s)
        # The margin is only kept where somebody else needs the seat.
        finish_s = start_s + run_s(batch.rows)
        for job in batch.items:
            assert job.serve_late or job.deadline_s is None or finish_s <= job.deadline_s + 1e-9


@settings(max_examples=200, deadline=None)
@given(STEPS)
def test_no_job_is_lost_doubled_late_or_in_bad_company_whatever_happens(steps: list[tuple[Any, ...]]) -> None:
    Model().goes_through(steps)


@settings(max_examples=60, deadline=None)
@given(st.lists(JOB, max_size=60))
def test_a_free_device_empties_the_queue_in_the_end(jobs: list[dict[str, Any]]) -> None:
    Model().empties(jobs)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 70), st.integers(1, 16), st.integers(0, 3))
def test_single_rows_leave_in_as_few_batches_as_there_can_be(jobs: int, max_rows: int, gap_ms: int) -> None:
    policy = Policy(max_rows=max_rows, max_bytes=1_000)
    for number in range(jobs):
        policy.put("a", gap_ms / 1000 * number)
    assert len(policy.batches(10.0)) == -(-jobs // max_rows)


def test_a_job_inside_the_margin_rides_where_nobody_needs_its_seat_and_is_given_up_where_somebody_does() -> None:
    due_s = run_s(MAX_ROWS) + 0.5 * 0.050
    alone = Policy(margin_s=0.050)
    alone.put("a", deadline_s=due_s)
    poll = alone.poll(MAX_WAIT_S / 2, free=True, start_s=0.0)
    assert poll.given_up == ()
    crowded = Policy(margin_s=0.050)
    crowded.put("a", deadline_s=due_s)
    for number in range(4 * MAX_ROWS):
        crowded.put(f"b{number}", deadline_s=1.0 + number / 1000)
    assert [job.name for job in crowded.poll(MAX_WAIT_S / 2, free=True, start_s=0.0).given_up] == ["a"]
