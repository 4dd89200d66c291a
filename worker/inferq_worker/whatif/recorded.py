"""Arrivals that were recorded, from a file: JSON lines or CSV."""

from __future__ import annotations

import csv
import json
import math
from typing import TYPE_CHECKING, Any

from inferq.commands import CommandError
from inferq_worker.scheduling.traces import Arrival

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path
    from typing import TextIO

_KEYS = frozenset({"at_s", "deadline_s", "rows", "lane"})


def read_trace(path: Path) -> list[Arrival]:
    """Read a recorded trace and sort it; its first job comes at 0.

    A record has `at_s` (seconds on any clock) and, as far as wanted, `deadline_s` (seconds from then on; empty = none),
    `rows` (1) and `lane` ("interactive" or 0; all others are bulk).

    Raises:
        CommandError: the file cannot be read, or a line of it.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            records = _csv(file) if path.suffix.lower() == ".csv" else _json_lines(file)
            arrivals = [_arrival(record, f"{path}, line {line}") for line, record in records]
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"cannot read the trace {path}: {error}") from error
    if not arrivals:
        raise CommandError(f"the trace {path} has no jobs")
    arrivals.sort(key=lambda arrival: arrival.at_s)
    return shifted(arrivals, -arrivals[0].at_s, 1.0)


def shifted(arrivals: list[Arrival], by_s: float, speed: float) -> list[Arrival]:
    """The same jobs at other times; deadlines stay as long as they were."""
    return [
        Arrival((one.at_s + by_s) / speed, one.allowance_s, one.rows, one.lane_rank, one.bucket, one.serve_late)
        for one in arrivals
    ]


def _csv(file: TextIO) -> Iterator[tuple[int, Mapping[str, Any]]]:
    reader = csv.DictReader(file)
    for record in reader:
        yield reader.line_num, {key: value for key, value in record.items() if value not in ("", None)}


def _json_lines(file: TextIO) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for number, line in enumerate(file, 1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except ValueError as error:
                raise CommandError(f"{file.name}, line {number}: not JSON ({error})") from error


def _arrival(record: Mapping[str, Any], where: str) -> Arrival:
    if not isinstance(record, dict) or not record.keys() <= _KEYS or "at_s" not in record:
        raise CommandError(
            f"{where}: a job has at_s and, as far as wanted, deadline_s, rows and lane; here is {record}"
        )
    deadline, lane = record.get("deadline_s"), record.get("lane", 0)
    try:
        allowance_s = None if deadline is None else float(deadline)
        arrival = Arrival(float(record["at_s"]), allowance_s, int(record.get("rows", 1)), _rank(lane))
    except (TypeError, ValueError) as error:
        raise CommandError(f"{where}: {error}") from error
    if not math.isfinite(arrival.at_s + (allowance_s or 0.0)):
        raise CommandError(f"{where}: times are finite; leave deadline_s out for a job that has none")
    if arrival.rows < 1:
        raise CommandError(f"{where}: a job has at least one row, not {arrival.rows}")
    return arrival


def _rank(lane: object) -> int:
    return 0 if str(lane) in ("0", "interactive") else 1
