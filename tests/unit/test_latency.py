"""What the latency table predicts from what it has seen."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferq_worker.scheduling.latency import LatencyTable, RunningP95


def test_nothing_is_predicted_before_anything_is_known() -> None:
    assert LatencyTable().predict(1) is None


def test_a_known_size_is_predicted_as_seen() -> None:
    assert LatencyTable({1: 0.002, 8: 0.01}).predict(8) == 0.01


def test_between_known_sizes_lies_a_straight_line() -> None:
    assert LatencyTable({2: 0.002, 4: 0.004, 8: 0.02}).predict(6) == pytest.approx(0.012)


def test_below_the_smallest_size_the_smallest_counts() -> None:
    assert LatencyTable({8: 0.01}).predict(1) == 0.01


def test_above_the_largest_size_time_grows_with_rows() -> None:
    assert LatencyTable({1: 0.001, 8: 0.01}).predict(16) == pytest.approx(0.02)


def test_a_run_moves_the_average_of_its_size_and_in_proportion_what_is_expected_of_the_others() -> None:
    table = LatencyTable({1: 0.001, 8: 0.01})
    table.observe(8, 0.02)
    assert table.predict(8) == pytest.approx(0.0115, rel=0.02)
    assert table.predict(1) == pytest.approx(0.00115, rel=0.02)


def test_each_shape_bucket_learns_for_itself() -> None:
    table = LatencyTable({1: 0.001, 8: 0.01})
    for _ in range(30):
        table.observe(8, 0.02, bucket="large")
        table.observe(1, 0.001, bucket="small")
    assert table.predict(8, "large") == pytest.approx(0.02, rel=0.01)
    assert table.predict(1, "large") == pytest.approx(0.002, rel=0.2)
    assert table.predict(1, "small") == pytest.approx(0.001, rel=0.01)


def test_the_curve_bends_slowly_to_what_its_sizes_take_and_never_falls_with_rows() -> None:
    table = LatencyTable({1: 0.010, 2: 0.011, 4: 0.012})
    for _ in range(300):
        table.observe(1, 0.001)
        table.observe(4, 0.040)
    ahead = table.snapshot()
    assert ahead[1] == pytest.approx(0.001, rel=0.3)
    assert ahead[4] == pytest.approx(0.040, rel=0.3)
    assert ahead[1] <= ahead[2] <= ahead[4]


def test_shapes_without_end_are_not_remembered_without_end() -> None:
    table = LatencyTable({8: 0.01})
    for shape in range(10_000):
        table.observe(8, 0.02, bucket=shape)
    assert len(table._speeds) <= 256


def test_one_hiccup_does_not_move_a_mean_by_more_than_an_outlier_may() -> None:
    table = LatencyTable({8: 0.01})
    table.observe(8, 60.0)
    assert table.predict(8) == pytest.approx(0.013, rel=0.05)


def test_p95_lies_above_the_mean_by_the_spread_of_the_runs() -> None:
    steady, noisy = LatencyTable({8: 0.01}), LatencyTable({8: 0.01})
    for index in range(200):
        steady.observe(8, 0.01)
        noisy.observe(8, 0.008 if index % 2 else 0.012)
    assert steady.p95(8) == pytest.approx(0.01)
    assert 0.0115 < (noisy.p95(8) or 0.0) < 0.016
    assert LatencyTable().p95(1) is None


def test_an_observation_tells_how_wrong_the_prediction_was() -> None:
    table = LatencyTable({8: 0.01})
    assert table.observe(8, 0.015) == pytest.approx(0.5)
    assert LatencyTable().observe(8, 0.015) is None


def test_a_change_of_speed_is_learned_within_a_few_runs() -> None:
    table = LatencyTable({8: 0.01})
    for _ in range(20):
        table.observe(8, 0.1)
    assert table.predict(8) == pytest.approx(0.1, rel=0.1)


def test_a_padded_batch_is_predicted_and_learned_as_its_bucket() -> None:
    table = LatencyTable({4: 0.01, 8: 0.02}, padded=lambda rows: 4 if rows <= 4 else 8)
    assert (table.predict(1), table.predict(4), table.predict(5)) == (0.01, 0.01, 0.02)
    assert table.observe(5, 0.03) == pytest.approx(0.5)
    assert table.snapshot().keys() == {4, 8}


def test_a_size_never_seen_before_is_taken_in() -> None:
    table = LatencyTable()
    for rows, run_s in ((8, 0.01), (2, 0.004), (4, 0.006)):
        table.observe(rows, run_s)
    assert table.snapshot() == {2: 0.004, 4: 0.006, 8: 0.01}
    assert table.predict(3) == pytest.approx(0.005)


def test_a_run_in_which_no_row_was_computed_teaches_nothing() -> None:
    table = LatencyTable()
    table.observe(0, 0.0)
    assert table.predict(1) is None
    table = LatencyTable({8: 0.01})
    table.observe(0, 0.0)
    assert table.predict(1) == 0.01


def slowed_down() -> LatencyTable:
    """Seeded with 20 ms for a row, and then ten runs took ten times as long."""
    table = LatencyTable({1: 0.02, 8: 0.04})
    for _ in range(10):
        table.observe(1, 0.2, "b")
    return table


def test_predictions_that_turn_jobs_away_and_that_no_run_confirms_sink_below_the_warm_up() -> None:
    """The warm-up may have run on a busy machine too."""
    table = slowed_down()
    assert (table.predict(1, "b") or 0) > 0.1
    for second in range(60):
        table.doubt(float(second), "b")
    assert (table.predict(1, "b") or 0) < 0.001
    assert (table.p95(8, "b") or 0) < 0.001
    table.observe(1, 0.02, "b")
    assert (table.predict(1, "b") or 0) < 0.02


def test_doubt_grows_by_the_second_and_not_by_the_job() -> None:
    table = slowed_down()
    before_s = table.predict(1, "b")
    assert not any(table.doubt(0.0009 * job, "b") for job in range(1000))
    assert table.predict(1, "b") == before_s
    assert table.doubt(1.0, "b")


def test_a_run_ends_all_doubt_for_a_second() -> None:
    table = slowed_down()
    table.doubt(0.0, "b")
    table.observe(1, 0.2, "b")
    assert not table.doubt(5.0, "b")
    assert not table.doubt(5.9, "b")
    assert table.doubt(6.0, "b")


def test_doubt_touches_no_other_bucket() -> None:
    table = LatencyTable({1: 0.02})
    for bucket in ("doubted", "other"):
        for _ in range(30):
            table.observe(1, 0.05, bucket)
    before_s = table.predict(1, "other")
    for second in range(60):
        table.doubt(float(second), "doubted")
    assert table.predict(1, "other") == before_s


def test_a_running_p95_in_doubt_nears_its_first_value_from_above() -> None:
    high, low = RunningP95(0.003), RunningP95(0.003)
    for _ in range(30):
        high.observe(1.0)
        low.observe(0.001)
    before_s = low.seconds
    for _ in range(100):
        high.doubt()
        low.doubt()
    assert high.seconds == pytest.approx(0.003, rel=0.05)
    assert low.seconds == before_s


def test_a_running_p95_starts_with_what_it_was_given() -> None:
    assert RunningP95(0.003).seconds == 0.003


@pytest.mark.parametrize("first_s", [0.0003, 0.003, 3.0])
def test_a_running_p95_settles_where_one_in_twenty_lies_above(first_s: float) -> None:
    """The step is a fifth of the estimate, so that it follows within seconds; the price is that it wobbles."""
    chance = np.random.default_rng(1)
    p95, above = RunningP95(first_s), 0
    seen: list[float] = []
    for number in range(6000):
        value_s = chance.uniform(0.001, 0.011)
        if number >= 2000:
            above += value_s > p95.seconds
            seen.append(p95.seconds)
        p95.observe(value_s)
    assert above / len(seen) == pytest.approx(0.05, abs=0.01)
    assert sum(seen) / len(seen) == pytest.approx(0.0105, rel=0.15)


def test_a_running_p95_follows_a_rise_within_a_few_values_and_a_fall_within_some_hundred() -> None:
    p95 = RunningP95(0.003)
    for _ in range(20):
        p95.observe(0.030)
    assert p95.seconds > 0.025
    for _ in range(300):
        p95.observe(0.003)
    assert p95.seconds < 0.004


def test_one_outlier_moves_a_running_p95_by_a_fifth_at_most() -> None:
    p95 = RunningP95(0.003)
    p95.observe(3600.0)
    assert p95.seconds <= 0.003 * 1.2


@given(st.lists(st.floats(0, 10), max_size=200), st.floats(1e-5, 10))
@settings(max_examples=60)
def test_a_running_p95_stays_within_a_step_of_what_it_has_seen(values: list[float], first_s: float) -> None:
    p95 = RunningP95(first_s)
    for value_s in values:
        p95.observe(value_s)
    least_s, most_s = min([first_s, *values]), max([first_s, *values])
    assert least_s * 0.98 - 1e-5 <= p95.seconds <= most_s * 1.2 + 1e-4


def test_shapes_that_are_only_ever_turned_away_are_forgotten_too() -> None:
    table = LatencyTable({1: 0.01})
    for number in range(10_000):
        table.doubt(0.0, ("m", number))
    assert len(table._doubted_s) < 300
