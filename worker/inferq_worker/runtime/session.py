"""A model at work: native runs on threads of its own, items in, answers out, a bad item alone.

Stands between the pipeline, which awaits it, and an `Engine`, which blocks. The event loop is never blocked, and
buffers are held by the thread that uses them, so cancelling whoever waits frees nothing early.
"""

import asyncio
import contextlib
import gc
import queue
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from inferq_worker.models.repository import ModelFile
from inferq_worker.runtime import onnxfile, ort, signature
from inferq_worker.runtime.buckets import buckets
from inferq_worker.runtime.caps import RowCaps
from inferq_worker.runtime.collate import (
    Collator,
    RowsMixed,
)
from inferq_worker.runtime.interface import (
    Engine,
    Feeds,
    ModelRefused,
    RowError,
    RunFailed,
    RunReport,
    RuntimeUnavailable,
    RunWatcher,
    Session,
    SessionBroken,
    SessionInfo,
    TensorSpec,
)
from inferq_worker.runtime.probe import PROBE_ROWS, Probe, Unprobeable, row_count, take
from inferq_worker.runtime.runs import Runs
from inferq_worker.runtime.settings import RuntimeSettings
from inferq_worker.runtime.turns import Turns, WatchedTurn

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
_REST_S = 60.0
"""A session that breaks so soon after it was rebuilt is beyond help in this process."""


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
    if model.buckets is not None:
        wish = model.buckets if isinstance(model.buckets, str) else list(model.buckets)
        config = config.model_copy(update={"buckets": wish})
    engine, placement, sha256 = _open(model, config, max_rows)
    fixed = signature.fixed_rows(model, engine.inputs, engine.outputs)
    most_rows = fixed or model.max_rows or max_rows
    on_cpu = placement.provider == ort.PROVIDER_NAMES["cpu"]
    sizes = buckets(config.buckets, most_rows, on_cpu=on_cpu)
    batchable = model.batch != "single"
    info = SessionInfo(
        inputs=engine.inputs,
        outputs=engine.outputs,
        fixed_rows=fixed,
        shared=model.shared_inputs,
        provider=placement.provider,
        requested_provider=placement.requested_provider,
        nodes_by_provider=placement.nodes_by_provider,
        sha256=sha256,
        max_rows=most_rows,
        batchable=batchable,
        buckets=sizes if batchable and fixed is None else (),
        warning=placement.warning,
        cache=placement.cache,
        load_s=placement.load_s,
        notes=placement.notes,
    )
    turns = turns or Turns(config.slots if on_cpu else 1)
    reopen = partial(_reopen, model, config, info)
    return OrtSession(
        model, engine, info, turns=turns, limit_s=config.run_limit_s, grace_s=config.stop_grace_s, reopen=reopen
    )


def _open(model: ModelFile, config: RuntimeSettings, max_rows: int) -> tuple[Engine, ort.Placement, str]:
    """The engine, where it landed, and the fingerprint of its files."""
    facts = onnxfile.read_facts(model.path)
    if not config.trust_models:
        onnxfile.refuse_compiled_nodes(model.path, facts)
    identity = onnxfile.identify(model.path, facts)
    _check_pin(model, identity.sha256)
    engine, placement = ort.open_engine(model.path, config, identity, model.max_rows or max_rows)
    return engine, placement, identity.sha256


