"""What findings mean: sizes worth a batch, settings, warnings."""

from pathlib import Path
from typing import Any

import pytest

from inferq_worker.inspection import advice
from inferq_worker.inspection.trial import Timing
from inferq_worker.models.repository import ModelFile
from inferq_worker.runtime.onnxfile import DeclaredTensor, GraphFacts

MODEL = ModelFile("m", "1", Path("m.onnx"))


def timings(**ms: float) -> list[Timing]:
    return [Timing(int(rows[1:]), 5, value / 1000, value / 1000) for rows, value in ms.items()]


@pytest.mark.parametrize(
    ("measured", "worth"),
    [
        ({"r1": 1.0, "r2": 1.1, "r4": 1.3, "r8": 2.6}, [1, 2, 4]),
        ({"r1": 1.0, "r2": 2.0, "r4": 4.1}, [1]),
        ({"r1": 1.0, "r2": 1.92, "r4": 3.84}, [1]),
        ({"r1": 1.0, "r2": 2.5, "r4": 2.0, "r8": 8.0}, [1, 4]),
        ({"r1": 0.0}, [1]),
        ({}, []),
    ],
    ids=["rises, then not", "never", "within what runs vary by", "after a dip", "too fast to time", "not timed"],
)
def test_the_sizes_worth_a_batch_are_those_at_which_throughput_rises(
    measured: dict[str, float], worth: list[int]
) -> None:
    assert advice.buckets(timings(**measured)) == worth


def test_the_settings_are_lines_that_model_toml_takes() -> None:
    model = ModelFile("m", "1", Path("m.onnx"), batch="single", shared_inputs=frozenset({"sr", "rate"}))
    assert advice.settings(model, None) == ['batch = "single"', 'shared_inputs = ["rate", "sr"]']
    assert advice.settings(MODEL, 16) == ["max_rows = 16"]


def test_rows_on_another_axis_are_found_by_the_name_of_the_axis() -> None:
    state = DeclaredTensor("state", "float32", (2, "batch", 128))
    audio = DeclaredTensor("audio", "float32", ("batch", 576))
    assert "input 'state' has its rows on axis 1 ('batch', which is axis 0 of 'audio')" in advice.misplaced_rows(
        [audio, state]
    )


@pytest.mark.parametrize("shape", [("batch", 128), ("batch", "batch"), (2, None), (2, "time"), ()], ids=str)
def test_rows_on_axis_0_are_in_their_place(shape: tuple[int | str | None, ...]) -> None:
    inputs = [DeclaredTensor("audio", "float32", ("batch", 576)), DeclaredTensor("other", "float32", shape)]
    assert advice.misplaced_rows(inputs) == ""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "model" / "m.onnx"
    file.parent.mkdir()
    file.write_bytes(b"x")
    return file


def cautions(path: Path, **facts: Any) -> str:
    return "\n".join(advice.cautions(path, GraphFacts(**facts)))


def test_a_plain_model_has_no_warnings(path: Path) -> None:
    x = DeclaredTensor("x", "float32", ("n", 3))
    plain = {"opsets": {"ai.onnx": 20}, "operators": {"Conv": 3, "com.microsoft:Gelu": 1, "ai.onnx.ml:Scaler": 1}}
    assert cautions(path, inputs=(x,), outputs=(x,), **plain) == ""


@pytest.mark.parametrize(
    ("facts", "warning"),
    [
        ({"compiled_nodes": 2}, "2 EPContext node(s): native code"),
        ({"operators": {"my.ops:Foo": 1, "my.ops:Bar": 2}}, "custom operators of the domain 'my.ops' (Bar, Foo)"),
        ({"operators": {"Loop": 2, "Scan": 1}}, "Loop (2) and Scan (1): run times may depend on the values"),
        ({"opsets": {"ai.onnx": 6}}, "opset 6 is older than 7"),
        ({"external_data": ("../w.bin",)}, "weights in '../w.bin', outside the model's folder: refused"),
        ({"external_data": ("w.bin",)}, "weights in 'w.bin', which is not there"),
        ({"inputs": (DeclaredTensor("", "float32", ("n",)),)}, "an input has no name"),
        ({"inputs": (DeclaredTensor("x", "string", ("n",)),)}, "input 'x' is text"),
        ({"outputs": (DeclaredTensor("y", "map", None, is_tensor=False),)}, "output 'y' is a map"),
        ({"outputs": (DeclaredTensor("y", "float32", None),)}, "output 'y' declares no shape"),
        ({"inputs": (DeclaredTensor("x", "float32", ("n", "t", None, 3)),)}, "dynamic inner axes (t, axis 2)"),
        (
            {"inputs": (DeclaredTensor("x", "float32", ("t", 9)), DeclaredTensor("h", "float32", (1, 9)))},
            "axis 0 of 'x' is dynamic, that of 'h' is 1",
        ),
    ],
)
def test_what_an_operator_should_know_is_said(path: Path, facts: dict[str, Any], warning: str) -> None:
    assert warning in cautions(path, **facts)


def test_operators_that_the_file_defines_itself_are_not_strange(path: Path) -> None:
    assert cautions(path, operators={"my.ops:Twice": 1}, functions=frozenset({"my.ops:Twice"})) == ""


def test_weights_beside_the_model_count_as_its_size(path: Path) -> None:
    with (path.parent / "w.bin").open("wb") as file:
        file.truncate(3 * 2**30)
    said = cautions(path, external_data=("w.bin",))
    assert "weights in 'w.bin' (3.0 GiB): goes where the .onnx file goes" in said
    assert "3.0 GiB to load" in said


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (2**20, "1.0 MiB"), (2**41, "2048.0 GiB")]
)
def test_sizes_are_in_binary_units(size: int, text: str) -> None:
    assert advice.in_bytes(size) == text
