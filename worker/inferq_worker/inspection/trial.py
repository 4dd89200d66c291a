"""Tries a loaded model as a worker would: which of its possible settings it can be served with, and the evidence."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from inferq_worker.runtime.collate import Collator, Piece, share_out
from inferq_worker.runtime.interface import ModelRefused, RunFailed, SessionInfo
from inferq_worker.runtime.probe import PROBE_ROWS, Comparison, Probe, Unprobeable, row_count, take
from inferq_worker.runtime.signature import fixed_rows

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from inferq_worker.models.repository import ModelFile
    from inferq_worker.runtime.interface import Engine, Feeds, TensorSpec

FEW_RUNS, MANY_RUNS = 5, 50
_SIZE_S = 0.5  # time for one size, once it has had its few runs
_LONG_RUN_S = 1.0  # of a run as long as this, a few would take too long


@dataclass(frozen=True, slots=True)
class Trial:
    """What came of serving a model with one set of settings.

    Attributes:
        model: the settings.
        problem: why a worker would refuse it; empty if it would serve it.
        info: how it would be run; None if its inputs and outputs alone speak against it.
        sample: made-up feeds that it accepts; None if none were found.
        probed_rows: rows that were compared; 0 if they were not.
        evidence: the largest difference for each way of running and each output.
        oddities: what is strange about its answers, so that they prove less than they seem to.
    """

    model: ModelFile
    problem: str
    info: SessionInfo | None = None
    sample: Feeds | None = None
    probed_rows: int = 0
    evidence: tuple[Comparison, ...] = ()
    oddities: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Timing:
    """Run times of one batch size, in seconds, collation not included."""

    rows: int
    runs: int
    p50_s: float
    p95_s: float

    @property
    def rows_per_s(self) -> float:
        """Rows a second, one run after the other."""
        return self.rows / self.p50_s if self.p50_s else math.inf


def attempts(
    engine: Engine, model: ModelFile, max_rows: int, *, inputs: Sequence[TensorSpec], alone: bool
) -> Iterator[Trial]:
    """Try the model as its `model.toml` has it, then with what else could make it work, up to the first success.

    Args:
        engine: the loaded graph.
        model: the settings as they stand.
        max_rows: most rows of one run; >= 1.
        inputs: those of the engine, with the sizes that dynamic inner axes shall have.
        alone: whether running every job alone could help.
    """
    scalars = frozenset(spec.name for spec in engine.inputs if not spec.shape)
    shared = replace(model, shared_inputs=model.shared_inputs | scalars)
    candidates = [model, shared, *([replace(shared, batch="single")] if alone else [])]
    for candidate in dict.fromkeys(candidates):
        trial = _attempt(engine, candidate, max_rows, inputs)
        yield trial
        if not trial.problem:
            return


def _attempt(engine: Engine, model: ModelFile, max_rows: int, inputs: Sequence[TensorSpec]) -> Trial:
    try:
        fixed = fixed_rows(model, engine.inputs, engine.outputs)
    except ModelRefused as refused:
        return Trial(model, str(refused).removeprefix(f"{model.name}: "))
    info = SessionInfo(
        inputs=engine.inputs,
        outputs=engine.outputs,
        fixed_rows=fixed,
        shared=model.shared_inputs,
        provider="",
        requested_provider="",
        nodes_by_provider={},
        sha256="",
        max_rows=fixed or model.max_rows or max(max_rows, PROBE_ROWS),
        batchable=model.batch != "single",
    )
    return _probe(Bench(engine, info), model, info, inputs)


def _probe(bench: Bench, model: ModelFile, info: SessionInfo, inputs: Sequence[TensorSpec]) -> Trial:
    """The judgement of `Session.warm_up`, but all comparisons are made, and kept."""
    probe = Probe(bench.run, inputs, info.outputs)
    rows = min(PROBE_ROWS, info.max_rows) if info.batchable else (info.fixed_rows or 1)
    sample: Feeds | None = None
    evidence: tuple[Comparison, ...] = ()
    oddities: tuple[str, ...] = ()
    try:
        sample = probe.find_sample(rows)
        oddities = tuple(_oddities(bench.run(sample), rows if info.batchable else 1))
        evidence = _worst(probe.compare(sample)) if info.batchable else ()
    except Unprobeable as error:
        problem = str(error) if model.batch == "probe" else ""
    except RunFailed as error:
        problem = str(error) if sample is None else f"rows that it takes together it refuses alone or reversed: {error}"
    else:
        apart = next((found for found in evidence if not found.agrees), None)
        problem = apart.meaning if apart and model.batch == "probe" else ""
    return Trial(model, problem, info, sample, rows if evidence else 0, evidence, oddities)


def _oddities(answers: Feeds, rows: int) -> Iterator[str]:
    for name, array in answers.items():
        if array.dtype.kind == "f" and array.size and not np.isfinite(array).any():
            yield f"output {name!r} is never finite for made-up inputs (NaN or infinity): are the weights damaged?"
        elif rows > 1 and array.size and (array == array[:1]).all():
            yield f"output {name!r} is the same for all made-up rows, so it proves little about the batch axis"


def _worst(comparisons: Iterable[Comparison]) -> tuple[Comparison, ...]:
    worst: dict[tuple[str, str], Comparison] = {}
    for found in comparisons:
        before = worst.get((found.what, found.output))
        if before is None or found.difference > before.difference:
            worst[found.what, found.output] = found
    return tuple(worst.values())


class Bench:
    """Runs one model on the calling thread, collated and shared out as a worker does it."""

    def __init__(self, engine: Engine, info: SessionInfo) -> None:
        self._engine = engine
        self._info = info
        self._collator = Collator(info)

    def run(self, feeds: Feeds) -> Feeds:
        """Run one item; raises what `NativeRun.run` and `share_out` raise."""
        pieces = [Piece(0, 0, row_count(feeds, self._info.inputs))]
        return share_out(self._engine.prepare(self._collator.gather(pieces, [feeds])).run(), pieces, self._info)[0]

    def time(self, sample: Feeds, sizes: Sequence[int], limit_s: float) -> Iterator[Timing]:
        """Time each size with the rows of a sample, over and over.

        Args:
            sample: at least one row that the model accepts.
            sizes: ascending.
            limit_s: no further size is begun that would end after so many seconds.

        Raises:
            RunFailed: a size does not run, for want of memory for one.
        """
        started_s = perf_counter()
        available = row_count(sample, self._info.inputs)
        for size in sizes:
            rows = [row % available for row in range(size)]
            begun_s = perf_counter()
            timing = self._time(self._collator.gather([Piece(0, 0, size)], [take(sample, rows, self._info.inputs)]))
            yield replace(timing, rows=size)
            ended_s = perf_counter()
            if ended_s - started_s + 2 * (ended_s - begun_s) > limit_s:
                return

    def _time(self, feeds: Feeds) -> Timing:
        # The first run of a shape also plans its memory.
        first_s = self._elapsed_s(feeds)
        seconds = [] if first_s < _LONG_RUN_S else [first_s]
        while len(seconds) < FEW_RUNS or (len(seconds) < MANY_RUNS and sum(seconds) < _SIZE_S):
            if seconds and seconds[-1] >= _LONG_RUN_S:
                break
            seconds.append(self._elapsed_s(feeds))
        p50_s, p95_s = np.percentile(seconds, (50, 95))
        return Timing(0, len(seconds), float(p50_s), float(p95_s))

    def _elapsed_s(self, feeds: Feeds) -> float:
        run = self._engine.prepare(feeds)
        started_s = perf_counter()
        run.run()
        return perf_counter() - started_s
