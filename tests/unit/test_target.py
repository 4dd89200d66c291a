"""How large a batch is aimed at, given what deadlines were seen."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.scheduled_jobs import run_s

from inferq_worker.scheduling.target import TargetRows, largest


def target_of(*allowances_s: float, max_rows: int = 64) -> TargetRows:
    target = TargetRows()
    for allowance_s in allowances_s:
        target.saw(allowance_s)
    return target


def test_without_a_deadline_it_is_all_that_is_possible() -> None:
    assert target_of().rows(run_s, 64) == 64


def test_without_a_prediction_it_is_all_that_is_possible() -> None:
    assert target_of(0.001).rows(lambda _rows: None, 64) == 64


def test_two_runs_fit_into_the_deadline() -> None:
    # 2 * (5 ms + 0.5 ms * 40) = 50 ms.
    assert target_of(*[0.05] * 300).rows(run_s, 64) == 40


def test_it_is_never_more_than_is_possible() -> None:
    assert target_of(*[60.0] * 300).rows(run_s, 64) == 64


def test_the_tight_ones_of_a_mixture_decide_while_that_answers_more_jobs() -> None:
    # 40 ms allow 30 rows, 1,500 rows a second for everybody; 64 rows are 1,730 a second, for half of the jobs.
    assert target_of(*[0.04, 0.2] * 150).rows(run_s, 64) == 30


@pytest.mark.parametrize("hopeless_s", [0.001, 0.009, 0.012])
def test_a_few_jobs_in_a_hurry_do_not_make_all_batches_small(hopeless_s: float) -> None:
    assert target_of(*[hopeless_s, *[0.05] * 9] * 30).rows(run_s, 64) == 40


def test_where_two_runs_fit_into_no_deadline_one_must() -> None:
    # 1.2 * (5 ms + 0.5 ms * 3) < 8 ms
    assert target_of(*[0.008] * 300).rows(run_s, 64) == 3


def test_deadlines_that_nothing_can_meet_do_not_count() -> None:
    assert target_of(*[0.004] * 300).rows(run_s, 64) == 64


def test_the_first_jobs_count_at_once() -> None:
    assert target_of(0.05).rows(run_s, 64) == 40


def test_it_follows_when_deadlines_change_and_says_so() -> None:
    target = target_of(*[0.05] * 600)
    changes = [target.saw(0.03) for _ in range(400)]
    assert target.rows(run_s, 64) == 20
    assert 2 <= sum(changes) <= 4


def test_what_is_forgotten_does_not_count() -> None:
    target = target_of(*[0.05] * 600)
    assert target.forget()
    assert target.rows(run_s, 64) == 64
    assert not target.forget()
    target.saw(0.03)
    assert target.rows(run_s, 64) == 20


@given(st.lists(st.floats(0.0001, 10.0), max_size=40), st.integers(1, 100), st.integers(0, 9))
def test_it_is_always_possible(allowances_s: list[float], max_rows: int, seed: int) -> None:
    random = Random(seed)  # noqa: S311 - a seed is a latency table
    steps_s = [random.random() / 1000 for _ in range(max_rows)]
    target = target_of(*allowances_s, max_rows=max_rows)
    assert 1 <= target.rows(lambda rows: sum(steps_s[:rows]), max_rows) <= max_rows


@given(st.integers(0, 50), st.integers(1, 50))
def test_the_largest_that_fits_is_found(limit: int, most: int) -> None:
    assert largest(lambda rows: rows <= limit, most) == min(limit, most)
