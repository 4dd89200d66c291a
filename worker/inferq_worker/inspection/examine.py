"""From a file to what there is to say of it: facts, then a trial, then run times, then advice."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from inferq_worker.inspection import advice
from inferq_worker.inspection.axes import sized
from inferq_worker.inspection.trial import Bench, attempts
from inferq_worker.runtime import onnxfile, ort
from inferq_worker.runtime.interface import ModelRefused, RunFailed, RuntimeUnavailable

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from inferq_worker.inspection.trial import Timing, Trial
    from inferq_worker.models.repository import ModelFile
    from inferq_worker.runtime.interface import Engine, SessionInfo
    from inferq_worker.runtime.onnxfile import GraphFacts
    from inferq_worker.runtime.ort import NewestVersions, Placement
    from inferq_worker.runtime.settings import RuntimeSettings


_TOO_NEW = "newer than what this ONNX Runtime loads; it will be refused"


@dataclass(frozen=True, slots=True)
class Inspection:
    """What was found.

    Attributes:
        model: the file, with the settings of its `model.toml`.
        file_bytes: of the .onnx file alone.
        newest: what the installed ONNX Runtime loads; None if there is none.
        problem: why a worker would refuse the file as it stands; None if it was not tried.
        placement: where the graph landed; None if it was not loaded.
        trials: settings that were tried, the file's own first; the last is the one that works, if any does.
        timings: of the last trial.
        timing_note: why there are no more timings than these; empty if all sizes were run.
        buckets: sizes at which throughput still rises; empty for a model whose rows are not batched.
        settings: lines of the `model.toml` to serve it with; empty if it needs none, or if none would help.
        cautions: what else an operator should know.
    """

    model: ModelFile
    file_bytes: int
    sha256: str
    facts: GraphFacts
    newest: NewestVersions | None
    problem: str | None
    cautions: tuple[str, ...]
    placement: Placement | None = None
    trials: tuple[Trial, ...] = ()
    timings: tuple[Timing, ...] = ()
    timing_note: str = ""
    buckets: tuple[int, ...] = ()
    settings: tuple[str, ...] = ()

    @property
    def works(self) -> Trial | None:
        """The trial with which a worker would serve it."""
        return self.trials[-1] if self.trials and not self.trials[-1].problem else None


@dataclass(frozen=True, slots=True)
class Limits:
    """How far the trial goes.

    Attributes:
        max_rows: the largest batch to time.
        served_rows: the largest batch of a worker, where `model.toml` says nothing.
        timing_s: what measuring run times may take, in seconds.
        axes: sizes of dynamic inner axes, as for `sized`.
    """

    max_rows: int
    served_rows: int
    timing_s: float
    axes: Mapping[str, int]


def describe(model: ModelFile) -> Inspection:
    """Read the file, and run nothing of it.

    Raises:
        ModelRefused: it is not there, cannot be read, or is no ONNX model.
    """
    facts = onnxfile.read_facts(model.path)
    try:
        newest = ort.newest_versions()
    except RuntimeUnavailable:
        newest = None
    too_new = [_TOO_NEW] if _is_too_new(facts, newest) else []
    return Inspection(
        model=model,
        file_bytes=model.path.stat().st_size,
        sha256=onnxfile.fingerprint(model.path, facts),
        facts=facts,
        newest=newest,
        problem=None,
        cautions=(*too_new, *advice.cautions(model.path, facts)),
    )


def examine(model: ModelFile, runtime: RuntimeSettings, limits: Limits) -> Inspection:
    """Read the file, load it, and try it.

    Raises:
        CommandError: the file has no such axis.
        ModelRefused: it is not there, no ONNX model, or newer than what ONNX Runtime loads.
        RuntimeUnavailable: ONNX Runtime or a required provider is missing.
        SessionBroken: the device failed.
    """
    found = describe(model)
    try:
        if not runtime.trust_models:
            onnxfile.refuse_compiled_nodes(model.path, found.facts)
        engine, placement = ort.open_engine(model.path, runtime)
    except ModelRefused as refused:
        if _is_too_new(found.facts, found.newest):
            raise
        return replace(found, problem=_without_path(str(refused), model.path))
    misplaced = advice.misplaced_rows(found.facts.inputs)
    inputs = sized(engine.inputs, found.facts.inputs, limits.axes)
    trials = tuple(attempts(engine, model, limits.max_rows, inputs=inputs, alone=not misplaced))
    problem = misplaced if trials[0].problem and misplaced else trials[0].problem
    warning = [placement.warning.removeprefix(f"{model.path.name}: ")] if placement.warning else []
    cautions = (*warning, *found.cautions, *trials[-1].oddities)
    found = replace(found, problem=problem, placement=placement, trials=trials, cautions=cautions)
    return _timed(found, engine, limits)


def _without_path(message: str, path: Path) -> str:
    """The report names the file once; messages of the loader begin with it, in full or not."""
    for start in (f"{path}: ", f"{path.name}: ", f"{path} "):
        if message.startswith(start):
            rest = message.removeprefix(start)
            return rest if start.endswith(": ") else f"it {rest}"
    return message


def _is_too_new(facts: GraphFacts, newest: NewestVersions | None) -> bool:
    return newest is not None and (
        facts.ir_version > newest.ir > 0 or facts.opsets.get("ai.onnx", 0) > newest.opset > 0
    )


def _timed(found: Inspection, engine: Engine, limits: Limits) -> Inspection:
    trial = found.works
    if trial is None or trial.info is None:
        return found
    if trial.sample is None:
        note = "no made-up input suits it, so it was not run; a worker will not warm it up either"
        return replace(found, timing_note=note, settings=tuple(advice.settings(trial.model, None)))
    info = trial.info
    sizes = _sizes(info, limits.max_rows)
    timings: list[Timing] = []
    note, problem = "", found.problem
    try:
        for timing in Bench(engine, info).time(trial.sample, sizes, limits.timing_s):
            timings.append(timing)  # noqa: PERF402 - those before a failure count
    except RunFailed as error:
        note = f"{sizes[len(timings)]} rows do not run: {error}"
        # A worker warms up every power of two up to its largest batch.
        problem = problem or (note if sizes[len(timings)] <= (trial.model.max_rows or limits.served_rows) else "")
    if not note and len(timings) < len(sizes):
        note = f"the {limits.timing_s:g} s for run times are over (--time)"
    buckets = advice.buckets(timings) if info.batchable and len(sizes) > 1 else []
    settings = tuple(advice.settings(trial.model, buckets[-1] if buckets else None))
    found = replace(found, problem=problem)
    return replace(found, timings=tuple(timings), timing_note=note, buckets=tuple(buckets), settings=settings)


def _sizes(info: SessionInfo, max_rows: int) -> list[int]:
    if info.fixed_rows:
        return [info.fixed_rows]
    if info.max_rows == 1:
        return [1]  # its model.toml says so, perhaps because its rows must not meet
    return [1 << power for power in range(max_rows.bit_length())]
