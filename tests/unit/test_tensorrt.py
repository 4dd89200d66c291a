"""The shapes that TensorRT is told to build engines for."""

import importlib.util
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from inferq_worker.runtime import tensorrt
from inferq_worker.runtime.interface import TensorSpec


def spec(name: str, *shape: int | None) -> TensorSpec:
    return TensorSpec(name, "float32", shape)


def test_the_batch_axis_goes_from_one_row_to_the_largest_run() -> None:
    inputs = [spec("image", None, 3, 224, 224), spec("size", None, 2), spec("rate")]
    assert tensorrt.profile(inputs, 32) == {
        "trt_profile_min_shapes": "image:1x3x224x224,size:1x2",
        "trt_profile_opt_shapes": "image:32x3x224x224,size:32x2",
        "trt_profile_max_shapes": "image:32x3x224x224,size:32x2",
    }


def test_a_model_of_fixed_shapes_needs_no_profile() -> None:
    assert tensorrt.profile([spec("image", 8, 3, 224, 224), spec("rate")], 8) == {}


def test_only_dynamic_inputs_are_named() -> None:
    assert tensorrt.profile([spec("a", 4, 2), spec("b", None)], 4)["trt_profile_max_shapes"] == "b:4"


def test_inner_axes_of_unknown_range_are_refused_with_the_mend() -> None:
    with pytest.raises(
        tensorrt.NoProfile, match=r"'ids' has dynamic inner axes \[None, None\]; .*trt_profile_min_shapes"
    ):
        tensorrt.profile([spec("ids", None, None)], 8)


def test_engines_and_timings_are_kept_where_they_are_told() -> None:
    assert tensorrt.engine_options(None, None) == {}
    assert tensorrt.engine_options(Path("/c/e"), Path("/c/t")) == {
        "trt_engine_cache_enable": True,
        "trt_engine_cache_path": "/c/e",
        "trt_timing_cache_enable": True,
        "trt_timing_cache_path": "/c/t",
    }


def test_pips_libraries_are_loaded_by_their_path(monkeypatch: pytest.MonkeyPatch) -> None:
    found = ModuleSpec("tensorrt_libs", None, is_package=True)
    found.submodule_search_locations = ["/site/tensorrt_libs"]
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: found)
    loaded: list[str] = []

    def load(path: str) -> None:
        loaded.append(path)
        raise OSError("not there")

    tensorrt.preload(load)
    assert loaded == ["/site/tensorrt_libs/libnvinfer.so.10", "/site/tensorrt_libs/libnvonnxparser.so.10"]


def test_without_pips_libraries_nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    tensorrt.preload(pytest.fail)
