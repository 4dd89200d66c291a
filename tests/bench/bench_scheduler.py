"""What a scheduler step costs: CPU per job at several lengths of the queue, against pushing and popping a heap.

A step is what one job causes: it is added, admission asks for the rows before it, and it has its share of the poll that
composes a batch. Both sides run in turn, so that a busy machine slows both. Run it as `python
tests/bench/bench_scheduler.py`; the last line is JSON. Exit status 1 when the promise is broken.
"""

from __future__ import annotations

import argparse
import heapq
import json
import statistics
import sys
import time
from itertools import count
from random import Random
from typing import TYPE_CHECKING

from inferq_worker.scheduling import LatencyTable
from inferq_worker.scheduling.earliest_deadline import EarliestDeadline
from inferq_worker.scheduling.simulator import Setup, SimulatedJob, simulate
from inferq_worker.scheduling.traces import Stream, arrivals

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

MAX_ROWS = 32
ROUNDS = 7
SPREAD_S = 1_000.0
ORDER = count()
"""Numbers the entries of the heap, so that two jobs are never compared."""
WAITING = (1_000, 10_000, 100_000)
MOST_TIMES_HEAPQ = 10.0
MOST_GROWTH = 1.25
"""Against the heap's own growth from the shortest queue to the longest: that is log n, and what caches do not hold."""
LATENCY = LatencyTable({rows: 0.005 + 0.0005 * rows for rows in (1, 2, 4, 8, 16, 32)})


class Jobs:
    """Jobs due within `SPREAD_S` of their arrival; time passes so that `waiting` of them wait when each leaves just in
    time, whatever holds them.
    """

    def __init__(self, waiting: int) -> None:
        self._random = Random(waiting)  # noqa: S311 - a seed is a trace
        self._now_s = 1_000.0
        self._step_s = SPREAD_S / 2 / waiting

    def take(self, jobs: int) -> list[SimulatedJob]:
        taken = []
        for _ in range(jobs):
            self._now_s += self._step_s
            due_s = self._now_s + SPREAD_S * self._random.random()
            taken.append(SimulatedJob(1, 0, 0, 0.0, 0.0, due_s, serve_late=False))
        return taken


def scheduler_s(policy: EarliestDeadline[SimulatedJob], jobs: Sequence[SimulatedJob]) -> float:
    """CPU seconds for as many steps as there are jobs; the queue is as long afterwards as before."""
    began_s = time.process_time()
    for number, job in enumerate(jobs, 1):
        policy.rows_ahead(job.deadline_s or 0.0)
        policy.target_rows(job.bucket)
        policy.add(job)
        if number % MAX_ROWS == 0:
            policy.poll(0.0, free=True)
    return time.process_time() - began_s


def heapq_s(heap: list[tuple[float, int, SimulatedJob]], jobs: Sequence[SimulatedJob]) -> float:
    """The same with a heap into which they are pushed and from which the earliest are popped."""
    began_s = time.process_time()
    for job in jobs:
        heapq.heappush(heap, (job.deadline_s or 0.0, next(ORDER), job))
        heapq.heappop(heap)
    return time.process_time() - began_s


def measure(waiting: int, steps: int, rounds: int = ROUNDS) -> tuple[float, float, float]:
    """Medians of the CPU seconds of one step, of one push and pop, and of their ratio in the same round."""
    policy: EarliestDeadline[SimulatedJob] = EarliestDeadline(
        max_rows=MAX_ROWS, max_bytes=1 << 40, max_wait_s=0.005, predict_s=lambda _bucket, rows: LATENCY.predict(rows)
    )
    heap: list[tuple[float, int, SimulatedJob]] = []
    jobs = Jobs(waiting)
    for job in jobs.take(waiting):
        policy.add(job)
        heapq.heappush(heap, (job.deadline_s or 0.0, next(ORDER), job))
    taken: list[tuple[float, float]] = []
    for _ in range(rounds + 1):
        steps_of = jobs.take(steps)
        ours_s = scheduler_s(policy, steps_of)
        heap_s = heapq_s(heap, steps_of)
        taken.append((ours_s / steps, heap_s / steps))
        assert len(policy) == len(heap) == waiting, "every batch was full"
    # The first round warms up.
    ours, heaps = zip(*taken[1:], strict=True)
    times = [mine / heap for mine, heap in taken[1:]]
    return statistics.median(ours), statistics.median(heaps), statistics.median(times)


def simulated(jobs: int) -> tuple[float, float]:
    """Seconds to simulate so many jobs at 6 % overload, and the goodput."""
    run_s: Callable[[int], float] = lambda rows: 0.005 + 0.0005 * rows  # noqa: E731 - one formula
    setup = Setup(
        policy=lambda: EarliestDeadline(
            max_rows=40, max_bytes=1 << 40, max_wait_s=0.005, predict_s=lambda _bucket, rows: run_s(rows)
        ),
        run_s=run_s,
    )
    began_s = time.process_time()
    trace = arrivals(Random(1), Stream(1_700.0, (0.05,)), jobs / 1_700.0)  # noqa: S311 - a seed is a trace
    report = simulate(trace, setup)
    return time.process_time() - began_s, report.goodput


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6_400, help="steps in a round (default %(default)s)")
    parser.add_argument("--simulate", type=int, default=1_000_000, metavar="JOBS", help="0 = leave it out")
    args = parser.parse_args(argv)
    print(f"{'waiting':>8}  {'step us':>8}  {'heapq us':>8}  {'times':>6}")
    results = {}
    for waiting in WAITING:
        ours_s, heap_s, times = measure(waiting, args.steps)
        results[waiting] = {"step_us": ours_s * 1e6, "heapq_us": heap_s * 1e6, "times_heapq": times}
        print(f"{waiting:8,}  {ours_s * 1e6:8.2f}  {heap_s * 1e6:8.2f}  {times:6.1f}")
    growth = results[WAITING[-1]]["times_heapq"] / results[WAITING[0]]["times_heapq"]
    held = results[WAITING[0]]["times_heapq"] <= MOST_TIMES_HEAPQ and growth <= MOST_GROWTH
    print(f"growth from {WAITING[0]:,} to {WAITING[-1]:,} waiting, against the heap's: {growth:.2f}")
    print(f"at most {MOST_TIMES_HEAPQ:.0f} times heapq at {WAITING[0]:,}, growing like it: {'yes' if held else 'NO'}")
    summary: dict[str, object] = {"waiting": results, "growth": growth, "held": held}
    if args.simulate:
        cpu_s, goodput = simulated(args.simulate)
        print(f"{args.simulate:,} jobs simulated in {cpu_s:.1f} s of CPU; goodput {goodput:.2%}")
        summary["simulation"] = {"jobs": args.simulate, "cpu_s": cpu_s, "goodput": goodput}
    print(json.dumps(summary))
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
