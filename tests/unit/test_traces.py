"""Made-up arrivals have the rate, the bursts and the mixture that they are said to have; a seed is a trace."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from inferq_worker.scheduling.traces import BURSTS, Phase, Stream, arrivals, merged


def drawn(stream: Stream, seconds: float = 20.0, seed: int = 1) -> list[float]:
    return [arrival.at_s for arrival in arrivals(Random(seed), stream, seconds)]  # noqa: S311 - a seed is a trace


def test_poisson_arrivals_have_their_rate_and_their_spread() -> None:
    times_s = drawn(Stream(1_000))
    assert len(times_s) == pytest.approx(20_000, rel=0.03)
    a_second = Counter(int(at_s) for at_s in times_s)
    variance = sum((count - 1_000) ** 2 for count in a_second.values()) / len(a_second)
    assert 300 < variance < 2_500, "about the mean: neither a metronome nor bursts"


def test_they_come_in_order_and_end_in_time() -> None:
    times_s = drawn(Stream(500, phases=BURSTS), seconds=3.3)
    assert times_s == sorted(times_s)
    assert 0 < times_s[0] < times_s[-1] < 3.3


def test_bursts_keep_the_mean_rate() -> None:
    times_s = drawn(Stream(1_000, phases=BURSTS), seconds=40)
    assert len(times_s) == pytest.approx(40_000, rel=0.03)
    in_burst = sum(at_s % 0.8 < 0.2 for at_s in times_s)
    assert in_burst / len(times_s) == pytest.approx(2.5 * 0.2 / 0.8, rel=0.03)


def test_a_phase_may_be_silent() -> None:
    assert all(at_s % 2.0 >= 1.0 for at_s in drawn(Stream(50, phases=(Phase(0.0, 1.0), Phase(1.0, 1.0)))))


def test_no_rate_is_no_job() -> None:
    assert drawn(Stream(0.0)) == []


def test_deadlines_rows_and_shapes_are_drawn_from_what_there_is() -> None:
    stream = Stream(1_000, (0.04, None), (1, 8), 1, ("a", "b"))
    jobs = list(arrivals(Random(1), stream, 2.0))  # noqa: S311 - a seed is a trace
    kinds = Counter((job.allowance_s, job.rows, job.lane_rank, job.bucket) for job in jobs)
    assert len(kinds) == 8
    assert {rank for _, _, rank, _ in kinds} == {1}


def test_streams_are_merged_in_order() -> None:
    random = Random(1)  # noqa: S311 - a seed is a trace
    jobs = list(merged(random, [Stream(100, (0.05,)), Stream(50, lane_rank=1)], 5.0))
    assert [job.at_s for job in jobs] == sorted(job.at_s for job in jobs)
    assert Counter(job.lane_rank for job in jobs)[0] > Counter(job.lane_rank for job in jobs)[1] > 0


def test_a_seed_is_a_trace() -> None:
    assert drawn(Stream(100), seed=3) == drawn(Stream(100), seed=3) != drawn(Stream(100), seed=4)
