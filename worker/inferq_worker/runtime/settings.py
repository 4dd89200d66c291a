"""How models are run: which provider, on which device, with how many threads. Data only: no import of ONNX Runtime."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from inferq.settings import Section
from inferq_worker.models.repository import BucketSizes

ProviderName = Literal["cuda", "tensorrt", "cpu"]
OptionValue = str | int | float | bool

# ONNX Runtime takes an unknown option for granted or fails far from its cause, and some options load native code
# (trt_extra_plugin_lib_paths) or write files. So only these pass.
ALLOWED_PROVIDER_OPTIONS: Mapping[ProviderName, frozenset[str]] = MappingProxyType(
    {
        "cuda": frozenset(
            {
                "cudnn_conv1d_pad_to_nc1d",
                "cudnn_conv_use_max_workspace",
                "enable_cudnn",
                "fuse_conv_bias",
                "prefer_nhwc",
                "sdpa_kernel",
                "use_tf32",
            }
        ),
        "tensorrt": frozenset(
            {
                "trt_auxiliary_streams",
                "trt_bf16_enable",
                "trt_builder_optimization_level",
                "trt_engine_hw_compatible",
                "trt_fp16_enable",
                "trt_int8_enable",
                "trt_max_workspace_size",
                "trt_profile_max_shapes",
                "trt_profile_min_shapes",
                "trt_profile_opt_shapes",
            }
        ),
        "cpu": frozenset(),
    }
)


PROFILE_OPTIONS = ("trt_profile_min_shapes", "trt_profile_opt_shapes", "trt_profile_max_shapes")
_GPU_ONLY = ("gpu_memory_limit_bytes", "arena_extend", "cudnn_search", "cuda_graphs")


class RuntimeSettings(Section):
    """Knobs of the runtime. Contradictions are errors here, not surprises at the first run."""

    provider: ProviderName = Field("cuda", description="What should run the graph.")
    provider_policy: Literal["require", "prefer"] = Field(
        "prefer", description="require: refuse to start without the provider; prefer: run on the CPU, loudly."
    )
    device_id: int = Field(0, ge=0, le=63, description="Index of the GPU.")
    slots: int = Field(
        1, ge=1, le=64, description="Runs at a time on the CPU; on a GPU one, while the next batch is packed beside it."
    )
    run_limit_s: float = Field(
        30.0, gt=0, le=900, description="A run that lasts longer is stopped; its jobs go to a CPU worker or fail."
    )
    stop_grace_s: float = Field(
        5.0,
        gt=0,
        le=300,
        description="A run that has not ended so long after it was stopped is given up for lost, with its slot.",
    )
    intra_op_threads: int = Field(1, ge=1, le=256, description="Threads inside one run; keep 1 on a GPU.")
    inter_op_threads: int = Field(
        1, ge=1, le=256, description="Branches of a graph at a time; only with execution_mode parallel."
    )
    execution_mode: Literal["sequential", "parallel"] = Field(
        "sequential", description="parallel: branches of the graph at a time; measured slower on the CPU."
    )
    graph_optimization: Literal["off", "basic", "extended", "layout", "all"] = Field(
        "all", description="How far ONNX Runtime rewrites the graph at load; all is specific to the machine."
    )
    memory_pattern: bool = Field(
        False, description="One block of memory planned per input shape; grows with every batch size seen."
    )
    gpu_memory_limit_bytes: int | None = Field(
        None, ge=64 * 2**20, description="Limit of the provider's arena; cuDNN, cuBLAS and the context come on top."
    )
    arena_extend: Literal["same_as_requested", "next_power_of_two"] = Field(
        "same_as_requested", description="By how much the GPU arena grows when it is full."
    )
    cudnn_search: Literal["heuristic", "exhaustive", "default"] = Field(
        "heuristic", description="How cuDNN picks a convolution for a new shape; exhaustive takes long for each."
    )
    cuda_graphs: bool = Field(
        False, description="Capture one CUDA graph per bucket (powers of two if buckets are off); needs fixed shapes."
    )
    cache_dir: Path | None = Field(
        None,
        description="Keeps optimised graphs and TensorRT engines for the next start, below a private folder of the "
        "user's; unset = no cache.",
    )
    cache_limit_bytes: int = Field(
        8 * 2**30, ge=2**20, description="Most bytes in the cache; the least recently used go first."
    )
    buckets: BucketSizes = Field(
        "auto",
        description="Sizes in rows that runs are padded to, such as [4, 16]; the largest run is always one. "
        "Or a word: auto = powers of two on a GPU, off on the CPU.",
    )
    provider_options: dict[str, OptionValue] = Field(
        default_factory=dict, description="Extra provider options, from an allow-list."
    )
    trust_models: bool = Field(
        False, description="Load graphs with EPContext nodes, which carry native code of no known origin."
    )

    def on_cpu(self) -> Self:
        """The same knobs for a worker that runs on the CPU whatever they say: what means a GPU is put aside."""
        gpu_only = {name: type(self).model_fields[name].get_default() for name in _GPU_ONLY}
        return self.model_copy(update={"provider": "cpu", "provider_options": {}, **gpu_only})

    @field_validator("buckets", mode="before")
    @classmethod
    def _a_word_is_no_list(cls, value: object) -> object:
        """Texts from the environment come as lists, since the knob may be one."""
        return value[0] if isinstance(value, list) and len(value) == 1 and value[0] in {"auto", "off"} else value

    @model_validator(mode="after")
    def _options_are_known(self) -> Self:
        allowed = ALLOWED_PROVIDER_OPTIONS[self.provider]
        unknown = sorted(self.provider_options.keys() - allowed)
        if unknown:
            known = ", ".join(sorted(allowed)) or "none"
            raise ValueError(
                f"provider_options of {self.provider}: {unknown[0]!r} is not allowed; allowed are: {known}"
            )
        profiles = [name for name in PROFILE_OPTIONS if name in self.provider_options]
        if profiles and len(profiles) < len(PROFILE_OPTIONS):
            raise ValueError(f"provider_options: {profiles[0]} needs its companions; give all of {PROFILE_OPTIONS}")
        return self

    @model_validator(mode="after")
    def _the_provider_has_them(self) -> Self:
        if self.provider == "cpu":
            for name in _GPU_ONLY:
                if getattr(self, name) != type(self).model_fields[name].get_default():
                    raise ValueError(f'{name} has no meaning with provider = "cpu"; remove one of the two')
        if self.cuda_graphs and self.provider != "cuda":
            raise ValueError('cuda_graphs needs provider = "cuda"; set it, or cuda_graphs = false')
        if self.cuda_graphs and self.slots > 1:
            raise ValueError(
                f"cuda_graphs and slots = {self.slots} exclude each other, since captured graphs share their memory; "
                "set slots = 1 or cuda_graphs = false"
            )
        return self

    @model_validator(mode="after")
    def _threads_are_used(self) -> Self:
        if self.execution_mode == "sequential" and self.inter_op_threads > 1:
            raise ValueError(
                f"inter_op_threads = {self.inter_op_threads} would idle, since nodes run one after the other; "
                'set execution_mode = "parallel" or inter_op_threads = 1'
            )
        if self.execution_mode == "parallel" and self.memory_pattern:
            raise ValueError(
                "memory_pattern needs nodes in a fixed order; "
                'set execution_mode = "sequential" or memory_pattern = false'
            )
        return self


class BreakerSettings(Section):
    """When a model is taken out of service because its runs fail, and when it is tried again."""

    failures_in_row: int = Field(
        5,
        ge=1,
        le=1000,
        description="Failed runs in a row that open it. A run fails when none of its jobs is answered.",
    )
    error_ratio: float = Field(
        0.03, gt=0, le=1, description="Share of failed runs in the window above which it opens; 1 = never."
    )
    run_p95_s: float = Field(
        0.8, gt=0, le=3600, description="p95 of the run time in the window above which it opens, seconds."
    )
    slow_factor: float = Field(
        3.0,
        ge=1,
        le=1000,
        description="Models whose largest batch is slow by nature: run_p95_s is at least so many times its warm-up.",
    )
    timeouts: int = Field(2, ge=1, le=1000, description="Runs cut off at their time limit in the window that open it.")
    window_s: float = Field(60.0, ge=1, le=3600, description="Seconds that runs count.")
    min_runs: int = Field(
        20, ge=1, le=100_000, description="Runs in the window before error_ratio and run_p95_s are judged."
    )
    half_open_after_s: float = Field(
        5.0, gt=0, le=3600, description="Seconds until the model is probed, with made-up inputs, not with jobs."
    )
    half_open_max_s: float = Field(
        60.0, gt=0, le=3600, description="Most seconds until the next probe; the wait doubles with each failure."
    )

    @model_validator(mode="after")
    def _waits_grow(self) -> Self:
        if self.half_open_max_s < self.half_open_after_s:
            raise ValueError(
                f"half_open_max_s ({self.half_open_max_s:g}) is below half_open_after_s ({self.half_open_after_s:g}); "
                "raise it, or lower the other"
            )
        return self
