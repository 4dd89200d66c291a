"""Take, divert or refuse: decided on arrival, while there is slack."""

from __future__ import annotations

import pytest
from tests.scheduled_jobs import run_s

from inferq_worker.scheduling.admission import Admission, Backlog, Forecast, ForecastingPolicy, decide, forecast
from inferq_worker.scheduling.earliest_deadline import EarliestDeadline
from inferq_worker.scheduling.size_or_timeout import SizeOrTimeout

TAKE, DIVERT, REFUSE = Admission.TAKE, Admission.DIVERT, Admission.REFUSE


def foresee(
    rows_ahead: int, *others: Backlog, rows: int = 1, step_rows: int = 40, start_s: float = 0.0, after_s: float = 0.0
) -> Forecast:
    own = Backlog(rows_ahead, 40, run_s)
    return forecast(rows=rows, step_rows=step_rows, own=own, others=others, start_s=start_s, after_s=after_s)


def test_a_job_that_nobody_precedes_runs_alone() -> None:
    assert (foresee(0).hopeful_s, foresee(0).sober_s) == pytest.approx((0.0055, 0.0055))


def test_a_job_rides_with_those_before_it() -> None:
    assert foresee(9).hopeful_s == pytest.approx(run_s(10))


def test_full_batches_run_before_it_and_then_its_own_is_perhaps_full_too() -> None:
    seen = foresee(85)
    assert seen.hopeful_s == pytest.approx(2 * 0.025 + run_s(6))
    assert seen.sober_s == pytest.approx(3 * 0.025)


def test_the_device_must_be_free_first_and_the_answer_takes_its_time() -> None:
    assert foresee(0, start_s=7.0, after_s=0.1).hopeful_s == pytest.approx(7.1055)


def test_a_job_larger_than_a_batch_is_reckoned_with_all_its_steps() -> None:
    assert foresee(0, rows=100).hopeful_s == pytest.approx(2 * 0.025 + run_s(20))
    assert foresee(0, rows=100).sober_s == pytest.approx(3 * 0.025), "others ride with its last step"
    assert foresee(0, rows=80).sober_s == pytest.approx(2 * 0.025)
    assert foresee(43, rows=100).hopeful_s == pytest.approx(0.025 + run_s(3) + 2 * 0.025 + run_s(20))


def test_a_job_that_cannot_go_in_steps_is_reckoned_with_one_run_of_all_its_rows() -> None:
    assert foresee(0, rows=100, step_rows=100).sober_s == pytest.approx(run_s(100))
    assert foresee(40, rows=100, step_rows=100).sober_s == pytest.approx(0.025 + run_s(100))


def test_what_runs_before_of_another_bucket_is_reckoned_by_its_own_batches_and_run_times() -> None:
    slow = Backlog(10, 4, lambda rows: 1.0 * rows)
    assert foresee(0, slow).hopeful_s == pytest.approx(4.0 + 4.0 + 2.0 + run_s(1))
    assert foresee(0, slow).sober_s == pytest.approx(3 * 4.0 + run_s(1)), "its last batch is full by then"
    assert foresee(0, Backlog(3, 4, slow.run_s)).sober_s == pytest.approx(3.0 + run_s(1))
    assert foresee(40, slow, slow).hopeful_s == pytest.approx(2 * 10.0 + 0.025 + run_s(1))


@pytest.mark.parametrize(
    ("hopeful_s", "sober_s", "cpu_s", "may_divert", "serve_late", "expected"),
    [
        pytest.param(1.0, 2.0, 0.5, True, False, TAKE, id="in time, so the gpu keeps it although a cpu is sooner"),
        pytest.param(2.0, 3.5, 2.5, True, False, DIVERT, id="perhaps late, and a cpu makes it"),
        pytest.param(2.0, 3.5, 3.1, True, False, TAKE, id="perhaps late, and a cpu would be as well"),
        pytest.param(2.0, 3.5, 2.5, False, False, TAKE, id="perhaps late, and the cpu may not"),
        pytest.param(3.1, 3.5, 2.5, True, True, DIVERT, id="late, and a cpu is in time, which is better than late"),
        pytest.param(3.1, 3.5, None, True, True, TAKE, id="late everywhere, and welcome all the same"),
        pytest.param(3.1, 3.5, None, True, False, REFUSE, id="late, and no cpu lives"),
        pytest.param(3.1, 3.5, 3.1, True, False, REFUSE, id="late everywhere"),
        pytest.param(3.0, 3.0, 2.5, True, False, TAKE, id="at the deadline is in time"),
    ],
)
def test_the_decision(
    hopeful_s: float, sober_s: float, cpu_s: float | None, may_divert: bool, serve_late: bool, expected: Admission
) -> None:
    gpu = Forecast(hopeful_s, sober_s)
    assert decide(gpu, cpu_s=cpu_s, deadline_s=3.0, may_divert=may_divert, serve_late=serve_late) is expected


def test_only_a_policy_that_looks_ahead_can_be_asked() -> None:
    earliest: EarliestDeadline[object] = EarliestDeadline(  # type: ignore[type-var]  # no job is needed here
        max_rows=1, max_bytes=1, max_wait_s=0, predict_s=lambda _bucket, _rows: None
    )
    plain: SizeOrTimeout[object] = SizeOrTimeout(  # type: ignore[type-var]  # same
        max_rows=1, max_bytes=1, max_wait_s=0, predict_s=lambda _bucket, _rows: None
    )
    assert isinstance(earliest, ForecastingPolicy)
    assert not isinstance(plain, ForecastingPolicy)
