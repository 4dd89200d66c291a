"""Resident memory of a worker over 200,000 jobs of random sizes and shapes: does it stop growing?

A command, not a test: `make bench-memory`, or `python -m tests.bench.soak_memory` with the addresses of a stack in the
environment. A real client sends bundles through a real broker to a real worker; one job in a hundred is refused, and
shapes that were never seen before keep coming. Exit status 1 if memory grew by more than the limit over the second half
of the run. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from onnx import TensorProto, helper
from tests import models
from tests.bench.goodput import Worker

from inferq import Client
from inferq_worker.observe.memory import Resident, resident

if TYPE_CHECKING:
    from collections.abc import Iterator

JOBS = 200_000
MAX_SIDE, MAX_ROWS = 64, 8
USUAL_SIDES = (1, 7, 24, 64)
NEW_SHAPE, REFUSED = 0.01, 0.01
"""Shares of jobs: of a shape drawn from 4,096 instead of the usual 16, and with an input that the model refuses."""
KNOBS = {"lanes.bulk_window_rows": 8192}
"""So much in hand that jobs of one shape meet; otherwise nearly every job would run alone."""
SAMPLES = 100


@dataclass(frozen=True, slots=True)
class Sample:
    """Memory of the worker after so many answers."""

    jobs: int
    memory: Resident


def write_model(folder: Path) -> Path:
    """y = sum of x over its last axis, [n, h, w] to [n, h], with all three dynamic."""
    return models.write(
        folder / "soak.onnx",
        [helper.make_node("ReduceSum", ["x", "axes"], ["y"], keepdims=0)],
        [("x", TensorProto.FLOAT, ["n", "h", "w"])],
        [("y", TensorProto.FLOAT, ["n", "h"])],
        {"axes": np.array([2], np.int64)},
    )


def jobs_of(count: int, seed: int) -> Iterator[dict[str, np.ndarray]]:
    """Inputs of random rows and shapes; few have more than a quarter of a megabyte and travel through Redis."""
    random = np.random.default_rng(seed)
    numbers = random.random(MAX_ROWS * MAX_SIDE * MAX_SIDE, np.float32)
    for _ in range(count):
        rows = int(random.integers(1, MAX_ROWS + 1))
        sides = random.integers(1, MAX_SIDE + 1, 2) if random.random() < NEW_SHAPE else random.choice(USUAL_SIDES, 2)
        x = numbers[: rows * sides.prod()].reshape(rows, *sides)
        yield {"x": x.astype(np.float64) if random.random() < REFUSED else x}


async def soak(count: int, seed: int) -> list[Sample]:
    """Send the jobs, count the answers, and look at the worker's memory at even distances."""
    samples: list[Sample] = []
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder))
        async with (
            Worker(model, "earliest_deadline", max_rows=128, knobs=KNOBS) as worker,
            Client(reply="queue") as client,
        ):
            answered = refused = 0
            async for answer in client.infer_many(model.stem, jobs_of(count, seed), bundle_jobs=128, window_jobs=4096):
                answered += 1
                refused += answer.error is not None
                if answered % max(1, count // SAMPLES) == 0:
                    memory = resident(worker.pid)
                    assert memory is not None, "there is no /proc here to read the worker's memory from"
                    samples.append(Sample(answered, memory))
    assert answered == count
    assert refused < 2 * REFUSED * count + 10, f"{refused} of {count} jobs failed, but only {REFUSED:.0%} were bad"
    return samples


def growth_ratio(samples: list[Sample]) -> float:
    """Growth over the second half of the run, as a share: its highest samples at the end against those before.

    Peaks of a quarter of the run each, up to the half and up to the end: in between memory falls and rises by what is
    in hand at the time, which medians would take for growth.
    """
    quarter, half = len(samples) // 4, len(samples) // 2
    before = max(one.memory.bytes for one in samples[quarter:half])
    return max(one.memory.bytes for one in samples[-quarter:]) / before - 1


def main() -> int:
    """Run the soak."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=JOBS)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--limit-percent", type=float, default=1.0, help="most growth over the second half")
    arguments = parser.parse_args()
    started_s = time.monotonic()
    samples = asyncio.run(soak(arguments.jobs, arguments.seed))
    seconds = time.monotonic() - started_s
    for one in samples[:: max(1, len(samples) // 20)]:
        print(
            f"  {one.jobs:9,} jobs  {one.memory.bytes / 2**20:7.1f} MiB, {one.memory.anonymous_bytes / 2**20:.1f} anon"
        )
    percent = 100 * growth_ratio(samples)
    figures = [[one.jobs, one.memory.bytes] for one in samples]
    print(
        json.dumps(
            {
                "bench": "soak_memory",
                "jobs": arguments.jobs,
                "seconds": round(seconds, 1),
                "growth_percent": round(percent, 3),
                "limit_percent": arguments.limit_percent,
                "resident_bytes_by_jobs": figures,
            }
        )
    )
    return int(percent > arguments.limit_percent)


if __name__ == "__main__":
    sys.exit(main())
