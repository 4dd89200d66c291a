"""Jobs to work items: what the model takes, and whether there is time."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.fakes import delivery_of, job_of, request_of, tensor

from inferq_schemas import Job, Tensor
from inferq_worker.admit import admit
from inferq_worker.errors import WorkError
from inferq_worker.runtime import SessionInfo, TensorSpec
from inferq_worker.runtime.fake import FAKE_INFO

if TYPE_CHECKING:
    from inferq_worker.work import WorkItem

INFO = replace(
    FAKE_INFO,
    inputs=(
        TensorSpec("x", "float32", (None, 4)),
        TensorSpec("mask", "bool", (None, None)),
        TensorSpec("scale", "float32", ()),
    ),
    shared=frozenset({"scale"}),
)

MAX_ROWS = 1000


def array(values: Any, dtype: str) -> Tensor:
    return Tensor.from_numpy(np.asarray(values, dtype))


GOOD = {"x": tensor(1.0, 2.0), "mask": array([[True], [False]], "bool"), "scale": array(2.0, "float32")}


def admitted(inputs: dict[str, Tensor] | None = None, info: SessionInfo = INFO, **fields: Any) -> WorkItem:
    late, deadline_s = (fields.pop(name, None) for name in ("late", "deadline_s"))
    inputs = GOOD if inputs is None else inputs
    job = Job.build(id="a", model="m", inputs=inputs, late=late or "drop")
    return admit(
        job,
        request_of(delivery_of(received_s=100.0)),
        inputs,
        info,
        max_rows=MAX_ROWS,
        deadline_s=deadline_s,
        lane_rank=1,
    )


def refusal(inputs: dict[str, Tensor] | None = None, **fields: Any) -> WorkError:
    with pytest.raises(WorkError) as caught:
        admitted(inputs, **fields)
    return caught.value


def test_a_work_item_carries_all_that_the_scheduler_and_the_session_need() -> None:
    item = admitted(deadline_s=101.0)
    assert (item.rows, item.payload_bytes) == (2, 2 * 16 + 2 + 4)
    assert (item.arrived_s, item.deadline_s, item.lane_rank, item.alone) == (100.0, 101.0, 1, False)
    assert item.digest == item.job.digest()
    assert list(item.inputs) == ["x", "mask", "scale"]
    assert item.inputs["x"].shape == (2, 4)


def test_inputs_are_views_of_the_message_and_read_only() -> None:
    view = admitted().inputs["x"]
    assert view.base is not None
    assert not view.flags.writeable


def test_an_unknown_and_a_missing_input_are_both_named() -> None:
    error = refusal({"x": GOOD["x"], "mask": GOOD["mask"], "y": tensor(1.0, 2.0)})
    assert error.code == "invalid_input"
    assert "unknown y" in error.message
    assert "missing scale" in error.message
    assert "x, mask, scale" in error.message


def test_a_wrong_dtype_is_named_with_the_right_one() -> None:
    error = refusal(GOOD | {"x": array([[1.0] * 4] * 2, "float64")})
    assert error.message == "inputs.x.dtype is float64, the model takes float32"


@pytest.mark.parametrize("shape", [(2, 5), (2,), (2, 4, 1)])
def test_a_wrong_shape_is_named_with_the_right_one(shape: tuple[int, ...]) -> None:
    error = refusal(GOOD | {"x": array(np.zeros(shape), "float32")})
    assert error.message == f"inputs.x.shape is {list(shape)}, the model takes [n, 4]"


def test_a_scalar_where_rows_belong_is_refused() -> None:
    error = refusal(GOOD | {"x": array(1.0, "float32")})
    assert "[n, 4]" in error.message


def test_a_dynamic_axis_takes_any_size() -> None:
    assert admitted(GOOD | {"mask": array(np.ones((2, 77)), "bool")}).inputs["mask"].shape == (2, 77)


def test_a_shared_input_has_no_rows() -> None:
    error = refusal(GOOD | {"scale": array([1.0, 2.0], "float32")})
    assert "scale is shared" in error.message


def test_jobs_share_a_batch_when_inner_shapes_and_shared_values_agree() -> None:
    same = admitted(GOOD | {"x": tensor(7.0, 8.0)})
    longer = admitted({"x": tensor(1.0), "mask": array([[True]], "bool"), "scale": GOOD["scale"]})
    wider = admitted(GOOD | {"mask": array(np.ones((2, 3)), "bool")})
    scaled = admitted(GOOD | {"scale": array(3.0, "float32")})
    bucket = admitted().bucket
    assert same.bucket == longer.bucket == bucket
    assert wider.bucket != bucket
    assert scaled.bucket != bucket


def test_jobs_share_a_batch_when_their_shared_texts_agree() -> None:
    info = replace(INFO, inputs=(INFO.inputs[0], TensorSpec("lang", "string", ())), shared=frozenset({"lang"}))

    def bucket(text: str) -> object:
        lang = Tensor(dtype="string", shape=(), data=("".join(list(text)),))
        return admitted({"x": GOOD["x"], "lang": lang}, info).bucket

    assert bucket("danish") == bucket("danish")
    assert bucket("danish") != bucket("german")


@pytest.mark.parametrize("rows", [MAX_ROWS + 1, 2**31, 2**53 - 1])
def test_rows_that_cost_no_bytes_are_bounded_all_the_same(rows: int) -> None:
    info = replace(FAKE_INFO, inputs=(TensorSpec("x", "float32", (None, None)),))
    error = refusal({"x": Tensor(dtype="float32", shape=(rows, 0), data=b"")}, info=info)
    assert error.code == "too_large"
    assert f"{rows} rows, at most {MAX_ROWS} (limits.rows)" in error.message
    assert admitted({"x": Tensor(dtype="float32", shape=(MAX_ROWS, 0), data=b"")}, info=info).job.rows == MAX_ROWS


def test_a_job_whose_deadline_has_passed_is_not_admitted() -> None:
    error = refusal(deadline_s=99.5)
    assert error.code == "deadline_exceeded"
    assert "500 ms before" in error.message


def test_a_job_with_any_time_left_is_admitted_for_the_scheduler_to_judge() -> None:
    assert admitted(deadline_s=100.001).deadline_s == 100.001


def test_a_job_whose_answer_is_welcome_late_is_always_admitted() -> None:
    assert admitted(deadline_s=1.0, late="serve").serve_late


def test_a_job_without_deadline_is_always_admitted() -> None:
    assert admitted().deadline_s is None


def test_the_first_problem_is_told_before_the_deadline_is_looked_at() -> None:
    assert refusal({"x": GOOD["x"]}, deadline_s=1.0).code == "invalid_input"


def test_a_job_of_the_fake_model_is_admitted_as_it_is() -> None:
    job = job_of("a", 1.0, 2.0, 3.0)
    item = admit(job, request_of(), job.inputs, FAKE_INFO, max_rows=MAX_ROWS, deadline_s=None, lane_rank=0)
    assert item.rows == 3
