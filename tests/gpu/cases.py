"""Models that a GPU and a CPU must agree on, with rows for them."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from onnx import TensorProto, helper
from tests import models

from inferq_worker.runtime.interface import Array, Feeds, RowError, RunReport
from inferq_worker.runtime.ort import OrtEngine

MAX_ROWS = 32
BUCKETS = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True, slots=True)
class Case:
    """A model, how to make rows for it, and how far a GPU may be off, relative to the largest answer."""

    build: Callable[[Path], Path]
    make: Callable[[np.random.Generator, int], Feeds]
    tolerance: float


def _normal(*shape: int, dtype: type = np.float32) -> Callable[[np.random.Generator, int], Feeds]:
    return lambda rng, rows: {"x": rng.standard_normal((rows, *shape)).astype(dtype)}


# TF32 keeps ten bits of mantissa, so float32 agrees to three digits.
CASES = {
    "convolution": Case(models.convolution, _normal(3, 8, 8), 5e-3),
    "matmul chain": Case(lambda folder: models.slow(folder, layers=8, width=256), _normal(256), 2e-2),
    "float16": Case(models.float16, _normal(3, dtype=np.float16), 1e-3),
}


def bfloat16_relu(folder: Path) -> Path:
    """y = relu(x) in bfloat16: no CPU kernel, so the answer is known rather than compared."""
    return models.write(
        folder / "bfloat16_relu.onnx",
        [helper.make_node("Relu", ["x"], ["y"])],
        [("x", TensorProto.BFLOAT16, ["n", 4])],
        [("y", TensorProto.BFLOAT16, ["n", 4])],
    )


def run(engine: OrtEngine, feeds: Feeds) -> Feeds:
    """One native run, without a session around it."""
    return engine.prepare(feeds).run()


def only(report: RunReport) -> Array:
    """`y` of a run of one item."""
    (answer,) = report.answers
    assert not isinstance(answer, RowError), answer
    return answer["y"]


def assert_close(actual: Array, expected: Array, tolerance: float) -> None:
    scale = float(np.abs(expected.astype(np.float64)).max()) or 1.0
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    assert float(np.abs(actual.astype(np.float64) - expected.astype(np.float64)).max()) <= tolerance * scale
