"""Items become feeds and answers without needless copies, and nothing unsafe gets past the check."""

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferq_worker.runtime.collate import Collator, Piece, RowsMixed, check, check_all, join, plan, share_out
from inferq_worker.runtime.interface import Array, Feeds, RowError, SessionInfo, TensorSpec


def info(
    *inputs: TensorSpec,
    fixed_rows: int | None = None,
    max_rows: int = 8,
    shared: frozenset[str] = frozenset(),
    batchable: bool = True,
) -> SessionInfo:
    return SessionInfo(
        inputs=inputs or (TensorSpec("x", "float32", (None, 3)),),
        outputs=(TensorSpec("y", "float32", (None, 3)),),
        fixed_rows=fixed_rows,
        shared=shared,
        provider="CPUExecutionProvider",
        requested_provider="CPUExecutionProvider",
        nodes_by_provider={},
        sha256="",
        max_rows=max_rows,
        batchable=batchable,
    )


def rows_of(start: int, count: int) -> Feeds:
    return {"x": np.arange(start * 3, (start + count) * 3, dtype=np.float32).reshape(count, 3)}


def test_a_run_of_one_contiguous_item_is_passed_through_uncopied() -> None:
    item = rows_of(0, 4)
    collated = Collator(info()).gather([Piece(0, 0, 4)], [item])
    assert np.shares_memory(collated["x"], item["x"])


def test_a_cut_of_a_large_item_is_passed_through_uncopied_too() -> None:
    item = rows_of(0, 10)
    collated = Collator(info()).gather([Piece(0, 4, 8)], [item])
    assert np.shares_memory(collated["x"], item["x"])
    np.testing.assert_array_equal(collated["x"], item["x"][4:8])


def test_an_item_that_is_not_contiguous_is_copied_once() -> None:
    item = {"x": np.asfortranarray(rows_of(0, 4)["x"])}
    collated = Collator(info()).gather([Piece(0, 0, 4)], [item])
    assert collated["x"].flags.c_contiguous
    np.testing.assert_array_equal(collated["x"], item["x"])


def test_several_items_are_gathered_in_order_into_a_buffer_that_is_reused() -> None:
    collator = Collator(info())
    items = [rows_of(0, 2), rows_of(2, 1), rows_of(3, 3)]
    pieces = [Piece(0, 0, 2), Piece(1, 0, 1), Piece(2, 0, 3)]
    first = collator.gather(pieces, items)["x"]
    np.testing.assert_array_equal(first, rows_of(0, 6)["x"])
    assert np.shares_memory(first, collator.gather(pieces[:2], items)["x"])


def test_the_buffer_grows_for_a_larger_run_and_serves_other_inner_shapes() -> None:
    collator = Collator(info(TensorSpec("x", "float32", (None, None))))
    small = [{"x": np.ones((1, 2), np.float32)}, {"x": np.zeros((1, 2), np.float32)}]
    large = [{"x": np.full((1, 50), 5, np.float32)}, {"x": np.full((1, 50), 6, np.float32)}]
    pieces = [Piece(0, 0, 1), Piece(1, 0, 1)]
    assert collator.gather(pieces, small)["x"].shape == (2, 2)
    grown = collator.gather(pieces, large)["x"]
    np.testing.assert_array_equal(grown[:, 0], [5, 6])
    assert np.shares_memory(grown, collator.gather(pieces, small)["x"])


def test_a_fixed_batch_is_filled_by_repeating_the_last_row() -> None:
    collated = Collator(info(fixed_rows=4)).gather([Piece(0, 0, 1), Piece(1, 0, 1)], [rows_of(0, 1), rows_of(1, 1)])
    np.testing.assert_array_equal(collated["x"][:, 0], [0, 3, 3, 3])


def test_padding_never_leaks_rows_of_an_earlier_run() -> None:
    collator = Collator(info(fixed_rows=4))
    collator.gather([Piece(0, 0, 3)], [{"x": np.full((3, 3), 99, np.float32)}])
    assert 99 not in collator.gather([Piece(0, 0, 1)], [rows_of(0, 1)])["x"]


