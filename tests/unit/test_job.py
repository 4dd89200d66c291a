"""Jobs: what is one, how many rows it has, its digest, and how much time is left."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferq_schemas import DEFAULT_LIMITS, MAX_SKEW_MS, ContractError, Job, Limits, Tensor, time_left_ms

ROW = Tensor.from_numpy(np.array([[1.0, 2.0]], np.float32))


def job(**fields: Any) -> Job:
    return Job.build(**({"id": "a", "model": "m", "inputs": {"x": ROW}} | fields))


def refusal(**fields: Any) -> ContractError:
    with pytest.raises(ContractError) as caught:
        job(**fields)
    return caught.value


def test_validation_keeps_the_very_same_bytes() -> None:
    data = bytes(100_000)
    fields = {"id": "a", "model": "m", "inputs": {"x": {"dtype": "uint8", "shape": (1, 100_000), "data": data}}}
    assert Job.model_validate(fields).inputs["x"].data is data


def test_defaults_are_those_of_the_contract() -> None:
    plain = job()
    assert (plain.v, plain.version, plain.deadline_unix_ms, plain.sent_unix_ms) == (1, None, None, None)
    assert (plain.fallback, plain.late, plain.force, plain.params) == ("allow", "drop", False, {})


@pytest.mark.parametrize(
    ("fields", "code", "message"),
    [
        ({"v": 2}, "unsupported_version", "v: only contract version 1 is served here; send v = 1"),
        ({"v": 0, "id": ""}, "unsupported_version", "v: only contract version 1 is served here; send v = 1"),
        ({"v": True}, "malformed", "v: must be a valid integer"),
        ({"v": 1.0}, "malformed", "v: must be a valid integer"),
        ({"id": ""}, "malformed", "id: does not match ^[A-Za-z0-9_.:-]{1,128}$"),
        ({"id": "a\n"}, "malformed", "id: does not match ^[A-Za-z0-9_.:-]{1,128}$"),
        ({"id": "a" * 129}, "malformed", "id: does not match ^[A-Za-z0-9_.:-]{1,128}$"),
        ({"id": "ä"}, "malformed", "id: does not match ^[A-Za-z0-9_.:-]{1,128}$"),
        ({"id": b"a"}, "malformed", "id: must be a valid string"),
        ({"model": "-m"}, "malformed", "model: does not match ^[a-z0-9][a-z0-9_-]{0,63}$"),
        ({"model": "m.n"}, "malformed", "model: does not match ^[a-z0-9][a-z0-9_-]{0,63}$"),
        ({"version": "../1"}, "malformed", "version: does not match ^[A-Za-z0-9_.-]{1,64}$"),
        ({"deadline_unix_ms": -1}, "malformed", "deadline_unix_ms: must be greater than or equal to 0"),
        ({"deadline_unix_ms": 1.5}, "malformed", "deadline_unix_ms: must be a valid integer"),
        ({"fallback": "maybe"}, "malformed", "fallback: must be 'allow' or 'never'"),
        ({"force": 1}, "malformed", "force: must be a valid boolean"),
        ({"inputs": {}}, "malformed", "inputs: needs at least 1 entry"),
        ({"inputs": None}, "malformed", "inputs: must be a map"),
        ({"inputs": {"x": 5}}, "malformed", "inputs.x: must be a map"),
        ({"inputs": {"": ROW}}, "malformed", None),
        ({"inputs": {"a\nb": ROW}}, "malformed", None),
        ({"inputs": {f"x{i}": ROW for i in range(65)}}, "too_large", "inputs: more than 64 entries"),
        ({"params": {f"p{i}": i for i in range(33)}}, "too_large", "params: more than 32 entries"),
        ({"params": {"p": None}}, "malformed", "params.p: must be a bool, an int of 64 bits, a float or a str"),
        ({"params": {"p": 2**64}}, "malformed", "params.p: must be a bool, an int of 64 bits, a float or a str"),
        ({"params": {"p": "ä" * 2049}}, "too_large", "params.p: a text has at most 4096 bytes"),
        ({"priority": 1, "ttl": 2}, "malformed", None),
    ],
)
def test_what_breaks_the_contract_is_named_with_its_place(
    fields: dict[str, Any], code: str, message: str | None
) -> None:
    error = refusal(**fields)
    assert error.code == code
    assert message is None or error.message == message


def test_the_place_of_a_tensors_problem_is_its_path() -> None:
    error = refusal(inputs={"x": {"dtype": "float32", "shape": (2, 3), "data": bytes(20)}})
    assert error.code == "invalid_input"
    assert error.message == (
        "inputs.x.shape: [2, 3] of float32 needs 24 bytes, data has 20; send little-endian, C order"
    )


def test_several_problems_are_counted_by_place() -> None:
    assert refusal(priority=1, ttl=2).message == (
        "priority: unknown key; this version does not have it (workers are upgraded before clients) (and 1 more)"
    )


def test_a_strangers_long_and_unprintable_key_does_not_fill_the_message() -> None:
    message = refusal(**{"\x1b[31m" + "k" * 10_000: 1}).message
    assert len(message) <= 500
    assert message.isprintable()


def test_rows_are_the_shared_first_axis_and_scalars_have_none() -> None:
    scalar = Tensor.from_numpy(np.float32(0.5))
    pair = Tensor.from_numpy(np.zeros((2, 3)))
    assert job(inputs={"threshold": scalar, "x": pair, "y": pair}).rows == 2


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ([(2,), (3,)], "inputs.1.shape: 3 rows, but an input before it has 2; all share the first axis, the batch"),
        ([(0, 3)], "inputs.0.shape: the first axis is the batch and must be at least 1"),
        ([()], "inputs: no input has a batch axis; send shape [1, ...] for a single row"),
    ],
)
def test_inputs_without_a_common_batch_axis_are_invalid(shapes: list[tuple[int, ...]], message: str) -> None:
    error = refusal(inputs={str(i): Tensor.from_numpy(np.zeros(shape)) for i, shape in enumerate(shapes)})
    assert (error.code, error.message) == ("invalid_input", message)


def test_a_zero_behind_the_batch_axis_is_legal() -> None:
    assert job(inputs={"x": Tensor.from_numpy(np.zeros((3, 0)))}).rows == 3


def test_params_keep_their_types() -> None:
    params = {"i": 1, "b": True, "f": 1.0, "s": "1", "inf": math.inf}
    assert [type(value) for value in job(params=params).params.values()] == [int, bool, float, str, float]


def test_the_digest_does_not_see_order_id_or_policy() -> None:
    other = Tensor.from_numpy(np.ones((1, 1)))
    first = job(inputs={"x": ROW, "y": other}, params={"a": 1, "b": 2})
    second = job(
        id="b", inputs={"y": other, "x": ROW}, params={"b": 2, "a": 1}, force=True, late="serve", deadline_unix_ms=1
    )
    assert first.digest() == second.digest()
    assert len(first.digest()) == 16


def test_the_digest_sees_everything_that_is_computed() -> None:
    flat = Tensor(dtype="float32", shape=(2,), data=bytes(8))
    variants = [
        job(),
        job(model="n"),
        job(version="1"),
        job(inputs={"y": ROW}),
        job(inputs={"x": ROW, "y": ROW}),
        job(inputs={"x": flat}),
        job(inputs={"x": Tensor(dtype="float32", shape=(2, 1), data=bytes(8))}),
        job(inputs={"x": Tensor(dtype="int32", shape=(2,), data=bytes(8))}),
        job(inputs={"x": Tensor(dtype="float32", shape=(2,), data=bytes(7) + b"\x01")}),
        job(inputs={"x": Tensor(dtype="float32", shape=(2,), ref="k")}),
        job(inputs={"x": Tensor(dtype="float32", shape=(2,), ref="l")}),
        job(inputs={"x": Tensor(dtype="string", shape=(2,), data=("ab", "c"))}),
        job(inputs={"x": Tensor(dtype="string", shape=(2,), data=("a", "bc"))}),
        job(params={"p": 1}),
        job(params={"p": True}),
        job(params={"p": 1.0}),
        job(params={"p": "1"}),
    ]
    assert len({variant.digest() for variant in variants}) == len(variants)


def test_the_digest_of_a_known_job_never_changes() -> None:
    # Workers of two releases compare digests in one Redis: another value here would turn reruns into conflicts.
    known = job(version="1", params={"p": 1})
    assert known.digest().hex() == "beb1bb1466f6f07632714f7f53007cc6"


@pytest.mark.parametrize(
    ("deadline", "sent", "now", "left"),
    [
        (None, 10, 0, None),
        (1000, None, 400, 600),
        (1000, None, 1400, -400),
        (1000, 300, 400, 600),
        (1000, 400, 400, 600),
        (1000, 500, 400, 500),
        (10_000, MAX_SKEW_MS, 0, 5000),
        (400, 500, 450, -100),
    ],
)
def test_time_left_never_exceeds_the_budget_of_a_sender_whose_clock_is_ahead(
    deadline: int | None, sent: int | None, now: int, left: int | None
) -> None:
    assert time_left_ms(job(deadline_unix_ms=deadline, sent_unix_ms=sent), now) == left


def test_a_clock_too_far_ahead_is_refused_by_its_skew() -> None:
    ahead = job(deadline_unix_ms=20_000, sent_unix_ms=MAX_SKEW_MS + 1)
    with pytest.raises(ContractError, match="invalid_input: sent_unix_ms: 5001 ms ahead"):
        time_left_ms(ahead, 0)


def test_a_clock_does_not_matter_to_a_job_without_deadline() -> None:
    assert time_left_ms(job(sent_unix_ms=10**9), 0) is None


@settings(max_examples=60, deadline=None)
@given(deadline=st.integers(0, 10**6), sent=st.integers(0, 10**6), now=st.integers(0, 10**6))
def test_time_left_is_at_most_what_either_clock_allows(deadline: int, sent: int, now: int) -> None:
    timed = job(deadline_unix_ms=deadline, sent_unix_ms=sent)
    if sent - now > MAX_SKEW_MS:
        with pytest.raises(ContractError):
            time_left_ms(timed, now)
        return
    left = time_left_ms(timed, now)
    assert left == (deadline - now if sent <= now else min(deadline - now, deadline - sent))


def test_limits_can_be_tightened_and_not_widened() -> None:
    assert Limits(inputs=1, body_bytes=2**30).inputs == 1
    with pytest.raises(ValueError, match=r"limits\.rank is at most 8"):
        Limits(rank=9)
    with pytest.raises(ValueError, match=r"limits\.bundle_jobs must be at least 1"):
        Limits(bundle_jobs=0)
    assert Limits() == DEFAULT_LIMITS
