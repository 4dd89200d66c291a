"""A sorted list of blocks behaves like a sorted list."""

from __future__ import annotations

import gc
import weakref
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.scheduled_jobs import Job

from inferq_worker.scheduling import deadline_queue
from inferq_worker.scheduling.deadline_queue import DeadlineQueue

INFINITY = float("inf")


def queue_of(*due_s: float) -> tuple[DeadlineQueue[Job], list[Job]]:
    queue: DeadlineQueue[Job] = DeadlineQueue()
    jobs = [Job(str(number)) for number in range(len(due_s))]
    for job, when_s in zip(jobs, due_s, strict=True):
        queue.add(job, when_s)
    return queue, jobs


def test_jobs_come_in_the_order_in_which_they_are_due() -> None:
    queue, (a, b, c) = queue_of(3.0, 1.0, 2.0)
    assert list(queue) == [b, c, a]
    assert queue.first_due_s() == 1.0
    assert [queue.due_s(index) for index in range(3)] == [1.0, 2.0, 3.0]


def test_equal_deadlines_keep_the_order_of_arrival() -> None:
    queue, jobs = queue_of(1.0, 1.0, 1.0)
    assert queue.cut(2) == jobs[:2]
    assert list(queue) == jobs[2:]


def test_an_empty_queue_is_due_never() -> None:
    queue, _ = queue_of()
    assert (queue.first_due_s(), queue.rows_by(INFINITY), queue.cut(3), len(queue)) == (INFINITY, 0, [], 0)
    with pytest.raises(IndexError):
        queue.due_s(0)


def test_what_has_begun_goes_first_among_equal_deadlines_only() -> None:
    queue, (a, b) = queue_of(1.0, 2.0)
    queue.add(rest := Job("rest", started=True), 2.0)
    assert list(queue) == [a, rest, b]


def test_rows_by_a_deadline_hold_those_of_equal_ones() -> None:
    queue, _ = queue_of(1.0, 2.0, 2.0, 3.0)
    assert [queue.rows_by(when_s) for when_s in (1.0, 2.0, 2.5, 9.0)] == [1, 3, 3, 4]
    assert queue.rows_by(0.9) == 0


def test_what_left_is_referenced_no_more() -> None:
    queue: DeadlineQueue[Any] = DeadlineQueue()

    class Weak(Job):
        __slots__ = ("__weakref__",)

    jobs: list[Job] = [Weak() for _ in range(4)]
    left = [weakref.ref(job) for job in jobs]
    for number, job in enumerate(jobs):
        queue.add(job, float(number))
    queue.remove(jobs[1])
    queue.remove(jobs[3])
    queue.cut(1)
    jobs.clear()
    del job
    gc.collect()
    assert [one() is None for one in left] == [True, True, False, True]


STEPS = st.lists(
    st.tuples(st.just("add"), st.integers(0, 9), st.integers(1, 50))
    | st.tuples(st.just("remove"), st.integers(0, 99), st.just(0))
    | st.tuples(st.just("cut"), st.integers(0, 12), st.just(0)),
    max_size=120,
)


@settings(max_examples=150, deadline=None)
@given(STEPS, st.sampled_from([1, 50]))
def test_it_is_a_sorted_list_whatever_is_done(steps: list[tuple[str, int, int]], most_rows: int) -> None:
    with patch.object(deadline_queue, "_BLOCK_JOBS", 4):
        queue: DeadlineQueue[Job] = DeadlineQueue()
        plain: list[tuple[int, Job]] = []
        for step, number, rows in steps:
            if step == "add":
                job = Job(rows=min(rows, most_rows, 5), later_rows=max(0, min(rows, most_rows) - 5))
                queue.add(job, number)
                plain.append((number, job))
                plain.sort(key=lambda entry: entry[0])
            elif step == "remove" and plain:
                _, job = plain.pop(number % len(plain))
                assert queue.remove(job)
                assert not queue.remove(job)
                assert job not in queue
            elif step == "cut":
                assert queue.cut(number) == [job for _, job in plain[:number]]
                del plain[:number]
            assert list(queue) == [job for _, job in plain]
            assert [due_s for due_s, *_ in queue.places()] == [due_s for due_s, _ in plain]
            assert [queue.due_s(index) for index in range(len(plain))] == [due_s for due_s, _ in plain]
            assert (len(queue), queue.rows) == (len(plain), sum(job.rows for _, job in plain))
            assert queue.first_due_s() == (plain[0][0] if plain else INFINITY)
            for due_s in range(-1, 11):
                assert queue.rows_by(due_s) == sum(job.rows_left for when_s, job in plain if when_s <= due_s)
