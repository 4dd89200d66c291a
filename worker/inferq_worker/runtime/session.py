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
    NativeRun,
    RowError,
    RunFailed,
    RunReport,
    RunStopped,
    RunWatcher,
    Session,
    SessionBroken,
    SessionInfo,
    TensorSpec,
)
from inferq_worker.runtime.isolate import isolate
from inferq_worker.runtime.probe import PROBE_ROWS, Probe, Unprobeable, row_count, take
from inferq_worker.runtime.settings import RuntimeSettings
from inferq_worker.runtime.turns import Turn, Turns, WatchedTurn

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


async def open_session(
    model: ModelFile, config: RuntimeSettings, *, max_rows: int = 32, turns: Turns | None = None
) -> "OrtSession":
    """Load a model in a thread. It is not proved or warm yet: call `warm_up` before the first `run`.

    Cancelling leaves the load running to its end in its thread; what it loaded is dropped.

    Args:
        model: the file and what its `model.toml` says.
        config: provider, device, threads.
        max_rows: most rows of one native run, unless `model.toml` or a fixed batch says otherwise; >= 1.
        turns: of the device; models that share one share its turns. None = a device of its own.

    Raises:
        ModelRefused: the file cannot be served; the message names the mend.
        RuntimeUnavailable: ONNX Runtime or a required provider is missing.
    """
    loader = ThreadPoolExecutor(1, thread_name_prefix=f"load-{model.name}")
    try:
        return await asyncio.wrap_future(loader.submit(_load, model, config, max_rows, turns))
    finally:
        loader.shutdown(wait=False)


def _load(model: ModelFile, config: RuntimeSettings, max_rows: int, turns: Turns | None) -> "OrtSession":
    facts = onnxfile.read_facts(model.path)
    if not config.trust_models:
        onnxfile.refuse_compiled_nodes(model.path, facts)
    identity = onnxfile.identify(model.path, facts)
    _check_pin(model, identity.sha256)
    engine, placement = ort.open_engine(model.path, config, identity, model.max_rows or max_rows)
    fixed = signature.fixed_rows(model, engine.inputs, engine.outputs)
    info = SessionInfo(
        inputs=engine.inputs,
        outputs=engine.outputs,
        fixed_rows=fixed,
        shared=model.shared_inputs,
        provider=placement.provider,
        requested_provider=placement.requested_provider,
        nodes_by_provider=placement.nodes_by_provider,
        sha256=identity.sha256,
        max_rows=fixed or model.max_rows or max_rows,
        batchable=model.batch != "single",
        warning=placement.warning,
        cache=placement.cache,
        load_s=placement.load_s,
        notes=placement.notes,
    )
    turns = turns or Turns(config.slots if placement.provider == ort.PROVIDER_NAMES["cpu"] else 1)
    return OrtSession(model, engine, info, turns=turns, limit_s=config.run_limit_s, grace_s=config.stop_grace_s)


def _check_pin(model: ModelFile, sha256: str) -> None:
    if model.sha256 not in (None, sha256):
        raise ModelRefused(
            f"{model.name}: {model.path} (with its external data) has SHA-256 {sha256}, and {model.toml} pins "
            f"{model.sha256}: restore the file, or pin the new one if the change was meant"
        )


class OrtSession:
    """A `Session` over one engine.

    Each slot is a thread with buffers of its own. There is one more of them than the device takes runs at a time, so
    that the next batch lies packed when a run ends.

    Args:
        model: its name and how far its batch axis is trusted.
        engine: the loaded graph; safe from several threads at a time.
        info: what was loaded.
        turns: of the device.
        limit_s: a native run that lasts longer is told to end.
        grace_s: one that has not ended so long after that is given up for lost.
    """

    def __init__(
        self,
        model: ModelFile,
        engine: Engine,
        info: SessionInfo,
        *,
        turns: Turns | None = None,
        limit_s: float = 30.0,
        grace_s: float = 5.0,
    ) -> None:
        self._model = model
        self._engine: Engine | None = engine
        self._info = info
        self._turns = turns or Turns(1)
        self._limit_s = limit_s
        self._grace_s = grace_s
        slots = self._turns.count + 1
        self._executor = ThreadPoolExecutor(slots, thread_name_prefix=f"infer-{model.name}")
        self._in_flight: set[asyncio.Future[Any]] = set()
        self._sample: Feeds | None = None
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
        self._sample = sample = await asyncio.shield(self._in_thread(partial(_prove, self._model)))
        if sample is None:
            return {}
        return await asyncio.shield(self._in_thread(partial(_warm_up, self._model, sample, tuple(rows))))

    async def probe(self, watcher: RunWatcher | None = None) -> RunReport:
        """See `Session.probe`."""
        if self._sample is None:
            return RunReport((), 0.0, 0, 0)
        return await self.run(_items(self._sample, self._info.max_rows, self._info), watcher)

    async def run(self, feeds: Sequence[Feeds], watcher: RunWatcher | None = None) -> RunReport:
        """See `Session.run`."""
        turn = WatchedTurn(self._turns, watcher, limit_s=self._limit_s, grace_s=self._grace_s)
        future = self._in_thread(partial(_Work.answer, feeds=tuple(feeds), turn=turn))
        try:
            either: set[asyncio.Future[Any]] = {future, turn.wedged}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            turn.leave()
        if future.done():
            return future.result()
        self._in_flight.discard(future)
        self._turns.lose()
        lost = RowError("inference_timeout", f"the run did not end within {self._limit_s:g} s, nor when it was told to")
        return RunReport((lost,) * len(feeds), self._limit_s, 0, 0, timed_out=True, wedged=True)

    async def close(self) -> None:
        """See `Session.close`."""
        self._engine = None
        self._executor.shutdown(wait=False)
        if self._in_flight:
            await asyncio.wait(self._in_flight)

    def _in_thread(self, task: Callable[["_Work"], _T]) -> asyncio.Future[_T]:
        """Cancelling who waits must not make a run that is under way look finished to `close`: wait or shield."""
        engine = self._engine
        if engine is None:
            raise SessionBroken(f"{self._model.name}: the session is closed")
        future: asyncio.Future[_T] = asyncio.wrap_future(self._executor.submit(self._with_collator, engine, task))
        self._in_flight.add(future)
        future.add_done_callback(self._ended)
        return future

    def _ended(self, future: asyncio.Future[Any]) -> None:
        self._in_flight.discard(future)
        if not future.cancelled():
            # Known, even where nobody waits any more.
            future.exception()

    def _with_collator(self, engine: Engine, task: Callable[["_Work"], _T]) -> _T:
        collator = self._collators.get()
        try:
            return task(_Work(engine, collator, self._info, self._turns))
        finally:
            self._collators.put(collator)


