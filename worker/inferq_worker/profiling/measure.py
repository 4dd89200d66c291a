"""Runs a model under ONNX Runtime's profiler, with made-up inputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from inferq_worker.inspection.axes import sized
from inferq_worker.profiling.trace import Profile, read_profile
from inferq_worker.runtime import onnxfile, ort
from inferq_worker.runtime.interface import ModelRefused
from inferq_worker.runtime.probe import Probe, Unprobeable

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from inferq_worker.runtime.interface import Feeds, TensorSpec
    from inferq_worker.runtime.onnxfile import DeclaredTensor
    from inferq_worker.runtime.ort import Placement
    from inferq_worker.runtime.settings import RuntimeSettings

_WARM_RUNS = 2  # the first of a shape plans memory, and on a GPU it picks kernels


@dataclass(frozen=True, slots=True)
class Measured:
    """A profile and how it came about.

    Attributes:
        trace: the file that ONNX Runtime wrote; warm-up runs are in it, and not in `profile`.
        placement: what ran the graph.
        shapes: of the inputs of each run, by name.
    """

    profile: Profile
    trace: Path
    placement: Placement
    shapes: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Wish:
    """What to profile: runs of so many rows, and `axes` as for `sized`. A first axis of fixed size keeps its size."""

    rows: int
    runs: int
    axes: Mapping[str, int]


def measure(path: Path, runtime: RuntimeSettings, wish: Wish, folder: Path) -> Measured:
    """Profile a model; the trace is written into `folder`, which must exist.

    Raises:
        CommandError: the model has no such axis.
        ModelRefused: the file cannot be loaded, or nothing that was made up suits it.
        NotAProfile: this ONNX Runtime writes profiles of another kind.
        RunFailed: a run failed.
        RuntimeUnavailable: ONNX Runtime or a required provider is missing.
        SessionBroken: the device failed.
    """
    facts = onnxfile.read_facts(path)
    if not runtime.trust_models:
        onnxfile.refuse_compiled_nodes(path, facts)
    # With a session of its own, so that inputs that do not suit leave nothing in the profile.
    sample = _sample(path, runtime, wish, facts.inputs)
    engine, placement = ort.open_engine(path, runtime, profile=folder / path.stem)
    try:
        for _ in range(_WARM_RUNS + wish.runs):
            engine.prepare(sample).run()
    finally:
        trace = engine.end_profile()
    shapes = {name: array.shape for name, array in sample.items()}
    return Measured(read_profile(trace, skip_runs=_WARM_RUNS), trace, placement, shapes)


def _sample(path: Path, runtime: RuntimeSettings, wish: Wish, declared: tuple[DeclaredTensor, ...]) -> Feeds:
    engine, _ = ort.open_engine(path, runtime)
    inputs = _rows_filled(sized(engine.inputs, declared, wish.axes), declared, wish.rows)
    try:
        return Probe(
            lambda feeds: engine.prepare(feeds).run(), inputs, engine.outputs, keep_first_axes=True
        ).find_sample(wish.rows)
    except Unprobeable as error:
        raise ModelRefused(f"{path}: {error}; give its dynamic axes sizes that it takes, with --dim") from error


def _rows_filled(
    specs: tuple[TensorSpec, ...], declared: tuple[DeclaredTensor, ...], rows: int
) -> tuple[TensorSpec, ...]:
    """Inner axes that bear the name of an axis 0 have as many rows as that, such as a recurrent state's."""
    first = {tensor.shape[0] for tensor in declared if tensor.shape and isinstance(tensor.shape[0], str)}
    inner = {name for tensor in declared for name in (tensor.shape or ())[1:] if isinstance(name, str)}
    return sized(specs, declared, {str(name): rows for name in first & inner})
