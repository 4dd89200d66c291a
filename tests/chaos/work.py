"""The jobs of a chaos run: a real model whose answers are known, and rows that make it fail, hang or end its process.

y = 2 x + 1 in small whole numbers, which float32 holds exactly, so a right answer is right to the
bit on every provider.
The first column is special: 1e6 reads beyond a table and fails the run, -1e6 loops for hours.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np
from onnx import TensorProto, helper, numpy_helper
from tests import models
from tests.e2e.poisoned_worker import POISON

if TYPE_CHECKING:
    import random
    from pathlib import Path

FEATURES = 4
FAIL, HANG = 1e6, -1e6
_HANG_STEPS = 10**10
_LEAST, _VALUES = 1000, 900_000
"""Ordinary values lie between 1000 and 901,000: away from the special ones, and exact when doubled."""


class Kind(StrEnum):
    """What a job does to whoever runs it."""

    RIGHT = "right"
    FAIL = "fail"
    KILL = "kill"
    HANG = "hang"


_SPECIAL = {Kind.FAIL: FAIL, Kind.KILL: POISON, Kind.HANG: HANG}


@dataclass(frozen=True, slots=True)
class Work:
    """One job's content, made from its number alone, so that the ledger need not hold arrays.

    Attributes:
        number: no other job of the run has it.
        rows: 1 or more.
        kind: what its last row does.
    """

    number: int
    rows: int = 1
    kind: Kind = Kind.RIGHT

    @property
    def x(self) -> np.ndarray:
        """Input, float32 (rows, FEATURES)."""
        flat = _LEAST + (self.number * 977 + np.arange(self.rows * FEATURES)) % _VALUES
        made = flat.reshape(self.rows, FEATURES).astype(np.float32)
        if self.kind in _SPECIAL:
            made[-1, 0] = _SPECIAL[self.kind]
        return made

    def is_right(self, y: np.ndarray) -> bool:
        """Whether this is the answer; a row that fails or hangs has none, one that kills has it where nothing kills."""
        return self.kind in {Kind.RIGHT, Kind.KILL} and y.dtype == np.float32 and np.array_equal(y, 2 * self.x + 1)


def any_rows(chance: random.Random) -> int:
    """Rows of a job: mostly few, sometimes more than a batch holds."""
    return chance.choice((1, 1, 1, 1, 2, 3, 5, 8, 40))


def write_model(folder: Path, name: str) -> Path:
    """Write the model; its file's stem is its name."""
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["go"], ["go_on"]),
            helper.make_node("Add", ["zero_in", "nothing"], ["zero_out"]),
        ],
        "wait",
        [
            helper.make_tensor_value_info("step", TensorProto.INT64, []),
            helper.make_tensor_value_info("go", TensorProto.BOOL, []),
            helper.make_tensor_value_info("zero_in", TensorProto.FLOAT, []),
        ],
        [
            helper.make_tensor_value_info("go_on", TensorProto.BOOL, []),
            helper.make_tensor_value_info("zero_out", TensorProto.FLOAT, []),
        ],
        [numpy_helper.from_array(np.array(0, np.float32), "nothing")],
    )
    nodes = [
        helper.make_node("Mul", ["x", "two"], ["doubled"]),
        helper.make_node("Add", ["doubled", "one"], ["right"]),
        # An index beyond the table of one zero fails the run; index -1 is that zero again.
        helper.make_node("Div", ["x", "million"], ["millions"]),
        helper.make_node("Cast", ["millions"], ["index"], to=TensorProto.INT64),
        helper.make_node("Gather", ["table", "index"], ["zeros"]),
        helper.make_node("Add", ["right", "zeros"], ["checked"]),
        # A negative million asks for a loop without end; everybody else's loop has no step.
        helper.make_node("Neg", ["index"], ["negated"]),
        helper.make_node("ReduceMax", ["negated"], ["worst"], keepdims=0),
        helper.make_node("Max", ["worst", "no_steps"], ["wanted"]),
        helper.make_node("Mul", ["wanted", "many"], ["steps"]),
        helper.make_node("Loop", ["steps", "yes", "zero"], ["waited"], body=body),
        helper.make_node("Add", ["checked", "waited"], ["y"]),
    ]
    weights: dict[str, np.ndarray] = {
        "two": np.array(2, np.float32),
        "one": np.array(1, np.float32),
        "million": np.array(1e6, np.float32),
        "table": np.zeros(1, np.float32),
        "no_steps": np.array(0, np.int64),
        "many": np.array(_HANG_STEPS, np.int64),
        "yes": np.array(True),
        "zero": np.array(0, np.float32),
    }
    shape = ("n", FEATURES)
    return models.write(
        folder / f"{name}.onnx", nodes, [("x", TensorProto.FLOAT, shape)], [("y", TensorProto.FLOAT, shape)], weights
    )
