import msgpack
import numpy as np
import pytest

from inferq.outcome import Outcome, decode_outcome
from inferq_schemas import ContractError, Result, ServedBy, Tensor

DIGEST = bytes(range(16))


def test_an_outcome_survives_the_store() -> None:
    outputs = {"y": Tensor.from_numpy(np.ones((2, 3), np.float32))}
    result = Result("a", "ok", outputs=outputs, late=True, served_by=ServedBy("m", "1", "gpu", "CUDA", "w"))

    assert decode_outcome(Outcome(DIGEST, result).encode()) == Outcome(DIGEST, result)


def test_a_cancelled_outcome_agrees_with_any_content() -> None:
    outcome = decode_outcome(Outcome.cancelled("a").encode())

    assert outcome.result.error is not None
    assert outcome.result.error.code == "cancelled"
    assert outcome.agrees_with(DIGEST)


def test_an_outcome_of_other_content_does_not_agree() -> None:
    outcome = Outcome(DIGEST, Result.failed("a", "internal", ""))

    assert outcome.agrees_with(DIGEST)
    assert not outcome.agrees_with(bytes(16))


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"hello",
        msgpack.packb([1]),
        msgpack.packb({"d": None}),
        msgpack.packb({"d": b"short", "r": {"id": "a", "status": "ok"}}),
        msgpack.packb({"d": None, "r": {"id": 1}}),
        msgpack.packb({1: 2}),
        b"\xc1",
    ],
)
def test_what_is_no_outcome_is_refused_and_nothing_else_is_raised(raw: bytes) -> None:
    with pytest.raises(ContractError):
        decode_outcome(raw)
