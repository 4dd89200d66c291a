"""CPU that the worker adds to a run, between the scheduler and the results, as a share of the run itself.

A command, not a test: `make bench-overhead`. Admitted single-row jobs go through the real scheduler, device, session
and answer building; store, broker and log are left out, and so is packing answers. Beside it stands a bare loop of
`session.run` over the same batches, collated beforehand. Jobs are made and admitted as they are taken in, as in a
worker, and neither is counted. Nor are the worker's own native runs, measured on their thread: what they cost more than
bare ones is the machine's doing. Rounds are interleaved, medians compared; the last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import onnxruntime
import structlog
from prometheus_client import CollectorRegistry
from tests.bench.goodput import FEATURES, write_model
from tests.fakes import FakeChannel, delivery_of, settler_of

from inferq_schemas import Job, Tensor
from inferq_worker import interpreter
from inferq_worker.admit import admit
from inferq_worker.answer import Answerer
from inferq_worker.breakers import Breakers
from inferq_worker.device import Device
from inferq_worker.evacuate import Evacuation
from inferq_worker.hand import Hand
from inferq_worker.models.repository import ModelFile
from inferq_worker.observe.metrics import Metrics
from inferq_worker.pipeline import Pipeline
from inferq_worker.poison import RunRecord
from inferq_worker.runtime import BreakerSettings, RuntimeSettings, open_session
from inferq_worker.runtime.engine import OrtRun
from inferq_worker.scheduling import Batcher, EarliestDeadline, LatencyTable, RunningP95
from inferq_worker.scheduling.clock import LoopClock
from inferq_worker.served import ServedModel
from inferq_worker.tasks import Tasks
from inferq_worker.windows import Window
from inferq_worker.work import Request, WorkItem

if TYPE_CHECKING:
    from collections.abc import Sequence

    from inferq.outcome import Outcome
    from inferq_worker.runtime import Session
    from inferq_worker.runtime.interface import Feeds
    from inferq_worker.work import Answer

BATCH_ROWS = 32
RUN_S = 0.005
AHEAD_BATCHES = 3
"""Batches' worth of jobs that wait at a time, as a window would hold them."""


class NativeRuns:
    """CPU seconds of the native runs that the worker makes; one at a time, each measured on its own thread."""

    def __init__(self) -> None:
        self.cpu_s = 0.0
        run = OrtRun.run

        def timed(native: OrtRun) -> Feeds:
            started_s = time.thread_time()
            try:
                return run(native)
            finally:
                self.cpu_s += time.thread_time() - started_s

        setattr(OrtRun, "run", timed)  # noqa: B010 - to a method, which mypy lets nobody assign


class NoStore:
    """Knows no outcome, keeps no record; costs what a call costs."""

    def record(self, ids: Sequence[str]) -> RunRecord:
        """A record of these jobs."""
        return RunRecord("bench/1", "bench", frozenset(ids), 0)

    async def claim(self, _record: RunRecord, ids: Sequence[str], *, forget: Sequence[str]) -> list[Outcome | None]:  # noqa: ARG002 - the interface
        """Nothing is known of any."""
        return [None] * len(ids)


class Sink:
    """Takes answers instead of packing and sending them, and lets the next jobs in."""

    def __init__(self) -> None:
        self.answers = 0
        self.came = asyncio.Event()

    async def finish(self, answers: Sequence[Answer], _record: RunRecord | None) -> None:
        """Count them."""
        assert all(answer.result.status == "ok" for answer in answers)
        self.answers += len(answers)
        self.came.set()


async def _no_lanes(_model: str, _paused: bool) -> None:
    """There are none to pause."""


