"""How many rows of the urgent lane are held: the rate that was measured, times the usual deadline, within bounds."""

from __future__ import annotations

import pytest

from inferq_worker.consume import WINDOW_MAX
from inferq_worker.windows import Window

MAX_ROWS, FIRST_ROWS = 32, 256


@pytest.fixture
def window() -> Window:
    return Window(max_rows=MAX_ROWS, first_rows=FIRST_ROWS)


def test_before_anything_is_measured_the_setting_holds(window: Window) -> None:
    assert window.rows(1.0) == FIRST_ROWS


def test_it_holds_what_the_device_answers_within_the_usual_deadline(window: Window) -> None:
    window.arrived(0.5)
    window.served(2000)
    assert window.rows(1.0) == 1000


def test_the_rate_is_per_second_whatever_time_has_passed(window: Window) -> None:
    window.arrived(0.5)
    window.served(2000)
    assert window.rows(2.0) == 500


def test_a_few_jobs_with_much_time_do_not_decide(window: Window) -> None:
    for _ in range(97):
        window.arrived(0.1)
    for _ in range(3):
        window.arrived(3600)
    window.served(2000)
    assert window.rows(1.0) == 200


def test_the_deadlines_seen_last_count(window: Window) -> None:
    for allowance_s in [9.0] * 300 + [0.1] * 256:
        window.arrived(allowance_s)
    window.served(2000)
    assert window.rows(1.0) == 200


def test_a_change_of_rate_moves_it_step_by_step(window: Window) -> None:
    window.arrived(1.0)
    held = list[int]()
    for _ in range(30):
        window.served(500 if not held else 1000)
        held.append(window.rows(1.0))
    assert held[:2] == [500, 600]
    assert held == sorted(held)
    assert held[-1] == pytest.approx(1000, abs=5)


def test_idle_times_teach_nothing(window: Window) -> None:
    window.arrived(1.0)
    window.served(500)
    assert [window.rows(1.0) for _ in range(10)] == [500] * 10


def test_without_deadlines_nothing_is_learned(window: Window) -> None:
    window.served(2000)
    assert window.rows(1.0) == FIRST_ROWS


@pytest.mark.parametrize(("served", "held"), [(1, 2 * MAX_ROWS), (10**6, WINDOW_MAX)])
def test_it_never_holds_less_than_two_batches_nor_more_than_the_broker_bears(
    window: Window, served: int, held: int
) -> None:
    window.arrived(1.0)
    window.served(served)
    assert window.rows(1.0) == held


def test_two_of_the_largest_batches_are_no_more_than_the_broker_bears() -> None:
    window = Window(max_rows=65_536, first_rows=WINDOW_MAX)
    window.arrived(1.0)
    window.served(1)
    assert window.rows(1.0) == WINDOW_MAX
