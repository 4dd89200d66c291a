"""Runs are padded to a few sizes on a GPU, to none on the CPU, or to those that somebody listed."""

import dataclasses
from typing import Any

import pytest

from inferq_worker.runtime.buckets import buckets
from inferq_worker.runtime.fake import FAKE_INFO


@pytest.mark.parametrize(
    ("wish", "max_rows", "on_cpu", "sizes"),
    [
        ("auto", 32, False, (1, 2, 4, 8, 16, 32)),
        ("auto", 24, False, (1, 2, 4, 8, 16, 24)),
        ("auto", 1, False, (1,)),
        ("auto", 32, True, ()),
        ("off", 32, False, ()),
        ([16, 4], 32, True, (4, 16, 32)),
        ((4, 64), 32, False, (4, 32)),
    ],
)
def test_the_sizes_are_as_wished_and_end_with_the_largest_run(
    wish: Any, max_rows: int, on_cpu: bool, sizes: tuple[int, ...]
) -> None:
    assert buckets(wish, max_rows, on_cpu=on_cpu) == sizes


@pytest.mark.parametrize(
    ("changes", "padded"),
    [
        ({"max_rows": 16, "buckets": (4, 8, 16)}, {1: 4, 4: 4, 5: 8, 16: 16, 17: 20, 33: 36}),
        ({"max_rows": 8, "fixed_rows": 8}, {1: 8, 8: 8, 9: 16}),
        ({"max_rows": 8}, {1: 1, 7: 7, 20: 20}),
    ],
)
def test_rows_are_padded_to_the_next_bucket_beyond_full_runs(changes: dict[str, Any], padded: dict[int, int]) -> None:
    info = dataclasses.replace(FAKE_INFO, **changes)
    assert {rows: info.padded(rows) for rows in padded} == padded
