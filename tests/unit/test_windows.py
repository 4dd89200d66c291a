"""How many rows of the urgent lane are held: the device's speed, times the usual deadline, within bounds."""

from __future__ import annotations

import pytest

from inferq_worker.windows import Window
from inferq_worker.work import WINDOW_MAX

MAX_ROWS, FIRST_ROWS = 32, 256


@pytest.fixture
def window() -> Window:
    return Window(max_rows=MAX_ROWS, first_rows=FIRST_ROWS)


def test_before_anything_is_measured_the_setting_holds(window: Window) -> None:
    assert window.rows(None) == FIRST_ROWS
    assert window.rows(2000.0) == FIRST_ROWS


def test_it_holds_what_the_device_answers_within_the_usual_deadline(window: Window) -> None:
    window.arrived(0.5)
    assert window.rows(2000.0) == 1000


def test_a_few_jobs_with_much_time_do_not_decide(window: Window) -> None:
    for _ in range(97):
        window.arrived(0.1)
    for _ in range(3):
        window.arrived(3600)
    assert window.rows(2000.0) == 200


def test_the_deadlines_seen_last_count(window: Window) -> None:
    for allowance_s in [9.0] * 300 + [0.1] * 256:
        window.arrived(allowance_s)
    assert window.rows(2000.0) == 200


def test_quiet_times_do_not_shrink_it(window: Window) -> None:
    window.arrived(0.5)
    before = window.rows(2000.0)
    assert [window.rows(2000.0) for _ in range(100)] == [before] * 100
    assert window.rows(None) == before


@pytest.mark.parametrize(("rows_per_s", "held"), [(1.0, 2 * MAX_ROWS), (1e9, WINDOW_MAX)])
def test_it_never_holds_less_than_two_batches_nor_more_than_the_broker_likes(
    window: Window, rows_per_s: float, held: int
) -> None:
    window.arrived(1.0)
    assert window.rows(rows_per_s) == held