class Bench:
    """The worker's middle, around one session."""

    def __init__(self, session: Session, group: asyncio.TaskGroup, latency: LatencyTable) -> None:
        clock = LoopClock(asyncio.get_running_loop(), time.monotonic)
        metrics = Metrics(CollectorRegistry(), role="gpu")
        model = ServedModel(
            ModelFile("calibrated", "1", Path("calibrated.onnx")),
            session,
            latency,
            Window(max_rows=BATCH_ROWS, first_rows=256),
        )
        models = {"calibrated": model}
        self.session = session
        self.settler = settler_of(FakeChannel())
        self.sink = Sink()
        triage: Any = None
        outbox: Any = None
        policy: EarliestDeadline[WorkItem] = EarliestDeadline(
            max_rows=BATCH_ROWS,
            max_bytes=2**30,
            max_wait_s=0.005,
            predict_s=lambda bucket, rows: latency.predict(rows, bucket),
        )
        self.hand = Hand(policy=policy, outbox=outbox, triage=triage, metrics=metrics)
        self.batcher = Batcher(policy, clock, self.hand.expired, self.hand.given_up)
        device, tasks, spare = Device(1, clock), Tasks(group), cast("Any", _NoCpu())
        breakers = Breakers(
            BreakerSettings(), models, _no_lanes, device=device, clock=clock, metrics=metrics, tasks=tasks
        )
        self.pipeline = Pipeline(
            models=models,
            batcher=self.batcher,
            hand=self.hand,
            clock=clock,
            device=device,
            triage=spare,
            breakers=breakers,
            evacuation=Evacuation(breakers, self.batcher, self.hand, spare),
            outbox=outbox,
            answerer=Answerer(worker="bench", role="gpu"),
            finisher=cast("Any", self.sink),
            store=cast("Any", NoStore()),
            after=RunningP95(0.003),
            beyond=RunningP95(0.003),
            batches_in_flight=8,
            metrics=metrics,
            tasks=tasks,
        )

    def _admit(self, rows: np.ndarray, first: int) -> None:
        """One job for each row, decoded, admitted and taken in."""
        now_s, deadline_ms = time.monotonic(), time.time_ns() // 10**6 + 600_000
        for number, row in enumerate(rows, first):
            tensor = Tensor.from_numpy(row[None])
            job = Job(id=f"job-{number}", model="calibrated", inputs={"x": tensor}, deadline_unix_ms=deadline_ms)
            delivery = delivery_of(b"", settler=self.settler, tag=number, received_s=now_s)
            item = admit(
                job, Request(delivery, "interactive"), job.inputs, self.session.info,
                max_rows=4096, deadline_s=now_s + 600, lane_rank=0,
            )  # fmt: skip
            self.batcher.add(item)
            self.hand.take(item)

    async def answer(self, rows: np.ndarray) -> float:
        """CPU seconds, of all threads, from the composition of batches to their results."""
        self.sink.answers = sent = 0
        started_s, admitting_s = time.process_time(), 0.0
        while self.sink.answers < len(rows):
            self.sink.came.clear()
            room = AHEAD_BATCHES * BATCH_ROWS - (sent - self.sink.answers)
            began_s = time.thread_time()
            self._admit(rows[sent : sent + room], sent)
            admitting_s += time.thread_time() - began_s
            sent = min(sent + room, len(rows))
            await self.sink.came.wait()
        return time.process_time() - started_s - admitting_s


class _NoCpu:
    def last_chance_s(self, _item: WorkItem) -> None:
        """Nobody to hand over to."""


def bare(session: onnxruntime.InferenceSession, batches: Sequence[np.ndarray]) -> float:
    """CPU seconds of the runs alone."""
    started_s = time.process_time()
    for batch in batches:
        session.run(None, {"x": batch})
    return time.process_time() - started_s


def raw_session(path: Path) -> onnxruntime.InferenceSession:
    """As the worker opens it."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.enable_mem_pattern = False
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def calibrated(folder: Path) -> Path:
    """A model whose run of a full batch takes about `RUN_S` on this machine."""
    batches = [np.random.default_rng(0).random((BATCH_ROWS, FEATURES), np.float32)] * 100
    steps = 16
    for _ in range(3):
        path = write_model(folder, steps, 0, width=1024)
        steps = max(1, round(steps * RUN_S / (bare(raw_session(path), batches) / len(batches))))
    return write_model(folder, steps, 0, width=1024)


async def measure(path: Path, rounds: int, batches: int) -> dict[str, Any]:
    """Medians over interleaved rounds; milliseconds of CPU for a batch."""
    rows = np.random.default_rng(0).random((batches * BATCH_ROWS, FEATURES), np.float32)
    packed = list(rows.reshape(batches, BATCH_ROWS, FEATURES))
    raw = raw_session(path)
    session = await open_session(ModelFile("calibrated", "1", path), RuntimeSettings(provider="cpu"))
    latency = LatencyTable(await session.warm_up([1, 2, 4, 8, 16, 32]))
    figures: dict[str, list[float]] = {"bare": [], "native": [], "own": []}
    native = NativeRuns()
    async with asyncio.TaskGroup() as group:
        bench = Bench(session, group, latency)
        serving = group.create_task(bench.pipeline.serve())
        interpreter.started()
        for number in range(rounds + 1):
            native.cpu_s = 0.0
            worker_s = await bench.answer(rows)
            spent = {"bare": bare(raw, packed), "native": native.cpu_s, "own": worker_s - native.cpu_s}
            if number:  # the first warms up
                for kind, cpu_s in spent.items():
                    figures[kind].append(cpu_s / batches * 1000)
        bench.batcher.close()
        serving.cancel()
    await session.close()
    ratios = [own / run for own, run in zip(figures["own"], figures["bare"], strict=True)]
    medians = {f"{kind}_ms_per_batch": round(statistics.median(values), 4) for kind, values in figures.items()}
    return {**medians, "overhead_ratio": round(statistics.median(ratios), 4)}


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--batches", type=int, default=100, help="batches of 32 jobs in a round (default 100)")
    arguments = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    interpreter.tune()
    with tempfile.TemporaryDirectory() as folder, asyncio.Runner(loop_factory=interpreter.loop_factory()) as runner:
        result = runner.run(measure(calibrated(Path(folder)), arguments.rounds, arguments.batches))
    print(
        f"  session.run alone      {result['bare_ms_per_batch']:.2f} ms of CPU a batch of {BATCH_ROWS} single-row jobs"
    )
    print(f"  the same in the worker {result['native_ms_per_batch']:.2f} ms")
    print(
        f"  the worker's own       {result['own_ms_per_batch']:.2f} ms: {result['overhead_ratio']:.1%} of session.run"
    )
    print(json.dumps({"bench": "overhead", **result}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
