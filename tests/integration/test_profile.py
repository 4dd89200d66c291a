"""`inferq profile` on real models: ONNX Runtime's own profile, kept and summed up."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from tests import models

from inferq import cli

LIGHT = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def unconfigured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def profile(path: Path, *words: str) -> int:
    return cli.main(["profile", str(path), "--provider", "cpu", "--runs", "3", *words])


def report(capsys: Capture, path: Path, *words: str) -> dict[str, Any]:
    assert profile(path, "--json", *words) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def looping(folder: Path) -> Path:
    """Three times x = tanh(x) in a Loop."""
    body = helper.make_graph(
        [helper.make_node("Tanh", ["v"], ["w"], name="inner"), helper.make_node("Identity", ["go"], ["on"])],
        "body",
        [
            helper.make_tensor_value_info("i", TensorProto.INT64, []),
            helper.make_tensor_value_info("go", TensorProto.BOOL, []),
            helper.make_tensor_value_info("v", TensorProto.FLOAT, ["n", 3]),
        ],
        [
            helper.make_tensor_value_info("on", TensorProto.BOOL, []),
            helper.make_tensor_value_info("w", TensorProto.FLOAT, ["n", 3]),
        ],
    )
    return models.write(
        folder / "looping.onnx",
        [helper.make_node("Loop", ["times", "", "x"], ["y"], name="outer", body=body)],
        [("x", TensorProto.FLOAT, ["n", 3])],
        [("y", TensorProto.FLOAT, ["n", 3])],
        {"times": np.array(3, np.int64)},
    )


def test_the_time_of_a_real_model_is_told_by_operator_and_by_node(tmp_path: Path, capsys: Capture) -> None:
    found = report(capsys, LIGHT / "light_squeezenet.onnx")
    assert found["runs"] == 3
    assert found["shapes"] == {"data_0": [1, 3, 224, 224]}
    assert found["operators"][0]["operator"] in {"FusedConv", "Conv"}
    assert sum(one["share"] for one in found["operators"]) == pytest.approx(1)
    assert sum(one["own_ms"] for one in found["nodes"]) == pytest.approx(3 * found["operators_ms"])
    assert 0 < found["operators_ms"] <= found["run_ms"]
    assert {one["provider"] for one in found["nodes"]} == {"CPUExecutionProvider"}


def test_the_trace_lies_in_the_folder_and_holds_the_warm_up_too(tmp_path: Path, capsys: Capture) -> None:
    found = report(capsys, models.scale(tmp_path, features=3), "--rows", "4", "--out", "deep/traces")
    trace = Path(found["trace"])
    assert trace.parent == Path("deep/traces")
    assert [path.name for path in trace.parent.iterdir()] == [trace.name]
    events = json.loads(trace.read_text())
    assert sum(event["name"] == "model_run" for event in events) == 2 + 3
    assert found["shapes"] == {"x": [4, 3]}
    assert all(one["executions"] == 3 for one in found["operators"])


def test_the_body_of_a_loop_is_not_counted_twice(tmp_path: Path, capsys: Capture) -> None:
    found = report(capsys, looping(tmp_path), "--rows", "2")
    executions = {one["operator"]: one["executions"] for one in found["operators"]}
    assert (executions["Loop"], executions["Tanh"]) == (3, 9)
    assert found["operators_ms"] <= found["run_ms"]


def test_the_text_has_tables_and_says_where_the_trace_is(tmp_path: Path, capsys: Capture) -> None:
    assert profile(models.slow(tmp_path, layers=6, width=16), "--top", "2") == 0
    text = capsys.readouterr().out
    assert text.startswith("3 runs on CPUExecutionProvider with x [1, 16]\n")
    rows = [line.split() for line in text.splitlines()]
    assert ["operator", "nodes", "count", "total", "ms", "ms/run", "share", "provider"] in rows
    assert {row[0]: row[1:3] for row in rows if row and row[0] in {"MatMul", "Tanh"}} == {
        "MatMul": ["6", "18"],
        "Tanh": ["6", "18"],
    }
    assert sum(row[0].startswith(("MatMul_", "Tanh_")) for row in rows if row) == 2
    assert rows[-1][:1] == ["trace:"]
    assert Path(rows[-1][1]).is_file()


def test_rows_that_lie_on_another_axis_go_with_the_batch(tmp_path: Path, capsys: Capture) -> None:
    path = models.write(
        tmp_path / "recurrent.onnx",
        [
            helper.make_node("ReduceMean", ["state", "axes"], ["mean"], keepdims=0),
            helper.make_node("Add", ["x", "mean"], ["y"]),
        ],
        [("x", TensorProto.FLOAT, ["batch", 3]), ("state", TensorProto.FLOAT, [2, "batch", 3])],
        [("y", TensorProto.FLOAT, ["batch", 3])],
        {"axes": np.array([0], np.int64)},
    )
    assert report(capsys, path, "--rows", "5")["shapes"] == {"x": [5, 3], "state": [2, 5, 3]}


def test_sizes_of_dynamic_axes_are_taken(tmp_path: Path, capsys: Capture) -> None:
    found = report(capsys, models.row_sums(tmp_path), "--rows", "2", "--dim", "h=30", "--dim", "w=7")
    assert found["shapes"] == {"x": [2, 30, 7]}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--dim", "height=3"), "--dim height: no input has such a dynamic inner axis; there are: features, x:1"),
        (("--dim", "height"), "'height' is not AXIS=N"),
        (("--runs", "0"), "0 is not in 1..65536"),
        (("--limit", "0"), "0 is not above 0"),
        (("--out", "scale.onnx"), "cannot make the folder scale.onnx: File exists"),
    ],
)
def test_what_cannot_be_is_one_line_and_status_2(
    tmp_path: Path, capsys: Capture, words: tuple[str, ...], message: str
) -> None:
    assert profile(models.scale(tmp_path), *words) == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    assert message in printed.err


def test_native_code_is_not_loaded_and_leaves_no_trace(tmp_path: Path, capsys: Capture) -> None:
    node = helper.make_node("EPContext", ["x"], ["y"], domain="com.microsoft", embed_mode=1, ep_cache_context="blob")
    path = models.write(
        tmp_path / "compiled.onnx",
        [node],
        [("x", TensorProto.FLOAT, ["n"])],
        [("y", TensorProto.FLOAT, ["n"])],
        opsets={"com.microsoft": 1},
    )
    assert profile(path, "--out", "traces") == 2
    assert "EPContext" in capsys.readouterr().err
    assert list(Path("traces").iterdir()) == []
