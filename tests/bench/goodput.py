"""Goodput of the real thing under overload: broker, worker, calibrated model, open-loop Poisson load.

A command, not a test: `make bench-goodput`, or `python -m tests.bench.goodput` with the addresses of a stack in the
environment. For each load the same arrivals go to a worker with the deadline scheduler and to one with size-or-timeout;
beside them stand the bound min(1, capacity / offered) and what the simulator predicts for the run times that the worker
measured. Everything shares one machine, so figures are compared within one run only. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from onnx import TensorProto, helper
from tests import models

from inferq import Client
from inferq_worker.scheduling import EarliestDeadline, LatencyTable, SizeOrTimeout
from inferq_worker.scheduling.simulator import Setup, simulate
from inferq_worker.scheduling.traces import Arrival, Stream, arrivals

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from inferq_worker.scheduling import Policy
    from inferq_worker.scheduling.simulator import SimulatedJob

FEATURES, WIDTH = 64, 16_384
MAX_ROWS = 16
ROW_S, FIXED_S = 0.0065, 0.013
"""Run time that the model is calibrated to: about thirteen milliseconds and six and a half more for each row.

That is some 135 jobs a second on an idle machine: broker, store, clients and the worker's event loop need a core beside
the device's, and share two with it here.
"""
POLICIES = ("earliest_deadline", "size_or_timeout")


@dataclass(frozen=True, slots=True)
class Load:
    """One cell of the table; shares are of the offered jobs."""

    factor: float
    policy: str
    offered: int
    goodput: float
    bound: float
    simulated: float
    codes: dict[str, int]


def write_model(folder: Path, steps: int, fixed_steps: int, *, width: int = WIDTH) -> Path:
    """Tanh chains: `steps` over every row, `fixed_steps` over one row whatever the batch, which adds exactly zero.

    A row is small on the wire and made wide inside, so that what is measured is not the transport of its bytes.
    """
    nodes = [helper.make_node("Tile", ["x", "wide"], ["r0"])]
    nodes += [helper.make_node("Tanh", [f"r{i}"], [f"r{i + 1}"]) for i in range(steps)]
    nodes.append(helper.make_node("Slice", ["r0", "zero", "one", "zero"], ["f0"]))
    nodes += [helper.make_node("Tanh", [f"f{i}"], [f"f{i + 1}"]) for i in range(fixed_steps)]
    nodes.append(helper.make_node("Mul", [f"f{fixed_steps}", "nothing"], ["f"]))
    nodes.append(helper.make_node("Add", [f"r{steps}", "f"], ["sum"]))
    nodes.append(helper.make_node("ReduceMean", ["sum", "axes"], ["y"], keepdims=1))
    weights: dict[str, np.ndarray] = {
        "wide": np.array([1, width // FEATURES], np.int64),
        "zero": np.zeros(1, np.int64),
        "one": np.ones(1, np.int64),
        "axes": np.ones(1, np.int64),
        "nothing": np.zeros(1, np.float32),
    }
    inputs = [("x", TensorProto.FLOAT, ("n", FEATURES))]
    outputs = [("y", TensorProto.FLOAT, ("n", 1))]
    return models.write(folder / "calibrated.onnx", nodes, inputs, outputs, weights)


def calibrate(folder: Path) -> Path:
    """A model that takes about `FIXED_S` and `ROW_S` a row on this machine."""
    import onnxruntime  # noqa: PLC0415 - measured here, served by the worker

    path = write_model(folder, 10, 1)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    x = np.random.default_rng(0).random((MAX_ROWS, FEATURES), np.float32)
    runs = []
    for _ in range(9):
        started = time.perf_counter()
        session.run(None, {"x": x})
        runs.append(time.perf_counter() - started)
    step_s = sorted(runs)[len(runs) // 2] / (10 * MAX_ROWS)
    return write_model(folder, max(1, round(ROW_S / step_s)), max(1, round(FIXED_S / step_s)))


class Worker:
    """A worker process that serves one model with one policy; `knobs` are further settings."""

    def __init__(
        self, model: Path, policy: str, *, max_rows: int = MAX_ROWS, knobs: Mapping[str, object] | None = None
    ) -> None:
        self._model = model
        self._policy = policy
        self._max_rows = max_rows
        self._knobs = knobs or {}
        self._process: asyncio.subprocess.Process | None = None
        self._port = 0

    async def __aenter__(self) -> Self:
        settings = {"batching.policy": self._policy, "batching.max_rows": self._max_rows, "log.format": "json"}
        settings |= self._knobs
        arguments = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "inferq", "worker", "--model", str(self._model), "--admin-port", "0",
            "--provider", "cpu", *arguments, stderr=asyncio.subprocess.PIPE, limit=2**20,
        )  # fmt: skip
        self._drain = asyncio.create_task(self._read_log())
        async with asyncio.timeout(60):
            while not self._port or not await asyncio.to_thread(self._is_ready):  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.2)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)
            await self._process.wait()
            await self._drain

    @property
    def pid(self) -> int:
        """Of the worker."""
        assert self._process is not None
        return self._process.pid

    async def _read_log(self) -> None:
        assert self._process is not None
        assert self._process.stderr is not None
        async for line in self._process.stderr:
            event = json.loads(line) if line.startswith(b"{") else {}
            if event.get("message") == "admin.listening":
                self._port = event["port"]

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/readyz", timeout=2):
                return True
        except OSError:
            return False

    def run_s_by_rows(self) -> dict[int, float]:
        """What the worker has learned of the model's run time."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/status", timeout=5) as answer:
            status = json.load(answer)
        return {int(rows): ms / 1000 for rows, ms in status["models"]["calibrated"]["run_ms_by_rows"].items()}


