"""The worker program: opens the models, wires the steps, runs until a signal, drains.

Start: load -> warm up -> connect -> ready. Stop: consumers stop, what is not in a batch goes back, what runs is
finished, answered and settled, connections close. The first SIGTERM or SIGINT drains, the second ends the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import socket
import sys
import time
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import structlog
from prometheus_client import CollectorRegistry

from inferq.redis_pools import open_redis
from inferq.settings import effective
from inferq.version import installed_version
from inferq_schemas import Limits
from inferq_worker.answer import Answerer
from inferq_worker.broker import Broker, lanes_of
from inferq_worker.errors import StoreUnavailable
from inferq_worker.finish import Finisher
from inferq_worker.held import Held
from inferq_worker.models import RepositoryError, find_models
from inferq_worker.observe.admin import AdminError, AdminServer, Check
from inferq_worker.observe.lag import LoopBeat
from inferq_worker.observe.logs import configure_logging
from inferq_worker.observe.metrics import Metrics
from inferq_worker.payloads import Payloads
from inferq_worker.pipeline import Pipeline, ServedModel
from inferq_worker.publish import Mover, Replies, ReplyAllowList
from inferq_worker.redelivered import Redelivered
from inferq_worker.runtime import ModelRefused, RuntimeUnavailable, open_session
from inferq_worker.scheduling import Batcher, LatencyTable, SizeOrTimeout
from inferq_worker.scheduling.clock import LoopClock
from inferq_worker.store import HEARTBEAT_EVERY_S, Store
from inferq_worker.tasks import Tasks
from inferq_worker.topology import TopologyGate
from inferq_worker.undertaker import Undertaker

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from inferq_worker.models import ModelFile
    from inferq_worker.runtime import Session, SessionInfo
    from inferq_worker.settings import WorkerSettings
    from inferq_worker.work import Lane, WorkItem

_Opened: TypeAlias = "tuple[ModelFile, Session, Mapping[int, float]]"
_log = structlog.get_logger(__name__)
_LOOP_SILENT_S = 10.0
_OBSERVE_EVERY_S = 1.0
START_ERRORS = (RepositoryError, ModelRefused, RuntimeUnavailable, AdminError)
EXIT_OK, EXIT_FAILED, EXIT_CONFIGURATION = 0, 1, 2


def serve(settings: WorkerSettings) -> int:
    """Run a worker until it is told to stop.

    Returns:
        0 after a clean drain, 1 after a failure or a drain that ran out of time, 2 if it could not start.
    """
    worker = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
    json_lines = {"auto": None, "json": True, "console": False}[settings.log.format]
    configure_logging(settings.log.level, json_lines, fields={"service": "inferq-worker", "worker_id": worker})
    try:
        models = find_models(settings.models.dir, settings.models.files)
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            status = runner.run(Worker(settings, models, worker).run())
    except (*START_ERRORS, ExceptionGroup) as error:
        refused = _start_error(error)
        if refused is None:
            _log.critical("worker.failed", exc_info=error)
            _leave(EXIT_FAILED)
        print(f"inferq worker: {refused}", file=sys.stderr)  # noqa: T201 - for a person
        return EXIT_CONFIGURATION
    if status != EXIT_OK:
        _leave(status)
    return status


def _leave(status: int) -> NoReturn:
    """End at once: a native run that hangs would keep a normal exit waiting for its thread for ever."""
    logging.shutdown()
    sys.stderr.flush()
    os._exit(status)


def _start_error(error: Exception) -> Exception | None:
    """What kept the worker from starting, if that is what the error says."""
    if isinstance(error, ExceptionGroup):
        matching, others = error.split(START_ERRORS)
        return None if matching is None or others is not None else _start_error(matching.exceptions[0])
    return error


def _loop_factory() -> Any:
    try:
        import uvloop  # noqa: PLC0415 - not on every platform
    except ImportError:
        return None
    return uvloop.new_event_loop


class Worker:
    """One worker process.

    Args:
        models: what to serve.
        worker: id of this process.
    """

    def __init__(self, settings: WorkerSettings, models: Sequence[ModelFile], worker: str) -> None:
        self._settings = settings
        self._files = [model for model in models if settings.role == "gpu" or model.fallback]
        self._worker = worker
        self._registry = CollectorRegistry()
        self._metrics = Metrics(self._registry, role=settings.role)
        self._store = Store(open_redis(settings.redis, retries=0), settings.redis, worker, self._metrics)
        self._broker = Broker(settings.broker, settings.lanes, role=settings.role, worker=worker, metrics=self._metrics)
        self._gate = TopologyGate(settings, self._files)
        self._beat = LoopBeat(self._metrics.loop_lag)
        self._stop = asyncio.Event()
        self._models: dict[str, ServedModel] = {}
        self._warm_up_s: dict[str, float] = {}
        self._pipeline: Pipeline | None = None
        self._draining = False

    async def run(self) -> int:
        """Load, warm up, connect, serve, drain."""
        self._catch_signals()
        _log.info("worker.starting", version=installed_version(), settings=effective(self._settings))
        admin = self._settings.admin
        server = AdminServer(
            admin.host,
            admin.port,
            metrics_registry=self._registry,
            live=self._live,
            ready=self._ready,
            started=self._started,
            status=self._status,
        )
        with contextlib.closing(server.start()):
            _log.info("admin.listening", host=admin.host, port=server.port)
            self._metrics.build_info(version=installed_version(), worker=self._worker)
            async with asyncio.TaskGroup() as group:
                upkeep = [group.create_task(self._beat.run()), group.create_task(self._heartbeat())]
                sessions = await self._open_sessions()
                status = await self._serve(sessions, group)
                for task in upkeep:
                    task.cancel()
            if status == EXIT_OK:
                for model in self._models.values():
                    await model.session.close()
        _log.info("worker.stopped", status=status)
        return status

    async def _open_sessions(self) -> list[_Opened]:
        runtime = self._settings.runtime
        if self._settings.role == "cpu":
            runtime = runtime.model_copy(
                update={"provider": "cpu", "provider_options": {}, "gpu_memory_limit_bytes": None}
            )
        opened: list[_Opened] = []
        for file in self._files:
            session = await open_session(file, runtime, max_rows=self._settings.batching.max_rows)
            info = session.info
            if info.warning:
                _log.warning("model.degraded", model=file.name, requested=info.requested_provider, reason=info.warning)
            started_s = time.monotonic()
            seconds = await session.warm_up(_warm_up_rows(info))
            self._warm_up_s[file.name] = time.monotonic() - started_s
            _log.info(
                "model.ready",
                model=file.name,
                version=file.version,
                provider=info.provider,
                sha256=info.sha256,
                run_ms={rows: round(run_s * 1000, 3) for rows, run_s in sorted(seconds.items())},
            )
            opened.append((file, session, seconds))
        return opened

    async def _serve(self, sessions: Sequence[_Opened], group: asyncio.TaskGroup) -> int:
        tasks = Tasks(group)
        pipeline, undertaker = self._wire(sessions, tasks)
        self._pipeline = pipeline
        slots = [
            group.create_task(pipeline.serve(model))
            for model in self._models.values()
            for _ in range(self._settings.runtime.slots if self._settings.role == "cpu" else 1)
        ]
        await self._gate.open(self._stop)
        lanes = [lane for model in self._models.values() for lane in self._lanes_of(model.file, model.session.info)]
        self._broker.consume(lanes, pipeline.take, undertaker.take)
        broker = group.create_task(self._broker.run())
        upkeep = [
            group.create_task(self._broker.adopt_orphans(self._store)),
            group.create_task(_every(_OBSERVE_EVERY_S, pipeline.observe)),
        ]
        await self._stop.wait()
        for task in upkeep:
            task.cancel()
        status = await self._drain(pipeline, slots, tasks)
        broker.cancel()
        return status

    def _wire(self, sessions: Sequence[_Opened], tasks: Tasks) -> tuple[Pipeline, Undertaker]:
        settings, metrics = self._settings, self._metrics
        limits = Limits(body_bytes=settings.limits.body_bytes, bundle_jobs=settings.limits.bundle_jobs)
        allow = ReplyAllowList(settings.replies.allow)
        held = Held(settings.lanes.max_held_bytes, self._broker.pause_bulk)
        finisher = Finisher(
            store=self._store,
            replies=Replies(self._broker.replies, metrics),
            mover=Mover(self._broker.moves, metrics),
            metrics=metrics,
            tasks=tasks,
            claim_check_bytes=settings.limits.claim_check_bytes,
            held=held,
        )
        pipeline = Pipeline(
            models=self._models,
            limits=limits,
            allow=allow,
            answerer=Answerer(worker=self._worker, role=settings.role),
            finisher=finisher,
            store=self._store,
            redelivered=Redelivered(self._store, self._worker, metrics),
            payloads=Payloads(self._store, max_bytes=settings.limits.payload_bytes),
            in_hand=held,
            metrics=metrics,
            tasks=tasks,
        )
        clock = LoopClock(asyncio.get_running_loop(), time.monotonic)
        for file, session, seconds in sessions:
            self._models[file.name] = self._served(file, session, seconds, clock, pipeline)
        undertaker = Undertaker(limits=limits, allow=allow, finisher=finisher, held=held, metrics=metrics, tasks=tasks)
        return pipeline, undertaker

    def _served(
        self, file: ModelFile, session: Session, seconds: Mapping[int, float], clock: LoopClock, pipeline: Pipeline
    ) -> ServedModel:
        info, batching = session.info, self._settings.batching
        latency = LatencyTable(seconds)
        policy: SizeOrTimeout[WorkItem] = SizeOrTimeout(
            max_rows=info.max_rows if info.batchable else 1,
            max_bytes=batching.max_bytes,
            max_wait_s=batching.max_wait_s,
            predict_s=latency.predict,
        )
        lanes = [lane.name for lane in self._lanes_of(file, info)]
        self._metrics.model_served(file.name, {*lanes, *file.lanes})
        self._metrics.warmed_up(file.name, self._warm_up_s[file.name])
        self._metrics.model_info(file.name, version=file.version, sha256=info.sha256)
        self._metrics.provider(
            file.name,
            requested=info.requested_provider,
            provider=info.provider,
            nodes_by_provider=info.nodes_by_provider,
        )
        return ServedModel(file, session, Batcher(policy, clock, pipeline.expired), latency)

    def _lanes_of(self, file: ModelFile, info: SessionInfo) -> list[Lane]:
        return lanes_of(file, self._settings.role, self._settings.lanes, info.max_rows)

    async def _drain(self, pipeline: Pipeline, slots: Sequence[asyncio.Task[None]], tasks: Tasks) -> int:
        """Stop taking, give back what is not in a batch, finish what runs; within `drain.limit_s`."""
        self._draining = True
        self._metrics.draining(draining=True)
        _log.info("worker.draining", held_jobs=pipeline.held_jobs)
        try:
            async with asyncio.timeout(self._settings.drain.limit_s):
                await self._broker.stop()
                pipeline.drain()
                await asyncio.gather(*slots)
                await tasks.idle()
                await self._broker.flush()
                with contextlib.suppress(StoreUnavailable):
                    await self._store.retire()
        except TimeoutError:
            _log.error("worker.drain_timed_out", limit_s=self._settings.drain.limit_s)
            tasks.cancel()
            for slot in slots:
                slot.cancel()
            return EXIT_FAILED
        return EXIT_OK

    async def _heartbeat(self) -> None:
        models = [file.name for file in self._files] if self._settings.role == "cpu" else []
        was_up = True
        while True:
            with contextlib.suppress(StoreUnavailable):
                await self._store.beat(cpu_models=models if self._pipeline is not None and not self._draining else [])
            if self._store.up != was_up:
                was_up = self._store.up
                _log.warning("redis.back" if was_up else "redis.away", reason=self._store.last_error)
            await asyncio.sleep(HEARTBEAT_EVERY_S if was_up else 0.5)

    def _catch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: signal.Signals) -> None:
        if not self._stop.is_set():
            self._stop.set()
            return
        _log.error("worker.forced", signal=number.name)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def _live(self) -> Mapping[str, Check]:
        age_s = self._beat.age_s()
        run_s = self._pipeline.longest_run_s() if self._pipeline else 0.0
        stall_s = self._settings.admin.stall_s
        return {
            "event_loop": Check(age_s < _LOOP_SILENT_S, f"last beat {age_s:.1f} s ago", age_s),
            "run": Check(run_s < stall_s, f"running for {run_s:.1f} s, limit {stall_s:g} s", run_s),
        }

    def _ready(self) -> Mapping[str, Check]:
        problems = [*self._gate.problems(), *self._broker.problems()]
        return {
            "models": Check(self._pipeline is not None, "loaded" if self._pipeline else "loading and warming up"),
            "broker": Check(not problems, "; ".join(problems) or "consuming"),
            "redis": Check(self._store.up, "answers" if self._store.up else self._store.last_error),
            "draining": Check(not self._stop.is_set(), "draining" if self._stop.is_set() else "no"),
        }

    def _started(self) -> Mapping[str, Check]:
        started = self._pipeline is not None
        return {"models": Check(started, "loaded" if started else "loading and warming up")}

    def _status(self) -> Mapping[str, Any]:
        return {
            "worker": self._worker,
            "version": installed_version(),
            "role": self._settings.role,
            "models": {
                name: {
                    "version": model.file.version,
                    "provider": model.session.info.provider,
                    "waiting_jobs": len(model.batcher),
                    "run_ms_by_rows": {rows: run_s * 1000 for rows, run_s in model.latency.snapshot().items()},
                }
                for name, model in self._models.items()
            },
            "lanes": self._broker.status(),
            "settings": effective(self._settings),
        }


async def _every(interval_s: float, action: Callable[[], None]) -> NoReturn:
    while True:
        await asyncio.sleep(interval_s)
        action()


def _warm_up_rows(info: SessionInfo) -> list[int]:
    """Powers of two up to the largest run, and that one; a fixed batch is the only size there is."""
    if info.fixed_rows is not None:
        return [info.fixed_rows]
    return sorted({info.max_rows, *(1 << power for power in range(info.max_rows.bit_length()))})
