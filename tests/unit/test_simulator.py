"""The figures that the scheduler is built for, in simulated time; and that the simulator counts honestly."""

from __future__ import annotations

from collections import Counter
from random import Random
from statistics import mean
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.scheduled_jobs import run_s

from inferq_worker.scheduling.earliest_deadline import EarliestDeadline
from inferq_worker.scheduling.simulator import Report, Setup, SimulatedJob, simulate
from inferq_worker.scheduling.size_or_timeout import SizeOrTimeout
from inferq_worker.scheduling.traces import BURSTS, Arrival, Stream, arrivals, merged

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_ROWS, MAX_WAIT_S = 40, 0.005
SEEDS = range(10)


def earliest_deadline() -> EarliestDeadline[SimulatedJob]:
    return EarliestDeadline(
        max_rows=MAX_ROWS, max_bytes=1, max_wait_s=MAX_WAIT_S, predict_s=lambda _bucket, rows: run_s(rows)
    )


def size_or_timeout() -> SizeOrTimeout[SimulatedJob]:
    return SizeOrTimeout(
        max_rows=MAX_ROWS, max_bytes=1, max_wait_s=MAX_WAIT_S, predict_s=lambda _bucket, rows: run_s(rows)
    )


def setup_of(**fields: Any) -> Setup:
    return Setup(**({"policy": earliest_deadline, "run_s": run_s} | fields))


def runs(stream: Stream, seconds: float, seeds: range = SEEDS, **fields: Any) -> list[Report]:
    traces = (arrivals(Random(seed), stream, seconds) for seed in seeds)  # noqa: S311 - a seed is a trace
    return [simulate(trace, setup_of(**fields)) for trace in traces]


def goodput(reports: list[Report]) -> float:
    return 100 * mean(report.goodput for report in reports)


@pytest.mark.parametrize(("rate_per_s", "least"), [(1_400, 99.7), (1_700, 92.5), (2_000, 79.0), (2_600, 60.5)])
def test_goodput_stays_near_the_bound_of_capacity_over_load(rate_per_s: float, least: float) -> None:
    reached = goodput(runs(Stream(rate_per_s, (0.05,)), seconds=8))
    bound = 100 * min(1.0, MAX_ROWS / run_s(MAX_ROWS) / rate_per_s)
    assert least <= reached <= bound + 0.6, "above the bound, the simulator would cheat (queues start empty)"


@pytest.mark.parametrize(("rate_per_s", "most"), [(1_700, 40.0), (2_000, 15.0), (2_600, 15.0)])
def test_size_or_timeout_collapses_where_deadline_order_does_not(rate_per_s: float, most: float) -> None:
    assert goodput(runs(Stream(rate_per_s, (0.05,)), seconds=10, seeds=range(2), policy=size_or_timeout)) <= most


def test_mixed_deadlines_in_bursts_are_nearly_all_met() -> None:
    mixed = Stream(800, (0.04, 0.2), phases=BURSTS)
    assert goodput(runs(mixed, seconds=6)) >= 99.0
    assert goodput(runs(mixed, seconds=6, seeds=range(3), policy=size_or_timeout)) < 98.0


def test_diverting_while_there_is_slack_answers_more() -> None:
    overload = Stream(1_700, (0.2,))
    alone = runs(overload, seconds=8, seeds=range(3))
    helped = runs(overload, seconds=8, seeds=range(3), cpu_lanes=8, cpu_run_s=0.025)
    assert goodput(helped) >= goodput(alone) + 3.0
    assert all(report.by_cpu > 0 for report in helped)


def test_bulk_gets_its_share_of_an_overloaded_device_and_not_more() -> None:
    streams = [Stream(2_000, (0.05,)), Stream(600, lane_rank=1)]
    report = simulate(merged(Random(1), streams, 10), setup_of(bulk_window_jobs=1_024))  # noqa: S311 - a seed
    # The trace ends after 10 s, the bulk backlog with it; what bulk got meanwhile is what urgent jobs did not get.
    urgent = report.in_time[0] / report.offered[0]
    assert report.in_time[1] == report.offered[1]
    assert 0.9 * 1_600 / 2_000 - 0.03 <= urgent <= 0.9 * 1_600 / 2_000 + 0.02


def test_a_few_jobs_in_a_hurry_do_not_collapse_the_rest() -> None:
    streams = [Stream(130, (0.009,)), Stream(1_170, (0.06,))]
    report = simulate(merged(Random(1), streams, 10), setup_of())  # noqa: S311 - a seed
    assert report.goodput >= 0.89


def test_freezing_the_next_batch_early_costs_goodput() -> None:
    overload = Stream(1_700, (0.05,))
    late = goodput(runs(overload, seconds=5, seeds=range(2), hand_over_s=0.002))
    early = goodput(runs(overload, seconds=5, seeds=range(2), hand_over_s=0.025))
    assert early < late - 3.0


def padded(rows: int) -> int:
    """The buckets of a device that computes powers of two up to 32, or all 40."""
    return next(size for size in (1, 2, 4, 8, 16, 32, MAX_ROWS) if size >= rows)


