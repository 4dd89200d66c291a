"""What does not find memory is answered in smaller runs, learned by shape, and tried again later; no row is lost."""

import contextlib
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engines import Calls, Doubling, info_of, items_of

from inferq_worker.runtime.caps import RowCaps, Trial
from inferq_worker.runtime.interface import Feeds, RowError, RunFailed, RunReport
from inferq_worker.runtime.turns import Turns

SHAPE = ((2,),)
BUCKETS = (1, 2, 4, 8, 16, 32)


def assert_all_doubled(report: RunReport, items: list[Feeds]) -> None:
    assert len(report.answers) == len(items)
    for answer, item in zip(report.answers, items, strict=True):
        assert not isinstance(answer, RowError), answer
        np.testing.assert_array_equal(answer["y"], item["x"] * 2)


def settle(caps: RowCaps, rows: int) -> int:
    """Run at the limit until it moves; returns the number of runs before."""
    runs = 0
    while caps.limit(SHAPE) == rows:
        caps.fitted(SHAPE, rows)
        runs += 1
        assert runs < 10_000
    return runs


def test_a_shape_that_nothing_is_known_of_may_be_as_large_as_ever() -> None:
    assert RowCaps(32).limit(SHAPE) == 32


def test_a_failure_caps_its_shape_and_no_other() -> None:
    caps = RowCaps(32)
    caps.overflowed(SHAPE, failed=16, fits=8)
    assert (caps.limit(SHAPE), caps.limit("other")) == (8, 32)
    assert caps.snapshot() == {SHAPE: 8}


def test_after_good_full_runs_the_next_size_is_tried_and_its_success_is_kept() -> None:
    caps = RowCaps(32, BUCKETS)
    caps.overflowed(SHAPE, failed=16, fits=8)
    settle(caps, 8)
    assert caps.limit(SHAPE) == 16
    caps.fitted(SHAPE, 16)
    assert caps.snapshot() == {SHAPE: 16}


def test_a_success_at_the_largest_size_forgets_the_cap() -> None:
    caps = RowCaps(16)
    caps.overflowed(SHAPE, failed=16, fits=8)
    settle(caps, 8)
    caps.fitted(SHAPE, 16)
    assert not caps.snapshot()


def test_a_size_that_fails_again_is_waited_for_twice_as_long() -> None:
    caps = RowCaps(32, BUCKETS)
    caps.overflowed(SHAPE, failed=16, fits=8)
    first = settle(caps, 8)
    caps.overflowed(SHAPE, failed=16, fits=8)
    assert settle(caps, 8) == 2 * first
    caps.overflowed(SHAPE, failed=16, fits=8)
    assert settle(caps, 8) == 4 * first


def test_runs_that_are_half_empty_say_nothing_about_more() -> None:
    caps = RowCaps(32)
    caps.overflowed(SHAPE, failed=16, fits=8)
    for _ in range(1000):
        caps.fitted(SHAPE, 4)
    assert caps.limit(SHAPE) == 8


def test_a_failed_probe_does_not_lower_the_cap_to_the_size_of_its_pieces() -> None:
    caps = RowCaps(32)
    caps.overflowed(SHAPE, failed=16, fits=8)
    caps.overflowed(SHAPE, failed=9, fits=5)
    assert caps.limit(SHAPE) == 8


def test_only_so_many_shapes_are_remembered_and_the_oldest_goes_first() -> None:
    caps = RowCaps(32)
    for number in range(1000):
        caps.overflowed(number, failed=2, fits=1)
    assert len(caps.snapshot()) == 256
    assert (caps.limit(0), caps.limit(999)) == (32, 1)


def test_a_size_that_failed_twice_and_never_succeeded_is_not_tried_a_third_time() -> None:
    trial = Trial(32)
    trial.overflowed(8)
    trial.check(8)
    trial.overflowed(8)
    with pytest.raises(RunFailed):
        trial.check(8)
    trial.fitted(8)
    trial.check(8)


