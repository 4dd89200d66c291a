"""NaN and infinity in float outputs cost the job that they belong to, and nobody else."""

from typing import Any

import numpy as np
import pytest

from inferq_worker.runtime.finite import refuse_nonfinite
from inferq_worker.runtime.interface import Feeds, RowError, TensorSpec


def answers_of(outputs: Feeds, *counts: int) -> list[Feeds]:
    stops = np.cumsum(counts)
    return [
        {name: array[stop - count : stop] for name, array in outputs.items()}
        for count, stop in zip(counts, stops, strict=True)
    ]


def specs_of(**dtypes: str) -> list[TensorSpec]:
    return [TensorSpec(name, dtype, (None, None)) for name, dtype in dtypes.items()]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_only_the_item_at_fault_fails_and_is_told_which_output(bad: float, dtype: str) -> None:
    y = np.ones((4, 2), dtype)
    y[1, 0] = bad
    outputs = {"n": np.arange(4), "y": y}
    answers = answers_of(outputs, 1, 2, 1)
    judged = refuse_nonfinite(outputs, answers, specs_of(n="int64", y=dtype))
    assert (judged[0], judged[2]) == (answers[0], answers[2])
    failed = judged[1]
    assert isinstance(failed, RowError)
    assert failed.code == "inference_failed"
    assert failed.message == "output 'y' holds NaN or infinity in 1 of 4 values"


@pytest.mark.parametrize(("bits", "fine"), [(0x7FC0, False), (0x7F80, False), (0xFF80, False), (0x7F7F, True)])
def test_bfloat16_is_judged_by_its_bits(bits: int, fine: bool) -> None:
    outputs = {"y": np.array([[0x3F80, bits]], np.uint16)}
    judged = refuse_nonfinite(outputs, answers_of(outputs, 1), specs_of(y="bfloat16"))
    assert isinstance(judged[0], dict) is fine


@pytest.mark.parametrize(
    "array", [np.array([["nan"]], object), np.array([[0xFFFF]], np.uint16), np.zeros((1, 0), np.float32)]
)
def test_what_cannot_hold_nan_is_left_alone(array: Any) -> None:
    outputs = {"y": array}
    answers = answers_of(outputs, 1)
    assert refuse_nonfinite(outputs, answers, specs_of(y="uint16")) is answers
