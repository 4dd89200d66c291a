"""A model at work: native runs on threads of its own, items in, answers out, a bad item alone.

Stands between the pipeline, which awaits it, and an `Engine`, which blocks. The event loop is never blocked, and
buffers are held by the thread that uses them, so cancelling whoever waits frees nothing early.
"""

import asyncio
import queue
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from time import perf_counter
from typing import Any, TypeVar

from inferq_worker.models.repository import ModelFile
from inferq_worker.runtime import onnxfile, ort, signature
from inferq_worker.runtime.collate import Collator, Piece, RowsMixed, check, join, plan, share_out
from inferq_worker.runtime.interface import (
    Engine,
    Feeds,
    ModelRefused,
    RowError,
    RunFailed,
    RunReport,
    Session,
    SessionBroken,
    SessionInfo,
    TensorSpec,
)
from inferq_worker.runtime.isolate import isolate
from inferq_worker.runtime.probe import PROBE_ROWS, Probe, Unprobeable, row_count, take
from inferq_worker.runtime.settings import RuntimeSettings

__all__ = [
    "Feeds",
    "ModelRefused",
    "OrtSession",
    "RowError",
    "RunReport",
    "Session",
    "SessionBroken",
    "SessionInfo",
    "TensorSpec",
    "open_session",
]

_T = TypeVar("_T")


async def open_session(model: ModelFile, config: RuntimeSettings, *, max_rows: int = 32) -> "OrtSession":
    """Load a model in a thread. It is not proved or warm yet: call `warm_up` before the first `run`.

    Cancelling leaves the load running to its end in its thread; what it loaded is dropped.

    Args:
        model: the file and what its `model.toml` says.
        config: provider, device, threads.
        max_rows: most rows of one native run, unless `model.toml` or a fixed batch says otherwise; >= 1.

    Raises:
        ModelRefused: the file cannot be served; the message names the mend.
        RuntimeUnavailable: ONNX Runtime or a required provider is missing.
    """
    loader = ThreadPoolExecutor(1, thread_name_prefix=f"load-{model.name}")
    try:
        return await asyncio.wrap_future(loader.submit(_load, model, config, max_rows))
    finally:
        loader.shutdown(wait=False)


def _load(model: ModelFile, config: RuntimeSettings, max_rows: int) -> "OrtSession":
    facts = onnxfile.read_facts(model.path)
    if facts.compiled_nodes and not config.trust_models:
        raise ModelRefused(
            f"{model.name}: {model.path} holds {facts.compiled_nodes} EPContext node(s), native code that nobody can "
            "inspect; use the original model, or set trust_models = true if you compiled it yourself"
        )
    engine, placement = ort.open_engine(model.path, config)
    fixed = signature.fixed_rows(model, engine.inputs, engine.outputs)
    info = SessionInfo(
        inputs=engine.inputs,
        outputs=engine.outputs,
        fixed_rows=fixed,
        shared=model.shared_inputs,
        provider=placement.provider,
        requested_provider=placement.requested_provider,
        nodes_by_provider=placement.nodes_by_provider,
        sha256=onnxfile.fingerprint(model.path, facts),
        max_rows=fixed or model.max_rows or max_rows,
        batchable=model.batch != "single",
        warning=placement.warning,
    )
    on_cpu = placement.provider == ort.PROVIDER_NAMES["cpu"]
    return OrtSession(model, engine, info, slots=config.slots if on_cpu else 1)


class OrtSession:
    """A `Session` over one engine.

    Args:
        model: its name and how far its batch axis is trusted.
        engine: the loaded graph; safe from `slots` threads at a time.
        info: what was loaded.
        slots: runs at a time, each with a thread and buffers of its own; >= 1.
    """

    def __init__(self, model: ModelFile, engine: Engine, info: SessionInfo, *, slots: int = 1) -> None:
        self._model = model
        self._engine: Engine | None = engine
        self._info = info
        self._executor = ThreadPoolExecutor(slots, thread_name_prefix=f"infer-{model.name}")
        self._in_flight: set[asyncio.Future[Any]] = set()
        # As many collators as threads, so taking one never waits.
        self._collators: queue.SimpleQueue[Collator] = queue.SimpleQueue()
        for _ in range(slots):
            self._collators.put(Collator(info))

    @property
    def info(self) -> SessionInfo:
        """What was loaded and what runs it."""
        return self._info

    async def warm_up(self, rows: Sequence[int]) -> Mapping[int, float]:
        """See `Session.warm_up`."""
        return await self._in_thread(partial(_warm_up, self._model, tuple(rows)))

    async def run(self, feeds: Sequence[Feeds]) -> RunReport:
        """See `Session.run`."""
        return await self._in_thread(partial(_Work.answer, feeds=tuple(feeds)))

    async def close(self) -> None:
        """See `Session.close`."""
        self._engine = None
        self._executor.shutdown(wait=False)
        if self._in_flight:
            await asyncio.wait(self._in_flight)

    async def _in_thread(self, task: Callable[["_Work"], _T]) -> _T:
        engine = self._engine
        if engine is None:
            raise SessionBroken(f"{self._model.name}: the session is closed")
        future: asyncio.Future[_T] = asyncio.wrap_future(self._executor.submit(self._with_collator, engine, task))
        self._in_flight.add(future)
        future.add_done_callback(self._in_flight.discard)
        # Shielded: a cancelled waiter must not make a run that is under way look finished to `close`.
        return await asyncio.shield(future)

    def _with_collator(self, engine: Engine, task: Callable[["_Work"], _T]) -> _T:
        collator = self._collators.get()
        try:
            return task(_Work(engine, collator, self._info))
        finally:
            self._collators.put(collator)


