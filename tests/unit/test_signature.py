"""Which models are refused at load because no message could ever carry their inputs or outputs."""

from pathlib import Path

import pytest

from inferq_worker.models import ModelFile
from inferq_worker.runtime.interface import ModelRefused, TensorSpec
from inferq_worker.runtime.signature import fixed_rows

MODEL = ModelFile("m", "1", Path("model.onnx"))


def specs(*names: str) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(name, "float32", (None, 3)) for name in names)


MANY = specs(*(f"t{number}" for number in range(65)))


@pytest.mark.parametrize(
    ("inputs", "outputs", "reason"),
    [
        (MANY, specs("y"), "65 inputs; a message carries at most 64"),
        (specs("x"), MANY, "65 outputs; a message carries at most 64"),
        (specs("x\ny"), specs("y"), r"input name 'x\\ny' cannot travel"),
        (specs("x"), specs("y" * 257), "output name 'y+' cannot travel"),
        (specs("x\n"), specs("y"), "cannot travel"),
        (specs(""), specs("y"), "cannot travel"),
    ],
)
def test_a_model_that_no_job_could_ever_use_is_refused(
    inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...], reason: str
) -> None:
    with pytest.raises(ModelRefused, match=reason):
        fixed_rows(MODEL, inputs, outputs)


def test_the_largest_signature_of_the_contract_is_served() -> None:
    assert fixed_rows(MODEL, MANY[:64], specs("y" * 256)) is None