def test_strings_are_gathered_as_objects_and_never_truncated() -> None:
    spec = TensorSpec("x", "string", (None, 1))
    items: list[Feeds] = [{"x": np.array([["a\0b"]], object)}, {"x": np.array([["longer"]])}]
    collated = Collator(info(spec)).gather([Piece(0, 0, 1), Piece(1, 0, 1)], items)
    assert collated["x"].dtype == object
    assert collated["x"].tolist() == [["a\0b"], ["longer"]]


def test_a_shared_scalar_is_handed_on_once() -> None:
    model = info(
        TensorSpec("x", "float32", (None, 3)), TensorSpec("sr", "int64", ()), shared=frozenset({"sr"}), fixed_rows=4
    )
    item = {**rows_of(0, 2), "sr": np.array(16_000)}
    assert Collator(model).gather([Piece(0, 0, 2)], [item])["sr"].item() == 16_000


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((2, 3), ">f4"), r"dtype >f4; the model wants float32"),
        (np.zeros((2, 3), np.float64), "dtype float64; the model wants float32"),
        (np.zeros((2, 3), "S4"), r"dtype \|S4"),
        (np.zeros((2, 4), np.float32), r"shape \[2, 4\]; the model wants \[any, 3\]"),
        (np.zeros(3, np.float32), r"shape \[3\]"),
        (np.zeros((0, 3), np.float32), "no rows"),
    ],
)
def test_an_array_that_does_not_fit_the_model_is_refused(array: Array, message: str) -> None:
    refused = check({"x": array}, info())
    assert isinstance(refused, RowError)
    assert refused.code == "invalid_input"
    assert re.search(message, refused.message), refused.message


@pytest.mark.parametrize(
    "array", [np.array([[b"abc"], [b"de"]]), np.array([[b"abc"]], object), np.array([["a"], [None]], object)]
)
def test_anything_but_text_is_refused_for_a_string_input(array: Array) -> None:
    refused = check({"x": array}, info(TensorSpec("x", "string", (None, 1))))
    assert isinstance(refused, RowError)
    assert "is not text" in refused.message


def test_wrong_input_names_are_refused_with_both_lists() -> None:
    refused = check({"z": np.zeros((1, 3), np.float32)}, info())
    assert isinstance(refused, RowError)
    assert "['z']; the model wants x" in refused.message


_ARRAYS = st.builds(
    np.zeros,
    st.lists(st.integers(0, 3), max_size=3).map(tuple),
    st.sampled_from(["<f4", ">f4", "<f8", "<i8", "S2", "O"]),
)


@given(
    items=st.lists(
        st.one_of(
            st.fixed_dictionaries({"x": _ARRAYS, "k": _ARRAYS}),
            st.integers(1, 3).map(lambda n: {"x": np.zeros((n, 2), np.float32), "k": np.zeros((n,), np.int64)}),
            st.tuples(st.integers(0, 3), st.integers(0, 3)).map(
                lambda rows: {"x": np.zeros((rows[0], 2), np.float32), "k": np.zeros(rows[1:], np.int64)}
            ),
        ),
        max_size=6,
    ),
    batchable=st.booleans(),
)
@settings(max_examples=200)
def test_items_checked_together_fare_as_each_by_itself(items: list[Feeds], batchable: bool) -> None:
    model = info(TensorSpec("x", "float32", (None, 2)), TensorSpec("k", "int64", (None,)), batchable=batchable)
    assert check_all(items, model) == [check(item, model) for item in items]


def test_parts_whose_inner_shapes_differ_are_an_error_and_no_exception() -> None:
    error = join([{"y": np.zeros((2, 4))}, {"y": np.zeros((1, 3))}])
    assert isinstance(error, RowError)
    assert error.code == "inference_failed"
    assert "'y' has rows of the shapes [3] and [4]" in error.message


def test_inputs_with_different_row_counts_are_refused() -> None:
    model = info(TensorSpec("a", "float32", (None,)), TensorSpec("b", "float32", (None,)))
    refused = check({"a": np.zeros(2, np.float32), "b": np.zeros(3, np.float32)}, model)
    assert isinstance(refused, RowError)
    assert "has 3 rows, another has 2" in refused.message


def test_rows_without_elements_are_never_cut_into_runs_without_end() -> None:
    model = info(TensorSpec("x", "float32", (None, None)), max_rows=8)
    refused = check({"x": np.zeros((2**31, 0), np.float32)}, model)
    assert isinstance(refused, RowError)
    assert refused.code == "too_large"
    assert check({"x": np.zeros((8, 0), np.float32)}, model) == 8