def trace(rate: float, seconds: float, allowance_s: float, seed: int) -> list[Arrival]:
    """Poisson arrivals of single rows."""
    return list(arrivals(random.Random(seed), Stream(rate, (allowance_s,)), seconds))  # noqa: S311 - a load


async def watch(worker: Worker, seen: list[dict[int, float]]) -> None:
    """What the worker holds of the model's run time, once a second: the speed under this load, not after it."""
    while True:
        await asyncio.sleep(1)
        seen.append(await asyncio.to_thread(worker.run_s_by_rows))


def mean_table(seen: Sequence[dict[int, float]]) -> LatencyTable:
    """The mean of what was seen."""
    return LatencyTable({rows: sum(one[rows] for one in seen) / len(seen) for rows in seen[0]})


async def offer(client: Client, jobs: Sequence[Arrival]) -> Counter[str]:
    """Send jobs at their times, whatever becomes of those before; count answers in time, late, and by code."""
    x = np.random.default_rng(0).random((1, FEATURES), np.float32)
    counts: Counter[str] = Counter()
    started = time.monotonic()

    async def ask(arrival: Arrival) -> None:
        assert arrival.allowance_s is not None
        await asyncio.sleep(started + arrival.at_s - time.monotonic())
        due_s = time.monotonic() + arrival.allowance_s
        try:
            await client.infer("calibrated", {"x": x}, deadline_s=arrival.allowance_s, fallback="never")
        except Exception as error:  # noqa: BLE001 - counted, whatever it is
            counts[getattr(error, "code", type(error).__name__)] += 1
        else:
            counts["in_time" if time.monotonic() <= due_s else "late"] += 1

    await asyncio.gather(*(ask(arrival) for arrival in jobs))
    return counts


def predicted(policy_name: str, jobs: Sequence[Arrival], table: LatencyTable) -> float:
    """Goodput that the simulator expects of the same arrivals."""

    def policy() -> Policy[SimulatedJob]:
        kind = EarliestDeadline if policy_name == "earliest_deadline" else SizeOrTimeout
        return kind(
            max_rows=MAX_ROWS, max_bytes=2**40, max_wait_s=0.005, predict_s=lambda _bucket, rows: table.predict(rows)
        )

    setup = Setup(policy, lambda rows: table.predict(rows) or 0.0, hand_over_s=0.003, after_s=0.003)
    return simulate(jobs, setup).goodput


def line(load: Load, capacity: float) -> str:
    """One row of the table."""
    shares = f"goodput {load.goodput:6.1%}  bound {load.bound:6.1%}  simulated {load.simulated:6.1%}"
    return f"  {load.policy:18} {load.factor:.1f} x {capacity:5.0f}/s  {shares}  {load.codes}"


async def measure(model: Path, policy: str, factors: Sequence[float], seconds: float, seed: int) -> list[Load]:
    """One worker, all loads."""
    loads = []
    async with Worker(model, policy) as worker, Client(reply="queue") as client:
        allowance_s = max(0.4, 4 * worker.run_s_by_rows()[MAX_ROWS])
        await offer(client, trace(50, 4, allowance_s, seed))
        for factor in factors:
            capacity = MAX_ROWS / worker.run_s_by_rows()[MAX_ROWS]
            jobs = trace(capacity * factor, seconds, allowance_s, seed)
            seen = [worker.run_s_by_rows()]
            watching = asyncio.create_task(watch(worker, seen))
            counts = await offer(client, jobs)
            watching.cancel()
            # The machine is shared and its speed depends on the load: the bound is that of the speed during this one.
            table = mean_table(seen)
            capacity = MAX_ROWS / (table.predict(MAX_ROWS) or 1.0)
            offered = len(jobs) / seconds
            load = Load(
                factor,
                policy,
                len(jobs),
                counts["in_time"] / len(jobs),
                min(1.0, capacity / offered),
                predicted(policy, jobs, table),
                dict(counts),
            )
            print(line(load, capacity), flush=True)
            loads.append(load)
    return loads


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="length of each load (default 60)")
    parser.add_argument("--load", type=float, action="append", help="times capacity; may be repeated")
    parser.add_argument("--policy", action="append", choices=POLICIES, help="may be repeated (default: both)")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    if "INFERQ_BROKER__URL" not in os.environ:
        parser.error("no broker: run it as `make bench-goodput`, or inside `infra/local/stack.py run --`")
    with tempfile.TemporaryDirectory() as folder:
        model = calibrate(Path(folder))
        loads: list[Any] = []
        for policy in arguments.policy or POLICIES:
            factors = arguments.load or [0.8, 1.0, 1.2, 1.5]
            loads += asyncio.run(measure(model, policy, factors, arguments.seconds, arguments.seed))
    print(json.dumps({"bench": "goodput", "seconds": arguments.seconds, "loads": [asdict(load) for load in loads]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
