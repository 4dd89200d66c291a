import json
from typing import Any

import numpy as np
import pytest

from inferq.answer_json import answer_line
from inferq.answers import failed_answer, to_answer
from inferq.errors import AnswerLost, JobFailed, QueueFull
from inferq_schemas import ErrorInfo, Result, ServedBy, Tensor


def good(array: np.ndarray[Any, Any], dtype: str | None = None, **fields: Any) -> Result:
    return Result("a", "ok", outputs={"y": Tensor.from_numpy(array, dtype=dtype)}, **fields)


async def test_outputs_are_read_only_views() -> None:
    answer = await to_answer(good(np.ones((2, 3), np.float32)), None, job_id="a", index=4)

    assert answer.ok
    assert answer.index == 4
    assert not answer.outputs["y"].flags.writeable
    np.testing.assert_array_equal(answer.outputs["y"], np.ones((2, 3), np.float32))


async def test_a_failed_result_becomes_a_failed_answer() -> None:
    answer = await to_answer(Result.failed("a", "overloaded", "too much"), None, job_id="a")

    assert isinstance(answer.error, JobFailed)
    assert (answer.error.code, answer.error.message) == ("overloaded", "too much")


async def test_an_answer_to_an_unreadable_message_gets_the_jobs_own_id() -> None:
    answer = await to_answer(Result.failed("", "malformed", "unreadable"), None, job_id="mine")

    assert answer.id == "mine"


async def test_outputs_kept_apart_need_redis() -> None:
    result = Result("a", "ok", outputs={"y": Tensor(dtype="int8", shape=(1,), ref="inferq:{a}:out:y")})

    answer = await to_answer(result, None, job_id="a")

    assert isinstance(answer.error, AnswerLost)
    assert "redis.url" in str(answer.error)


def test_a_failure_of_this_client_has_the_nearest_wire_code() -> None:
    answer = failed_answer("a", QueueFull("full"), index=1)

    assert answer.result.error == ErrorInfo("overloaded", "full")
    assert not answer.ok


async def test_an_answer_is_written_as_json() -> None:
    served = ServedBy("m", "1", "cpu", "CPUExecutionProvider", "w")
    answer = await to_answer(good(np.array([[1.5, 2]], np.float32), fallback=True, served_by=served), None, job_id="a")

    assert json.loads(answer_line(answer, index=7)) == {
        "index": 7,
        "id": "a",
        "status": "ok",
        "outputs": {"y": [[1.5, 2]]},
        "fallback": True,
        "served_by": {"model": "m", "version": "1", "role": "cpu", "provider": "CPUExecutionProvider", "worker": "w"},
    }


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
async def test_what_json_numbers_cannot_say_is_written_as_bytes(value: float) -> None:
    answer = await to_answer(good(np.array([[value]], np.float32)), None, job_id="a")

    output = json.loads(answer_line(answer))["outputs"]["y"]

    assert (output["dtype"], output["shape"]) == ("float32", [1, 1])


async def test_bfloat16_is_not_mistaken_for_integers() -> None:
    answer = await to_answer(good(np.array([[1]], np.uint16), "bfloat16"), None, job_id="a")

    assert json.loads(answer_line(answer))["outputs"]["y"]["dtype"] == "bfloat16"


def test_a_failure_is_written_with_code_and_message() -> None:
    line = json.loads(
        answer_line(failed_answer("a", JobFailed("conflict", "twice", Result.failed("a", "conflict", "twice"))))
    )

    assert line == {"id": "a", "status": "error", "error": {"code": "conflict", "message": "twice"}}