class _Work:
    """The native runs of one call, on one thread, with that thread's buffers."""

    def __init__(self, engine: Engine, collator: Collator, info: SessionInfo) -> None:
        self._engine = engine
        self._collator = collator
        self.info = info
        self._run_s = 0.0
        self._padded_rows = 0

    def answer(self, feeds: Sequence[Feeds]) -> RunReport:
        """Check, pack, run and hand out, item by item."""
        checked = [check(item, self.info) for item in feeds]
        rows = {item: count for item, count in enumerate(checked) if isinstance(count, int)}
        parts: dict[int, list[Feeds | RowError]] = {item: [] for item in rows}
        for pieces in plan(feeds, rows, self.info):
            answers = isolate(pieces, partial(self.run_pieces, feeds=feeds))
            for piece, answer in zip(pieces, answers, strict=True):
                parts[piece.item].append(answer)
        answered = (_whole(parts[item]) if isinstance(count, int) else count for item, count in enumerate(checked))
        return RunReport(tuple(answered), self._run_s, sum(rows.values()), self._padded_rows)

    def run_pieces(self, pieces: Sequence[Piece], *, feeds: Sequence[Feeds]) -> list[Feeds]:
        """One native run; answer i belongs to piece i."""
        collated = self._collator.gather(pieces, feeds)
        rows = sum(piece.rows for piece in pieces)
        self._padded_rows += (self.info.fixed_rows or rows) - rows
        started = perf_counter()
        try:
            outputs = self._engine.run(collated)
        finally:
            self._run_s += perf_counter() - started
        return share_out(outputs, pieces, self.info)

    def run_once(self, feeds: Feeds) -> Feeds:
        """One native run of one item, with its failure raised: what the probe needs."""
        return self.run_pieces([Piece(0, 0, row_count(feeds, self.info.inputs))], feeds=[feeds])[0]

    def steady_run_s(self, feeds: Sequence[Feeds]) -> float | RowError:
        """Seconds of the second of two equal runs, or the first failure."""
        for _ in range(2):
            report = self.answer(feeds)
            for answer in report.answers:
                if isinstance(answer, RowError):
                    return answer
            elapsed_s, self._run_s = report.run_s, 0.0
        return elapsed_s


def _whole(parts: Sequence[Feeds | RowError]) -> Feeds | RowError:
    answers: list[Feeds] = []
    for part in parts:
        if isinstance(part, RowError):
            return part
        answers.append(part)
    return join(answers)


def _warm_up(model: ModelFile, sizes: Sequence[int], work: _Work) -> dict[int, float]:
    sample = _prove(model, work)
    if sample is None:
        return {}
    steady: dict[int, float] = {}
    for size in sorted(set(sizes), reverse=True):
        elapsed_s = work.steady_run_s(_items(sample, size, work.info))
        if isinstance(elapsed_s, RowError):
            raise ModelRefused(
                f"{model.name}: fails when warmed with {size} rows: {elapsed_s.code}: {elapsed_s.message}; "
                "lower max_rows or give it more memory"
            )
        steady[size] = elapsed_s
    return steady


def _prove(model: ModelFile, work: _Work) -> Feeds | None:
    """A sample that the model accepts, after proof that rows are independent; None if it may go unproved."""
    info = work.info
    probe = Probe(work.run_once, info.inputs, info.outputs)
    rows = min(PROBE_ROWS, info.max_rows) if info.batchable else (info.fixed_rows or 1)
    try:
        sample = probe.find_sample(rows)
        if model.batch == "probe":
            probe.prove(sample)
    except (RowsMixed, Unprobeable) as error:
        if isinstance(error, Unprobeable) and model.batch != "probe":
            return None
        raise ModelRefused(
            f'{model.name}: {error}; set batch = "single" in {model.toml} to run each job alone'
            + (', or batch = "trust" if you know that its rows are independent' if model.batch == "probe" else "")
        ) from error
    except RunFailed as error:
        raise ModelRefused(
            f"{model.name}: rows that it takes together it refuses alone or reversed: {error}"
        ) from error
    return sample


def _items(sample: Feeds, size: int, info: SessionInfo) -> list[Feeds]:
    """`size` rows as jobs would bring them: one each, or all in one where the model runs jobs alone."""
    available = row_count(sample, info.inputs)
    if not info.batchable:
        rows = info.fixed_rows or min(size, info.max_rows)
        return [take(sample, [row % available for row in range(rows)], info.inputs)]
    return [take(sample, [row % available], info.inputs) for row in range(size)]
