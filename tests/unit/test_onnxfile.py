"""What an .onnx file says of itself, read without the `onnx` package and held against it."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from tests import models

from inferq_worker.runtime.interface import ModelRefused
from inferq_worker.runtime.onnxfile import DeclaredTensor, fingerprint, read_facts, refuse_compiled_nodes

LIGHT = sorted((Path(onnx.__file__).parent / "backend" / "test" / "data" / "light").glob("*.onnx"))
X: models.Spec = ("x", TensorProto.FLOAT, ["n", 3])
Y: models.Spec = ("y", TensorProto.FLOAT, ["n", 3])
# Field 100 as a group, which nobody has written since 2008 and every parser of protobuf skips.
GROUP = b"\xa3\x06\xa4\x06"


def compiled(path: Path) -> Path:
    node = helper.make_node("EPContext", ["x"], ["y"], domain="com.microsoft", embed_mode=1, ep_cache_context="blob")
    return models.write(path, [node], [X], [Y], opsets={"com.microsoft": 1})


@pytest.mark.parametrize("path", LIGHT, ids=lambda path: path.stem)
def test_a_real_model_is_read_as_onnx_reads_it(path: Path) -> None:
    model = onnx.load(path)
    facts = read_facts(path)
    weights = {tensor.name for tensor in model.graph.initializer}
    assert facts.ir_version == model.ir_version
    assert facts.opsets == {entry.domain or "ai.onnx": entry.version for entry in model.opset_import}
    assert sum(facts.operators.values()) == len(model.graph.node)
    assert facts.operators["Relu"] == sum(node.op_type == "Relu" for node in model.graph.node)
    assert [tensor.name for tensor in facts.inputs] == [
        value.name for value in model.graph.input if value.name not in weights
    ]
    assert [tensor.name for tensor in facts.outputs] == [value.name for value in model.graph.output]


def test_axes_are_numbers_names_or_nothing(tmp_path: Path) -> None:
    path = models.identity(tmp_path, TensorProto.INT64, ["rows", 3, None])
    assert read_facts(path).inputs == (DeclaredTensor("x", "int64", ("rows", 3, None)),)


def test_a_scalar_has_no_axes_and_an_unknown_shape_is_none(tmp_path: Path) -> None:
    model = models.build(
        [helper.make_node("Identity", ["x"], ["y"])], [("x", TensorProto.FLOAT, [])], [("y", TensorProto.FLOAT, [])]
    )
    model.graph.output[0].type.tensor_type.ClearField("shape")
    path = tmp_path / "m.onnx"
    path.write_bytes(model.SerializeToString())
    facts = read_facts(path)
    assert (facts.inputs[0].shape, facts.outputs[0].shape) == ((), None)


@pytest.mark.parametrize("name", [name for name in TensorProto.DataType.keys() if name != "UNDEFINED"])  # noqa: SIM118 - a protobuf enumeration is no mapping
def test_every_element_type_has_its_name(tmp_path: Path, name: str) -> None:
    ours = {"FLOAT": "float32", "DOUBLE": "float64"}.get(name, name.lower())
    path = models.identity(tmp_path, TensorProto.DataType.Value(name), ["n"])
    assert read_facts(path).inputs[0].dtype == ours


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        (helper.make_sequence_type_proto(helper.make_tensor_type_proto(TensorProto.FLOAT, [1])), "sequence"),
        (helper.make_optional_type_proto(helper.make_tensor_type_proto(TensorProto.FLOAT, [1])), "optional"),
        (
            helper.make_map_type_proto(TensorProto.INT64, helper.make_tensor_type_proto(TensorProto.FLOAT, [1])),
            "map",
        ),
        (helper.make_sparse_tensor_type_proto(TensorProto.FLOAT, [1]), "sparse tensor"),
        (onnx.TypeProto(), "undefined"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_no_tensor_is_named(tmp_path: Path, kind: onnx.TypeProto, what: str) -> None:
    model = models.build([helper.make_node("Identity", ["x"], ["y"])], [X], [Y])
    kind.denotation = "IMAGE"
    model.graph.output[0].type.CopyFrom(kind)
    path = tmp_path / "m.onnx"
    path.write_bytes(model.SerializeToString())
    assert read_facts(path).outputs == (DeclaredTensor("y", what, None, is_tensor=False),)


def test_operators_are_counted_with_their_domains_and_inside_subgraphs(tmp_path: Path) -> None:
    branch = helper.make_graph(
        [helper.make_node("Foo", ["x"], ["b"], domain="my.ops")], "branch", [], [helper.make_tensor_value_info(*Y)]
    )
    path = models.write(
        tmp_path / "m.onnx",
        [helper.make_node("If", ["yes"], ["y"], then_branch=branch, else_branch=branch)],
        [X],
        [Y],
        {"yes": np.array(True)},
        opsets={"my.ops": 3},
    )
    facts = read_facts(path)
    assert facts.operators == {"If": 1, "my.ops:Foo": 2}
    assert facts.opsets == {"ai.onnx": models.OPSET, "my.ops": 3}


def test_functions_of_the_file_are_known(tmp_path: Path) -> None:
    model = models.build([helper.make_node("Twice", ["x"], ["y"], domain="my.ops")], [X], [Y], opsets={"my.ops": 1})
    body = [helper.make_node("Add", ["a", "a"], ["b"])]
    model.functions.append(
        helper.make_function("my.ops", "Twice", ["a"], ["b"], body, [helper.make_opsetid("", models.OPSET)])
    )
    path = tmp_path / "m.onnx"
    path.write_bytes(model.SerializeToString())
    facts = read_facts(path)
    assert facts.functions == {"my.ops:Twice"}
    assert facts.operators == {"my.ops:Twice": 1}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\n<!DOCTYPE html><html>", "but a web page"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        (b"PK\x03\x04rest", "a zip archive"),
        (b"\x80\x02rest", "a Python pickle"),
        (b"\x89HDF\r\n", "an HDF5 file"),
        (b"\x1f\x8b\x08\x00", "compressed with gzip"),
        (b"\x1c\x00\x00\x00TFL3", "a TensorFlow Lite model"),
        (b"\x1c\x00\x00\x00ORTM", "ONNX Runtime's own format"),
        (b"\xff\xff\xff\xff", "or it is cut off"),
        (b"\x08\x0a", "or it is cut off"),
    ],
)
def test_another_kind_of_file_is_called_by_its_name(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(content)
    with pytest.raises(ModelRefused, match=f"m.onnx: this is not an ONNX model.*{message}"):
        read_facts(path)


def test_a_model_that_is_cut_off_anywhere_is_refused_or_has_less_in_it(tmp_path: Path) -> None:
    whole = models.scale(tmp_path).read_bytes()
    path = tmp_path / "cut.onnx"
    refused = 0
    for size in range(1, len(whole)):
        path.write_bytes(whole[:size])
        try:
            read_facts(path)
        except ModelRefused:
            refused += 1
    assert refused > len(whole) // 2


def test_native_code_cannot_hide_behind_what_only_the_loader_understands(tmp_path: Path) -> None:
    path = compiled(tmp_path / "m.onnx")
    path.write_bytes(GROUP + path.read_bytes())
    assert onnx.load(path).graph.node[0].op_type == "EPContext"
    with pytest.raises(ModelRefused, match="not an ONNX model"):
        read_facts(path)


def test_a_file_that_nests_without_end_is_refused(tmp_path: Path) -> None:
    inner = b""
    for level in range(201):
        size = len(inner)
        length = bytes([size]) if size < 128 else bytes([size & 127 | 128, size >> 7])
        # From the inside out: AttributeProto.g = 6, NodeProto.attribute = 5, GraphProto.node = 1.
        inner = (b"\x32", b"\x2a", b"\x0a")[level % 3] + length + inner
    path = tmp_path / "m.onnx"
    path.write_bytes(b"\x3a" + bytes([len(inner) & 127 | 128, len(inner) >> 7]) + inner)
    with pytest.raises(ModelRefused, match="not an ONNX model"):
        read_facts(path)


def test_compiled_nodes_are_refused_with_the_way_to_trust_them(tmp_path: Path) -> None:
    path = compiled(tmp_path / "m.onnx")
    with pytest.raises(ModelRefused, match=r"1 EPContext node\(s\).*runtime.trust_models = true"):
        refuse_compiled_nodes(path, read_facts(path))


def test_the_fingerprint_is_that_of_the_bytes(tmp_path: Path) -> None:
    path = models.scale(tmp_path)
    before = fingerprint(path, read_facts(path))
    path.write_bytes(path.read_bytes().replace(b"graph", b"grapf"))
    assert len(before) == 64
    assert fingerprint(path, read_facts(path)) != before
