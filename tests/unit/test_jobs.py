from typing import Any

import numpy as np
import pytest

from inferq.errors import InvalidJob
from inferq.jobs import GRACE_S, Item, JobOptions, answer_limit_s, build_job, expiration_ms, job_bytes, to_tensor
from inferq_schemas import Job, Tensor, encode_job

NOW_MS = 1_700_000_000_000
X = np.ones((2, 3), np.float32)


def job(inputs: Any = None, **options: Any) -> Job:
    return build_job("m", {"x": X} if inputs is None else inputs, JobOptions(**options), now_ms=NOW_MS)


def test_a_job_carries_its_deadline_and_sending_time_by_the_given_clock() -> None:
    built = job(deadline_s=1.5)

    assert built.sent_unix_ms == NOW_MS
    assert built.deadline_unix_ms == NOW_MS + 1500
    assert built.rows == 2


def test_ids_are_made_where_none_is_given() -> None:
    assert job().id != job().id
    assert build_job("m", {"x": X}, JobOptions(), now_ms=NOW_MS, job_id="mine").id == "mine"


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        ([[1.5]], "float32"),
        ([[1]], "int64"),
        ([[True]], "bool"),
        ([["a"]], "string"),
        (np.ones((1, 1), np.float64), "float64"),
        (np.ones((1, 1), ">f4"), "float32"),
        (np.ones((1, 1), np.uint8), "uint8"),
    ],
)
def test_arrays_keep_their_dtype_and_plain_numbers_get_the_usual_one(value: Any, dtype: str) -> None:
    assert to_tensor("x", value).dtype == dtype


def test_a_ready_tensor_passes_through() -> None:
    tensor = Tensor.from_numpy(np.zeros((1, 2), np.uint16), dtype="bfloat16")

    assert to_tensor("x", tensor) is tensor


@pytest.mark.parametrize("value", [[[1j]], [[1], [2, 3]], [[object()]], np.array([b"x"]), [[2**70]]])
def test_what_cannot_travel_is_refused_with_the_inputs_name(value: Any) -> None:
    with pytest.raises(InvalidJob, match="'odd'"):
        to_tensor("odd", value)


@pytest.mark.parametrize(
    ("inputs", "reason"),
    [
        ({}, "inputs"),
        ({"x": X, "y": np.ones((3, 1), np.float32)}, "first axis"),
        ({"x": np.float32(1)}, "batch axis"),
        ({"x": np.ones((0, 2), np.float32)}, "at least 1"),
    ],
)
def test_inputs_that_break_the_contract_are_refused(inputs: Any, reason: str) -> None:
    with pytest.raises(InvalidJob, match=reason):
        job(inputs)


def test_a_bad_id_or_model_is_refused() -> None:
    with pytest.raises(InvalidJob, match="id"):
        build_job("m", {"x": X}, JobOptions(), now_ms=NOW_MS, job_id="has space")
    with pytest.raises(InvalidJob, match="model"):
        build_job("Not A Model", {"x": X}, JobOptions(), now_ms=NOW_MS)


def test_an_interactive_job_needs_a_deadline_and_a_bulk_job_does_not() -> None:
    with pytest.raises(InvalidJob, match="need a deadline"):
        JobOptions(deadline_s=None)
    assert job(lane="bulk", deadline_s=None).deadline_unix_ms is None


@pytest.mark.parametrize("deadline_s", [0, -1, float("nan"), float("inf"), "2", True, [1]])
def test_a_deadline_is_a_number_above_zero(deadline_s: Any) -> None:
    with pytest.raises(InvalidJob, match="number of seconds above 0"):
        JobOptions(deadline_s=deadline_s)


def test_a_deadline_may_be_numpys() -> None:
    assert job(deadline_s=np.float32(1.5)).deadline_unix_ms == NOW_MS + 1500


@pytest.mark.parametrize("inputs", [X, [X], None])
def test_inputs_that_are_no_map_are_refused_with_the_form_they_should_have(inputs: Any) -> None:
    with pytest.raises(InvalidJob, match="inputs is a map of input name to array"):
        build_job("m", inputs, JobOptions(), now_ms=NOW_MS)


@pytest.mark.parametrize("model", ["Iris", "a.b", "", "a" * 65, 7])
def test_an_unfit_model_name_is_refused_in_words(model: Any) -> None:
    with pytest.raises(InvalidJob, match="is no model name: use small letters"):
        build_job(model, {"x": X}, JobOptions(), now_ms=NOW_MS)


@pytest.mark.parametrize(("lane", "said"), [("Bulk", "is no lane name: use small"), ("fallback", "use another name")])
def test_an_unfit_lane_is_refused_in_words(lane: str, said: str) -> None:
    with pytest.raises(InvalidJob, match=said):
        JobOptions(lane=lane)


def test_expiration_leaves_the_cpu_its_share() -> None:
    assert expiration_ms([job(deadline_s=10)], now_ms=NOW_MS, cpu_reserve_ratio=0.3) == 7000


def test_expiration_leaves_nothing_to_a_cpu_that_must_not_answer() -> None:
    assert expiration_ms([job(deadline_s=10, fallback="never")], now_ms=NOW_MS, cpu_reserve_ratio=0.3) == 10_000


def test_a_bundle_expires_with_its_most_patient_job() -> None:
    jobs = [job(deadline_s=1), job(deadline_s=10), job(deadline_s=2)]

    assert expiration_ms(jobs, now_ms=NOW_MS, cpu_reserve_ratio=0.5) == 5000
    assert expiration_ms([*jobs, job(lane="bulk", deadline_s=None)], now_ms=NOW_MS, cpu_reserve_ratio=0.5) is None


def test_expiration_of_a_late_job_is_zero_and_never_negative() -> None:
    assert expiration_ms([job(deadline_s=1)], now_ms=NOW_MS + 5000, cpu_reserve_ratio=0.3) == 0


def test_answers_are_waited_for_a_little_beyond_the_deadline() -> None:
    assert answer_limit_s(job(deadline_s=3), now_ms=NOW_MS, late_s=100) == 3 + GRACE_S
    assert answer_limit_s(job(deadline_s=3, late="serve"), now_ms=NOW_MS, late_s=100) == 103
    assert answer_limit_s(job(lane="bulk", deadline_s=None), now_ms=NOW_MS, late_s=100) is None


def test_an_item_overrides_what_the_call_said_for_all() -> None:
    common = JobOptions(lane="bulk", deadline_s=None, params={"a": 1})

    assert Item({}).options(common) == common
    assert Item({}, params={}, deadline_s=5).options(common) == JobOptions(lane="bulk", deadline_s=5, params={})


@pytest.mark.parametrize(
    "inputs",
    [
        {"x": X},
        {f"n{number}" * 20: np.ones((1, 1), np.int8) for number in range(64)},
        {"x": np.array([["é" * 300, "", "x"]] * 50)},
    ],
)
def test_the_estimate_of_a_jobs_size_is_never_too_low(inputs: Any) -> None:
    built = job(inputs, params={f"p{number}": "é" * 500 for number in range(32)})

    assert len(encode_job(built)) <= job_bytes(built)


def test_a_tensor_that_travels_apart_counts_little() -> None:
    large = job({"x": np.zeros((1, 2**20), np.float32)})

    assert job_bytes(large) > 2**22
    assert job_bytes(large, claims=True) < 4096
