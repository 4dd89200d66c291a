"""`inferq model inspect` on real files: what it says, and that a worker would agree."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from tests import models

from inferq import cli
from inferq_worker.models.repository import ModelFile
from inferq_worker.runtime import RuntimeSettings, open_session, ort
from inferq_worker.runtime.interface import ModelRefused

LIGHT = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
IRIS = Path(str(ort.onnxruntime().__path__[0])) / "datasets" / "logreg_iris.onnx"
Capture = pytest.CaptureFixture[str]
X: models.Spec = ("x", TensorProto.FLOAT, ["n", 3])
Y: models.Spec = ("y", TensorProto.FLOAT, ["n", 3])


@pytest.fixture(autouse=True)
def unconfigured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def inspect(path: Path, *words: str) -> int:
    return cli.main(["model", "inspect", str(path), "--provider", "cpu", "--max-rows", "8", *words])


def report(capsys: Capture, path: Path, *words: str, status: int = 0) -> dict[str, Any]:
    assert inspect(path, "--json", *words) == status
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["serves"] is (status == 0)
    return found


def compiled(folder: Path) -> Path:
    node = helper.make_node("EPContext", ["x"], ["y"], domain="com.microsoft", embed_mode=1, ep_cache_context="blob")
    return models.write(folder / "compiled.onnx", [node], [X], [Y], opsets={"com.microsoft": 1})


def recurrent(folder: Path) -> Path:
    """A state with its rows on axis 1, as those of silero-vad and most exported LSTMs."""
    return models.write(
        folder / "recurrent.onnx",
        [helper.make_node("Add", ["x", "mean"], ["y"]), helper.make_node("ReduceMean", ["state", "axes"], ["mean"])][
            ::-1
        ],
        [("x", TensorProto.FLOAT, ["batch", 3]), ("state", TensorProto.FLOAT, [2, "batch", 3])],
        [("y", TensorProto.FLOAT, ["batch", 3])],
        {"axes": np.array([0], np.int64)},
    )


def test_a_batchable_model_is_shown_with_evidence_times_and_settings(tmp_path: Path, capsys: Capture) -> None:
    found = report(capsys, models.scale(tmp_path, features=3))
    assert found["verdict"] == "a worker serves it as it stands"
    assert found["inputs"] == [{"name": "x", "dtype": "float32", "shape": ["n", 3], "tensor": True}]
    assert found["onnxruntime"] == {"version": ort.onnxruntime().__version__, "ir_version": 13, "opset": 26}
    (trial,) = found["trials"]
    assert trial["probed_rows"] == 4
    assert {one["compared_with"] for one in trial["evidence"]} >= {"each row alone", "the batch in reverse order"}
    assert all(one["agrees"] and one["difference"] <= one["tolerance"] for one in trial["evidence"])
    assert [timing["rows"] for timing in found["timings"]] == [1, 2, 4, 8]
    assert all(0 < timing["p50_ms"] <= timing["p95_ms"] for timing in found["timings"])
    assert found["buckets"][0] == 1
    assert found["suggested_toml"] == [f"max_rows = {found['buckets'][-1]}"]
    assert found["nodes_by_provider"] == {"CPUExecutionProvider": 2}


def test_the_text_has_the_verdict_first_and_every_part(tmp_path: Path, capsys: Capture) -> None:
    path = models.scale(tmp_path, features=3)
    assert inspect(path) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"{path}: a worker serves it as it stands\n\nsize ")
    for part in ("inputs", "outputs", "batch axis", "run times on CPUExecutionProvider", "suggested scale.toml"):
        assert f"\n\n{part}\n" in text
    assert "IR version 10, opset ai.onnx 20; ONNX Runtime 1.31" in text
    assert text.endswith("warnings\n  none\n")


@pytest.mark.parametrize(
    ("build", "suggested"),
    [
        (models.batch_mean, ['batch = "single"']),
        (models.total_over_rows, ['batch = "single"']),
        (models.shared_factor, ["max_rows", 'shared_inputs = ["factor"]']),
    ],
)
async def test_a_worker_serves_what_was_refused_with_the_settings_suggested(
    tmp_path: Path, capsys: Capture, build: Callable[[Path], Path], suggested: list[str]
) -> None:
    path = build(tmp_path)
    refused = report(capsys, path, status=1)
    assert refused["verdict"].endswith("and serves it with the " + path.with_suffix(".toml").name + " below")
    assert [line.partition(" = ")[0] if "max_rows" in line else line for line in refused["suggested_toml"]] == suggested
    path.with_suffix(".toml").write_text("\n".join(refused["suggested_toml"]))
    assert report(capsys, path)["trials"][0]["problem"] == ""


@pytest.mark.parametrize("build", [models.scale, models.batch_mean, models.total_over_rows, models.shared_factor])
async def test_the_verdict_is_that_of_a_worker(tmp_path: Path, capsys: Capture, build: Callable[[Path], Path]) -> None:
    path = build(tmp_path)
    inspect(path, "--json")
    said = json.loads(capsys.readouterr().out)
    serves = True
    try:
        session = await open_session(ModelFile("m", "1", path), RuntimeSettings(provider="cpu"))
        await session.warm_up([1, 8])
        await session.close()
    except ModelRefused:
        serves = False
    assert said["serves"] is serves


def test_a_mean_over_the_batch_is_refused_with_what_was_compared(tmp_path: Path, capsys: Capture) -> None:
    assert inspect(models.batch_mean(tmp_path)) == 1
    text = capsys.readouterr().out
    assert "refused: a row's answer depends on the other rows of its batch" in text
    assert any(
        line.split()[-4:] == ["y", "1", "0.002", "differs"] and "among copies" in line for line in text.splitlines()
    )


def test_a_state_with_its_rows_on_axis_1_is_refused_for_that(tmp_path: Path, capsys: Capture) -> None:
    found = report(capsys, recurrent(tmp_path), status=1)
    assert "input 'state' has its rows on axis 1 ('batch', which is axis 0 of 'x')" in found["problem"]
    assert found["suggested_toml"] == []
    assert found["timings"] == []


def test_a_real_model_of_fixed_batch_1_is_said_to_batch_nothing(capsys: Capture) -> None:
    path = LIGHT / "light_squeezenet.onnx"
    assert inspect(path) == 0
    text = capsys.readouterr().out
    assert "fixed at 1 row: every row runs alone" in text
    assert "Conv 26" in text
    assert "suggested" not in text


def test_a_fixed_batch_is_timed_at_its_size(tmp_path: Path, capsys: Capture) -> None:
    found = report(capsys, models.fixed_batch(tmp_path, 5))
    assert [timing["rows"] for timing in found["timings"]] == [5]
    assert found["buckets"] == []


def test_a_model_whose_rows_never_meet_is_not_compared(tmp_path: Path, capsys: Capture) -> None:
    path = models.batch_mean(tmp_path)
    path.with_suffix(".toml").write_text("max_rows = 1")
    found = report(capsys, path)
    assert found["trials"][0]["evidence"] == []
    assert [timing["rows"] for timing in found["timings"]] == [1]


def test_a_trusted_model_that_mixes_rows_is_served_and_said_to(tmp_path: Path, capsys: Capture) -> None:
    path = models.batch_mean(tmp_path)
    path.with_suffix(".toml").write_text('batch = "trust"')
    assert inspect(path) == 0
    assert "THE ROWS ARE NOT INDEPENDENT" in capsys.readouterr().out


def test_sizes_of_dynamic_axes_are_taken_and_shown(tmp_path: Path, capsys: Capture) -> None:
    path = models.row_sums(tmp_path)
    assert inspect(path, "--dim", "h=30", "--dim", "x:2=7") == 0
    assert "with made-up sizes (--dim): x [rows, 30, 7]" in capsys.readouterr().out
    assert report(capsys, path, "--dim", "h=30", "--dim", "w=9")["sample_shapes"] == {"x": [30, 9]}


def test_weights_that_give_nothing_but_nan_are_noticed(tmp_path: Path, capsys: Capture) -> None:
    found = report(capsys, models.matmul(tmp_path, np.full((3, 2), np.nan)))
    assert any("never finite" in warning for warning in found["warnings"])


def test_answers_that_are_all_the_same_are_said_to_prove_little(tmp_path: Path, capsys: Capture) -> None:
    found = report(capsys, models.matmul(tmp_path, np.zeros((3, 2))))
    assert any("the same for all made-up rows" in warning for warning in found["warnings"])


def test_a_name_that_is_damaged_is_a_reason_to_refuse(tmp_path: Path, capsys: Capture) -> None:
    path = models.scale(tmp_path, features="features")
    path.write_bytes(path.read_bytes().replace(b"features", b"\x9deatures"))
    found = report(capsys, path, status=1)
    assert found["problem"].startswith("the name of an input, an output or an axis is not UTF-8")


def four_rows_at_most(folder: Path) -> Path:
    """y = x + k, where k is an entry of a table with four entries for each row."""
    return models.write(
        folder / "four.onnx",
        [
            helper.make_node("Shape", ["x"], ["rows"], end=1),
            helper.make_node("Squeeze", ["rows"], ["count"]),
            helper.make_node("Range", ["zero", "count", "one"], ["index"]),
            helper.make_node("Gather", ["table", "index"], ["k"]),
            helper.make_node("Add", ["x", "k"], ["y"]),
        ],
        [X],
        [Y],
        {"zero": np.array(0), "one": np.array(1), "table": np.ones((4, 1), np.float32)},
    )


def test_a_size_that_does_not_run_is_a_reason_to_refuse_and_bounds_the_settings(
    tmp_path: Path, capsys: Capture
) -> None:
    path = four_rows_at_most(tmp_path)
    found = report(capsys, path, status=1)
    assert found["problem"].startswith("8 rows do not run: ")
    assert [timing["rows"] for timing in found["timings"]] == [1, 2, 4]
    path.with_suffix(".toml").write_text("max_rows = 4")
    assert report(capsys, path)["timing_note"].startswith("8 rows do not run: ")


def test_a_file_that_is_too_new_is_still_described_without_a_run(tmp_path: Path, capsys: Capture) -> None:
    path = models.write(tmp_path / "m.onnx", [helper.make_node("Identity", ["x"], ["y"])], [X], [Y], ir_version=99)
    assert inspect(path, "--no-run") == 0
    assert "newer than what this ONNX Runtime loads" in capsys.readouterr().out


def test_outputs_that_are_no_tensors_are_shown_and_refused(capsys: Capture) -> None:
    found = report(capsys, IRIS, status=1)
    assert found["outputs"][1] == {"name": "probabilities", "dtype": "sequence", "shape": None, "tensor": False}
    assert "zipmap" in found["problem"]


def test_custom_operators_are_named(tmp_path: Path, capsys: Capture) -> None:
    path = models.write(
        tmp_path / "m.onnx", [helper.make_node("Foo", ["x"], ["y"], domain="my.ops")], [X], [Y], opsets={"my.ops": 1}
    )
    found = report(capsys, path, status=1)
    assert "custom operator my.ops:Foo" in found["problem"]
    assert "my.ops" in found["warnings"][0]


@pytest.mark.parametrize("words", [(), ("--no-run",)])
def test_native_code_is_never_loaded(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    def load(*_: Any) -> None:
        raise AssertionError("it was loaded")

    path = compiled(tmp_path)
    monkeypatch.setattr(ort, "open_engine", load)
    assert inspect(path, *words) == (0 if words else 1)
    text = capsys.readouterr().out
    assert "1 EPContext node(s)" in text
    assert text.count(str(path)) == 1
    assert "x     float32  [n, 3]" in text


def test_trusted_native_code_is_handed_to_the_loader(tmp_path: Path, capsys: Capture) -> None:
    found = report(capsys, compiled(tmp_path), "--set", "runtime.trust_models=true", status=1)
    assert "trust_models" not in found["problem"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "m.onnx is empty"),
        (b"<html>404</html>", "not an ONNX model but a web page"),
        (b"\x08\x0a\x3a\x50cut off", "it is cut off"),
        (None, "m.onnx is not there"),
        ("folder", "m.onnx is a folder"),
        ("ir", "IR version 99 is newer than 13"),
        ("opset", "opset 99 is newer than 26"),
        ("toml", "unknown key 'max_row'; did you mean 'max_rows'?"),
    ],
    ids=["empty", "html", "cut", "missing", "folder", "ir", "opset", "toml"],
)
def test_what_is_no_model_for_this_runtime_is_one_line_and_status_2(
    tmp_path: Path, capsys: Capture, content: bytes | str | None, message: str
) -> None:
    path = tmp_path / "m.onnx"
    identity = [helper.make_node("Identity", ["x"], ["y"])]
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content == "folder":
        path.mkdir()
    elif content == "ir":
        models.write(path, identity, [X], [Y], ir_version=99)
    elif content == "opset":
        models.write(path, identity, [X], [Y], opsets={"": 99})
    elif content == "toml":
        models.write(path, identity, [X], [Y])
        path.with_suffix(".toml").write_text("max_row = 3")
    assert inspect(path) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("inferq: ")
    assert printed.err.count("\n") == 1
    assert message in printed.err


def test_a_trial_without_end_is_given_up(tmp_path: Path, capsys: Capture) -> None:
    assert inspect(models.slow(tmp_path, layers=20, width=64), "--limit", "0.001") == 2
    assert "was not done after 0.001 s" in capsys.readouterr().err