def _reopen(model: ModelFile, config: RuntimeSettings, info: SessionInfo) -> Engine:
    """The same model once more: whatever else came of it could not be answered for under the old name."""
    # What still holds the broken engine are cycles of exceptions and frames; its memory on the device goes with it.
    gc.collect()
    engine, placement, sha256 = _open(model, config, info.max_rows)
    if placement.provider != info.provider:
        raise RuntimeUnavailable(f"it ran on {info.provider} and would now run on {placement.provider}")
    if sha256 != info.sha256:
        raise ModelRefused(f"{model.path} is not the file any more that was loaded at the start")
    return engine


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
        reopen: loads the same graph once more, on the calling thread; None = it cannot be rebuilt.
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
        reopen: Callable[[], Engine] | None = None,
    ) -> None:
        self._model = model
        self._engine: Engine | None = engine
        self._info = info
        self._turns = turns or Turns(1)
        self._limit_s = limit_s
        self._grace_s = grace_s
        self._reopen = reopen
        self._closed = False
        self._warm_rows: tuple[int, ...] = ()
        self._rebuilding: asyncio.Task[None] | None = None
        self._rebuilt_s: float | None = None
        self._caps = RowCaps(info.max_rows, info.buckets)
        slots = self._turns.count + 1
        self._executor = ThreadPoolExecutor(slots, thread_name_prefix=f"infer-{model.name}")
        self._in_flight: set[asyncio.Future[Any]] = set()
        self._idle = asyncio.Event()
        self._idle.set()
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
        self._warm_rows = tuple(rows)
        return await self._warm()

    async def _warm(self) -> Mapping[int, float]:
        self._sample = sample = await self._in_thread(partial(_prove, self._model))
        if sample is None:
            return {}
        return await self._in_thread(partial(_warm_up, self._model, sample, self._warm_rows))

    async def probe(self, watcher: RunWatcher | None = None) -> RunReport:
        """See `Session.probe`."""
        if self._sample is None:
            return RunReport((), 0.0, 0, 0)
        # Whatever made-up numbers lead to: they are not answers.
        return await self._answer(_items(self._sample, self._info.max_rows, self._info), watcher, finite=False)

    async def run(self, feeds: Sequence[Feeds], watcher: RunWatcher | None = None) -> RunReport:
        """See `Session.run`."""
        return await self._answer(feeds, watcher, finite=self._model.nan == "fail")

    async def _answer(self, feeds: Sequence[Feeds], watcher: RunWatcher | None, *, finite: bool) -> RunReport:
        if self._rebuilding is not None:
            await asyncio.shield(self._rebuilding)
        turn = WatchedTurn(self._turns, watcher, limit_s=self._limit_s, grace_s=self._grace_s)
        over = self._in_thread(partial(Runs.answer, feeds=tuple(feeds), turn=turn, finite=finite))
        turn.on_wedged = partial(self._lose, over, len(feeds))
        try:
            return await over
        finally:
            turn.leave()

    def _lose(self, over: asyncio.Future[RunReport], jobs: int) -> None:
        """A run has not ended although it was told to: its thread and its turn are not waited for any more."""
        if not over.done():
            self._turns.lose()
            self._ended(over)
            lost = RowError(
                "inference_timeout", f"the run did not end within {self._limit_s:g} s, nor when it was told to"
            )
            over.set_result(RunReport((lost,) * jobs, self._limit_s, 0, 0, timed_out=True, wedged=True))

    def max_rows(self, shapes: Sequence[Hashable]) -> int:
        """See `Session.max_rows`."""
        named = zip(self._info.inputs, shapes, strict=True)
        return self._caps.limit(tuple(shape for spec, shape in named if spec.name not in self._info.shared))

    @property
    def row_caps(self) -> Mapping[Hashable, int]:
        """See `Session.row_caps`."""
        return self._caps.snapshot()

    async def rebuild(self) -> None:
        """See `Session.rebuild`."""
        if self._rebuilding is None:
            self._rebuilding = asyncio.create_task(self._rebuild())
            self._rebuilding.add_done_callback(self._rebuilding_ended)
        await asyncio.shield(self._rebuilding)

    def _rebuilding_ended(self, task: asyncio.Task[None]) -> None:
        self._rebuilding = None
        if not task.cancelled():
            # Known, even where nobody waits any more.
            task.exception()

    async def _rebuild(self) -> None:
        name = self._model.name
        if self._closed or self._reopen is None:
            raise SessionBroken(f"{name}: the session cannot be rebuilt: it is closed, or its engine came ready-made")
        if self._rebuilt_s is not None and (rest_s := asyncio.get_running_loop().time() - self._rebuilt_s) < _REST_S:
            raise SessionBroken(f"{name}: the session broke again {rest_s:.0f} s after it was rebuilt")
        self._engine = None
        await self._idle.wait()
        loader = ThreadPoolExecutor(1, thread_name_prefix=f"reload-{name}")
        try:
            self._engine = await asyncio.wrap_future(loader.submit(self._reopen))
            await self._warm()
        except Exception as error:
            self._engine = None
            raise SessionBroken(f"{name}: the session cannot be rebuilt: {error}") from error
        finally:
            loader.shutdown(wait=False)
        self._rebuilt_s = asyncio.get_running_loop().time()

    async def close(self) -> None:
        """See `Session.close`."""
        self._closed = True
        self._engine = None
        self._executor.shutdown(wait=False)
        if self._rebuilding is not None:
            await asyncio.wait({self._rebuilding})
        await self._idle.wait()

    def _in_thread(self, task: Callable[[Runs], _T]) -> asyncio.Future[_T]:
        """In flight until the thread is done with it, also when nobody waits for it any more."""
        engine = self._engine
        if engine is None:
            raise SessionBroken(f"{self._model.name}: the session is closed, or broken for good")
        future: asyncio.Future[_T] = asyncio.get_running_loop().create_future()
        self._executor.submit(self._with_collator, engine, task, future)
        self._in_flight.add(future)
        self._idle.clear()
        return future

    def _ended(self, future: asyncio.Future[Any], settle: Callable[[], None] | None = None) -> None:
        """The thread is done with it, or given up for lost; that one may end all the same, later."""
        self._in_flight.discard(future)
        if not self._in_flight:
            self._idle.set()
        if settle is not None and not future.done():
            settle()

    def _with_collator(self, engine: Engine, task: Callable[[Runs], _T], future: asyncio.Future[_T]) -> None:
        collator = self._collators.get()
        try:
            settle: Callable[[], None] = partial(
                future.set_result, task(Runs(engine, collator, self._info, self._turns, self._caps))
            )
        except BaseException as error:  # noqa: BLE001 - whoever waits for it gets it
            settle = partial(future.set_exception, error)
        finally:
            self._collators.put(collator)
        # The loop is closed when a forced end left this thread behind.
        with contextlib.suppress(RuntimeError):
            future.get_loop().call_soon_threadsafe(self._ended, future, settle)


def _warm_up(model: ModelFile, sample: Feeds, sizes: Sequence[int], work: Runs) -> dict[int, float]:
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


def _prove(model: ModelFile, work: Runs) -> Feeds | None:
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
