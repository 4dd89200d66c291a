"""A large job in steps: which rows each step has, and how its answer is joined again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fakes import FakeChannel, delivery_of, item_of, job_of, request_of, settler_of

from inferq_worker.runtime import RowError
from inferq_worker.work import Steps

if TYPE_CHECKING:
    from inferq_worker.work import Feeds, WorkItem


def doubled(feeds: Feeds) -> Feeds:
    return {"y": feeds["x"] * 2}


def test_a_job_within_the_limit_goes_in_one_step_and_nothing_is_copied() -> None:
    item = item_of(job_of("a", 1, 2, 3), step_rows=8)
    assert item.rows == 3
    assert item.feeds is item.inputs
    outputs = doubled(item.feeds)
    assert item.done(outputs, 0.5) is outputs
    assert item.rest() is None
    assert (item.steps.run_s, item.open_rows) == (0.5, 0)


def steps_of(item: WorkItem) -> list[WorkItem]:
    """Every step, as the scheduler hands them out."""
    steps = [item]
    while (rest := steps[-1].rest()) is not None:
        steps.append(rest)
    return steps


@given(rows=st.integers(1, 40), step_rows=st.integers(1, 12), data=st.data())
@settings(max_examples=60)
def test_steps_cover_all_rows_once_and_in_order_whichever_ends_first(
    rows: int, step_rows: int, data: st.DataObject
) -> None:
    item = item_of(job_of("a", *range(rows)), step_rows=step_rows)
    steps = steps_of(item)
    assert [one.rows for one in steps[:-1]] == [step_rows] * (len(steps) - 1)
    assert [one.rows_left for one in steps] == list(range(rows, 0, -step_rows))
    assert [one.started for one in steps] == [False] + [True] * (len(steps) - 1)
    ends = data.draw(st.permutations(steps))
    wholes = [one.done(doubled(one.feeds), 0.25) for one in ends]
    assert wholes[:-1] == [None] * (len(steps) - 1)
    whole = wholes[-1]
    assert isinstance(whole, dict)
    assert np.array_equal(whole["y"], item.inputs["x"] * 2)
    assert item.steps.run_s == 0.25 * len(steps)


def test_a_step_is_a_view_of_the_inputs_and_shared_scalars_go_with_each() -> None:
    job = job_of("a", 1, 2, 3)
    inputs = {name: one.to_numpy() for name, one in job.inputs.items()} | {"factor": np.array(3, np.float32)}
    _, last = steps_of(item_of(job, inputs=inputs, step_rows=2))
    assert last.feeds["x"].base is not None
    assert np.array_equal(last.feeds["x"], inputs["x"][2:])
    assert last.feeds["factor"].shape == ()


def test_every_output_is_joined_whatever_its_inner_shape_and_type() -> None:
    first, last = steps_of(item_of(job_of("a", 1, 2, 3), step_rows=2))
    assert first.done({"y": np.ones((2, 5)), "label": np.array(["a", "b"], object)}, 0.0) is None
    whole = last.done({"y": np.zeros((1, 5)), "label": np.array(["c"], object)}, 0.0)
    assert isinstance(whole, dict)
    assert whole["y"].shape == (3, 5)
    assert whole["label"].tolist() == ["a", "b", "c"]


def test_steps_whose_outputs_do_not_fit_together_are_an_error_of_that_job() -> None:
    first, last = steps_of(item_of(job_of("a", 1, 2, 3), step_rows=2))
    assert first.done({"y": np.ones((2, 5))}, 0.0) is None
    error = last.done({"y": np.zeros((1, 4))}, 0.0)
    assert isinstance(error, RowError)
    assert error.code == "inference_failed"


def test_the_job_knows_which_of_its_steps_waits() -> None:
    steps = Steps()
    item: WorkItem | None = item_of(job_of("a", 1, 2, 3, 4, 5), step_rows=2, steps=steps)
    known = []
    while item is not None:
        known.append((steps.waiting is item, steps.waiting is None))
        item = item.rest()
    assert known == [(False, True), (True, False), (True, False)]
    assert steps.waiting is None


def test_who_attaches_to_a_job_attaches_to_all_its_steps() -> None:
    item = item_of(job_of("a", 1, 2, 3), step_rows=2)
    last = item.rest()
    item.requests.append(request_of())
    assert last is not None
    assert len(last.requests) == 2


def test_a_job_is_stale_once_every_message_of_it_is_gone() -> None:
    channels = [FakeChannel(), FakeChannel()]
    requests = []
    for channel in channels:
        settler = settler_of(channel)
        settler.open(tag := channel.deliver())
        requests.append(request_of(delivery_of(settler=settler, tag=tag)))
    item = item_of(request=requests[0])
    item.requests.append(requests[1])
    channels[0].is_closed = True
    assert not item.stale
    channels[1].is_closed = True
    assert item.stale
