"""A large job in steps: which rows each step has, and how its answer is joined again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fakes import FakeChannel, delivery_of, item_of, job_of, request_of, settler_of

if TYPE_CHECKING:
    from inferq_worker.work import Feeds


def doubled(feeds: Feeds) -> Feeds:
    return {"y": feeds["x"] * 2}


def test_a_job_within_the_limit_goes_in_one_step_and_nothing_is_copied() -> None:
    item = item_of(job_of("a", 1, 2, 3), step_rows=8)
    assert item.rows == 3
    assert item.feeds is item.inputs
    outputs = doubled(item.feeds)
    assert item.step(outputs) is outputs


@given(rows=st.integers(1, 40), step_rows=st.integers(1, 12))
@settings(max_examples=60)
def test_steps_cover_all_rows_once_and_in_order(rows: int, step_rows: int) -> None:
    item = item_of(job_of("a", *range(rows)), step_rows=step_rows)
    sizes = []
    whole = None
    while whole is None:
        assert item.feeds["x"].shape == (item.rows, 4)
        sizes.append(item.rows)
        whole = item.step(doubled(item.feeds))
    assert sum(sizes) == rows
    assert all(size == step_rows for size in sizes[:-1])
    assert np.array_equal(whole["y"], item.inputs["x"] * 2)


def test_a_step_is_a_view_of_the_inputs_and_shared_scalars_go_with_each() -> None:
    job = job_of("a", 1, 2, 3)
    inputs = {name: one.to_numpy() for name, one in job.inputs.items()} | {"factor": np.array(3, np.float32)}
    item = item_of(job, inputs=inputs, step_rows=2)
    item.step({"y": np.zeros((2, 1))})
    assert item.feeds["x"].base is not None
    assert np.array_equal(item.feeds["x"], inputs["x"][2:])
    assert item.feeds["factor"].shape == ()


def test_every_output_is_joined_whatever_its_inner_shape_and_type() -> None:
    item = item_of(job_of("a", 1, 2, 3), step_rows=2)
    assert item.step({"y": np.ones((2, 5)), "label": np.array(["a", "b"], object)}) is None
    whole = item.step({"y": np.zeros((1, 5)), "label": np.array(["c"], object)})
    assert whole is not None
    assert whole["y"].shape == (3, 5)
    assert whole["label"].tolist() == ["a", "b", "c"]


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
