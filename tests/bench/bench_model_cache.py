"""What `runtime.cache_dir` saves at the second start of a worker, on the CPU: `make bench-model-cache`.

Two made-up transformers, one of many small nodes and one of many weights. Each start opens the model in this process as
a worker does: hash it, load it. The least of three is printed, in seconds of the clock and of the processor.
"""

import asyncio
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from onnx import TensorProto, helper
from tests import models

from inferq_worker.models.repository import ModelFile
from inferq_worker.runtime import RuntimeSettings, SessionInfo, open_session

SEQUENCE, HEADS, STARTS = 64, 8, 3


class Transformer:
    """Writes an encoder as an exporter does: normalisation and GELU in single steps, for the optimiser to fuse."""

    def __init__(self, layers: int, width: int) -> None:
        self._rng = np.random.default_rng(0)
        self._width = width
        self._nodes: list[Any] = []
        self._weights: dict[str, np.ndarray] = {
            "epsilon": np.array(1e-5, np.float32),
            "half": np.array(0.5, np.float32),
            "one": np.array(1, np.float32),
            "two": np.array(2, np.float32),
            "root": np.array(2**0.5, np.float32),
            "scale": np.array((width / HEADS) ** 0.5, np.float32),
            "split": np.array([0, 0, HEADS, width // HEADS], np.int64),
            "joined": np.array([0, 0, width], np.int64),
            "last": np.array([-1], np.int64),
        }
        self._count = 0
        self._last = "x"
        for _ in range(layers):
            self._last = self._layer(self._last)

    def write(self, folder: Path) -> Path:
        """Write the file."""
        self._nodes.append(helper.make_node("Identity", [self._last], ["y"]))
        shape: models.Shape = ["n", SEQUENCE, self._width]
        x: models.Spec = ("x", TensorProto.FLOAT, shape)
        y: models.Spec = ("y", TensorProto.FLOAT, shape)
        return models.write(folder / "transformer.onnx", self._nodes, [x], [y], self._weights)

    def _do(self, operator: str, *inputs: str, **attributes: Any) -> str:
        self._count += 1
        self._nodes.append(helper.make_node(operator, list(inputs), [f"t{self._count}"], **attributes))
        return f"t{self._count}"

    def _weight(self, *shape: int) -> str:
        name = f"w{len(self._weights)}"
        self._weights[name] = (self._rng.standard_normal(shape) / shape[0] ** 0.5).astype(np.float32)
        return name

    def _linear(self, x: str, size: int, out: int) -> str:
        return self._do("Add", self._do("MatMul", x, self._weight(size, out)), self._weight(out))

    def _normalise(self, x: str) -> str:
        centred = self._do("Sub", x, self._do("ReduceMean", x, "last"))
        variance = self._do("ReduceMean", self._do("Pow", centred, "two"), "last")
        whole = self._do("Div", centred, self._do("Sqrt", self._do("Add", variance, "epsilon")))
        return self._do("Add", self._do("Mul", whole, self._weight(self._width)), self._weight(self._width))

    def _attention(self, x: str) -> str:
        def heads(order: list[int]) -> str:
            return self._do(
                "Transpose", self._do("Reshape", self._linear(x, self._width, self._width), "split"), perm=order
            )

        query, key, value = heads([0, 2, 1, 3]), heads([0, 2, 3, 1]), heads([0, 2, 1, 3])
        scores = self._do("Softmax", self._do("Div", self._do("MatMul", query, key), "scale"), axis=-1)
        mixed = self._do("Transpose", self._do("MatMul", scores, value), perm=[0, 2, 1, 3])
        return self._linear(self._do("Reshape", mixed, "joined"), self._width, self._width)

    def _layer(self, x: str) -> str:
        x = self._normalise(self._do("Add", self._attention(x), x))
        hidden = self._linear(x, self._width, 4 * self._width)
        erf = self._do("Add", self._do("Erf", self._do("Div", hidden, "root")), "one")
        gelu = self._do("Mul", self._do("Mul", hidden, erf), "half")
        return self._normalise(self._do("Add", self._linear(gelu, 4 * self._width, self._width), x))


async def start(path: Path, cache_dir: Path | None) -> tuple[float, float, SessionInfo]:
    """Wall and processor seconds of one start, and what was loaded."""
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    session = await open_session(ModelFile("m", "1", path), RuntimeSettings(provider="cpu", cache_dir=cache_dir))
    spent = time.perf_counter() - wall_s, time.process_time() - cpu_s
    await session.close()
    return *spent, session.info


async def measure(folder: Path, layers: int, width: int) -> None:
    """Print the line of one model."""
    path = Transformer(layers, width).write(folder / "model")
    without = [await start(path, None) for _ in range(STARTS)]
    first = [await start(path, folder / str(number)) for number in range(STARTS)]
    second = [await start(path, folder / "0") for _ in range(STARTS)]
    assert {info.cache for *_, info in first} == {"built"}
    assert {info.cache for *_, info in second} == {"reused"}
    nodes = sum(without[0][2].nodes_by_provider.values())
    figures = "  ".join(
        f"{min(wall):6.2f} /{min(cpu):6.2f}"
        for wall, cpu, _ in (zip(*each, strict=True) for each in (without, first, second))
    )
    print(f"{nodes:6d} nodes {path.stat().st_size / 2**20:5.0f} MiB  {figures}")


async def main() -> None:
    """Measure both."""
    print("seconds, wall / processor         no cache       first start    second start")
    for layers, width in ((96, 64), (48, 384)):
        with tempfile.TemporaryDirectory() as folder:
            await measure(Path(folder), layers, width)


if __name__ == "__main__":
    asyncio.run(main())
