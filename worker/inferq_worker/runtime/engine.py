"""One loaded graph and one run of it: the calls into ONNX Runtime that every batch makes.

Made by `ort.py`; the library is an argument. Its exceptions become ours here.
"""

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from inferq_worker.runtime.binding import BoundRuns, GraphRuns, can_bind, host_value, to_numpy
from inferq_worker.runtime.interface import Feeds, ModelRefused, RunFailed, RunStopped, TensorSpec
from inferq_worker.runtime.translate import run_failure

_SEVERITY_FATAL = 4

# ONNX Runtime's type names -> the contract's.
_DTYPES = {
    f"tensor({theirs})": ours
    for theirs, ours in {
        "bool": "bool",
        "double": "float64",
        "float": "float32",
        "string": "string",
        **{name: name for name in ("float16", "bfloat16", "int8", "int16", "int32", "int64")},
        **{name: name for name in ("uint8", "uint16", "uint32", "uint64")},
    }.items()
}


class OrtEngine:
    """One loaded graph, safe to run from several threads at a time."""

    def __init__(self, ort: ModuleType, session: Any, model: str) -> None:
        self._ort = ort
        self._session = session
        self._inputs = specs(session.get_inputs(), model)
        self._outputs = specs(session.get_outputs(), model)
        self._output_names = [spec.name for spec in self._outputs]
        self._has_bfloat16 = any(spec.dtype == "bfloat16" for spec in self._inputs + self._outputs)
        self._bound: BoundRuns | GraphRuns | None = None

    def bind(self, graph_sizes: frozenset[int], device: tuple[str, int]) -> None:
        """Run through IOBinding from now on.

        Strings never leave the host, so a model with some goes on being run the plain way.

        Args:
            graph_sizes: batch sizes to capture a CUDA graph for.
            device: where the graphs' buffers lie: type and index, in ONNX Runtime's words.
        """
        if not can_bind(self._inputs + self._outputs):
            return
        parts = (self._ort, self._session, self._inputs, self._outputs)
        self._bound = GraphRuns(*parts, sizes=graph_sizes, device=device) if graph_sizes else BoundRuns(*parts)

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """Declared inputs, in graph order."""
        return self._inputs

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """Declared outputs, in graph order."""
        return self._outputs

    def prepare(self, feeds: Feeds) -> "OrtRun":
        """See `Engine.prepare`. On a GPU the inputs go there now, beside the run that is under way."""
        options = self._ort.RunOptions()
        # Every failure is raised and reported by us once; the library would print it on standard error as well.
        options.log_severity_level = _SEVERITY_FATAL
        try:
            native = self._plain(feeds) if self._bound is None else self._bound.prepare(feeds)
        except Exception as error:
            raise run_failure(error) from error
        return OrtRun(feeds, native, options)

    def end_profile(self) -> Path:
        """Write the profile that `open_engine` was asked for, and return where it is. Once."""
        return Path(self._session.end_profiling())

    def _plain(self, feeds: Feeds) -> Callable[[Any], Feeds]:
        return partial(self._run_values if self._has_bfloat16 else self._run_arrays, feeds)

    def _run_arrays(self, feeds: Feeds, options: Any) -> Feeds:
        arrays = self._session.run(self._output_names, dict(feeds), options)
        return dict(zip(self._output_names, arrays, strict=True))

    def _run_values(self, feeds: Feeds, options: Any) -> Feeds:
        """NumPy has no bfloat16, so such tensors go in and out as ORT values over uint16 memory."""
        values = {spec.name: host_value(self._ort, feeds[spec.name], spec) for spec in self._inputs}
        results = self._session.run_with_ort_values(self._output_names, values, options)
        return {spec.name: to_numpy(value, spec) for spec, value in zip(self._outputs, results, strict=True)}


class OrtRun:
    """One run of an engine: see `NativeRun`.

    Args:
        feeds: what goes in; kept, since the library only borrows their memory.
        native: the run; outputs are fresh memory. Takes the options.
        options: of this run alone, so that stopping it stops no other.
    """

    def __init__(self, feeds: Feeds, native: Callable[[Any], Feeds], options: Any) -> None:
        self.feeds = feeds
        self._native = native
        self._options = options
        self._stopped = False

    def run(self) -> Feeds:
        """See `NativeRun.run`."""
        try:
            return self._native(self._options)
        except RunFailed:
            raise
        except Exception as error:
            if self._stopped:
                raise RunStopped(str(error)) from error
            raise run_failure(error) from error

    def stop(self) -> None:
        """See `NativeRun.stop`."""
        self._stopped = True
        self._options.terminate = True


def specs(nodes: Iterable[Any], model: str) -> tuple[TensorSpec, ...]:
    """Inputs or outputs of a session in our words.

    Raises:
        ModelRefused: one of them is nothing that a message can carry.
    """
    try:
        return tuple(_spec(node, model) for node in nodes)
    except UnicodeDecodeError as error:
        raise ModelRefused(
            f"{model}: the name of an input, an output or an axis is not UTF-8; the file is damaged: fetch it again"
        ) from error


def _spec(node: Any, model: str) -> TensorSpec:
    dtype = _DTYPES.get(node.type)
    if dtype is None:
        raise ModelRefused(
            f"{model}: {node.name!r} is a {node.type}, which no message can carry; "
            "export the model with plain tensors in and out (scikit-learn: options={'zipmap': False})"
        )
    return TensorSpec(node.name, dtype, tuple(size if isinstance(size, int) else None for size in node.shape))
