"""The runs of one call copy no more than promised, and never touch what is still to be run or already handed out."""

import gc
import threading
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engines import Calls, Doubling, DoublingRun, info_of, items_of

from inferq_worker.runtime.interface import Feeds, RowError, RunReport


class Witness(Doubling):
    """Notes what each run was given when it was packed, and fails the test if that has changed when it runs."""

    def __init__(self, limit_rows: int = 1 << 30) -> None:
        super().__init__(limit_rows)
        self.packed: list[np.ndarray] = []
        self.ran: list[np.ndarray] = []
        self.both_packed = threading.Event()
        self._copies: list[np.ndarray] = []
        self.check = self._unchanged

    def prepare(self, feeds: Feeds) -> DoublingRun:
        number = len(self.packed)
        self.packed.append(feeds["x"])
        self._copies.append(feeds["x"].copy())
        if len(self.packed) > 1:
            self.both_packed.set()
        return super().prepare({**feeds, "number": np.array(number)})

    def _unchanged(self, feeds: Feeds) -> None:
        self.ran.append(feeds["x"])
        np.testing.assert_array_equal(feeds["x"], self._copies[int(feeds["number"])])


def outputs_of(answers: Sequence[Feeds | RowError]) -> Iterator[np.ndarray]:
    for answer in answers:
        assert not isinstance(answer, RowError), answer
        yield answer["y"]


def test_a_batch_of_one_contiguous_item_is_not_copied() -> None:
    engine = Witness()
    items = items_of(5)
    Calls(engine, info_of()).new().answer(items)
    assert np.shares_memory(engine.ran[0], items[0]["x"])


def test_a_batch_of_one_that_is_padded_is_copied_once_and_only_its_own_rows_come_back() -> None:
    engine = Witness()
    items = items_of(5)
    report = Calls(engine, info_of(buckets=(8, 32))).new().answer(items)
    assert [len(run) for run in engine.ran] == [8]
    np.testing.assert_array_equal(engine.ran[0][5:], np.repeat(items[0]["x"][4:], 3, axis=0))
    assert [len(y) for y in outputs_of(report.answers)] == [5]
    assert (report.rows, report.padded_rows) == (5, 3)


@pytest.mark.parametrize("limit_rows", [1 << 30, 3, 0], ids=["fits", "too large together", "does not fit at all"])
def test_what_ran_is_let_go_at_once_and_not_by_the_garbage_collector(limit_rows: int) -> None:
    calls, items = Calls(Doubling(limit_rows), info_of()), items_of(2, 3)
    arrays = [weakref.ref(item["x"]) for item in items]
    gc.disable()
    try:
        calls.new().answer(items)
        del items
        assert [array() for array in arrays] == [None, None]
    finally:
        gc.enable()


def test_a_batch_of_several_is_gathered_once_into_a_buffer_that_the_next_one_uses_again() -> None:
    engine = Witness()
    calls = Calls(engine, info_of())
    calls.new().answer(items_of(2, 3))
    calls.new().answer(items_of(1, 1))
    assert len(engine.packed) == 2
    assert np.shares_memory(engine.packed[0], engine.packed[1])


def test_answers_are_views_into_the_outputs_of_their_run() -> None:
    report = Calls(Doubling(), info_of()).new().answer(items_of(2, 3))
    first, second = outputs_of(report.answers)
    assert first.base is not None
    assert first.base is second.base


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=12),
    st.integers(1, 12),
    st.sampled_from([(), (1, 2, 4, 8), (3, 8)]),
)
def test_neither_feeds_nor_answers_change_whatever_is_bisected_cut_and_run_after_them(
    counts: list[int], limit_rows: int, buckets: tuple[int, ...]
) -> None:
    engine = Witness(limit_rows=max(limit_rows, *buckets[:1], 1))
    calls = Calls(engine, info_of(8, buckets))
    items = items_of(*counts)
    first = calls.new().answer(items)
    calls.new().answer(items_of(*counts, first=1000))
    for item, y in zip(items, outputs_of(first.answers), strict=True):
        np.testing.assert_array_equal(y, item["x"] * 2)


def test_a_batch_packed_while_another_runs_touches_nothing_of_it() -> None:
    engine = Witness()
    one, other = Calls(engine, info_of()), Calls(engine, info_of())
    other.turns = one.turns
    unchanged = engine.check
    pool = ThreadPoolExecutor(1)

    def pack_the_next(feeds: Feeds) -> None:
        if not waiting:
            waiting.append(pool.submit(other.new().answer, items_of(4, 1, first=100)))
            assert engine.both_packed.wait(20)
        unchanged(feeds)

    waiting: list[Future[RunReport]] = []
    engine.check = pack_the_next
    report = one.new().answer(items_of(2, 3))
    later = waiting[0].result(20)
    pool.shutdown()
    assert not np.shares_memory(engine.packed[0], engine.packed[1])
    assert [len(run) for run in engine.ran] == [5, 5]
    for answers, items in ((report.answers, items_of(2, 3)), (later.answers, items_of(4, 1, first=100))):
        for item, y in zip(items, outputs_of(answers), strict=True):
            np.testing.assert_array_equal(y, item["x"] * 2)
