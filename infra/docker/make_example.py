"""Writes the example model that `docker compose up` serves: a small classifier with fixed, made-up weights.

`example`: input `features` float32 (n, 4), output `scores` float32 (n, 3), rows independent of each other and summing
to one. The same bytes come out every time.
"""

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

MODEL_FILE = Path(__file__).with_name("models") / "example" / "1" / "model.onnx"
_FEATURES, _HIDDEN, _CLASSES = 4, 8, 3


def model_bytes() -> bytes:
    """Build the model."""
    shapes = {"w1": (_FEATURES, _HIDDEN), "b1": (_HIDDEN,), "w2": (_HIDDEN, _CLASSES), "b2": (_CLASSES,)}
    weights = [numpy_helper.from_array(_scattered(shape), name) for name, shape in shapes.items()]
    nodes = [
        helper.make_node("Gemm", ["features", "w1", "b1"], ["hidden"]),
        helper.make_node("Relu", ["hidden"], ["active"]),
        helper.make_node("Gemm", ["active", "w2", "b2"], ["logits"]),
        helper.make_node("Softmax", ["logits"], ["scores"], axis=1),
    ]
    inputs = [helper.make_tensor_value_info("features", TensorProto.FLOAT, ["n", _FEATURES])]
    outputs = [helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["n", _CLASSES])]
    graph = helper.make_graph(nodes, "example", inputs, outputs, weights)
    # Old enough for every ONNX Runtime that the project allows, and stated, so that a newer onnx changes nothing.
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8, producer_name="inferq")
    onnx.checker.check_model(model)
    content: bytes = model.SerializeToString(deterministic=True)
    return content


def _scattered(shape: tuple[int, ...]) -> np.ndarray:
    """Numbers in [-1, 1] that look random and, unlike a generator's, are the same with every NumPy."""
    return ((np.arange(np.prod(shape)) * 7919 % 101 - 50) / 50).astype(np.float32).reshape(shape)


if __name__ == "__main__":
    MODEL_FILE.parent.mkdir(parents=True, exist_ok=True)
    MODEL_FILE.write_bytes(model_bytes())