@pytest.mark.parametrize("counts", [(1,) * 32, (32,), (5, 20, 7), (100, 1)])
def test_a_batch_that_finds_no_memory_is_answered_in_runs_that_do_and_the_next_fits_at_once(
    counts: tuple[int, ...],
) -> None:
    engine = Doubling(limit_rows=8)
    calls = Calls(engine, info_of(buckets=BUCKETS))
    assert_all_doubled(calls.new().answer(items_of(*counts)), items_of(*counts))
    assert calls.caps.snapshot() == {SHAPE: 8}
    engine.tried.clear()
    assert_all_doubled(calls.new().answer(items_of(*counts)), items_of(*counts))
    assert max(engine.tried) == 8


def test_a_single_row_that_finds_no_memory_is_told_so_and_costs_only_itself() -> None:
    engine = Doubling()
    engine.greedy = 5
    calls = Calls(engine, info_of())
    answers = calls.new().answer(items_of(*[1] * 16)).answers
    failed = {number: one for number, one in enumerate(answers) if isinstance(one, RowError)}
    assert list(failed) == [5]
    assert failed[5].code == "out_of_memory"


def test_a_greedy_row_does_not_make_the_batches_of_its_shape_small() -> None:
    engine = Doubling()
    engine.greedy = 5
    calls = Calls(engine, info_of())
    calls.new().answer(items_of(*[1] * 16))
    calls.new().answer(items_of(1, first=5))
    assert not calls.caps.snapshot()


def test_a_fixed_batch_and_jobs_that_run_alone_have_no_caps() -> None:
    for info in (info_of(4, fixed_rows=4), info_of(batchable=False)):
        calls = Calls(Doubling(limit_rows=3), info)
        answers = calls.new().answer(items_of(4, 4)).answers
        assert [one.code for one in answers if isinstance(one, RowError)] == ["out_of_memory"] * 2
        assert not calls.caps.snapshot()


def test_what_was_packed_beside_a_run_that_learned_a_cap_is_not_tried_in_vain() -> None:
    engine = Doubling(limit_rows=8)
    calls = Calls(engine, info_of())
    ahead = Calls(engine, calls.info)
    ahead.caps, ahead.turns = calls.caps, _TurnsAfter(lambda: calls.new().answer(items_of(*[1] * 32)))
    assert_all_doubled(ahead.new().answer(items_of(*[1] * 32)), items_of(*[1] * 32))
    assert engine.tried.count(32) == 1


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.lists(st.integers(1, 9), min_size=1, max_size=12)), max_size=12),
    st.booleans(),
)
def test_under_a_moving_limit_no_row_is_lost(batches: list[tuple[int, list[int]]], with_buckets: bool) -> None:
    engine = Doubling()
    calls = Calls(engine, info_of(buckets=BUCKETS if with_buckets else ()))
    for limit_rows, counts in batches:
        engine.limit_rows = limit_rows
        assert_all_doubled(calls.new().answer(items_of(*counts)), items_of(*counts))


@settings(max_examples=12, deadline=None)
@given(st.integers(1, 15), st.integers(1, 16), st.booleans())
def test_caps_converge_to_a_limit_and_rise_with_it(tight: int, later: int, with_buckets: bool) -> None:
    engine = Doubling()
    calls = Calls(engine, info_of(16, buckets=(1, 2, 4, 8, 16) if with_buckets else ()))
    for limit_rows, runs in ((tight, 60), (later, 300), (16, 700)):
        engine.limit_rows = limit_rows
        engine.tried.clear()
        for _ in range(runs):
            # As large as the scheduler would make it.
            some = items_of(calls.caps.limit(SHAPE))
            assert_all_doubled(calls.new().answer(some), some)
        assert sum(rows > limit_rows for rows in engine.tried) <= 14
        assert limit_rows / 2 <= calls.caps.snapshot().get(SHAPE, 16) <= limit_rows
    assert not calls.caps.snapshot()


class _TurnsAfter(Turns):
    """Something else happens on the device before the turn comes."""

    def __init__(self, first: Callable[[], object]) -> None:
        super().__init__(1)
        self._first = first

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        self._first()
        with super().taken():
            yield