def in_buckets(predict_s: Callable[[int], float], rate_per_s: float, allowance_s: float) -> tuple[float, float]:
    """Goodput in percent, and rows of padding for each real one, where the device pads."""
    reports = runs(
        Stream(rate_per_s, (allowance_s,)),
        seconds=5,
        seeds=range(3),
        run_s=lambda rows: run_s(padded(rows)),
        predict_s=predict_s,
        policy=lambda: EarliestDeadline(
            max_rows=MAX_ROWS, max_bytes=1, max_wait_s=MAX_WAIT_S, predict_s=lambda _bucket, rows: predict_s(rows)
        ),
    )
    sizes = sum((report.batch_rows for report in reports), Counter[int]())
    real = sum(rows * batches for rows, batches in sizes.items())
    return goodput(reports), sum(padded(rows) * batches for rows, batches in sizes.items()) / real - 1


@pytest.mark.parametrize(("rate_per_s", "allowance_s", "least"), [(1_400, 0.03, 85.0), (1_000, 0.02, 81.0)])
def test_a_policy_that_knows_the_buckets_fills_the_padding_with_real_rows(
    rate_per_s: float, allowance_s: float, least: float
) -> None:
    reached, padding = in_buckets(lambda rows: run_s(padded(rows)), rate_per_s, allowance_s)
    blind, wasted = in_buckets(run_s, rate_per_s, allowance_s)
    assert reached >= least
    assert padding < 0.1
    assert blind < reached - 15, "asking the table for the real rows would be as good"
    assert wasted > 0.4


def test_a_window_too_small_for_the_deadline_order_costs_goodput() -> None:
    mixed = Stream(1_000, (0.04, 0.4), phases=BURSTS)
    wide = goodput(runs(mixed, seconds=5, seeds=range(2), window_jobs=1_000))
    narrow = goodput(runs(mixed, seconds=5, seeds=range(2), window_jobs=40))
    assert narrow < wide - 5.0


def test_one_job_alone_takes_its_run_and_what_follows() -> None:
    report = simulate([Arrival(1.0, 0.05)], setup_of(after_s=0.001))
    assert report.latencies_s == [pytest.approx(run_s(1) + 0.001)]
    assert (report.goodput, report.jobs, dict(report.batch_rows)) == (1.0, 1, {1: 1})
    assert report.ended_s == pytest.approx(1.0 + run_s(1) + 0.001)
    assert report.busy_share == pytest.approx(run_s(1) / report.ended_s)


def test_jobs_of_one_moment_are_taken_together() -> None:
    report = simulate([Arrival(1.0) for _ in range(100)], setup_of())
    assert dict(report.batch_rows) == {40: 2, 20: 1}
    assert report.mean_rows == pytest.approx(100 / 3)


def test_the_device_idles_between_runs_for_as_long_as_it_is_told() -> None:
    report = simulate([Arrival(0.0) for _ in range(80)], setup_of(gap_s=0.5))
    assert report.ended_s == pytest.approx(2 * run_s(40) + 0.5)


def test_the_broker_holds_back_what_the_window_has_no_room_for_until_it_is_answered() -> None:
    report = simulate([Arrival(0.0) for _ in range(20)], setup_of(window_jobs=10))
    assert dict(report.batch_rows) == {10: 2}


def test_a_deadline_that_passes_while_the_device_runs_is_seen_then() -> None:
    trace = [Arrival(0.0, rows=MAX_ROWS), Arrival(0.001, 0.004), Arrival(0.006)]
    report = simulate(trace, setup_of(window_jobs=1_000, admits=False))
    assert dict(report.dropped) == {"expired": 1}
    narrow = simulate(trace, setup_of(window_jobs=2, admits=False))
    # Its place in the window went to the third job at 5 ms, so that this one rides behind the first run.
    assert narrow.ended_s == pytest.approx(run_s(MAX_ROWS) + run_s(1))


def test_nothing_answered_has_a_latency_of_nothing() -> None:
    report = simulate([Arrival(0.0, 0.001)], setup_of())
    assert (report.goodput, report.quantiles_s(0.5, 0.99)) == (0.0, (0.0, 0.0))
    assert dict(report.dropped) == {"refused": 1}


ARRIVALS = st.builds(
    Arrival,
    at_s=st.integers(0, 100).map(lambda ms: ms / 1000),
    allowance_s=st.none() | st.integers(1, 200).map(lambda ms: ms / 1000),
    rows=st.integers(1, 60),
    lane_rank=st.integers(0, 1),
    bucket=st.integers(0, 1),
    serve_late=st.booleans(),
)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(ARRIVALS, max_size=60),
    st.sampled_from([earliest_deadline, size_or_timeout]),
    st.none() | st.integers(1, 20),
    st.integers(0, 2),
    st.booleans(),
)
def test_every_job_is_answered_or_dropped_once(
    trace: list[Arrival], policy: Any, window: int | None, cpu_lanes: int, admits: bool
) -> None:
    trace.sort(key=lambda arrival: arrival.at_s)
    setup = setup_of(
        policy=policy, window_jobs=window, bulk_window_jobs=window, cpu_lanes=cpu_lanes, cpu_run_s=0.02, admits=admits
    )
    report = simulate(trace, setup)
    answered = len(report.latencies_s)
    assert answered == report.in_time.total() + report.late
    assert report.jobs == len(trace) == answered + report.dropped.total()
    assert sum(rows * times for rows, times in report.batch_rows.items()) <= sum(arrival.rows for arrival in trace)
