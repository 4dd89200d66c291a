"""What the runtime's settings refuse, each with its mend."""

from pathlib import Path
from typing import Any

import pytest

from inferq_worker.runtime.settings import RuntimeSettings


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"provider": "cpu", "cuda_graphs": True}, 'cuda_graphs has no meaning with provider = "cpu"; remove one'),
        ({"provider": "cpu", "cudnn_search": "exhaustive"}, "cudnn_search has no meaning"),
        ({"provider": "cpu", "arena_extend": "next_power_of_two"}, "arena_extend has no meaning"),
        ({"provider": "cpu", "gpu_memory_limit_bytes": 2**30}, "gpu_memory_limit_bytes has no meaning"),
        ({"provider": "tensorrt", "cuda_graphs": True}, 'cuda_graphs needs provider = "cuda"; set it, or'),
        ({"cuda_graphs": True, "slots": 2}, "slots = 2 exclude each other.*; set slots = 1 or cuda_graphs = false"),
        ({"inter_op_threads": 2}, 'would idle.*; set execution_mode = "parallel" or inter_op_threads = 1'),
        ({"execution_mode": "parallel", "memory_pattern": True}, 'set execution_mode = "sequential" or memory_pattern'),
        ({"provider": "cpu", "provider_options": {"use_tf32": False}}, "allowed are: none"),
        ({"provider_options": {"cudnn_conv_algo_search": "DEFAULT"}}, "'cudnn_conv_algo_search' is not allowed"),
        ({"provider": "tensorrt", "provider_options": {"trt_engine_cache_path": "/x"}}, "is not allowed"),
        ({"provider": "tensorrt", "provider_options": {"trt_extra_plugin_lib_paths": "/x"}}, "is not allowed"),
        (
            {"provider": "tensorrt", "provider_options": {"trt_profile_opt_shapes": "x:1x3"}},
            "trt_profile_opt_shapes needs its companions; give all of",
        ),
        ({"cache_limit_bytes": 1}, "greater than or equal to 1048576"),
    ],
)
def test_a_contradiction_is_a_start_up_error_with_the_mend(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RuntimeSettings.model_validate(values)


@pytest.mark.parametrize(
    "values",
    [
        {"cuda_graphs": True},
        {"execution_mode": "parallel", "inter_op_threads": 2},
        {"provider": "cpu", "slots": 8, "cache_dir": "/var/cache/models"},
        {"provider": "tensorrt", "provider_options": {"trt_fp16_enable": True}},
    ],
)
def test_what_fits_together_is_taken(values: dict[str, Any]) -> None:
    RuntimeSettings.model_validate(values)


def test_settings_for_a_gpu_become_valid_ones_for_a_worker_on_the_cpu() -> None:
    gpu = RuntimeSettings(
        cuda_graphs=True,
        cudnn_search="exhaustive",
        gpu_memory_limit_bytes=2**30,
        arena_extend="next_power_of_two",
        provider_options={"use_tf32": False},
        intra_op_threads=4,
        cache_dir=Path("/c"),
    )
    cpu = gpu.on_cpu()
    assert RuntimeSettings.model_validate(cpu.model_dump()) == cpu
    assert (cpu.provider, cpu.intra_op_threads, cpu.cache_dir) == ("cpu", 4, Path("/c"))
