"""What opens a breaker and what does not, how long it stays open, and that it never changes state by another way."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from inferq_worker.runtime import BreakerSettings
from inferq_worker.runtime.breaker import LEAST_FAILURES, Breaker, State, Trip

SLOW_S = 0.8
NOW_S = 1_000.0


def breaker_of(**limits: Any) -> Breaker:
    return Breaker(BreakerSettings(**limits), slow_s=SLOW_S)


def run(breaker: Breaker, *, fail: int = 0, ok: int = 0, run_s: float = 0.01, at_s: float = NOW_S) -> None:
    for failed in [False] * ok + [True] * fail:
        breaker.ran(at_s, failed=failed, run_s=run_s)


def opened(breaker: Breaker) -> Trip | None:
    return breaker.trip if breaker.state is State.OPEN else None


def is_closed(breaker: Breaker) -> bool:
    return breaker.state is State.CLOSED


def test_five_failed_runs_in_a_row_open_it_and_four_do_not() -> None:
    breaker = breaker_of()
    run(breaker, fail=4)
    assert breaker.state is State.CLOSED
    assert breaker.ran(NOW_S, failed=True, run_s=0.01), "it says so when a run opens it"
    assert opened(breaker) is Trip.FAILURES


def test_one_run_that_succeeds_starts_the_row_again() -> None:
    breaker = breaker_of()
    for _ in range(3):
        run(breaker, fail=4)
        run(breaker, ok=1)
    assert breaker.state is State.CLOSED


def test_failures_that_lie_hours_apart_are_no_row() -> None:
    breaker = breaker_of()
    for n in range(20):
        run(breaker, fail=1, at_s=NOW_S + 15.1 * n)
    assert breaker.state is State.CLOSED


def test_more_than_three_percent_of_failed_runs_open_it() -> None:
    breaker = breaker_of()
    run(breaker, ok=100)
    for _ in range(3):
        run(breaker, fail=1)
        run(breaker, ok=1)
    assert breaker.state is State.CLOSED, "3 of 106"
    run(breaker, fail=1)
    assert opened(breaker) is Trip.ERRORS


def test_an_error_rate_needs_a_number_of_runs_and_of_failures() -> None:
    breaker = breaker_of(min_runs=20)
    for failed in (True, False) * 2:
        breaker.ran(NOW_S, failed=failed, run_s=0.01)
    run(breaker, ok=36)
    assert is_closed(breaker), f"2 of 40 are fewer than {LEAST_FAILURES}"
    breaker = breaker_of(min_runs=20)
    for failed in (True, False) * 9:
        breaker.ran(NOW_S, failed=failed, run_s=0.01)
    assert breaker.state is State.CLOSED, "half of 18 runs"
    run(breaker, ok=2)
    assert opened(breaker) is Trip.ERRORS, "judged at the twentieth, whatever came of that one"


def test_it_opens_when_more_than_one_run_in_twenty_is_slow() -> None:
    breaker = breaker_of()
    run(breaker, ok=39)
    run(breaker, ok=2, run_s=SLOW_S)
    assert breaker.state is State.CLOSED, "as slow as the limit is not slow"
    run(breaker, ok=2, run_s=SLOW_S + 0.01)
    assert breaker.state is State.CLOSED, "2 of 43"
    run(breaker, ok=1, run_s=SLOW_S + 0.01)
    assert opened(breaker) is Trip.SLOW


def test_two_time_outs_within_the_window_open_it_without_any_other_run() -> None:
    breaker = breaker_of()
    assert not breaker.timed_out(NOW_S)
    run(breaker, ok=10, at_s=NOW_S + 1)
    assert breaker.timed_out(NOW_S + 31)
    assert opened(breaker) is Trip.TIMEOUTS


def test_what_lies_before_the_window_does_not_count() -> None:
    breaker = breaker_of(window_s=60)
    breaker.timed_out(NOW_S)
    for failed in (True, False) * 4:
        breaker.ran(NOW_S, failed=failed, run_s=2.0)
    assert breaker.tally(NOW_S).failed == 5
    assert breaker.tally(NOW_S + 61).failed == 0, "also while nothing runs"
    run(breaker, ok=30, at_s=NOW_S + 61)
    assert breaker.tally(NOW_S + 61).runs == 30
    assert breaker.state is State.CLOSED


def test_it_is_half_opened_after_five_seconds_and_a_probe_closes_it() -> None:
    breaker = breaker_of()
    run(breaker, fail=5)
    assert breaker.half_open_s == NOW_S + 5
    breaker.half_open()
    assert str(breaker.state) == str(State.HALF_OPEN)
    breaker.probed(NOW_S + 5.1, passed=True)
    assert is_closed(breaker)
    assert breaker.tally(NOW_S + 5.1).runs == 0, "what opened it is forgotten"
    run(breaker, fail=4, at_s=NOW_S + 6)
    assert breaker.state is State.CLOSED


def test_each_failed_probe_doubles_the_wait_up_to_the_longest() -> None:
    breaker = breaker_of(half_open_after_s=5, half_open_max_s=30)
    run(breaker, fail=5)
    now_s, waits = NOW_S, []
    for _ in range(5):
        assert breaker.half_open_s is not None
        waits.append(breaker.half_open_s - now_s)
        now_s = breaker.half_open_s
        breaker.half_open()
        breaker.probed(now_s, passed=False)
        assert opened(breaker) is Trip.PROBE_FAILED
    assert waits == [5, 10, 20, 30, 30]


def test_one_that_opens_again_soon_after_a_good_probe_waits_longer_and_later_one_as_at_first() -> None:
    """The probe passes and the jobs fail: without this it would flap every five seconds, with five failures each."""
    breaker = breaker_of()
    run(breaker, fail=5)
    breaker.half_open()
    breaker.probed(NOW_S + 5, passed=True)
    run(breaker, fail=5, at_s=NOW_S + 6)
    assert breaker.half_open_s == NOW_S + 16
    breaker.half_open()
    breaker.probed(NOW_S + 16, passed=True)
    run(breaker, fail=5, at_s=NOW_S + 76)
    assert breaker.half_open_s == NOW_S + 81, "a window of good work lies between"


def test_runs_that_end_while_it_is_open_change_nothing() -> None:
    breaker = breaker_of()
    run(breaker, fail=5)
    before = breaker.half_open_s
    run(breaker, fail=10, ok=10)
    assert not breaker.timed_out(NOW_S)
    assert (breaker.half_open_s, breaker.tally(NOW_S).runs) == (before, 0)


def test_only_the_right_event_leads_out_of_a_state() -> None:
    breaker = breaker_of()
    breaker.half_open()
    assert is_closed(breaker)
    run(breaker, fail=5)
    breaker.probed(NOW_S, passed=True)
    assert opened(breaker) is Trip.FAILURES


@pytest.mark.parametrize(
    "wrong",
    [
        {"failures_in_row": 0},
        {"error_ratio": 0},
        {"error_ratio": 1.1},
        {"run_p95_s": 0},
        {"slow_factor": 0.5},
        {"timeouts": 0},
        {"window_s": 0},
        {"min_runs": 0},
        {"half_open_after_s": 0},
        {"half_open_after_s": 20, "half_open_max_s": 10},
    ],
)
def test_limits_that_make_no_sense_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValidationError):
        BreakerSettings.model_validate(wrong)


events = st.lists(
    st.tuples(
        st.sampled_from(["ok", "fail", "slow", "timeout", "half_open", "probe ok", "probe bad"]),
        st.sampled_from([0.0, 0.125, 1.0, 4.0, 9.0, 30.0, 70.0]),
    ),
    max_size=120,
)


@settings(max_examples=150)
@given(events)
def test_whatever_happens_it_opens_for_a_reason_and_waits_within_bounds(story: list[tuple[str, float]]) -> None:
    limits = BreakerSettings(min_runs=5)
    breaker, now_s = Breaker(limits, slow_s=SLOW_S), NOW_S
    since = deque[tuple[float, str]]()
    for what, passes_s in story:
        now_s += passes_s
        before = breaker.state
        if what == "half_open":
            breaker.half_open()
        elif what.startswith("probe"):
            breaker.probed(now_s, passed=what == "probe ok")
        elif what == "timeout":
            breaker.timed_out(now_s)
        else:
            breaker.ran(now_s, failed=what == "fail", run_s=2.0 if what == "slow" else 0.01)
        if before is State.CLOSED and what in {"ok", "fail", "slow", "timeout"}:
            since.append((now_s, what))
        assert (before, breaker.state) in {
            *((state, state) for state in State),
            (State.CLOSED, State.OPEN),
            (State.OPEN, State.HALF_OPEN),
            (State.HALF_OPEN, State.OPEN),
            (State.HALF_OPEN, State.CLOSED),
        }
        if breaker.state is State.OPEN and before is not State.OPEN:
            assert breaker.half_open_s is not None
            assert limits.half_open_after_s <= breaker.half_open_s - now_s <= limits.half_open_max_s
            assert breaker.trip is not None
            _assert_evident(breaker.trip, [one for at_s, one in since if now_s - at_s < limits.window_s], limits)
            since.clear()


def _assert_evident(trip: Trip, recent: list[str], limits: BreakerSettings) -> None:
    """What opened it is seen in the runs themselves, counted without slices."""
    bad = [one in {"fail", "timeout"} for one in recent]
    if trip is Trip.FAILURES:
        assert bad[-limits.failures_in_row :] == [True] * limits.failures_in_row
    elif trip is Trip.ERRORS:
        assert len(recent) >= limits.min_runs
        assert sum(bad) >= LEAST_FAILURES
        assert sum(bad) / len(recent) > limits.error_ratio
    elif trip is Trip.SLOW:
        assert sum(one in {"slow", "timeout"} for one in recent) > 0.05 * len(recent)
    elif trip is Trip.TIMEOUTS:
        assert recent.count("timeout") >= limits.timeouts
