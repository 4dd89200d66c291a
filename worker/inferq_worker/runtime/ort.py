"""The border to ONNX Runtime: the only module that imports it.

Nothing of the library's own classes, exceptions or habits passes: providers are what really runs, never what was
asked for, and every foreign exception becomes one of ours here.
"""

import contextlib
import ctypes
import importlib
import io
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from inferq_worker.runtime.interface import (
    Array,
    Feeds,
    ModelRefused,
    RunFailed,
    RunStopped,
    RuntimeUnavailable,
    TensorSpec,
)
from inferq_worker.runtime.settings import ProviderName, RuntimeSettings
from inferq_worker.runtime.translate import load_refusal, newest_in, run_failure

PROVIDER_NAMES: dict[ProviderName, str] = {
    "cuda": "CUDAExecutionProvider",
    "tensorrt": "TensorrtExecutionProvider",
    "cpu": "CPUExecutionProvider",
}
_CPU = PROVIDER_NAMES["cpu"]
_SEVERITY_ERROR, _SEVERITY_FATAL = 3, 4
_BFLOAT16_CODE = 16  # TensorProto.BFLOAT16

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


@cache
def onnxruntime() -> ModuleType:
    """Import ONNX Runtime with its telemetry off.

    Raises:
        RuntimeUnavailable: it is not installed, or installed twice.
    """
    check_distributions()
    # The official wheel writes a device id and a database under ~/.cache at the first session unless this is set
    # before the import; its own disable_telemetry_events() comes too late.
    os.environ["ORT_DISABLE_TELEMETRY"] = "1"
    # With this set a model file may choose session options, and so files to write.
    os.environ.pop("ORT_LOAD_CONFIG_FROM_MODEL", None)
    return importlib.import_module("onnxruntime")


def check_distributions() -> None:
    """Refuse an environment with no ONNX Runtime, or with two that overwrite each other's files.

    Raises:
        RuntimeUnavailable: names what is installed and the commands that mend it.
    """
    names = {(found.metadata["Name"] or "").lower().replace("_", "-") for found in metadata.distributions()}
    # Plug-in providers (onnxruntime-ep-*) and companions live in folders of their own.
    cores = sorted(names & {"onnxruntime", "onnxruntime-gpu", "onnxruntime-directml", "onnxruntime-openvino"})
    if not cores:
        raise RuntimeUnavailable(
            "ONNX Runtime is not installed; run: pip install 'inferq[worker]' (GPU) or pip install 'inferq[worker-cpu]'"
        )
    if len(cores) > 1:
        keep = "onnxruntime-gpu" if "onnxruntime-gpu" in cores else cores[0]
        raise RuntimeUnavailable(
            f"{' and '.join(cores)} are both installed and overwrite each other's files; run: "
            f"pip uninstall -y {' '.join(cores)} && pip install {keep}"
        )


def driver_present() -> bool:
    """Whether the NVIDIA driver's own library loads on this machine."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a graph landed. `warning` is empty when the wish was granted."""

    provider: str
    requested_provider: str
    nodes_by_provider: dict[str, int]
    warning: str


def open_engine(path: Path, settings: RuntimeSettings, *, profile: Path | None = None) -> tuple["OrtEngine", Placement]:
    """Load the graph at `path`; blocks for as long as that takes, so call it from a thread.

    Args:
        path: an .onnx file; external data is read from its folder.
        settings: provider, policy, threads.
        profile: where to write a profile of all runs until `OrtEngine.end_profile`: the start of a path, which ONNX
            Runtime completes with the time and `.json`. It grows with every run.

    Raises:
        ModelRefused: the file is not a model that this ONNX Runtime can run.
        RuntimeUnavailable: the policy is `require` and something else than the provider runs the graph.
    """
    ort = onnxruntime()
    requested = PROVIDER_NAMES[settings.provider]
    session, reason = _create(ort, path, settings, profile)
    provider = session.get_providers()[0]
    warning = ""
    if provider != requested:
        warning = f"{path.name}: {requested} was asked for but {provider} runs the model: {reason}"
        if settings.provider_policy == "require":
            raise RuntimeUnavailable(f'{warning}; or set provider_policy = "prefer" to accept this')
    nodes: Counter[str] = Counter()
    for part in session.get_provider_graph_assignment_info():
        nodes[part.ep_name] += len(part.get_nodes())
    return OrtEngine(ort, session, path.name), Placement(provider, requested, dict(nodes), warning)


