"""What cannot be served is refused at load with its mend, and what really runs a model is known."""

import hashlib
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper
from tests import models

from inferq_worker.models.repository import ModelFile
from inferq_worker.runtime import hardware, ort
from inferq_worker.runtime.interface import ModelRefused, RowError, RuntimeUnavailable, SessionInfo
from inferq_worker.runtime.session import open_session
from inferq_worker.runtime.settings import RuntimeSettings

CPU = RuntimeSettings(provider="cpu")


async def load(path: Path, config: RuntimeSettings = CPU) -> SessionInfo:
    opened = await open_session(ModelFile(path.stem, "1", path), config)
    await opened.close()
    return opened.info


X3: list[models.Spec] = [("x", TensorProto.FLOAT, ["n", 3])]
Y3: list[models.Spec] = [("y", TensorProto.FLOAT, ["n", 3])]


def custom(domain: str, op: str, **attributes: Any) -> list[Any]:
    return [helper.make_node(op, ["x"], ["y"], domain=domain, **attributes)]


def broken_file(tmp_path: Path, kind: str) -> Path:
    path = tmp_path / "m.onnx"
    whole = models.scale(tmp_path).read_bytes()
    identity = [helper.make_node("Identity", ["x"], ["y"])]
    if kind in {"empty", "html", "cut"}:
        path.write_bytes({"empty": b"", "html": b"<html>404</html>", "cut": whole[: len(whole) // 2]}[kind])
    elif kind == "folder":
        path.mkdir()
    elif kind == "ir":
        models.write(path, identity, X3, Y3, ir_version=99)
    elif kind == "opset":
        models.write(path, identity, X3, Y3, opsets={"": 99})
    elif kind == "custom":
        models.write(path, custom("my.ops", "Foo"), X3, Y3, opsets={"my.ops": 1})
    elif kind == "kernel":
        models.write(
            path,
            [helper.make_node("Relu", ["x"], ["y"])],
            [("x", TensorProto.BFLOAT16, ["n", 3])],
            [("y", TensorProto.BFLOAT16, ["n", 3])],
        )
    return path


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("missing", "m.onnx cannot be read: No such file or directory; check the path"),
        ("folder", "m.onnx cannot be read: Is a directory"),
        ("empty", "m.onnx is empty; copy or export the model again"),
        ("html", "this is not an ONNX model"),
        ("cut", "this is not an ONNX model"),
        ("ir", "the file's IR version 99 is newer than 13, .*ir_version=13"),
        ("opset", "the file's opset 99 is newer than 26, .*opset_version=26"),
        ("custom", "custom operator my.ops:Foo"),
        ("kernel", "no kernel for Relu.*bfloat16"),
    ],
)
async def test_a_file_that_cannot_be_served_is_refused_with_its_mend(tmp_path: Path, kind: str, message: str) -> None:
    with pytest.raises(ModelRefused, match=message):
        await load(broken_file(tmp_path, kind))


@pytest.mark.parametrize(
    ("location", "message"),
    [
        ("../secret.bin", "weights lie outside the model's folder"),
        ("sub/../../secret.bin", "weights lie outside the model's folder"),
        ("/etc/hostname", "weights lie outside the model's folder"),
        ("absent.bin", "weights file .*absent.bin is missing"),
    ],
)
async def test_weights_elsewhere_are_refused(tmp_path: Path, location: str, message: str) -> None:
    (tmp_path / "secret.bin").write_bytes(bytes(12))
    with pytest.raises(ModelRefused, match=message):
        await load(with_external_weights(tmp_path / "m" / "ext.onnx", location))


@pytest.mark.parametrize("location", ["link", "folder/secret.bin"])
async def test_weights_behind_a_link_out_of_the_folder_are_refused(tmp_path: Path, location: str) -> None:
    (tmp_path / "secret.bin").write_bytes(bytes(12))
    path = with_external_weights(tmp_path / "m" / "ext.onnx", location)
    (path.parent / "link").symlink_to(tmp_path / "secret.bin")
    (path.parent / "folder").symlink_to(tmp_path)
    with pytest.raises(ModelRefused, match="weights lie outside the model's folder"):
        await load(path)


async def test_a_hard_link_is_a_file_of_the_folder_like_any_other(tmp_path: Path) -> None:
    """Only who may write the folder can make one, and image layers and model stores are full of them."""
    (tmp_path / "store.bin").write_bytes(np.full(3, 7, np.float32).tobytes())
    path = with_external_weights(tmp_path / "m" / "ext.onnx", "w.bin")
    (path.parent / "w.bin").hardlink_to(tmp_path / "store.bin")
    session = await open_session(ModelFile("m", "1", path), CPU)
    (answer,) = (await session.run([{"x": np.zeros((1, 3), np.float32)}])).answers
    await session.close()
    assert not isinstance(answer, RowError)
    np.testing.assert_array_equal(answer["y"], [[7, 7, 7]])
    assert session.info.sha256 == hashlib.sha256(path.read_bytes() + (path.parent / "w.bin").read_bytes()).hexdigest()


def with_external_weights(path: Path, location: str) -> Path:
    model = models.build([helper.make_node("Add", ["x", "w"], ["y"])], X3, Y3)
    weights = numpy_helper.from_array(np.zeros(3, np.float32), "w")
    weights.ClearField("raw_data")
    weights.data_location = TensorProto.EXTERNAL
    entry = weights.external_data.add()
    entry.key, entry.value = "location", location
    model.graph.initializer.append(weights)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(model.SerializeToString())
    return path


async def test_the_fingerprint_covers_the_external_weights(tmp_path: Path) -> None:
    path = with_external_weights(tmp_path / "ext.onnx", "w.bin")
    (tmp_path / "w.bin").write_bytes(np.zeros(3, np.float32).tobytes())
    before = (await load(path)).sha256
    (tmp_path / "w.bin").write_bytes(np.ones(3, np.float32).tobytes())
    assert (await load(path)).sha256 != before


async def test_compiled_nodes_are_refused_even_inside_a_branch(tmp_path: Path) -> None:
    branch = helper.make_graph(
        [helper.make_node("EPContext", ["x"], ["b"], domain="com.microsoft", embed_mode=1, ep_cache_context="blob")],
        "branch",
        [],
        [helper.make_tensor_value_info("b", TensorProto.FLOAT, ["n", 3])],
    )
    path = models.write(
        tmp_path / "compiled.onnx",
        [helper.make_node("If", ["yes"], ["y"], then_branch=branch, else_branch=branch)],
        X3,
        Y3,
        {"yes": np.array(True)},
        opsets={"com.microsoft": 1},
    )
    with pytest.raises(ModelRefused, match=r"2 EPContext node\(s\).*trust_models"):
        await load(path)


async def test_outputs_that_are_no_tensors_are_refused() -> None:
    iris = Path(str(ort.onnxruntime().__path__[0])) / "datasets" / "logreg_iris.onnx"
    with pytest.raises(ModelRefused, match=r"'probabilities' is a seq\(.*zipmap"):
        await load(iris)


async def test_an_optional_tensor_as_input_is_refused(tmp_path: Path) -> None:
    model = models.build(
        [helper.make_node("OptionalGetElement", ["x"], ["y"])], [("unused", TensorProto.FLOAT, ["n", 3])], Y3
    )
    wrapped = helper.make_optional_type_proto(helper.make_tensor_type_proto(TensorProto.FLOAT, ["n", 3]))
    model.graph.input[0].CopyFrom(helper.make_value_info("x", wrapped))
    (tmp_path / "optional.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(ModelRefused, match=r"'x' is a optional\(tensor\(float\)\)"):
        await load(tmp_path / "optional.onnx")


async def test_a_recurrent_state_with_rows_on_its_second_axis_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match=r"input 'state' is \[2, any, 3\]: .*its rows seem to lie there.*export"):
        await load(models.state_on_axis_1(tmp_path))


no_gpu = pytest.mark.skipif(hardware.driver_present(), reason="this machine has a GPU; the fallback cannot be seen")


@no_gpu
@pytest.mark.parametrize("provider", ["cuda", "tensorrt"])
async def test_a_preferred_provider_that_is_not_there_is_noticed(
    tmp_path: Path, provider: str, capfd: pytest.CaptureFixture[str]
) -> None:
    info = await load(models.scale(tmp_path), RuntimeSettings.model_validate({"provider": provider}))
    assert info.provider == "CPUExecutionProvider"
    assert (
        info.requested_provider
        == {
            "cuda": "CUDAExecutionProvider",
            "tensorrt": "TensorrtExecutionProvider",
        }[provider]
    )
    assert info.degraded
    assert "no NVIDIA driver" in info.warning
    assert sum(info.nodes_by_provider.values()) > 0
    assert capfd.readouterr() == ("", "")


@no_gpu
async def test_a_required_provider_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    config = RuntimeSettings(provider="cuda", provider_policy="require")
    with pytest.raises(RuntimeUnavailable, match=r"CUDAExecutionProvider was asked for but CPU.*NVIDIA driver"):
        await load(models.scale(tmp_path), config)


@no_gpu
@pytest.mark.parametrize("provider", ["cuda", "tensorrt"])
async def test_the_answer_of_the_library_counts_and_not_the_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, provider: str
) -> None:
    monkeypatch.setattr(hardware, "driver_present", lambda: True)
    info = await load(models.scale(tmp_path), RuntimeSettings.model_validate({"provider": provider}))
    assert info.provider == "CPUExecutionProvider"
    assert info.degraded
    assert info.warning


