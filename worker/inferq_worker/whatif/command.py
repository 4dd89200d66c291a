"""`inferq whatif`: what a person types, and what is simulated for it."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from inferq.commands import CommandError, add_command, settings_of
from inferq_worker.scheduling.simulator import simulate
from inferq_worker.scheduling.traces import BURSTS, Arrival, Stream, merged
from inferq_worker.whatif.cases import POLICIES, Case, SchedulingSettings, parse_case
from inferq_worker.whatif.latencies import Latency, fetch_latency, parse_latency
from inferq_worker.whatif.plot import svg
from inferq_worker.whatif.recorded import read_trace, shifted
from inferq_worker.whatif.report import Outcome, as_json, histogram, outcome, table

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from inferq.commands import Subparsers

_DESCRIPTION = """\
Replays arrivals through the scheduler's own code in simulated time, and says what would have come of them: goodput (the
share of all jobs that is answered by its deadline), latencies, batch sizes, drops. A million jobs take well under a
minute for each case.

The load is made up (Poisson, at each --rate, with the deadlines of --deadline) or recorded (--trace). The device runs
as long as --latency says, or as a worker measured. Compared are earliest_deadline and size_or_timeout with the
configured limits, or what --case says.

Goodput never exceeds the bound (capacity over load) for long, but for jobs without deadline: they only wait.

A case is "NAME: KNOB=VALUE ...". Knobs, with seconds in those that end in _s:
  policy            earliest_deadline or size_or_timeout
  max_rows          largest batch; like max_wait_s and the windows it is by default what the worker's configuration says
  max_wait_s        longest wait for company while the device is free
  margin_s          kept between the expected end of a run and a deadline (0.002)
  bulk_share        rows that bulk jobs get under overload (0.1)
  window_jobs       urgent jobs in hand, beyond which the broker is first in, first out; 0 = no limit
  bulk_window_jobs  the same for bulk
  hand_over_s       the next batch is frozen this long before the running one ends (0.002)
  gap_s             the device idles this long between two runs (0)
  after_s           from the end of a run to the answer (0.001)
  cpu_lanes         jobs that CPU workers run at a time (0: no diversion), each for
  cpu_run_s         seconds
  admit             yes or no: judge jobs on arrival
  spread            runs take up to this share longer or shorter than predicted (0)"""
_EXAMPLES = """\
inferq whatif
inferq whatif --latency table:1=5.5,8=9,32=21 --rate 800 --rate 1400 --deadline 0.05
inferq whatif --latency-from http://127.0.0.1:9180/status --rate 500 --deadline 0.04,0.2 --bursty
inferq whatif --rate 1700 --deadline 0.2 --case "gpu only:" --case "with cpus: cpu_lanes=8 cpu_run_s=0.025"
inferq whatif --rate 1000 --bulk-rate 900 --case "tenth:" --case "half: bulk_share=0.5"
inferq whatif --trace yesterday.csv --speed 1 --speed 2 --json
inferq whatif --plot goodput.svg"""
_LOADS = (0.5, 0.8, 0.9, 1.0, 1.1, 1.3, 1.6)
"""Without --rate: these multiples of what the device does at best."""


@dataclass(frozen=True, slots=True)
class _Load:
    """Arrivals to replay: a list, or streams to draw them from anew for each case."""

    offered_per_s: float
    mean_rows: float
    recorded: Sequence[Arrival] = ()
    streams: Sequence[Stream] = ()
    seconds: float = 0.0

    def trace(self, seed: int) -> Iterator[Arrival]:
        if self.recorded:
            return iter(self.recorded)
        return merged(Random(seed), self.streams, self.seconds)  # noqa: S311 - a seed is a trace


def register(subparsers: Subparsers) -> None:
    """Add `inferq whatif`."""
    parser = add_command(
        subparsers,
        "whatif",
        summary="simulate the scheduler: what a configuration would do under a load",
        description=_DESCRIPTION,
        examples=_EXAMPLES,
    )
    load = parser.add_argument_group("load")
    load.add_argument("--rate", type=_positive, action="append", metavar="JOBS", help="jobs a second; may be repeated")
    load.add_argument(
        "--deadline", type=_deadlines, default=(0.05,), metavar="S,...", help="one is drawn for each job (default 0.05)"
    )
    load.add_argument("--rows", type=_rows, default=(1,), metavar="N,...", help="one is drawn for each job (default 1)")
    load.add_argument("--shapes", type=int, default=1, metavar="N", help="jobs of as many shapes that share no batch")
    load.add_argument("--bursty", action="store_true", help="2.5 times the rate for 200 ms, half of it for 600 ms")
    load.add_argument(
        "--bulk-rate", type=_positive, metavar="JOBS", help="bulk jobs a second besides, without deadline"
    )
    load.add_argument("--jobs", type=int, default=20_000, help="jobs at each rate (default %(default)s)")
    load.add_argument("--seed", type=int, default=1, help="another one draws another load (default %(default)s)")
    load.add_argument(
        "--trace", type=Path, metavar="FILE", help="JSON lines or .csv with at_s and, as wanted, deadline_s, rows, lane"
    )
    load.add_argument(
        "--speed", type=_positive, action="append", metavar="TIMES", help="replay the trace so much faster; repeatable"
    )
    device = parser.add_argument_group("device")
    source = device.add_mutually_exclusive_group()
    source.add_argument(
        "--latency",
        default="linear:5:0.5",
        metavar="TABLE",
        help="linear:MS:MS_PER_ROW or table:ROWS=MS,... (default %(default)s)",
    )
    source.add_argument("--latency-from", metavar="STATUS", help="what a worker measured: its /status, URL or file")
    device.add_argument("--model", metavar="NAME", help="which model of --latency-from")
    parser.add_argument("--case", action="append", metavar='"NAME: KNOB=VALUE ..."', help="compare this; repeatable")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="draw goodput by load as well")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Simulate every case under every load and print what came of it."""
    base = Case.configured(settings_of(args, SchedulingSettings))
    cases = [parse_case(text, base) for text in args.case or [f"{name}: policy={name}" for name in POLICIES]]
    if len({case.name for case in cases}) < len(cases):
        raise CommandError("two --case have the same name")
    latency = fetch_latency(args.latency_from, args.model) if args.latency_from else parse_latency(args.latency)
    loads = _recorded(args) if args.trace else _made_up(args, latency, max(case.max_rows for case in cases))
    outcomes = [_simulate(case, load, latency, args.seed) for load in loads for case in cases]
    if args.plot:
        _write(args.plot, svg(outcomes, f"goodput, runs of {latency.label}"))
    jobs = f"{outcomes[0].jobs:,} recorded jobs" if args.trace else f"about {args.jobs:,} jobs at each rate"
    _print(outcomes, f"runs of {latency.label}; {jobs}", as_text=not args.json)
    return 0