class _Work:
    """The native runs of one call, on one thread, with that thread's buffers."""

    def __init__(self, engine: Engine, collator: Collator, info: SessionInfo, turns: Turns) -> None:
        self._engine = engine
        self._collator = collator
        self.info = info
        self._turns = turns
        self._run_s = 0.0
        self._padded_rows = 0

    def answer(self, feeds: Sequence[Feeds], turn: Turn | None = None) -> RunReport:
        """Check and pack, wait for the device, run and hand out, item by item."""
        turn = turn or Turn(self._turns)
        checked = [check(item, self.info) for item in feeds]
        rows = {item: count for item, count in enumerate(checked) if isinstance(count, int)}
        runs = plan(feeds, rows, self.info)
        ahead = self._prepare(runs[0], feeds) if runs else None
        parts: dict[int, list[Feeds | RowError]] = {item: [] for item in rows}
        with turn.taken() as unwanted:
            if unwanted:
                rows = {item: count for item, count in rows.items() if item not in unwanted}
                runs, ahead = plan(feeds, rows, self.info) if rows else [], None
            for pieces in runs:
                for piece, answer in zip(pieces, self._run(pieces, feeds, turn, ahead), strict=True):
                    parts[piece.item].append(answer)
                ahead = None
        answered = (_whole(parts[item]) if isinstance(count, int) else count for item, count in enumerate(checked))
        return RunReport(
            tuple(answered), self._run_s, sum(rows.values()), self._padded_rows, timed_out=turn.was_stopped
        )

    def _run(
        self, pieces: Sequence[Piece], feeds: Sequence[Feeds], turn: Turn, ahead: NativeRun | RunFailed | None
    ) -> list[Feeds | RowError]:
        """Answers of one packed run, its culprits isolated."""

        def run(some: Sequence[Piece]) -> list[Feeds]:
            ready = ahead if some is pieces and ahead is not None else self._prepare(some, feeds)
            return self._go(some, ready, turn)

        try:
            return isolate(pieces, run)
        except RunStopped:
            return [RowError("inference_timeout", f"the run was stopped at its limit of {turn.limit_s:g} s")] * len(
                pieces
            )

    def _prepare(self, pieces: Sequence[Piece], feeds: Sequence[Feeds]) -> NativeRun | RunFailed:
        """Gather the rows and hand them to the engine; a failure is raised when its turn has come."""
        rows = sum(piece.rows for piece in pieces)
        try:
            native = self._engine.prepare(self._collator.gather(pieces, feeds))
        except RunFailed as error:
            return error
        self._padded_rows += (self.info.fixed_rows or rows) - rows
        return native

    def _go(self, pieces: Sequence[Piece], ready: NativeRun | RunFailed, turn: Turn) -> list[Feeds]:
        if isinstance(ready, RunFailed):
            raise ready
        started = perf_counter()
        try:
            outputs = turn.run(ready)
        finally:
            self._run_s += perf_counter() - started
        return share_out(outputs, pieces, self.info)

    def run_once(self, feeds: Feeds) -> Feeds:
        """One native run of one item, with its failure raised: what the probe needs."""
        pieces = [Piece(0, 0, row_count(feeds, self.info.inputs))]
        turn = Turn(self._turns)
        with turn.taken():
            return self._go(pieces, self._prepare(pieces, [feeds]), turn)[0]

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
    """The answer to one item; without any part of it nobody wanted it any more."""
    if not parts:
        return RowError("cancelled", "nobody waited for it any more when its run began")
    answers: list[Feeds] = []
    for part in parts:
        if isinstance(part, RowError):
            return part
        answers.append(part)
    return join(answers)


def _warm_up(model: ModelFile, sample: Feeds, sizes: Sequence[int], work: _Work) -> dict[int, float]:
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
