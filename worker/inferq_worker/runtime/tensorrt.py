"""What TensorRT needs to know before it builds an engine: the range of shapes, and where its libraries are.

Pure but for `preload`. Not run by the project's tests on a GPU yet; the options are those of the provider's manual.
"""

import contextlib
import ctypes
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path

from inferq_worker.runtime.hardware import Library
from inferq_worker.runtime.interface import TensorSpec
from inferq_worker.runtime.settings import PROFILE_OPTIONS

_LIBRARIES = ("libnvinfer.so.10", "libnvonnxparser.so.10")


class NoProfile(Exception):  # noqa: N818 - says what happened
    """The shapes an engine is built for cannot be told. The message names the mend."""


def profile(inputs: Sequence[TensorSpec], max_rows: int) -> dict[str, str]:
    """The provider's three options that bound a dynamic batch axis: from 1 row to `max_rows`, tuned for `max_rows`.

    A shape outside them would make the provider build a new engine in the middle of a run, for minutes.

    Args:
        inputs: as the model declares them.
        max_rows: most rows of one run; >= 1.

    Returns:
        Nothing for a model whose shapes are all fixed: it needs no profile.

    Raises:
        NoProfile: an axis other than the first is dynamic, and nobody but the model's owner knows its range.
    """
    dynamic = [spec for spec in inputs if None in spec.shape]
    for spec in dynamic:
        if None in spec.shape[1:]:
            raise NoProfile(
                f"input {spec.name!r} has dynamic inner axes {list(spec.shape)}; give their range in "
                f"runtime.provider_options as {', '.join(PROFILE_OPTIONS)} (such as {spec.name}:1x...), "
                "or export it with fixed ones"
            )
    if not dynamic:
        return {}
    return {
        name: ",".join(
            f"{spec.name}:{'x'.join(str(rows if size is None else size) for size in spec.shape)}" for spec in dynamic
        )
        for name, rows in zip(PROFILE_OPTIONS, (1, max_rows, max_rows), strict=True)
    }


def engine_options(engines: Path | None, timings: Path | None) -> Mapping[str, str | bool]:
    """The provider's options that keep engines, and the timings that speed up other builds on the same GPU."""
    options: dict[str, str | bool] = {}
    if engines is not None:
        options |= {"trt_engine_cache_enable": True, "trt_engine_cache_path": str(engines)}
    if timings is not None:
        options |= {"trt_timing_cache_enable": True, "trt_timing_cache_path": str(timings)}
    return options


def preload(load: Library = lambda name: ctypes.CDLL(name, ctypes.RTLD_GLOBAL)) -> None:
    """Load TensorRT from pip's wheels, where the dynamic linker does not look; nothing if they are not installed."""
    found = importlib.util.find_spec("tensorrt_libs")
    for folder in (found.submodule_search_locations or []) if found else []:
        for name in _LIBRARIES:
            with contextlib.suppress(OSError):  # the session says what it misses
                load(str(Path(folder) / name))
