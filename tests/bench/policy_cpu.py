"""CPU that a worker spends on a job at saturation without deadlines: deadline scheduler against the plain batcher.

A command, not a test: `make bench-policy-cpu`. Rounds are interleaved (one policy, then the other, seven times) and
medians compared, because a machine drifts; the model is tiny, so that what is measured is the worker. The last line is
JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

import numpy as np
from tests import models
from tests.bench.goodput import POLICIES, Worker

from inferq import Client

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def cpu_s(pid: int) -> float:
    """User and system CPU seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


async def one_round(model: Path, policy: str, jobs: int) -> float:
    """Microseconds of worker CPU for a job."""
    x = np.ones((1, 4), np.float32)
    async with Worker(model, policy, max_rows=32) as worker, Client(reply="queue") as client:
        for count in (jobs // 5, jobs):
            before_s = cpu_s(worker.pid)
            answers = [answer async for answer in client.infer_many(model.stem, ({"x": x} for _ in range(count)))]
            assert all(answer.error is None for answer in answers)
            spent_s = cpu_s(worker.pid) - before_s
    return spent_s / jobs * 1e6


async def measure(rounds: int, jobs: int) -> dict[str, list[float]]:
    """Microseconds for a job by policy, one figure a round."""
    figures: dict[str, list[float]] = {policy: [] for policy in POLICIES}
    with tempfile.TemporaryDirectory() as folder:
        model = models.scale(Path(folder), features=4)
        for number in range(rounds):
            for policy in POLICIES if number % 2 else reversed(POLICIES):
                figures[policy].append(await one_round(model, policy, jobs))
                print(f"  round {number + 1}: {policy:18} {figures[policy][-1]:6.1f} us", flush=True)
    return figures


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--jobs", type=int, default=10_000, help="jobs a round")
    arguments = parser.parse_args()
    figures = asyncio.run(measure(arguments.rounds, arguments.jobs))
    medians = {policy: statistics.median(values) for policy, values in figures.items()}
    ratio = medians["earliest_deadline"] / medians["size_or_timeout"]
    print(json.dumps({"bench": "policy_cpu", "us_per_job": medians, "ratio": round(ratio, 4)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
