"""The worker program: opens the models, wires the steps, runs until a signal, drains.

Start: load -> warm up -> connect -> ready. Stop: consumers stop, what is not in a batch goes back, what runs is
finished, answered and settled, connections close. The first SIGTERM or SIGINT drains, the second ends the process.
A worker over its memory limit drains by itself, and ends with a status of its own.
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
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias, cast

import structlog
from prometheus_client import CollectorRegistry

from inferq.amqp import end_if_cancelled
from inferq.configuration import ConfigurationError
from inferq.redis_pools import open_redis
from inferq.settings import effective
from inferq.version import installed_version
from inferq_worker import interpreter
from inferq_worker.broker import Broker, lanes_of
from inferq_worker.budget import Windows
from inferq_worker.cpu import CpuWorker
from inferq_worker.errors import StoreUnavailable
from inferq_worker.memory import Memory
from inferq_worker.models import RepositoryError, find_models
from inferq_worker.observe.admin import AdminError, AdminServer, Check
from inferq_worker.observe.lag import LoopBeat
from inferq_worker.observe.logs import configure_logging
from inferq_worker.observe.metrics import Metrics
from inferq_worker.runtime import ModelRefused, RuntimeUnavailable, Turns, open_session
from inferq_worker.scheduling import LatencyTable
from inferq_worker.served import ServedModel
from inferq_worker.store import HEARTBEAT_EVERY_S, Store
from inferq_worker.tasks import Tasks
from inferq_worker.topology import TopologyGate
from inferq_worker.windows import Window
from inferq_worker.wiring import Steps, wire

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

    from inferq.pauses import Pause
    from inferq_worker.device import Device
    from inferq_worker.models import ModelFile
    from inferq_worker.runtime import Session, SessionInfo, TensorSpec
    from inferq_worker.settings import WorkerSettings
    from inferq_worker.work import Lane

_Opened: TypeAlias = "tuple[ModelFile, Session, Mapping[int, float]]"
_log = structlog.get_logger(__name__)
_LOOP_SILENT_S = 10.0
_OBSERVE_EVERY_S = 1.0
START_ERRORS = (ConfigurationError, RepositoryError, ModelRefused, RuntimeUnavailable, AdminError)
EXIT_OK, EXIT_FAILED, EXIT_CONFIGURATION, EXIT_MEMORY = 0, 1, 2, 3


def serve(settings: WorkerSettings) -> int:
    """Run a worker until it is told to stop.

    Returns:
        0 after a clean drain, 1 after a failure or a drain that ran out of time, 2 if it could not start, 3 after a
        clean drain because of the memory limit: start it again.
    """
    worker = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
    json_lines = {"auto": None, "json": True, "console": False}[settings.log.format]
    configure_logging(settings.log.level, json_lines, fields={"service": "inferq-worker", "worker_id": worker})
    interpreter.tune()
    try:
        models = find_models(settings.models.dir, settings.models.files)
        with asyncio.Runner(loop_factory=interpreter.loop_factory()) as runner:
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
        self._store = Store(open_redis(settings.redis, retries=0, patient=True), settings.redis, worker, self._metrics)
        self._broker = Broker(settings.broker, role=settings.role, worker=worker, metrics=self._metrics)
        self._gate = TopologyGate(settings, self._files)
        self._beat = LoopBeat(self._metrics.loop_lag)
        self._memory = Memory(settings, worker, self._metrics)
        self._windows = Windows(settings.lanes)
        self._stop = asyncio.Event()
        on_cpu = settings.role == "cpu" or settings.runtime.provider == "cpu"
        self._turns = Turns(settings.runtime.slots if on_cpu else 1)
        self._signalled = False
        self._over_memory = False
        self._models: dict[str, ServedModel] = {}
        self._warm_up_s: dict[str, float] = {}
        self._steps: Steps | None = None
        self._draining = False
        self._pauses: Mapping[str, Pause] = {}

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
                self._fit_memory([session.info for _, session, _ in sessions])
                status = await self._serve(sessions, group)
                for task in upkeep:
                    task.cancel()
            if status != EXIT_FAILED:
                for model in self._models.values():
                    await model.session.close()
        _log.info("worker.stopped", status=status)
        return status

    async def _open_sessions(self) -> list[_Opened]:
        runtime = self._settings.runtime
        if self._settings.role == "cpu":
            runtime = runtime.on_cpu()
        opened: list[_Opened] = []
        for file in self._files:
            session = await open_session(file, runtime, max_rows=self._settings.batching.max_rows, turns=self._turns)
            info = session.info
            if info.warning:
                _log.warning("model.degraded", model=file.name, requested=info.requested_provider, reason=info.warning)
            for note in info.notes:
                _log.warning("model.cache", model=file.name, reason=note)
            started_s = time.monotonic()
            seconds = await session.warm_up(_warm_up_rows(info))
            self._warm_up_s[file.name] = time.monotonic() - started_s
            _log.info(
                "model.ready",
                model=file.name,
                version=file.version,
                provider=info.provider,
                nodes=dict(info.nodes_by_provider),
                cache=info.cache,
                load_s=round(info.load_s, 3),
                inputs=[_spec(spec) for spec in info.inputs],
                outputs=[_spec(spec) for spec in info.outputs],
                sha256=info.sha256,
                run_ms={rows: round(run_s * 1000, 3) for rows, run_s in sorted(seconds.items())},
            )
            opened.append((file, session, seconds))
        return opened

    def _fit_memory(self, models: Sequence[SessionInfo]) -> None:
        """Now that the models have what they need: what may be in hand, or a start-up error."""
        self._windows = self._memory.windows(self._files)
        self._settings = self._settings.model_copy(update={"lanes": self._windows.lanes})
        if any(info.provider != "CPUExecutionProvider" for info in models):
            self._memory.watch_device(self._settings.runtime.device_id)

    async def _serve(self, sessions: Sequence[_Opened], group: asyncio.TaskGroup) -> int:
        tasks = Tasks(group)
        models = {file.name: self._served(file, session, seconds) for file, session, seconds in sessions}
        steps = wire(
            self._settings,
            models,
            self._broker,
            self._store,
            turns=self._turns.count,
            worker=self._worker,
            metrics=self._metrics,
            tasks=tasks,
        )
        self._models, self._steps = models, steps
        interpreter.started()
        loop = group.create_task(steps.pipeline.serve())
        # Before the gate, whose questions may take long: what keeps the broker away is then known at once.
        broker = group.create_task(self._broker.run())
        await self._store.connect()
        await self._gate.open(self._stop)
        lanes = [lane for model in models.values() for lane in self._lanes_of(model.file, model.session.info)]
        dead_window = self._settings.lanes.dead_window
        self._broker.consume(lanes, steps.intake.take, steps.undertaker.take, dead_window=dead_window)
        self._broker.obey(self._pauses)
        upkeep = [
            group.create_task(self._broker.watch_fallback(self._store, steps.cpus)),
            group.create_task(_every(_OBSERVE_EVERY_S, self._observe)),
            group.create_task(self._stop_if_lost(steps.device)),
            group.create_task(self._stop_if_over_memory()),
        ]
        await self._stop.wait()
        for task in upkeep:
            task.cancel()
        status = await self._drain(steps, loop, tasks)
        broker.cancel()
        if steps.device.lost.is_set():
            return EXIT_FAILED
        # One that was told to stop while it left for memory is not wanted again.
        return EXIT_MEMORY if status == EXIT_OK and self._over_memory and not self._signalled else status

    async def _stop_if_over_memory(self) -> None:
        """What grows in a process ends with it: another one, started afresh, goes on."""
        await self._memory.exceeded()
        self._over_memory = True
        self._stop.set()

    async def _stop_if_lost(self, device: Device) -> None:
        """A device on which nothing ends any more serves nobody: another process, on a fresh one, may."""
        await device.lost.wait()
        _log.critical("device.lost", reason="a run does not end, and no slot is left; the worker leaves")
        self._stop.set()

    def _served(self, file: ModelFile, session: Session, seconds: Mapping[int, float]) -> ServedModel:
        info = session.info
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
        first_rows = self._settings.lanes.interactive_window
        window = Window(max_rows=info.max_rows, first_rows=first_rows)
        return ServedModel(file, session, LatencyTable(seconds, info.padded), window)

    def _observe(self) -> None:
        """Once a second: figures of what is held, and windows that follow the measured rate."""
        if self._steps is None:
            return
        self._steps.hand.observe()
        for name, served in self._models.items():
            caps = served.session.row_caps
            lowest_rows = min(caps.values(), default=served.session.info.max_rows)
            self._metrics.row_caps(name, shapes=len(caps), lowest_rows=lowest_rows)
        for consumer in self._broker.consumers:
            model = self._models.get(consumer.lane.model)
            if model is not None and consumer.lane.rank == 0:
                rows = model.session.info.max_rows
                run_s = model.latency.predict(rows)
                consumer.aim(model.window.rows(rows / run_s if run_s else None))

    def _lanes_of(self, file: ModelFile, info: SessionInfo) -> list[Lane]:
        return lanes_of(file, self._settings.role, self._windows, info.max_rows)

    async def _drain(self, steps: Steps, loop: asyncio.Task[None], tasks: Tasks) -> int:
        """Stop taking, give back what is not in a batch, finish what runs; within `drain.limit_s`."""
        self._draining = True
        self._metrics.draining(draining=True)
        _log.info("worker.draining", held_jobs=len(steps.hand))
        try:
            async with asyncio.timeout(self._settings.drain.limit_s):
                await self._broker.stop()
                steps.pipeline.drain()
                await loop
                await tasks.idle()
                await self._broker.flush()
                with contextlib.suppress(StoreUnavailable):
                    served, gpu = list(self._models), self._settings.role == "gpu"
                    await self._store.retire(cpu_models=() if gpu else served, gpu_models=served if gpu else ())
        except TimeoutError:
            _log.error("worker.drain_timed_out", limit_s=self._settings.drain.limit_s)
            tasks.cancel()
            loop.cancel()
            return EXIT_FAILED
        return EXIT_OK

    async def _heartbeat(self) -> None:
        was_up, refusal = True, None
        beat = 0
        while True:
            beat += 1
            serving = self._steps is not None and not self._draining
            gpu = serving and self._settings.role == "gpu"
            with contextlib.suppress(StoreUnavailable):
                await self._store.beat(
                    cpu=self._cpu_entries(beat) if serving and not gpu else None,
                    gpu_models=list(self._models) if gpu else (),
                )
                self._pauses = await self._store.pauses()
            # With Redis away what was known last holds; a pause for a while ends all the same.
            self._broker.obey(self._pauses)
            if self._store.up != was_up:
                was_up = self._store.up
                if was_up:
                    _log.warning("redis.back")
                else:
                    _log.warning("redis.away", reason=self._store.last_error)
            if (now := self._store.refusal if was_up else None) != refusal:
                refusal = now
                _log.warning("redis.refuses" if refusal else "redis.accepts", reason=refusal)
            end_if_cancelled()
            await asyncio.sleep(HEARTBEAT_EVERY_S if was_up else 0.5)

    def _cpu_entries(self, beat: int) -> dict[str, CpuWorker]:
        """What this worker can do for diverted jobs, by model; nothing for one that it must not run."""
        if self._steps is None:
            return {}
        held, lanes = len(self._steps.hand), self._settings.runtime.slots
        return {
            name: CpuWorker(model.latency.p95(1) or 0.0, lanes, held, beat)
            for name, model in self._models.items()
            if self._steps.breakers.allows(name)
        }

    def _catch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: signal.Signals) -> None:
        if not self._signalled:
            # A worker that already leaves for memory is not forced by the first signal: it drains, as it was told.
            self._signalled = True
            self._stop.set()
            return
        _log.error("worker.forced", signal=number.name)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def _live(self) -> Mapping[str, Check]:
        age_s = self._beat.age_s()
        run_s = self._steps.device.longest_run_s() if self._steps else 0.0
        stall_s = self._settings.admin.stall_s
        return {
            "event_loop": Check(age_s < _LOOP_SILENT_S, f"last beat {age_s:.1f} s ago", age_s),
            "run": Check(run_s < stall_s, f"running for {run_s:.1f} s, limit {stall_s:g} s", run_s),
        }

    def _ready(self) -> Mapping[str, Check]:
        problems = [*self._gate.problems(), *self._broker.problems()]
        broken = self._steps is not None and self._steps.breakers.all_open
        return {
            "models": Check(self._steps is not None, "loaded" if self._steps else "loading and warming up"),
            "broker": Check(not problems, "; ".join(problems) or "consuming"),
            "redis": self._redis(),
            "breakers": Check(not broken, "open for every model: none can be run" if broken else "runs are allowed"),
            "draining": Check(not self._stop.is_set(), "draining" if self._stop.is_set() else "no"),
        }

    def _redis(self) -> Check:
        if not self._store.up:
            return Check(False, self._store.last_error)
        refusal = self._store.refusal
        return Check(refusal is None, "answers" if refusal is None else f"refuses: {refusal}")

    def _started(self) -> Mapping[str, Check]:
        started = self._steps is not None
        return {"models": Check(started, "loaded" if started else "loading and warming up")}

    def _status(self) -> Mapping[str, Any]:
        return {
            "worker": self._worker,
            "version": installed_version(),
            "role": self._settings.role,
            "held_jobs": len(self._steps.hand) if self._steps else 0,
            "models": {
                name: {
                    "version": model.file.version,
                    "provider": model.session.info.provider,
                    "requested_provider": model.session.info.requested_provider,
                    "nodes_by_provider": dict(model.session.info.nodes_by_provider),
                    "warning": model.session.info.warning,
                    "cache": model.session.info.cache,
                    "load_s": model.session.info.load_s,
                    "inputs": [_spec(spec) for spec in model.session.info.inputs],
                    "outputs": [_spec(spec) for spec in model.session.info.outputs],
                    "max_rows": model.session.info.max_rows,
                    "buckets": list(model.session.info.buckets),
                    "row_caps": {_shapes(shapes): rows for shapes, rows in model.session.row_caps.items()},
                    "run_ms_by_rows": {rows: run_s * 1000 for rows, run_s in model.latency.snapshot().items()},
                    "breaker": self._steps.breakers.status(name) if self._steps else None,
                }
                for name, model in self._models.items()
            },
            "lanes": self._broker.status(),
            "pauses": [pause.to_map() for pause in self._pauses.values() if pause.holds(int(time.time() * 1000))],
            "memory": self._memory.status(),
            "settings": effective(self._settings),
        }


async def _every(interval_s: float, action: Callable[[], None]) -> NoReturn:
    while True:
        await asyncio.sleep(interval_s)
        action()


def _spec(spec: TensorSpec) -> str:
    """An input or output in one line, such as `x: float32 [n, 3, any]`."""
    sizes = ["any" if size is None else str(size) for size in spec.shape]
    return f"{spec.name}: {spec.dtype} [{', '.join(['n', *sizes[1:]]) if sizes else ''}]"


def _shapes(shapes: Hashable) -> str:
    """The inner shapes of the batched inputs in one line, such as `[3, 224, 224] [2]`."""
    return " ".join(str(list(shape)) for shape in cast("tuple[tuple[int, ...], ...]", shapes))


def _warm_up_rows(info: SessionInfo) -> list[int]:
    """Every size there is: a fixed batch or the buckets; of any size, powers of two up to the largest, and that one."""
    if info.fixed_rows is not None:
        return [info.fixed_rows]
    if info.buckets:
        return list(info.buckets)
    return sorted({info.max_rows, *(1 << power for power in range(info.max_rows.bit_length()))})
