"""From settings to the words that ONNX Runtime wants. The library is a stand-in here."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from inferq_worker.runtime import hardware, providers, tensorrt
from inferq_worker.runtime.providers import Wish
from inferq_worker.runtime.reuse import Source
from inferq_worker.runtime.settings import RuntimeSettings

CUDA, TENSORRT, CPU = "CUDAExecutionProvider", "TensorrtExecutionProvider", "CPUExecutionProvider"


class Options:
    def __init__(self) -> None:
        self.entries: dict[str, str] = {}

    def add_session_config_entry(self, key: str, value: str) -> None:
        self.entries[key] = value


class Library:
    """ONNX Runtime as far as it is asked before a session; a session is what it was made from."""

    __version__ = "1.31.1"
    SessionOptions = Options
    ExecutionMode = SimpleNamespace(ORT_SEQUENTIAL="sequential", ORT_PARALLEL="parallel")
    GraphOptimizationLevel = SimpleNamespace(
        ORT_DISABLE_ALL=0, ORT_ENABLE_BASIC=1, ORT_ENABLE_EXTENDED=2, ORT_ENABLE_LAYOUT=3, ORT_ENABLE_ALL=99
    )

    def __init__(self, *available: str) -> None:
        self._available = [*available, CPU]

    def get_available_providers(self) -> list[str]:
        return self._available

    def get_build_info(self) -> str:
        return "build"

    def preload_dlls(self) -> None:
        print("a library that is missing")  # noqa: T201 - as the real one does

    def InferenceSession(self, path: Path, options: Any, **rest: Any) -> Any:  # noqa: N802 - the library's name
        return SimpleNamespace(path=path, options=options, **rest)


@pytest.fixture(name="gpu", autouse=True)
def _gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "driver_present", lambda: True)
    monkeypatch.setattr(hardware, "gpu", lambda number: f"GPU {number}")
    monkeypatch.setattr(hardware, "tensorrt_version", lambda: "10")
    monkeypatch.setattr(tensorrt, "preload", lambda: None)


def wished(library: Any, **values: Any) -> list[Wish]:
    return providers.wishes(library, RuntimeSettings.model_validate(values))[0]


def made(source: Source, **values: Any) -> Any:
    config = RuntimeSettings.model_validate({"provider": "cpu", **values})
    return providers.create(Library(), config, [Wish(CPU)], source)  # type: ignore[arg-type]  # a stand-in


def test_cuda_is_wished_for_with_all_its_settings(capsys: pytest.CaptureFixture[str]) -> None:
    cuda, cpu = wished(
        Library(CUDA),
        device_id=2,
        cudnn_search="exhaustive",
        arena_extend="next_power_of_two",
        gpu_memory_limit_bytes=2**30,
        cuda_graphs=True,
        provider_options={"use_tf32": False},
    )
    assert (cuda.provider, cpu) == (CUDA, Wish(CPU))
    assert dict(cuda.options) == {
        "device_id": "2",
        "cudnn_conv_algo_search": "EXHAUSTIVE",
        "arena_extend_strategy": "kNextPowerOfTwo",
        "gpu_mem_limit": str(2**30),
        "enable_cuda_graph": "1",
        "use_tf32": "0",
    }
    assert capsys.readouterr().out == ""


def test_the_defaults_are_those_that_do_not_stall_on_a_new_shape() -> None:
    options = dict(wished(Library(CUDA))[0].options)
    assert options == {
        "device_id": "0",
        "cudnn_conv_algo_search": "HEURISTIC",
        "arena_extend_strategy": "kSameAsRequested",
    }


def test_tensorrt_leaves_what_it_cannot_do_to_cuda_and_then_to_the_cpu() -> None:
    first, *rest = wished(Library(TENSORRT, CUDA), provider="tensorrt", provider_options={"trt_fp16_enable": True})
    assert (first.provider, dict(first.options)) == (TENSORRT, {"device_id": "0", "trt_fp16_enable": "1"})
    assert [wish.provider for wish in rest] == [CUDA, CPU]


@pytest.mark.parametrize(
    ("library", "driver", "reason"),
    [(Library(), True, "install onnxruntime-gpu instead"), (Library(CUDA), False, "no NVIDIA driver")],
)
def test_what_cannot_be_is_not_wished_for_and_the_reason_is_said(
    monkeypatch: pytest.MonkeyPatch, library: Any, driver: bool, reason: str
) -> None:
    monkeypatch.setattr(hardware, "driver_present", lambda: driver)
    wishes, said = providers.wishes(library, RuntimeSettings())
    assert wishes == [Wish(CPU)]
    assert reason in said


def test_session_options_follow_the_settings() -> None:
    options = made(
        Source(Path("m.onnx")),
        intra_op_threads=3,
        inter_op_threads=2,
        execution_mode="parallel",
        graph_optimization="extended",
    ).options
    assert (options.intra_op_num_threads, options.inter_op_num_threads) == (3, 2)
    assert (options.execution_mode, options.graph_optimization_level) == ("parallel", 2)
    assert not options.enable_mem_pattern
    assert options.entries["session.intra_op.allow_spinning"] == "0"
    assert options.entries["session.inter_op.allow_spinning"] == "0"
    assert made(Source(Path("m.onnx")), memory_pattern=True).options.enable_mem_pattern


def test_an_optimised_graph_is_not_optimised_again_and_a_new_one_is_written_with_its_weights_beside_it() -> None:
    assert made(Source(Path("o.onnx"), optimised=True)).options.graph_optimization_level == 0
    writing = made(Source(Path("m.onnx"), save_to=Path("/c/model.onnx"))).options
    assert writing.graph_optimization_level == 99
    assert writing.optimized_model_filepath == "/c/model.onnx"
    assert writing.entries["session.optimized_model_external_initializers_file_name"] == "weights.bin"


def test_a_session_never_moves_to_the_cpu_in_the_middle_of_a_run() -> None:
    assert made(Source(Path("m.onnx"))).enable_fallback == 0


def test_only_tensorrt_is_told_where_engines_are_kept() -> None:
    session = providers.create(
        Library(TENSORRT, CUDA),  # type: ignore[arg-type]  # a stand-in
        RuntimeSettings(provider="tensorrt"),
        wished(Library(TENSORRT, CUDA), provider="tensorrt"),
        Source(Path("m.onnx"), engines=Path("/c/engines")),
        timings=Path("/c/timings"),
    )
    options = dict(session.providers)
    assert options[TENSORRT]["trt_engine_cache_path"] == "/c/engines"
    assert options[TENSORRT]["trt_timing_cache_path"] == "/c/timings"
    assert not [name for name in options[CUDA] if name.startswith("trt_")]


def key(*, sha256: str = "m", **values: Any) -> str:
    config = RuntimeSettings.model_validate(values)
    library: Any = Library(TENSORRT, CUDA)
    return providers.cache_key(library, config, providers.wishes(library, config)[0], sha256).name


def test_whatever_an_optimised_graph_depends_on_is_in_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [
        key(),
        key(sha256="other"),
        key(provider="cpu"),
        key(provider="tensorrt"),
        key(graph_optimization="basic"),
        key(device_id=1),
        key(cudnn_search="default"),
        key(provider_options={"prefer_nhwc": True}),
        key(provider="tensorrt", provider_options={"trt_fp16_enable": True}),
    ]
    for patched, name in ((hardware, "cpu"), (hardware, "gpu"), (Library, "__version__"), (Library, "get_build_info")):
        with monkeypatch.context() as patch:
            patch.setattr(patched, name, "2" if name == "__version__" else lambda *_: "other")
            keys.append(key())
    with monkeypatch.context() as patch:
        patch.setattr(hardware, "tensorrt_version", lambda: "11")
        keys.append(key(provider="tensorrt"))
    assert len(set(keys)) == len(keys)


def test_what_changes_no_graph_is_not_in_its_key() -> None:
    assert key() == key(intra_op_threads=2, memory_pattern=True, provider_policy="require")
