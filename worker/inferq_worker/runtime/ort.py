"""The border to ONNX Runtime: the only module that imports it.

Nothing of the library's own classes, exceptions or habits passes: providers are what really runs, never what was
asked for, and every foreign exception becomes one of ours here.
"""

import importlib
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib import metadata
from pathlib import Path
from time import perf_counter
from types import ModuleType
from typing import Any

from inferq_worker.runtime import providers, tensorrt
from inferq_worker.runtime.binding import can_bind
from inferq_worker.runtime.buckets import buckets
from inferq_worker.runtime.cache import DiskCache
from inferq_worker.runtime.engine import OrtEngine, OrtRun, specs
from inferq_worker.runtime.interface import ModelRefused, RuntimeUnavailable, TensorSpec
from inferq_worker.runtime.onnxfile import Identity
from inferq_worker.runtime.providers import CPU, PROVIDER_NAMES, Wish
from inferq_worker.runtime.reuse import Cached, CacheUse, Opened, Source
from inferq_worker.runtime.settings import PROFILE_OPTIONS, RuntimeSettings
from inferq_worker.runtime.translate import load_refusal, newest_in

__all__ = [
    "CPU",
    "PROVIDER_NAMES",
    "NewestVersions",
    "OrtEngine",
    "OrtRun",
    "Placement",
    "newest_versions",
    "onnxruntime",
    "open_engine",
]

