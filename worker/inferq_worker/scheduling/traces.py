"""Arrivals made up for the simulator: Poisson or in bursts, with deadlines, job sizes and lanes mixed.

Pure: who calls brings the randomness, so that a seed is a trace.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from itertools import cycle
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Sequence
    from random import Random


@dataclass(frozen=True, slots=True)
class Arrival:
    """One job of a trace.

    Attributes:
        at_s: when it reaches the queue, seconds from the start.
        allowance_s: from then to its deadline; None = it has none.
        lane_rank: 0 is urgent, higher ones are bulk.
        bucket: jobs of equal bucket can share a batch.
    """

    at_s: float
    allowance_s: float | None = None
    rows: int = 1
    lane_rank: int = 0
    bucket: Hashable = 0
    serve_late: bool = False


@dataclass(frozen=True, slots=True)
class Phase:
    """A stretch of time with its own rate, as a multiple of the stream's."""

    factor: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Stream:
    """Jobs that come independently of each other.

    Attributes:
        rate_per_s: jobs a second; with phases, the rate that their factors multiply.
        allowances_s: one of them is drawn for each job; None = no deadline.
        rows: one of them is drawn for each job.
        buckets: one of them is drawn for each job.
        phases: repeated for ever; none = an even rate.
    """

    rate_per_s: float
    allowances_s: Sequence[float | None] = (None,)
    rows: Sequence[int] = (1,)
    lane_rank: int = 0
    buckets: Sequence[Hashable] = (0,)
    phases: Sequence[Phase] = ()


BURSTS = (Phase(2.5, 0.2), Phase(0.5, 0.6))
"""Two and a half times the rate for 200 ms, half of it for 600 ms: the same on average."""


def arrivals(random: Random, stream: Stream, seconds: float) -> Iterator[Arrival]:
    """Draw the jobs of a stream, in order, from 0 up to `seconds`."""
    start_s = 0.0
    for phase in cycle(stream.phases or (Phase(1.0, seconds),)):
        end_s = min(start_s + phase.seconds, seconds)
        # Poisson arrivals have no memory, so each phase begins anew.
        for at_s in _poisson(random, stream.rate_per_s * phase.factor, start_s, end_s):
            yield Arrival(
                at_s,
                random.choice(stream.allowances_s),
                random.choice(stream.rows),
                stream.lane_rank,
                random.choice(stream.buckets),
            )
        if end_s >= seconds:
            return
        start_s = end_s


def merged(random: Random, streams: Sequence[Stream], seconds: float) -> Iterator[Arrival]:
    """Draw the jobs of several streams, in order."""
    return heapq.merge(*(arrivals(random, stream, seconds) for stream in streams), key=lambda arrival: arrival.at_s)


def _poisson(random: Random, rate_per_s: float, start_s: float, end_s: float) -> Iterator[float]:
    at_s = start_s
    while rate_per_s > 0:
        at_s += random.expovariate(rate_per_s)
        if at_s >= end_s:
            return
        yield at_s