def test_bfloat16_is_carried_as_uint16() -> None:
    model = info(TensorSpec("x", "bfloat16", (None, 3)))
    assert check({"x": np.zeros((2, 3), np.uint16)}, model) == 2


def test_an_item_over_the_limit_is_too_large_only_where_items_run_alone() -> None:
    large = rows_of(0, 9)
    assert check(large, info()) == 9
    refused = check(large, info(batchable=False))
    assert isinstance(refused, RowError)
    assert refused.code == "too_large"


def test_items_of_other_inner_shapes_never_meet_in_a_run() -> None:
    model = info(TensorSpec("x", "float32", (None, None)))
    items: list[Feeds] = [{"x": np.zeros((1, width), np.float32)} for width in (2, 5, 2)]
    assert plan(items, {0: 1, 1: 1, 2: 1}, model) == [(Piece(0, 0, 1), Piece(2, 0, 1)), (Piece(1, 0, 1),)]


def test_items_with_other_shared_scalars_never_meet_in_a_run() -> None:
    model = info(TensorSpec("x", "float32", (None, 3)), TensorSpec("sr", "int64", ()), shared=frozenset({"sr"}))
    items: list[Feeds] = [{**rows_of(0, 1), "sr": np.array(rate)} for rate in (8, 16, 8)]
    assert [[piece.item for piece in run] for run in plan(items, {0: 1, 1: 1, 2: 1}, model)] == [[0, 2], [1]]


def test_an_item_that_fits_in_a_run_is_kept_whole() -> None:
    items: list[Feeds] = [rows_of(0, 6), rows_of(6, 5)]
    assert plan(items, {0: 6, 1: 5}, info()) == [(Piece(0, 0, 6),), (Piece(1, 0, 5),)]


def test_the_end_of_a_large_item_shares_its_run_with_what_follows() -> None:
    items: list[Feeds] = [rows_of(0, 10), rows_of(10, 3)]
    assert plan(items, {0: 10, 1: 3}, info()) == [(Piece(0, 0, 8),), (Piece(0, 8, 10), Piece(1, 0, 3))]


def test_nothing_to_run_is_no_run() -> None:
    assert plan([], {}, info()) == []


def test_outputs_are_shared_out_as_views_without_the_padding() -> None:
    y = np.arange(12, dtype=np.float32).reshape(4, 3)
    parts = share_out({"y": y}, [Piece(0, 0, 1), Piece(1, 0, 2)], info(fixed_rows=4))
    assert [part["y"].shape[0] for part in parts] == [1, 2]
    assert all(np.shares_memory(part["y"], y) for part in parts)


@pytest.mark.parametrize("y", [np.float32(3).reshape(()), np.zeros((1, 3), np.float32)])
def test_an_output_without_a_row_per_row_is_refused(y: Array) -> None:
    with pytest.raises(RowsMixed, match="output 'y' has the shape"):
        share_out({"y": y}, [Piece(0, 0, 2)], info())


@settings(max_examples=60, deadline=None)
@given(
    counts=st.lists(st.integers(1, 20), max_size=12),
    max_rows=st.integers(1, 9),
    fixed=st.booleans(),
)
def test_every_row_is_answered_once_and_in_place(counts: list[int], max_rows: int, fixed: bool) -> None:
    model = info(max_rows=max_rows, fixed_rows=max_rows if fixed else None)
    starts = np.cumsum([0, *counts])
    items = [rows_of(int(start), count) for start, count in zip(starts, counts, strict=False)]
    collator = Collator(model)
    parts: dict[int, list[Any]] = {item: [] for item in range(len(items))}
    for pieces in plan(items, dict(enumerate(counts)), model):
        collated = collator.gather(pieces, items)["x"]
        assert len(collated) == max_rows if fixed else len(collated) <= max_rows
        for piece, part in zip(pieces, share_out({"y": collated + 1}, pieces, model), strict=True):
            parts[piece.item].append(part)
    for item, answers in parts.items():
        whole = join(answers)
        assert not isinstance(whole, RowError)
        np.testing.assert_array_equal(whole["y"], items[item]["x"] + 1)