_SEVERITY_FATAL = 4


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


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a graph landed.

    Attributes:
        provider: what really runs it.
        requested_provider: what was asked for.
        nodes_by_provider: graph nodes given to each provider.
        warning: why the wish was not granted; empty when it was.
        cache: what part the cache on disk took.
        load_s: seconds that the session took to make.
        notes: what the operator should know of the cache.
    """

    provider: str
    requested_provider: str
    nodes_by_provider: dict[str, int]
    warning: str
    cache: CacheUse = "off"
    load_s: float = 0.0
    notes: tuple[str, ...] = ()


def open_engine(
    path: Path,
    settings: RuntimeSettings,
    identity: Identity | None = None,
    max_rows: int = 1,
    *,
    profile: Path | None = None,
) -> tuple[OrtEngine, Placement]:
    """Load the graph at `path`; blocks for as long as that takes, so call it from a thread.

    Args:
        path: an .onnx file; external data is read from its folder.
        settings: provider, policy, threads.
        identity: what the files hold; None leaves the cache out.
        max_rows: most rows of one run: the largest shape a TensorRT engine or a CUDA graph is made for.
        profile: where to write a profile of all runs until `OrtEngine.end_profile`: the start of a path, which ONNX
            Runtime completes with the time and `.json`. It grows with every run.

    Raises:
        ModelRefused: the file is not a model that this ONNX Runtime can run, or not with these settings.
        RuntimeUnavailable: the policy is `require` and something else than the provider runs the graph.
    """
    started_s = perf_counter()
    loader = _Loader(onnxruntime(), path, settings, identity, profile)
    opened, reason = loader.open(max_rows)
    session = opened.session
    requested, provider = PROVIDER_NAMES[settings.provider], session.get_providers()[0]
    warning = ""
    if provider != requested:
        warning = f"{path.name}: {requested} was asked for but {provider} runs the model: {reason}"
        if settings.provider_policy == "require":
            raise RuntimeUnavailable(f'{warning}; or set provider_policy = "prefer" to accept this')
    nodes: Counter[str] = Counter()
    for part in session.get_provider_graph_assignment_info():
        nodes[part.ep_name] += len(part.get_nodes())
    engine = OrtEngine(loader.ort, session, path.name)
    if provider != CPU:
        sizes = buckets("auto" if settings.buckets == "off" else settings.buckets, max_rows, on_cpu=False)
        graph_sizes = _graph_sizes(path, engine, dict(nodes), sizes) if settings.cuda_graphs else frozenset()
        engine.bind(graph_sizes, ("cuda", settings.device_id))
    load_s = perf_counter() - started_s
    return engine, Placement(provider, requested, dict(nodes), warning, opened.use, load_s, opened.notes)


def _graph_sizes(path: Path, engine: OrtEngine, nodes: dict[str, int], sizes: Sequence[int]) -> frozenset[int]:
    """Batch sizes to capture: a fixed batch, or `sizes`.

    Raises:
        ModelRefused: the model has no fixed shapes, or parts of it run elsewhere.
    """
    mend = "set runtime.cuda_graphs = false for this model"
    for spec in engine.inputs:
        if None in spec.shape[1:]:
            raise ModelRefused(
                f"{path}: a CUDA graph needs fixed shapes, and input {spec.name!r} is {list(spec.shape)}; {mend}"
            )
    elsewhere = {name: count for name, count in nodes.items() if name != PROVIDER_NAMES["cuda"]}
    if elsewhere or not can_bind(engine.inputs + engine.outputs):
        raise ModelRefused(f"{path}: a CUDA graph needs all nodes on the GPU; elsewhere are {elsewhere}; {mend}")
    fixed = {spec.shape[0] for spec in engine.inputs if spec.shape and spec.shape[0] is not None}
    return frozenset(size for size in fixed if size) or frozenset(sizes)


class _Loader:
    """Makes a session on the best provider that lets itself be created, through the cache where there is one."""

    def __init__(
        self,
        ort: ModuleType,
        path: Path,
        settings: RuntimeSettings,
        identity: Identity | None,
        profile: Path | None,
    ) -> None:
        self.ort = ort
        self._path = path
        self._settings = settings
        self._identity = identity
        self._profile = profile

    def open(self, max_rows: int) -> tuple[Opened, str]:
        """The session, and why the requested provider does not run it if it does not."""
        wished, reason = providers.wishes(self.ort, self._settings)
        while True:
            try:
                return self._open_on(wished, max_rows), reason
            except ModelRefused:
                raise
            except Exception as error:
                if len(wished) == 1 or not _is_provider_error(error):
                    raise load_refusal(self._path, error) from error
                reason = f"{wished[0].provider} failed to start: {' '.join(str(error).split())[:300]}"
                wished = wished[1:]

    def _open_on(self, wished: list[Wish], max_rows: int) -> Opened:
        makes_engines = wished[0].provider == PROVIDER_NAMES["tensorrt"]
        if makes_engines:
            wished = [wished[0].with_options(**self._shapes(max_rows)), *wished[1:]]
        create = partial(providers.create, self.ort, self._settings, wished, profile=self._profile)
        if self._identity is None or self._settings.cache_dir is None:
            return Opened(create(Source(self._path)))
        if self._settings.graph_optimization == "off" and not makes_engines:
            return Opened(create(Source(self._path)))
        try:
            store = DiskCache(self._settings.cache_dir, self._settings.cache_limit_bytes)
            key = providers.cache_key(self.ort, self._settings, wished, self._identity.sha256)
            timings = store.shared_folder("tensorrt-timings") if makes_engines else None
        except OSError as error:
            return Opened(create(Source(self._path)), "failed", (f"the cache is not used: {error}",))
        return Cached(
            store,
            key,
            self._path,
            self._identity.size_bytes,
            create=partial(create, timings=timings),
            worth_keeping=partial(self._belongs, wished[0].provider, self._identity),
            makes_engines=makes_engines,
        ).open()

    @staticmethod
    def _belongs(provider: str, identity: Identity, session: Any) -> bool:
        """The provider silently changes when its libraries are missing; the file may have been replaced meanwhile."""
        return bool(session.get_providers()[0] == provider) and identity.still_holds()

    def _shapes(self, max_rows: int) -> dict[str, str]:
        if self._settings.provider == "tensorrt" and PROFILE_OPTIONS[0] in self._settings.provider_options:
            return {}
        return tensorrt.profile(self._inputs(), max_rows)

    def _inputs(self) -> tuple[TensorSpec, ...]:
        """The declared inputs: a profile must be there before the engine, so the graph is read once without it."""
        options = providers.session_options(self.ort, self._settings)
        options.graph_optimization_level = self.ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.add_session_config_entry("session.disable_prepacking", "1")
        try:
            session = self.ort.InferenceSession(self._path, options, providers=[CPU], enable_fallback=0)
        except Exception as error:
            raise tensorrt.NoProfile(
                f"the CPU cannot read the graph to tell its inputs ({' '.join(str(error).split())[:200]}); "
                f"give {', '.join(PROFILE_OPTIONS)} in runtime.provider_options"
            ) from error
        return specs(session.get_inputs(), self._path.name)


def _is_provider_error(error: Exception) -> bool:
    text = str(error)
    return (
        isinstance(error, tensorrt.NoProfile)
        or type(error).__name__ == "EPFail"
        or any(mark in text for mark in ("ExecutionProvider", "CUDA failure", "CUDA error", "TensorRT", "libnvinfer"))
    )


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
        ort.InferenceSession(model, options, providers=[CPU])
    except Exception as error:  # noqa: BLE001 - ONNX Runtime's errors have no common base
        return newest_in(error)
    return 0
