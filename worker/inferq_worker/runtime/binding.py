"""Runs on a device through IOBinding: each input goes there once and each output comes back once a batch.

The host side is the collator's reused buffer and a fresh output; the device side is memory that ONNX Runtime's arena
uses again for the next batch, or with CUDA graphs a buffer of ours with a fixed address. Nothing is shared by threads
except captured graphs, which one thread at a time may run. Works on the CPU provider too, and there it is tested.
"""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np

from inferq_schemas.tensor import DTYPES
from inferq_worker.runtime.interface import Array, Feeds, RunFailed, TensorSpec

BFLOAT16_CODE = 16  # TensorProto.BFLOAT16
_GRAPH_ID, _NO_GRAPH = "gpu_graph_id", "-1"
# A replayed graph runs the very kernels that it was captured from; what TF32 and another algorithm may change.
_RELATIVE, _ABSOLUTE = 1e-2, 1e-3


def can_bind(specs: Sequence[TensorSpec]) -> bool:
    """Whether all tensors can be bound: ONNX Runtime keeps strings on the host, outside of any binding."""
    return all(spec.dtype != "string" for spec in specs)


class BoundRuns:
    """Runs a session with inputs copied to its device, once each, and outputs copied back, once each.

    Args:
        ort: the library.
        session: the loaded graph.
        inputs: in graph order.
        outputs: in graph order.
    """

    def __init__(
        self, ort: ModuleType, session: Any, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]
    ) -> None:
        self._ort = ort
        self._session = session
        self._inputs = tuple(inputs)
        self._outputs = tuple(outputs)

    def prepare(self, feeds: Feeds) -> Callable[[Any], Feeds]:
        """Copy the inputs to the device; raises what ONNX Runtime raises.

        Returns:
            The run: takes its options, returns outputs in fresh memory, raises what ONNX Runtime raises.
        """
        # A binding of its own for every run: one that is used again hands out the same memory again.
        binding = self._session.io_binding()
        for spec in self._inputs:
            # Binding copies to the device at once, and only this once.
            binding.bind_ortvalue_input(spec.name, host_value(self._ort, feeds[spec.name], spec))
        for spec in self._outputs:
            binding.bind_output(spec.name, "cpu")
        return partial(self._run, binding)

    def _run(self, binding: Any, options: Any) -> Feeds:
        self._session.run_with_iobinding(binding, options)
        values = binding.get_outputs()
        return {spec.name: to_numpy(value, spec) for spec, value in zip(self._outputs, values, strict=True)}


@dataclass(frozen=True, slots=True)
class _Graph:
    binding: Any
    inputs: dict[str, Any]
    outputs: dict[str, Any]


