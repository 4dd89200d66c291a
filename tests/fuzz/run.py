"""Feeds the decoders millions of bodies that nobody should send: `python -m tests.fuzz --minutes 10` (`make fuzz`).

Several processes; each keeps its current body in a file, so that one that kills the process is known afterwards. The
last line is JSON; the exit status is 0 only if nothing crashed, nothing unexpected was raised and memory stayed flat.
"""

import argparse
import json
import mmap
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random, SystemRandom

from tests.fuzz.bodies import Bodies, seeds
from tests.fuzz.targets import try_body

_WARM_UP_BODIES = 50_000
_BODIES_BETWEEN_LOOKS = 500_000
_MOST_ERRORS = 20
_SLOW_S = 2.0
_GROWTH_BYTES = 32 * 2**20
_BODY_FILE_BYTES = 16 * 2**20


@dataclass(slots=True)
class Report:
    """What one process found."""

    bodies: int = 0
    taken: int = 0
    errors: list[str] = field(default_factory=list)
    slowest_s: float = 0.0
    slowest_body: str = ""
    memory_bytes: list[int] = field(default_factory=list)


def fuzz(seed: int, *, bodies: int, seconds: float, keep: mmap.mmap | None = None) -> Report:
    """Try so many bodies, or for so long, whichever ends first.

    Args:
        seed: of all choices; the same seed makes the same bodies.
        bodies: at most.
        seconds: at most.
        keep: holds the length (8 bytes) and the bytes of the body under way.
    """
    report = Report()
    source = Bodies(Random(seed), seeds())  # noqa: S311 - repeatable, not secret
    give_up_s = time.monotonic() + seconds
    while report.bodies < bodies and (report.bodies % 256 or time.monotonic() < give_up_s):
        body = source.next()
        if keep is not None:
            keep[: 8 + len(body)] = len(body).to_bytes(8, "big") + body
        started_s = time.thread_time()
        try:
            report.taken += try_body(body) > 0
        except Exception:  # noqa: BLE001 - that is what is looked for
            if len(report.errors) < _MOST_ERRORS:
                report.errors.append(f"{traceback.format_exc(limit=-3)}\nbody: {body.hex()[:4000]}")
        took_s = time.thread_time() - started_s
        if took_s > report.slowest_s:
            report.slowest_s, report.slowest_body = took_s, body.hex()[:4000]
        report.bodies += 1
        if report.bodies == _WARM_UP_BODIES or report.bodies % _BODIES_BETWEEN_LOOKS == 0:
            report.memory_bytes.append(_memory_bytes())
    report.memory_bytes.append(_memory_bytes())
    return report


def _memory_bytes() -> int:
    """Resident memory of this process alone: without the file of the current body, which the longest one fills."""
    resident, shared = map(int, Path("/proc/self/statm").read_text().split()[1:3])
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


def _child(pipe: Connection, file: str, seed: int, bodies: int, seconds: float) -> None:
    with Path(file).open("r+b") as opened, mmap.mmap(opened.fileno(), _BODY_FILE_BYTES) as keep:
        pipe.send(fuzz(seed, bodies=bodies, seconds=seconds, keep=keep))


def main(arguments: Sequence[str]) -> int:
    """Run the processes and print what they found."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="longest time (default 10)")
    parser.add_argument("--bodies", type=int, default=10_000_000, help="most bodies, all together (default 10 million)")
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    parser.add_argument("--seed", type=int, default=None, help="repeat a run; default: a new one")
    options = parser.parse_args(arguments)
    seed = SystemRandom().randrange(2**32) if options.seed is None else options.seed
    print(f"seed {seed}, {options.processes} processes, up to {options.minutes:g} minutes", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        reports, crashes = _run(Path(folder), seed, options)
    for text in [error for report in reports for error in report.errors] + crashes:
        print(text)
    return summarize(seed, reports, crashes)


def _run(folder: Path, seed: int, options: argparse.Namespace) -> tuple[list[Report], list[str]]:
    context = multiprocessing.get_context("spawn")
    running = []
    for number in range(options.processes):
        file = folder / str(number)
        with file.open("wb") as opened:
            opened.truncate(_BODY_FILE_BYTES)
        ours, theirs = context.Pipe(duplex=False)
        share = -(-options.bodies // options.processes)
        process = context.Process(target=_child, args=(theirs, str(file), seed + number, share, options.minutes * 60))
        process.start()
        theirs.close()
        running.append((process, ours, file))
    reports, crashes = [], []
    for process, pipe, file in running:
        try:
            reports.append(pipe.recv())
        except EOFError:
            process.join()
            with file.open("rb") as opened:
                size = int.from_bytes(opened.read(8), "big")
                crashes.append(f"a process ended with {process.exitcode} over the body {opened.read(size).hex()}")
        process.join()
    return reports, crashes


def summarize(seed: int, reports: list[Report], crashes: list[str]) -> int:
    """Print one line of JSON; returns the exit status."""
    errors = sum(len(report.errors) for report in reports)
    grown = max((report.memory_bytes[-1] - report.memory_bytes[0] for report in reports), default=0)
    slowest = max(reports, key=lambda report: report.slowest_s, default=Report())
    ok = bool(reports) and not (errors or crashes) and grown < _GROWTH_BYTES and slowest.slowest_s < _SLOW_S
    if slowest.slowest_s >= _SLOW_S:
        print(f"slow body: {slowest.slowest_body}")
    figures = {
        "ok": ok,
        "seed": seed,
        "bodies": sum(report.bodies for report in reports),
        "taken": sum(report.taken for report in reports),
        "crashes": len(crashes),
        "unexpected_errors": errors,
        "slowest_ms": round(slowest.slowest_s * 1000, 1),
        "memory_mib": [[round(some / 2**20, 1) for some in report.memory_bytes] for report in reports],
    }
    print(json.dumps(figures))
    return 0 if ok else 1
