"""The deadline heap: earliest first among the living, and no more dead entries than its bound."""

from hypothesis import given, settings
from hypothesis import strategies as st

from inferq_worker.scheduling.deadlines import DeadlineHeap


def heap_of(*deadlines: tuple[float, str]) -> tuple[DeadlineHeap[str], set[str]]:
    waiting: set[str] = set()
    heap = DeadlineHeap(waiting)
    for deadline_s, item in deadlines:
        waiting.add(item)
        heap.push(deadline_s, item)
    return heap, waiting


def test_the_earliest_deadline_comes_first() -> None:
    heap, _ = heap_of((3.0, "late"), (1.0, "early"), (2.0, "middle"))
    assert heap.first() == (1.0, "early")


def test_equal_deadlines_keep_the_order_of_arrival() -> None:
    heap, waiting = heap_of((1.0, "z"), (1.0, "a"))
    assert heap.first() == (1.0, "z")
    waiting.remove("z")
    assert heap.first() == (1.0, "a")


def test_a_job_that_left_is_skipped() -> None:
    heap, waiting = heap_of((1.0, "gone"), (2.0, "here"))
    waiting.remove("gone")
    assert heap.first() == (2.0, "here")
    waiting.remove("here")
    assert heap.first() is None


def test_looking_takes_nothing_away() -> None:
    heap, _ = heap_of((1.0, "a"))
    assert heap.first() == heap.first() == (1.0, "a")


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3)), max_size=600))
def test_dead_entries_never_outnumber_twice_the_living_and_some(steps: list[tuple[int, int]]) -> None:
    waiting: set[int] = set()
    heap: DeadlineHeap[int] = DeadlineHeap(waiting)
    alive: dict[int, float] = {}
    for number, (deadline_s, kind) in enumerate(steps):
        if kind or not alive:
            waiting.add(number)
            alive[number] = float(deadline_s)
            heap.push(float(deadline_s), number)
            # One push sweeps before it adds, so the bound holds for what it found.
            assert len(heap._heap) <= 2 * len(waiting) + 64 + 1
        else:
            # The latest leave first: entries at the top of the heap would be swept by `first` alone.
            leaves = max(alive, key=lambda item: alive[item])
            waiting.discard(leaves)
            del alive[leaves]
        earliest = heap.first()
        assert earliest == (min((when, item) for item, when in alive.items()) if alive else None)


def test_a_long_stream_of_jobs_that_leave_leaves_nothing_behind() -> None:
    heap, waiting = heap_of((0.0, "stays"))
    for number in range(10_000):
        item = f"passes {number}"
        waiting.add(item)
        heap.push(1.0, item)
        waiting.remove(item)
    assert len(heap._heap) < 100
