"""Small real ONNX models, built on the spot. Each builder writes one file below a folder and returns its path.

IR version 10 and opset 20 are pinned: the newest `onnx` writes files that ONNX Runtime cannot read yet.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto, TensorProto, helper, load_model, numpy_helper, save_model

Shape = Sequence[int | str | None]
Spec = tuple[str, int, Shape]
"""Name, element type, shape: text is a named dynamic axis."""
IR_VERSION = 10
OPSET = 20


def write(
    path: Path,
    nodes: Sequence[Any],
    inputs: Sequence[Spec],
    outputs: Sequence[Spec],
    weights: dict[str, np.ndarray] | None = None,
    *,
    ir_version: int = IR_VERSION,
    opsets: dict[str, int] | None = None,
) -> Path:
    """Write a graph as an .onnx file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(build(nodes, inputs, outputs, weights, ir_version=ir_version, opsets=opsets).SerializeToString())
    return path


def build(
    nodes: Sequence[Any],
    inputs: Sequence[Spec],
    outputs: Sequence[Spec],
    weights: dict[str, np.ndarray] | None = None,
    *,
    ir_version: int = IR_VERSION,
    opsets: dict[str, int] | None = None,
) -> ModelProto:
    """Build a graph in memory."""
    graph = helper.make_graph(
        list(nodes),
        "graph",
        [helper.make_tensor_value_info(*spec) for spec in inputs],
        [helper.make_tensor_value_info(*spec) for spec in outputs],
        initializer=[numpy_helper.from_array(array, name) for name, array in (weights or {}).items()],
    )
    imports = [helper.make_opsetid(domain, version) for domain, version in ({"": OPSET} | (opsets or {})).items()]
    return helper.make_model(graph, ir_version=ir_version, opset_imports=imports)


def scale(folder: Path, *, features: int | str = "features", rows: int | str = "n") -> Path:
    """y = 2 x + 1, any number of rows."""
    return write(
        folder / "scale.onnx",
        [helper.make_node("Mul", ["x", "two"], ["d"]), helper.make_node("Add", ["d", "one"], ["y"])],
        [("x", TensorProto.FLOAT, [rows, features])],
        [("y", TensorProto.FLOAT, [rows, features])],
        {"two": np.array(2, np.float32), "one": np.array(1, np.float32)},
    )


def fixed_batch(folder: Path, rows: int) -> Path:
    """y = 2 x + 1 on exactly `rows` rows of 3."""
    return scale(folder, features=3, rows=rows)


def two_inputs_two_outputs(folder: Path) -> Path:
    """total = a + b and ids = 10 k, of float32 [n, 3] and int64 [n]."""
    return write(
        folder / "two.onnx",
        [helper.make_node("Add", ["a", "b"], ["total"]), helper.make_node("Mul", ["k", "ten"], ["ids"])],
        [("a", TensorProto.FLOAT, ["n", 3]), ("b", TensorProto.FLOAT, ["n", 3]), ("k", TensorProto.INT64, ["n"])],
        [("total", TensorProto.FLOAT, ["n", 3]), ("ids", TensorProto.INT64, ["n"])],
        {"ten": np.array(10, np.int64)},
    )


def matmul(folder: Path, weights: np.ndarray) -> Path:
    """y = x W, float32 [n, features] to [n, out]."""
    features, out = weights.shape
    return write(
        folder / "matmul.onnx",
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        [("x", TensorProto.FLOAT, ["n", features])],
        [("y", TensorProto.FLOAT, ["n", out])],
        {"w": weights.astype(np.float32)},
    )


def batch_mean(folder: Path, *, rows: int | str = "n") -> Path:
    """y = x - mean over axis 0: looks batchable, and is not."""
    return write(
        folder / "batch_mean.onnx",
        [helper.make_node("ReduceMean", ["x", "axis"], ["m"]), helper.make_node("Sub", ["x", "m"], ["y"])],
        [("x", TensorProto.FLOAT, [rows, 3])],
        [("y", TensorProto.FLOAT, [rows, 3])],
        {"axis": np.array([0], np.int64)},
    )


def total_over_rows(folder: Path, *, features: int | str = 3, keepdims: int = 1) -> Path:
    """y = sum over axis 0: one row out, or without keepdims none, whatever goes in."""
    return write(
        folder / "total.onnx",
        [helper.make_node("ReduceSum", ["x", "axis"], ["y"], keepdims=keepdims)],
        [("x", TensorProto.FLOAT, ["n", features])],
        [("y", TensorProto.FLOAT, [1, features] if keepdims else [features])],
        {"axis": np.array([0], np.int64)},
    )