def _create(ort: ModuleType, path: Path, settings: RuntimeSettings, profile: Path | None) -> tuple[Any, str]:
    """Create the session on the best provider that lets itself be created, and say why it is not the requested one."""
    options = _session_options(ort, settings)
    if profile is not None:
        options.enable_profiling = True
        options.profile_file_prefix = str(profile)
    wishes, reason = _wishes(ort, settings)
    while True:
        try:
            # enable_fallback=0: otherwise a device error in mid-run silently rebuilds the session on the CPU.
            return ort.InferenceSession(path, options, providers=wishes, enable_fallback=0), reason
        except Exception as error:
            if len(wishes) == 1 or not _is_provider_error(error):
                raise load_refusal(path, error) from error
            reason = f"{_name_of(wishes[0])} failed to start: {' '.join(str(error).split())[:300]}"
            wishes = wishes[1:]


def _wishes(ort: ModuleType, settings: RuntimeSettings) -> tuple[list[Any], str]:
    if settings.provider == "cpu":
        return [_CPU], ""
    requested = PROVIDER_NAMES[settings.provider]
    if requested not in ort.get_available_providers():
        return [_CPU], "this ONNX Runtime is built without it; install onnxruntime-gpu instead of onnxruntime"
    if not driver_present():
        return [_CPU], "there is no NVIDIA driver (libcuda.so.1 does not load); install one that supports CUDA 13"
    # The libraries of pip's nvidia-* wheels are found only through this call, which prints what it misses.
    with contextlib.redirect_stdout(io.StringIO()):
        ort.preload_dlls()
    cuda = (PROVIDER_NAMES["cuda"], _cuda_options(settings))
    reason = "its libraries did not load (see standard error); pip install 'inferq[cuda]' brings CUDA 13 and cuDNN 9"
    if settings.provider == "cuda":
        return [cuda, _CPU], reason
    return [(requested, {"device_id": settings.device_id, **settings.provider_options}), cuda, _CPU], reason


def _cuda_options(settings: RuntimeSettings) -> dict[str, Any]:
    options: dict[str, Any] = {
        "device_id": settings.device_id,
        # The default searches an algorithm for every new shape, hundreds of milliseconds each.
        "cudnn_conv_algo_search": "HEURISTIC",
        "arena_extend_strategy": "kSameAsRequested",
    }
    if settings.gpu_memory_limit_bytes is not None:
        options["gpu_mem_limit"] = settings.gpu_memory_limit_bytes
    return options | (settings.provider_options if settings.provider == "cuda" else {})


def _session_options(ort: ModuleType, settings: RuntimeSettings) -> Any:
    options = ort.SessionOptions()
    options.log_severity_level = _SEVERITY_ERROR
    options.intra_op_num_threads = settings.intra_op_threads
    options.inter_op_num_threads = 1
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    # A pattern is one more block of memory per shape ever seen; with many batch sizes that only grows.
    options.enable_mem_pattern = False
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    if settings.intra_op_threads > 1:
        # Spinning burns a core between runs; blocking costs well under a millisecond.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return options


def _is_provider_error(error: Exception) -> bool:
    text = str(error)
    return type(error).__name__ == "EPFail" or any(
        mark in text for mark in ("ExecutionProvider", "CUDA failure", "CUDA error", "TensorRT", "libnvinfer")
    )


def _name_of(wish: Any) -> str:
    return wish if isinstance(wish, str) else str(wish[0])