def _simulate(case: Case, load: _Load, latency: Latency, seed: int) -> Outcome:
    if sys.stderr.isatty():
        print(f"{load.offered_per_s:,.0f} jobs/s, {case.name} ...", end="\r", file=sys.stderr)
    noise = Random(seed)  # noqa: S311 - same
    report = simulate(load.trace(seed), case.setup(latency, noise))
    jobs_per_s = case.jobs_per_s(latency, load.mean_rows)
    return outcome(case.name, report, offered_per_s=load.offered_per_s, jobs_per_s=jobs_per_s)


def _made_up(args: argparse.Namespace, latency: Latency, max_rows: int) -> list[_Load]:
    if args.speed:
        raise CommandError("--speed goes with --trace; for a made-up load, say --rate")
    if min(args.jobs, args.shapes) < 1:
        raise CommandError("--jobs and --shapes are at least 1")
    mean_rows = sum(args.rows) / len(args.rows)
    best_per_s = latency.rows_per_s(max_rows) / mean_rows
    urgent = Stream(1.0, args.deadline, args.rows, 0, range(args.shapes), BURSTS if args.bursty else ())
    loads = []
    for rate_per_s in args.rate or [best_per_s * share for share in _LOADS]:
        streams = [replace(urgent, rate_per_s=rate_per_s)]
        if args.bulk_rate:
            streams.append(replace(urgent, rate_per_s=args.bulk_rate, allowances_s=(None,), lane_rank=1, phases=()))
        offered_per_s = sum(stream.rate_per_s for stream in streams)
        loads.append(_Load(offered_per_s, mean_rows, streams=streams, seconds=args.jobs / offered_per_s))
    return loads


def _recorded(args: argparse.Namespace) -> list[_Load]:
    if args.rate or args.bulk_rate:
        raise CommandError("a recorded trace has its own rate; to make it faster, say --speed")
    trace = read_trace(args.trace)
    mean_rows = sum(arrival.rows for arrival in trace) / len(trace)
    seconds = trace[-1].at_s or 1.0
    return [
        _Load(len(trace) / seconds * speed, mean_rows, recorded=shifted(trace, 0.0, speed))
        for speed in args.speed or [1.0]
    ]


def _print(outcomes: Sequence[Outcome], heading: str, *, as_text: bool) -> None:
    if as_text:
        print(heading, table(outcomes), histogram(outcomes), sep="\n\n")
    else:
        print(json.dumps({"simulated": heading, "outcomes": as_json(outcomes)}, indent=2))


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CommandError(f"cannot write {path}: {error}") from error


def _positive(text: str) -> float:
    number = float(text)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return number


def _deadlines(text: str) -> tuple[float | None, ...]:
    return tuple(None if part == "none" else _positive(part) for part in text.split(","))


def _rows(text: str) -> tuple[int, ...]:
    rows = tuple(int(part) for part in text.split(","))
    if min(rows) < 1:
        raise argparse.ArgumentTypeError("a job has at least one row")
    return rows