def gather(folder: Path, *, entries: int = 4) -> Path:
    """y = table[i], where table[k] = [k, 10 k]; an index outside the table fails the whole run."""
    table = np.stack([np.arange(entries), 10 * np.arange(entries)], axis=1).astype(np.float32)
    return write(
        folder / "gather.onnx",
        [helper.make_node("Gather", ["table", "i"], ["y"])],
        [("i", TensorProto.INT64, ["n", 1])],
        [("y", TensorProto.FLOAT, ["n", 1, 2])],
        {"table": table},
    )


def strings(folder: Path) -> Path:
    """The same strings out as in, [n, 1]."""
    return identity(folder, TensorProto.STRING, ["n", 1], name="strings")


def identity(folder: Path, dtype: int, shape: Shape, *, name: str = "identity") -> Path:
    """The same tensor out as in."""
    return write(
        folder / f"{name}.onnx",
        [helper.make_node("Identity", ["x"], ["y"])],
        [("x", dtype, shape)],
        [("y", dtype, shape)],
    )


def float16(folder: Path) -> Path:
    """y = relu(x) in float16, [n, 3]."""
    return write(
        folder / "float16.onnx",
        [helper.make_node("Relu", ["x"], ["y"])],
        [("x", TensorProto.FLOAT16, ["n", 3])],
        [("y", TensorProto.FLOAT16, ["n", 3])],
    )


def bfloat16(folder: Path) -> Path:
    """wide = float32(x) and same = bfloat16(wide): casts, the only bfloat16 kernels that a CPU has."""
    return write(
        folder / "bfloat16.onnx",
        [
            helper.make_node("Cast", ["x"], ["wide"], to=TensorProto.FLOAT),
            helper.make_node("Cast", ["wide"], ["same"], to=TensorProto.BFLOAT16),
        ],
        [("x", TensorProto.BFLOAT16, ["n", 3])],
        [("wide", TensorProto.FLOAT, ["n", 3]), ("same", TensorProto.BFLOAT16, ["n", 3])],
    )


def row_sums(folder: Path) -> Path:
    """y = sum over both inner axes of [n, h, w], which are dynamic."""
    return write(
        folder / "row_sums.onnx",
        [helper.make_node("ReduceSum", ["x", "axes"], ["y"], keepdims=0)],
        [("x", TensorProto.FLOAT, ["n", "h", "w"])],
        [("y", TensorProto.FLOAT, ["n"])],
        {"axes": np.array([1, 2], np.int64)},
    )


def shared_factor(folder: Path) -> Path:
    """y = x * factor, where factor is one scalar for all rows."""
    return write(
        folder / "shared_factor.onnx",
        [helper.make_node("Mul", ["x", "factor"], ["y"])],
        [("x", TensorProto.FLOAT, ["n", 2]), ("factor", TensorProto.FLOAT, [])],
        [("y", TensorProto.FLOAT, ["n", 2])],
    )


def slow(folder: Path, *, layers: int = 60, width: int = 512) -> Path:
    """A chain of `layers` MatMul and Tanh; time grows with layers and with the square of width."""
    nodes = []
    for layer in range(layers):
        source = "x" if layer == 0 else f"t{layer - 1}"
        target = "y" if layer == layers - 1 else f"t{layer}"
        nodes += [
            helper.make_node("MatMul", [source, "w"], [f"m{layer}"]),
            helper.make_node("Tanh", [f"m{layer}"], [target]),
        ]
    weights = np.random.default_rng(0).standard_normal((width, width)).astype(np.float32) / width**0.5
    return write(
        folder / "slow.onnx",
        nodes,
        [("x", TensorProto.FLOAT, ["n", width])],
        [("y", TensorProto.FLOAT, ["n", width])],
        {"w": weights},
    )