async def test_the_requested_cpu_is_no_degradation(tmp_path: Path) -> None:
    info = await load(models.scale(tmp_path))
    assert not info.degraded
    assert info.warning == ""
    assert set(info.nodes_by_provider) == {"CPUExecutionProvider"}


def test_an_unknown_provider_option_is_refused_by_the_settings() -> None:
    with pytest.raises(ValueError, match="trt_extra_plugin_lib_paths' is not allowed"):
        RuntimeSettings(provider="tensorrt", provider_options={"trt_extra_plugin_lib_paths": "evil.so"})


class Installed:
    def __init__(self, name: str) -> None:
        self.metadata = {"Name": name}


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (
            ["onnxruntime", "onnxruntime_gpu"],
            "pip uninstall -y onnxruntime onnxruntime-gpu && pip install onnxruntime-gpu",
        ),
        (["numpy"], r"not installed; run: pip install 'inferq\[worker\]'"),
    ],
)
def test_an_environment_with_two_or_no_onnxruntime_is_refused(
    monkeypatch: pytest.MonkeyPatch, names: list[str], message: str
) -> None:
    monkeypatch.setattr(metadata, "distributions", lambda: [Installed(name) for name in names])
    with pytest.raises(RuntimeUnavailable, match=message):
        ort.check_distributions()


