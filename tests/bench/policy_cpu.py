"""CPU that a worker spends on a job at saturation without deadlines: deadline scheduler against the plain batcher.

A command, not a test: `make bench-policy-cpu`. A worker of each policy takes turns with the other in short chunks, and
the medians of seven rounds are compared, because a machine drifts; the model is tiny, so that what is measured is the
worker. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
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

CHUNKS = 10
"""A round is so many turns for each policy."""
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def cpu_s(pid: int) -> float:
    """User and system CPU seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


async def spent_s(worker: Worker, client: Client, model: str, jobs: int) -> float:
    """CPU seconds of a worker for these jobs."""
    x = np.ones((1, 4), np.float32)
    before_s = cpu_s(worker.pid)
    answers = [answer async for answer in client.infer_many(model, ({"x": x} for _ in range(jobs)))]
    assert all(answer.error is None for answer in answers)
    return cpu_s(worker.pid) - before_s


async def measure(rounds: int, jobs: int) -> dict[str, list[float]]:
    """Microseconds for a job by policy, one figure a round.

    Both workers live all the time and take turns, a short chunk each: what a machine does to one, it does to the other.
    """
    figures: dict[str, list[float]] = {policy: [] for policy in POLICIES}
    with contextlib.ExitStack() as folders:
        models_of = {
            policy: models.scale(Path(folders.enter_context(tempfile.TemporaryDirectory())), features=4).rename(
                Path(folders.enter_context(tempfile.TemporaryDirectory())) / f"{policy}.onnx"
            )
            for policy in POLICIES
        }
        async with contextlib.AsyncExitStack() as workers, Client(reply="queue") as client:
            serving = {
                policy: await workers.enter_async_context(Worker(model, policy, max_rows=32))
                for policy, model in models_of.items()
            }
            for number in range(rounds + 1):
                spent = dict.fromkeys(POLICIES, 0.0)
                for chunk in range(CHUNKS):
                    for policy in POLICIES if (chunk + number) % 2 else reversed(POLICIES):
                        spent[policy] += await spent_s(serving[policy], client, policy, jobs // CHUNKS)
                if number:  # the first warms up
                    for policy in POLICIES:
                        figures[policy].append(spent[policy] / jobs * 1e6)
                        print(f"  round {number}: {policy:18} {figures[policy][-1]:6.1f} us", flush=True)
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