class OrtEngine:
    """One loaded graph, safe to run from several threads at a time."""

    def __init__(self, ort: ModuleType, session: Any, model: str) -> None:
        self._ort = ort
        self._session = session
        self._inputs = _specs(session.get_inputs(), model)
        self._outputs = _specs(session.get_outputs(), model)
        self._output_names = [spec.name for spec in self._outputs]
        self._has_bfloat16 = any(spec.dtype == "bfloat16" for spec in self._inputs + self._outputs)

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """Declared inputs, in graph order."""
        return self._inputs

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """Declared outputs, in graph order."""
        return self._outputs

    def prepare(self, feeds: Feeds) -> "OrtRun":
        """Make a run ready; see `Engine.prepare`."""
        return OrtRun(self, feeds)

    def run(self, feeds: Feeds, options: Any) -> Feeds:
        """Run once on the calling thread, without the GIL. Outputs are fresh memory that later runs do not touch."""
        if self._has_bfloat16:
            return self._run_values(feeds, options)
        arrays = self._session.run(self._output_names, dict(feeds), options)
        return dict(zip(self._output_names, arrays, strict=True))

    def end_profile(self) -> Path:
        """Write the profile that `open_engine` was asked for, and return where it is. Once."""
        return Path(self._session.end_profiling())

    def run_options(self) -> Any:
        """Options of one run: its own, so that stopping it stops no other."""
        options = self._ort.RunOptions()
        # Every failure is raised and reported by us once; the library would print it on standard error as well.
        options.log_severity_level = _SEVERITY_FATAL
        return options

    def _run_values(self, feeds: Feeds, options: Any) -> Feeds:
        """NumPy has no bfloat16, so such tensors go in and out as ORT values over uint16 memory."""
        make = self._ort.OrtValue
        values = {}
        for spec in self._inputs:
            array = np.ascontiguousarray(feeds[spec.name]).reshape(feeds[spec.name].shape)
            is_bfloat16 = spec.dtype == "bfloat16"
            values[spec.name] = (
                make.ortvalue_from_numpy_with_onnx_type(array, _BFLOAT16_CODE)
                if is_bfloat16
                else make.ortvalue_from_numpy(array)
            )
        results = self._session.run_with_ort_values(self._output_names, values, options)
        return {
            spec.name: _copy_bfloat16(result) if spec.dtype == "bfloat16" else result.numpy()
            for spec, result in zip(self._outputs, results, strict=True)
        }


class OrtRun:
    """One run of an engine: see `NativeRun`."""

    def __init__(self, engine: OrtEngine, feeds: Feeds) -> None:
        self._engine = engine
        self.feeds = feeds
        self._options = engine.run_options()
        self._stopped = False

    def run(self) -> Feeds:
        """See `NativeRun.run`."""
        try:
            return self._engine.run(self.feeds, self._options)
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


def _copy_bfloat16(value: Any) -> Array:
    if value.device_name() != "cpu":
        raise RunFailed("inference_failed", "a bfloat16 output stays on the device; cast it to float32 in the model")
    shape = tuple(value.shape())
    count = int(np.prod(shape, dtype=np.int64))
    if count == 0:
        return np.empty(shape, np.uint16)
    memory = (ctypes.c_uint16 * count).from_address(value.data_ptr())
    return np.ctypeslib.as_array(memory).reshape(shape).copy()


def _specs(nodes: Iterable[Any], model: str) -> tuple[TensorSpec, ...]:
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


@dataclass(frozen=True, slots=True)
class NewestVersions:
    """The newest files that the installed ONNX Runtime loads, and its own version."""

    onnxruntime: str
    ir: int
    opset: int


@cache
def newest_versions() -> NewestVersions:
    """Ask the library by having it refuse files from the far future: no call says it, only that message does.

    Raises:
        RuntimeUnavailable: ONNX Runtime is not installed, or installed twice.
    """
    ort = onnxruntime()
    return NewestVersions(str(ort.__version__), _newest(ort, ir_version=_FAR_FUTURE), _newest(ort, opset=_FAR_FUTURE))


_FAR_FUTURE = b"\xff\x7f"  # 16383, as a protobuf varint


def _newest(ort: ModuleType, *, ir_version: bytes = b"\x08", opset: bytes = b"\x0d") -> int:
    # ModelProto: 1 = ir_version, 7 = a graph with nothing but a name, 8 = opset_import {2 = version}.
    size = bytes([1 + len(opset)])
    model = b"\x08" + ir_version + b"\x3a\x03\x12\x01g" + b"\x42" + size + b"\x10" + opset
    options = ort.SessionOptions()
    options.log_severity_level = _SEVERITY_FATAL
    try:
        ort.InferenceSession(model, options, providers=[_CPU])
    except Exception as error:  # noqa: BLE001 - ONNX Runtime's errors have no common base
        return newest_in(error)
    return 0