def test_plug_in_providers_do_not_count_as_a_second_onnxruntime(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["onnxruntime-gpu", "onnxruntime-ep-openvino"]
    monkeypatch.setattr(metadata, "distributions", lambda: [Installed(name) for name in names])
    ort.check_distributions()


def test_no_telemetry_is_left_behind(tmp_path: Path) -> None:
    path = models.scale(tmp_path)
    home = tmp_path / "home"
    home.mkdir()
    code = (
        "import asyncio, pathlib\n"
        "from inferq_worker.models.repository import ModelFile\n"
        "from inferq_worker.runtime import RuntimeSettings, open_session\n"
        "async def main():\n"
        f"    s = await open_session(ModelFile('m', '1', pathlib.Path({str(path)!r})),"
        "        RuntimeSettings(provider='cpu'))\n"
        "    await s.warm_up([1])\n"
        "    await s.close()\n"
        "asyncio.run(main())\n"
    )
    # CI=true would switch the telemetry off by itself and so hide a mistake of ours.
    inherited = {key: value for key, value in os.environ.items() if key not in {"CI", "ORT_DISABLE_TELEMETRY"}}
    env = inherited | {"HOME": str(home), "XDG_CACHE_HOME": str(home / ".cache")}
    subprocess.run([sys.executable, "-c", code], env=env, check=True, timeout=50)
    assert list(home.rglob("*")) == []


async def test_a_model_that_is_not_the_pinned_one_is_refused_before_it_is_loaded(tmp_path: Path) -> None:
    path = models.scale(tmp_path)
    sha256 = (await load(path)).sha256
    pinned = ModelFile("m", "1", path, sha256=sha256)
    await (await open_session(pinned, CPU)).close()
    (tmp_path / "other").mkdir()
    path.write_bytes(models.scale(tmp_path / "other", features=7).read_bytes())
    with pytest.raises(ModelRefused, match=f"pins {sha256}: restore the file"):
        await open_session(pinned, CPU)