def one_long_node(folder: Path) -> Path:
    """`y` = 2 `x`, and a single node whose time grows with the square of the largest `x`: nothing can stop it midway.

    It suppresses non-maximal boxes among as many that do not overlap, so that each is compared with all before it. A
    core takes seconds for 30,000 of them, and more than a minute for 150,000.
    """
    node = helper.make_node
    nodes = [
        node("ReduceMax", ["x"], ["most"], keepdims=0),
        node("Max", ["most", "two"], ["at_least_two"]),
        node("Cast", ["at_least_two"], ["count"], to=TensorProto.INT64),
        node("Cast", ["count"], ["boxes"], to=TensorProto.FLOAT),
        node("Range", ["nought", "boxes", "one"], ["numbers"]),
        node("Unsqueeze", ["numbers", "last"], ["left"]),
        node("Add", ["left", "half"], ["right"]),
        node("Concat", ["left", "left", "right", "right"], ["flat"], axis=1),
        node("Unsqueeze", ["flat", "first"], ["corners"]),
        node("Unsqueeze", ["numbers", "both"], ["scores"]),
        node("NonMaxSuppression", ["corners", "scores", "count"], ["selected"]),
        node("Size", ["selected"], ["size"]),
        node("Cast", ["size"], ["some"], to=TensorProto.FLOAT),
        node("Mul", ["some", "nought"], ["nothing"]),
        node("Mul", ["x", "factor"], ["doubled"]),
        node("Add", ["doubled", "nothing"], ["y"]),
    ]
    scalars: dict[str, np.ndarray] = {
        name: np.array(value, np.float32)
        for name, value in {"nought": 0, "one": 1, "two": 2, "half": 0.5, "factor": 2}.items()
    }
    axes: dict[str, np.ndarray] = {
        "last": np.array([1], np.int64), "first": np.array([0], np.int64), "both": np.array([0, 1], np.int64)
    }  # fmt: skip
    ends = [("x", TensorProto.FLOAT, ("n", 1))], [("y", TensorProto.FLOAT, ("n", 1))]
    return write(folder / "long.onnx", nodes, *ends, scalars | axes)


def convolution(folder: Path) -> Path:
    """y = relu(conv(x) + b) of [n, 3, 8, 8]: the CPU provider changes its layout when it optimises."""
    weights = np.random.default_rng(5).standard_normal((16, 3, 3, 3)).astype(np.float32)
    return write(
        folder / "convolution.onnx",
        [
            helper.make_node("Conv", ["x", "w", "b"], ["c"], kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
            helper.make_node("Relu", ["c"], ["y"]),
        ],
        [("x", TensorProto.FLOAT, ["n", 3, 8, 8])],
        [("y", TensorProto.FLOAT, ["n", 16, 8, 8])],
        {"w": weights, "b": np.arange(16, dtype=np.float32)},
    )


def branching(folder: Path) -> Path:
    """y = x times 1024 weights, taken from inside an If, so from the weights of a subgraph."""
    weights = np.random.default_rng(6).standard_normal(1024).astype(np.float32)

    def branch(name: str, operator: str) -> Any:
        return helper.make_graph(
            [helper.make_node(operator, ["x", f"w_{name}"], [f"b_{name}"])],
            name,
            [],
            [helper.make_tensor_value_info(f"b_{name}", TensorProto.FLOAT, ["n", 1024])],
            initializer=[numpy_helper.from_array(weights, f"w_{name}")],
        )

    return write(
        folder / "branching.onnx",
        [
            helper.make_node("ReduceSum", ["yes"], ["s"], keepdims=0),
            helper.make_node("Greater", ["s", "zero"], ["b"]),
            helper.make_node("If", ["b"], ["y"], then_branch=branch("mul", "Mul"), else_branch=branch("add", "Add")),
        ],
        [("x", TensorProto.FLOAT, ["n", 1024]), ("yes", TensorProto.FLOAT, [])],
        [("y", TensorProto.FLOAT, ["n", 1024])],
        {"zero": np.array(0, np.float32)},
    )


def external(source: Path, folder: Path, *, location: str = "weights.bin") -> Path:
    """The same model with its weights in a file beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / source.name
    save_model(load_model(source), target, save_as_external_data=True, location=location, size_threshold=0)
    return target


def state_on_axis_1(folder: Path) -> Path:
    """A step of a recurrent net: y = sum(x) + state, with rows on axis 0 of x and on axis 1 of the state."""
    return write(
        folder / "recurrent.onnx",
        [
            helper.make_node("ReduceSum", ["x", "last"], ["s"], keepdims=1),
            helper.make_node("Add", ["state", "s"], ["next"]),
            helper.make_node("ReduceSum", ["next", "first"], ["y"], keepdims=0),
        ],
        [("x", TensorProto.FLOAT, ["n", 4]), ("state", TensorProto.FLOAT, [2, "n", 3])],
        [("y", TensorProto.FLOAT, ["n", 3]), ("next", TensorProto.FLOAT, [2, "n", 3])],
        {"last": np.array([1], np.int64), "first": np.array([0], np.int64)},
    )


def optional_input(folder: Path) -> Path:
    """y = x + bias, where the graph itself gives the bias a default that a caller may replace."""
    return write(
        folder / "optional.onnx",
        [helper.make_node("Add", ["x", "bias"], ["y"])],
        [("x", TensorProto.FLOAT, ["n", 3]), ("bias", TensorProto.FLOAT, [3])],
        [("y", TensorProto.FLOAT, ["n", 3])],
        {"bias": np.array([1, 2, 3], np.float32)},
    )