class GraphRuns:
    """Replays one captured CUDA graph per batch size, and runs other sizes the plain way. For one thread.

    A graph has fixed shapes and addresses, so each size has device buffers that live as long as the session.

    Args:
        ort: the library.
        session: the loaded graph, made with `enable_cuda_graph`; inner shapes are fixed.
        inputs: in graph order.
        outputs: in graph order.
        sizes: batch sizes to capture.
        device: where the buffers lie: type and index, in ONNX Runtime's words.
    """

    def __init__(
        self,
        ort: ModuleType,
        session: Any,
        inputs: Sequence[TensorSpec],
        outputs: Sequence[TensorSpec],
        *,
        sizes: frozenset[int],
        device: tuple[str, int],
    ) -> None:
        self._ort = ort
        self._session = session
        self._inputs = tuple(inputs)
        self._outputs = tuple(outputs)
        self._sizes = sizes
        self._device = device
        self._plain = BoundRuns(ort, session, inputs, outputs)
        self._graphs: dict[int, _Graph] = {}

    def prepare(self, feeds: Feeds) -> Callable[[Any], Feeds]:
        """Nothing to do ahead: a captured graph's buffers belong to the run that is under way.

        Returns:
            As `BoundRuns.prepare` does; the run raises `RunFailed` as well, when the graph that it captured answers
            otherwise than the plain run.
        """
        return partial(self._run, feeds)

    def _run(self, feeds: Feeds, options: Any) -> Feeds:
        rows = next((len(feeds[spec.name]) for spec in self._inputs if spec.shape), 0)
        graph = self._graphs.get(rows)
        options.add_run_config_entry(_GRAPH_ID, _NO_GRAPH if graph is None else str(rows))
        if graph is not None:
            return self._replay(graph, feeds, options)
        expected = self._plain.prepare(feeds)(options)
        if rows in self._sizes:
            self._graphs[rows] = self._capture(rows, feeds, expected)
        return expected

    def _capture(self, rows: int, feeds: Feeds, expected: Feeds) -> _Graph:
        inputs = {spec.name: self._buffer(feeds[spec.name], spec) for spec in self._inputs}
        outputs = {spec.name: self._buffer(expected[spec.name], spec) for spec in self._outputs}
        binding = self._session.io_binding()
        for name, value in inputs.items():
            binding.bind_ortvalue_input(name, value)
        for name, value in outputs.items():
            binding.bind_ortvalue_output(name, value)
        graph = _Graph(binding, inputs, outputs)
        options = self._ort.RunOptions()
        options.add_run_config_entry(_GRAPH_ID, str(rows))
        _compare(expected, self._replay(graph, feeds, options), rows)
        return graph

    def _buffer(self, like: Array, spec: TensorSpec) -> Any:
        kind = BFLOAT16_CODE if spec.dtype == "bfloat16" else like.dtype.type
        return self._ort.OrtValue.ortvalue_from_shape_and_type(list(like.shape), kind, *self._device)

    def _replay(self, graph: _Graph, feeds: Feeds, options: Any) -> Feeds:
        """The first call captures, later ones replay."""
        for spec in self._inputs:
            graph.inputs[spec.name].update_inplace(host_value(self._ort, feeds[spec.name], spec))
        self._session.run_with_iobinding(graph.binding, options)
        return {spec.name: self._fetch(graph.outputs[spec.name], spec) for spec in self._outputs}

    def _fetch(self, value: Any, spec: TensorSpec) -> Array:
        """Copy out of a buffer that the next run overwrites."""
        host = self._ort.OrtValue
        array = np.empty(value.shape(), DTYPES[spec.dtype].storage)
        target = (
            host.ortvalue_from_numpy_with_onnx_type(array, BFLOAT16_CODE)
            if spec.dtype == "bfloat16"
            else host.ortvalue_from_numpy(array)
        )
        target.update_inplace(value)
        return array


def _compare(expected: Feeds, actual: Feeds, rows: int) -> None:
    for name, array in expected.items():
        if array.dtype.kind == "f" and not np.allclose(
            actual[name], array, rtol=_RELATIVE, atol=_ABSOLUTE, equal_nan=True
        ):
            raise RunFailed(
                "inference_failed",
                f"the CUDA graph captured for {rows} rows answers otherwise than a plain run in output {name!r}; "
                "set runtime.cuda_graphs = false for this model",
            )


def host_value(ort: ModuleType, array: Array, spec: TensorSpec) -> Any:
    """An ORT value over the array's own memory where it is contiguous; bfloat16 travels as uint16."""
    array = np.ascontiguousarray(array).reshape(array.shape)
    if spec.dtype == "bfloat16":
        return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array, BFLOAT16_CODE)
    return ort.OrtValue.ortvalue_from_numpy(array)


def to_numpy(value: Any, spec: TensorSpec) -> Array:
    """A value on the host as an array that keeps its memory; a copy only for bfloat16, which NumPy cannot view."""
    if spec.dtype != "bfloat16":
        return np.asarray(value.numpy())
    if value.device_name() != "cpu":
        raise RunFailed("inference_failed", "a bfloat16 output stays on the device; cast it to float32 in the model")
    shape = tuple(value.shape())
    count = int(np.prod(shape, dtype=np.int64))
    if count == 0:
        return np.empty(shape, np.uint16)
    memory = (ctypes.c_uint16 * count).from_address(value.data_ptr())
    return np.ctypeslib.as_array(memory).reshape(shape).copy()
