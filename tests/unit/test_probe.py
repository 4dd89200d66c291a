"""The probe tells models that answer row by row from those that only look so. The model here is a function."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from inferq_worker.runtime.collate import RowsMixed
from inferq_worker.runtime.interface import Array, Feeds, RowError, RunFailed, TensorSpec
from inferq_worker.runtime.isolate import isolate
from inferq_worker.runtime.probe import Probe, Unprobeable

X = TensorSpec("x", "float32", (None, 3))
Y = TensorSpec("y", "float32", (None, 3))


def probe(function: Callable[[Array], Array], x: TensorSpec = X, y: TensorSpec = Y) -> Probe:
    return Probe(lambda feeds: {"y": function(feeds["x"])}, (x,), (y,))


def prove(subject: Probe, rows: int = 4) -> None:
    subject.prove(subject.find_sample(rows))


def test_a_model_that_works_row_by_row_passes() -> None:
    prove(probe(lambda x: x * 2 + 1))


def test_small_differences_between_batch_sizes_pass() -> None:
    prove(probe(lambda x: x * (1 + 1e-5 * len(x))))


def test_what_another_kernel_does_to_a_single_row_passes() -> None:
    prove(probe(lambda x: x * np.float32(1 if len(x) > 1 else 1.02)))


def test_a_difference_that_small_counts_where_the_batch_is_as_large() -> None:
    with pytest.raises(RowsMixed, match="depends on the other rows"):
        prove(probe(lambda x: x + 0.02 * x.mean(axis=0)))


def test_nan_answers_in_the_same_places_pass() -> None:
    prove(probe(lambda x: np.where(x > 0, x, np.float32(np.nan))))


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: x - x.mean(axis=0), "depends on the other rows"),
        (lambda x: np.cumsum(x, axis=0), "depend on the order"),
        (lambda x: x * len(x), "depends on how many rows"),
        (lambda x: x[np.argsort(x[:, 0])], "depends on the other rows"),
        (lambda x: x / x.max(), "depends on the other rows"),
    ],
)
def test_a_model_that_mixes_rows_is_found_out(function: Callable[[Array], Array], reason: str) -> None:
    with pytest.raises(RowsMixed, match=f"{reason}|depend on the order"):
        prove(probe(function))


def test_a_model_that_answers_by_chance_is_found_out() -> None:
    rng = np.random.default_rng(1)
    with pytest.raises(RowsMixed, match="when run again"):
        prove(probe(lambda x: x + rng.standard_normal(x.shape).astype(np.float32)))


def test_a_model_that_takes_only_one_row_is_found_out() -> None:
    def only_one(x: Array) -> Array:
        if len(x) > 1:
            raise RunFailed("inference_failed", "got 4, expected 1")
        return x

    with pytest.raises(RowsMixed, match=r"one row but not 4 together \(got 4, expected 1\)"):
        prove(probe(only_one))


def test_other_sizes_are_tried_for_dynamic_inner_axes() -> None:
    def strict(x: Array) -> Array:
        if x.shape[1] % 32:
            raise RunFailed("inference_failed", "width must be a multiple of 32")
        return x

    x = TensorSpec("x", "float32", (None, None))
    assert probe(strict, x).find_sample(4)["x"].shape == (4, 32)


def test_integers_stay_small_enough_for_an_embedding_of_two() -> None:
    table = np.array([[1.0], [5.0]], np.float32)

    def embed(x: Array) -> Array:
        if x.max() > 1 or x.min() < 0:
            raise RunFailed("inference_failed", "out of range")
        return np.asarray(table[x[:, 0]])

    prove(probe(embed, TensorSpec("x", "int64", (None, 1))))


def test_rows_of_a_single_small_integer_still_differ() -> None:
    sample = probe(lambda x: x, TensorSpec("x", "int64", (None, 1))).find_sample(4)
    assert len(np.unique(sample["x"])) > 1


def test_a_model_that_only_takes_equal_rows_proves_nothing() -> None:
    def only_ones(x: Array) -> Array:
        if (x != 1).any():
            raise RunFailed("inference_failed", "must be 1")
        return x

    with pytest.raises(Unprobeable, match="all the same"):
        prove(probe(only_ones, TensorSpec("x", "int64", (None, 2)), TensorSpec("y", "int64", (None, 2))))


def test_a_model_that_takes_nothing_reports_its_last_complaint() -> None:
    def never(_: Array) -> Array:
        raise RunFailed("inference_failed", "no such key")

    with pytest.raises(Unprobeable, match="no such key"):
        prove(probe(never))


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint64", "float16", "bfloat16", "float64", "string"])
def test_inputs_of_every_dtype_can_be_made_up(dtype: str) -> None:
    spec = TensorSpec("x", dtype, (None, 5))
    prove(probe(lambda x: x, spec, TensorSpec("y", dtype, (None, 5))))


def test_whole_numbers_must_agree_exactly() -> None:
    y = TensorSpec("y", "int64", (None, 3))
    with pytest.raises(RowsMixed):
        prove(probe(lambda x: (x * 0).astype(np.int64) + len(x), y=y))


def test_shared_scalars_are_made_up_once_and_stay() -> None:
    seen: list[tuple[int, ...]] = []

    def run(feeds: Feeds) -> Feeds:
        seen.append(feeds["sr"].shape)
        return {"y": feeds["x"] * feeds["sr"]}

    prove(Probe(run, (X, TensorSpec("sr", "int64", ())), (Y,)))
    assert set(seen) == {()}


def test_one_row_at_a_time_needs_no_proof() -> None:
    prove(probe(lambda x: x - x.mean(axis=0)), rows=1)


def test_the_evidence_says_what_was_compared_with_which_tolerance() -> None:
    subject = probe(lambda x: x * (1 + 1e-5 * len(x)))
    found = list(subject.compare(subject.find_sample(4)))
    assert all(one.agrees and one.output == "y" for one in found)
    assert {one.what: one.tolerance for one in found} == {
        "the same batch again": 2e-3,
        "the batch in reverse order": 2e-3,
        "each row among copies of itself": 2e-3,
        "each row alone": 0.05,
    }
    alone = [one.difference for one in found if one.what == "each row alone"]
    assert len(alone) == 4
    assert max(alone) == pytest.approx(3e-5, rel=0.1)


def test_the_evidence_goes_on_after_the_first_difference() -> None:
    subject = probe(lambda x: x - x.mean(axis=0))
    found = list(subject.compare(subject.find_sample(4)))
    assert {one.what for one in found if not one.agrees} == {"each row among copies of itself", "each row alone"}


def test_first_axes_of_fixed_size_are_kept_on_demand() -> None:
    state = TensorSpec("state", "float32", (2, 5))
    subject = Probe(lambda feeds: {"y": feeds["x"]}, (X, state), (Y,), keep_first_axes=True)
    assert {name: array.shape for name, array in subject.find_sample(4).items()} == {"x": (4, 3), "state": (2, 5)}


def failing(culprits: set[int], calls: list[int]) -> Callable[[Sequence[int]], list[int]]:
    def run(items: Sequence[int]) -> list[int]:
        calls.append(len(items))
        if culprits & set(items):
            raise RunFailed("inference_failed", "bad row")
        return [item * 10 for item in items]

    return run


def test_a_run_without_culprits_is_run_once() -> None:
    calls: list[int] = []
    assert isolate([1, 2, 3], failing(set(), calls)) == [10, 20, 30]
    assert calls == [3]


def test_one_culprit_among_32_costs_eleven_runs_and_only_its_own_answer() -> None:
    calls: list[int] = []
    answers = isolate(list(range(32)), failing({13}, calls))
    assert answers == [item * 10 if item != 13 else RowError("inference_failed", "bad row") for item in range(32)]
    assert len(calls) == 11


def test_culprits_on_both_sides_are_all_found() -> None:
    answers = isolate([1, 2, 3, 4, 5], failing({1, 5}, []))
    assert [isinstance(answer, RowError) for answer in answers] == [True, False, False, False, True]
