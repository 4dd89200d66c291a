"""Results: strict when written, lenient when read."""

from typing import Any

import numpy as np
import pytest

from inferq_schemas import (
    BatchInfo,
    ContractError,
    ErrorInfo,
    Result,
    ServedBy,
    Tensor,
    Timing,
    result_from_wire,
    result_to_wire,
)

OUTPUT = Tensor.from_numpy(np.array([[0.25]], np.float32))
SERVED = ServedBy("m", "1", "gpu", "CUDAExecutionProvider", "w0")
FULL = Result(
    "a",
    "ok",
    {"y": OUTPUT, "big": Tensor(dtype="uint8", shape=(1,), ref="k")},
    late=True,
    fallback=True,
    served_by=SERVED,
    timing_ms=Timing(1, 2.5, 3, 4, 10.5),
    batch=BatchInfo(32, "full"),
)
FAILED = Result.failed("a", "overloaded", "GPU 90 ms, CPU 400 ms, 50 ms left", served_by=SERVED, late=True)


def wire(**fields: Any) -> dict[str, Any]:
    return {"id": "a", "status": "ok"} | fields


def refusal(content: object) -> ContractError:
    with pytest.raises(ContractError) as caught:
        result_from_wire(content)
    return caught.value


@pytest.mark.parametrize("result", [FULL, FAILED, Result("", "ok"), Result("a", "ok", {"y": OUTPUT})])
def test_a_result_comes_back_equal(result: Result) -> None:
    assert result_from_wire(result_to_wire(result)) == result


def test_keys_that_hold_their_default_are_not_written() -> None:
    assert result_to_wire(Result("a", "ok")) == {"id": "a", "status": "ok"}
    assert list(result_to_wire(FULL)) == [
        "id",
        "status",
        "outputs",
        "late",
        "fallback",
        "served_by",
        "timing_ms",
        "batch",
    ]


def test_the_data_of_outputs_is_shared_and_not_copied() -> None:
    content = result_to_wire(FULL)
    assert content["outputs"]["y"]["data"] is OUTPUT.data
    assert result_from_wire(content).outputs["y"].data is OUTPUT.data


def test_a_failed_result_is_not_ok_and_its_message_is_bounded() -> None:
    result = Result.failed("a", "internal", "x" * 10_000)
    assert not result.ok
    assert FULL.ok
    assert result.error is not None
    assert len(result.error.message) == 2_000


def test_unknown_keys_are_ignored_at_every_level() -> None:
    later = result_to_wire(FULL)
    for part in (later, later["served_by"], later["timing_ms"], later["batch"], later["outputs"]["y"]):
        part["later"] = {"deep": ()}
    assert result_from_wire(later) == FULL


def test_an_unknown_code_reads_as_internal() -> None:
    read = result_from_wire(wire(status="error", error={"code": "quota", "message": "m"}))
    assert read.error == ErrorInfo("internal", "m")


def test_integers_are_numbers_in_timings() -> None:
    assert result_from_wire(wire(timing_ms={"total": 3})).timing_ms == Timing(total=3.0)


@pytest.mark.parametrize(
    ("content", "code", "message"),
    [
        ("a", "malformed", "result: must be a map, is str"),
        (wire(v=2), "unsupported_version", "v: this reader knows version 1, not 2"),
        (wire(v=True), "malformed", "result.v: must be an int"),
        ({"status": "ok"}, "malformed", "result.id: must be a str"),
        (wire(status="late"), "malformed", 'result.status: must be "ok" or "error"'),
        (wire(status="error"), "malformed", "result.error: must be there if and only if the status is error"),
        (
            wire(error={"code": "internal", "message": ""}),
            "malformed",
            "result.error: must be there if and only if the status is error",
        ),
        (wire(late=1), "malformed", "result.late: must be a bool"),
        (wire(outputs=[]), "malformed", "result.outputs: must be a map, is list"),
        (wire(outputs={b"y": {}}), "malformed", "result.outputs: names must be str"),
        (wire(outputs={"y": 1}), "malformed", "outputs.y: must be a map"),
        (wire(outputs={"y": {"dtype": "int8"}}), "malformed", "outputs.y.shape: missing"),
        (
            wire(outputs={"y": {"dtype": "int8", "shape": (2,), "data": b""}}),
            "invalid_input",
            "outputs.y.shape: [2] of int8 needs 2 bytes, data has 0; send little-endian, C order",
        ),
        (wire(outputs={str(i): 1 for i in range(65)}), "too_large", "result.outputs: at most 64, has 65"),
        (wire(timing_ms={"run": "1"}), "malformed", "result.timing_ms.run: must be a number"),
        (wire(served_by={"model": "m"}), "malformed", "result.served_by.version: must be a str"),
        (wire(batch={"rows": 1.0, "reason": "full"}), "malformed", "result.batch.rows: must be an int"),
        (
            wire(status="error", error={"code": "internal", "message": ""}, outputs=result_to_wire(FULL)["outputs"]),
            "malformed",
            "result: has both outputs and an error",
        ),
    ],
)
def test_a_known_key_of_a_wrong_type_is_named(content: object, code: str, message: str) -> None:
    error = refusal(content)
    assert (error.code, error.message) == (code, message)
