"""Settings to ONNX Runtime's own options: which providers to wish for, with what, and how to make a session.

Takes the library as an argument, so only `ort.py` imports it. Every option that is set here is one that was read in
the library's manual: an unknown one is accepted without a word, or fails far from its cause.
"""

import contextlib
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from inferq_worker.runtime import hardware, tensorrt
from inferq_worker.runtime.cache import Key
from inferq_worker.runtime.reuse import WEIGHTS_FILE, Source
from inferq_worker.runtime.settings import ProviderName, RuntimeSettings

PROVIDER_NAMES: dict[ProviderName, str] = {
    "cuda": "CUDAExecutionProvider",
    "tensorrt": "TensorrtExecutionProvider",
    "cpu": "CPUExecutionProvider",
}
CPU = PROVIDER_NAMES["cpu"]
_TENSORRT = PROVIDER_NAMES["tensorrt"]
_SEVERITY_ERROR = 3
# Weights of this size and more lie beside an optimised graph: a protobuf ends at 2 GiB, and a mapped file loads faster.
_WEIGHTS_MIN_BYTES = "1024"
_CUDNN_SEARCH = {"heuristic": "HEURISTIC", "exhaustive": "EXHAUSTIVE", "default": "DEFAULT"}
_ARENA_EXTEND = {"same_as_requested": "kSameAsRequested", "next_power_of_two": "kNextPowerOfTwo"}
_LEVELS = {
    "off": "ORT_DISABLE_ALL",
    "basic": "ORT_ENABLE_BASIC",
    "extended": "ORT_ENABLE_EXTENDED",
    "layout": "ORT_ENABLE_LAYOUT",
    "all": "ORT_ENABLE_ALL",
}


@dataclass(frozen=True, slots=True)
class Wish:
    """A provider and its options, in ONNX Runtime's spelling."""

    provider: str
    options: tuple[tuple[str, str], ...] = ()

    def with_options(self, **more: object) -> "Wish":
        """The same wish with further options."""
        merged = dict(self.options) | {name: _text(value) for name, value in more.items()}
        return Wish(self.provider, tuple(sorted(merged.items())))


def wishes(ort: ModuleType, settings: RuntimeSettings) -> tuple[list[Wish], str]:
    """What to try, best first and the CPU last, and what to say if the CPU is what remains."""
    if settings.provider == "cpu":
        return [Wish(CPU)], ""
    requested = PROVIDER_NAMES[settings.provider]
    if requested not in ort.get_available_providers():
        return [Wish(CPU)], "this ONNX Runtime is built without it; install onnxruntime-gpu instead of onnxruntime"
    if not hardware.driver_present():
        return [Wish(CPU)], "there is no NVIDIA driver (libcuda.so.1 does not load); install one that supports CUDA 13"
    # The libraries of pip's nvidia-* wheels are found only through this call, which prints what it misses.
    with contextlib.redirect_stdout(io.StringIO()):
        ort.preload_dlls()
    reason = "its libraries did not load (see standard error); pip install 'inferq[cuda]' brings CUDA 13 and cuDNN 9"
    if settings.provider == "cuda":
        return [_cuda(settings).with_options(**settings.provider_options), Wish(CPU)], reason
    tensorrt.preload()
    first = Wish(_TENSORRT).with_options(device_id=settings.device_id, **settings.provider_options)
    return [first, _cuda(settings), Wish(CPU)], f"{reason}, and pip install 'tensorrt-cu13>=10.13,<11' TensorRT"


def _cuda(settings: RuntimeSettings) -> Wish:
    wish = Wish(PROVIDER_NAMES["cuda"]).with_options(
        device_id=settings.device_id,
        # The default searches an algorithm for every new shape, hundreds of milliseconds each.
        cudnn_conv_algo_search=_CUDNN_SEARCH[settings.cudnn_search],
        arena_extend_strategy=_ARENA_EXTEND[settings.arena_extend],
    )
    if settings.gpu_memory_limit_bytes is not None:
        wish = wish.with_options(gpu_mem_limit=settings.gpu_memory_limit_bytes)
    return wish.with_options(enable_cuda_graph=True) if settings.cuda_graphs else wish


def create(
    ort: ModuleType,
    settings: RuntimeSettings,
    wished: Sequence[Wish],
    source: Source,
    *,
    timings: Path | None = None,
    profile: Path | None = None,
) -> Any:
    """Make a session; raises whatever ONNX Runtime raises.

    Args:
        ort: the library.
        settings: threads and the like.
        wished: best first.
        source: what to load and what to write.
        timings: folder of TensorRT's timing cache, or None.
        profile: start of the path of a profile of all runs, or None.
    """
    options = session_options(ort, settings)
    if source.optimised:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    if source.save_to is not None:
        options.optimized_model_filepath = str(source.save_to)
        prefix = "session.optimized_model_external_initializers"
        options.add_session_config_entry(f"{prefix}_file_name", WEIGHTS_FILE)
        options.add_session_config_entry(f"{prefix}_min_size_in_bytes", _WEIGHTS_MIN_BYTES)
    if profile is not None:
        options.enable_profiling = True
        options.profile_file_prefix = str(profile)
    engines = tensorrt.engine_options(source.engines, timings)
    providers = [
        (wish.provider, dict((wish.with_options(**engines) if wish.provider == _TENSORRT else wish).options))
        for wish in wished
    ]
    # enable_fallback=0: otherwise a device error in mid-run silently rebuilds the session on the CPU.
    return ort.InferenceSession(source.path, options, providers=providers, enable_fallback=0)


def session_options(ort: ModuleType, settings: RuntimeSettings) -> Any:
    """Options that all providers share."""
    options = ort.SessionOptions()
    options.log_severity_level = _SEVERITY_ERROR
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, _LEVELS[settings.graph_optimization])
    options.intra_op_num_threads = settings.intra_op_threads
    options.inter_op_num_threads = settings.inter_op_threads
    parallel = settings.execution_mode == "parallel"
    options.execution_mode = ort.ExecutionMode.ORT_PARALLEL if parallel else ort.ExecutionMode.ORT_SEQUENTIAL
    # A pattern is one more block of memory per shape ever seen; with many batch sizes that only grows.
    options.enable_mem_pattern = settings.memory_pattern
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    if settings.intra_op_threads > 1:
        # Spinning burns a core between runs; blocking costs well under a millisecond.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if parallel:
        options.add_session_config_entry("session.inter_op.allow_spinning", "0")
    return options


def cache_key(ort: ModuleType, settings: RuntimeSettings, wished: Sequence[Wish], sha256: str) -> Key:
    """What an optimised graph or an engine depends on.

    Raises:
        OSError: the GPU cannot be named.
    """
    first = wished[0]
    facts = {
        "model": sha256,
        "onnxruntime": f"{ort.__version__} {ort.get_build_info()}",
        "providers": repr([(wish.provider, wish.options) for wish in wished]),
        "optimization": settings.graph_optimization,
        "cpu": hardware.cpu(),
    }
    if first.provider != CPU:
        facts["gpu"] = hardware.gpu(settings.device_id)
    if first.provider == _TENSORRT:
        facts["tensorrt"] = hardware.tensorrt_version()
    return Key(_KINDS[first.provider], facts)


_KINDS = {name: kind for kind, name in PROVIDER_NAMES.items()}


def _text(value: object) -> str:
    """An option's value as the provider's parser wants it."""
    return str(int(value)) if isinstance(value, bool) else str(value)
