"""Reads just enough of an .onnx file to judge, describe and fingerprint it before native code sees it.

Field numbers are those of onnx.proto3; the `onnx` package is no dependency of the worker. Tensors are skipped, not
read, so gigabytes of weights cost nothing. Never loads a model.
"""

import hashlib
import mmap
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from inferq_worker.runtime.interface import ModelRefused
from inferq_worker.runtime.protobuf import Field, NotProtobuf, fields

_CHUNK_BYTES = 2**20
_MAX_DEPTH = 100  # messages inside messages; as protobuf's own parsers, which a deeper file would attack as well
_TEXT_BYTES = 1024  # of names and the like; what is longer is cut

# message -> field number -> nested message to walk into. onnx.proto3, IR version 13.
_NESTED: dict[str, dict[int, str]] = {
    "Model": {7: "Graph", 25: "Function"},
    "Graph": {1: "Node", 5: "Tensor", 15: "SparseTensor"},
    "Function": {7: "Node", 11: "Attribute"},
    "Node": {5: "Attribute"},
    "Attribute": {5: "Tensor", 6: "Graph", 10: "Tensor", 11: "Graph", 22: "SparseTensor", 23: "SparseTensor"},
    "SparseTensor": {1: "Tensor", 2: "Tensor"},
    "Tensor": {13: "Entry"},
}
# TensorProto.DataType -> the contract's name where it has one, else the one of onnx.proto3.
_DTYPES = (
    *("undefined", "float32", "uint8", "int8", "uint16", "int16", "int32", "int64", "string", "bool", "float16"),
    *("float64", "uint32", "uint64", "complex64", "complex128", "bfloat16", "float8e4m3fn", "float8e4m3fnuz"),
    *("float8e5m2", "float8e5m2fnuz", "uint4", "int4", "float4e2m1", "float8e8m0", "uint2", "int2"),
    *("float6e2m3", "float6e3m2"),
)
_TENSOR_TYPE = 1
_OTHER_TYPES = {4: "sequence", 5: "map", 7: "opaque", 8: "sparse tensor", 9: "optional"}
_STANDARD_DOMAIN = "ai.onnx"

# How other files begin -> what they are. The first that fits.
_OTHER_FILES: tuple[tuple[bytes, str], ...] = (
    (rb"\s*<", "a web page or XML; fetch the file itself, and compare its size"),
    (rb"version https://git-lfs", "a Git LFS pointer; run `git lfs pull` where it comes from"),
    (rb"PK\x03\x04", "a zip archive, as PyTorch and Keras write them; export it to ONNX, or unpack it"),
    (rb"\x80[\x02-\x05]", "a Python pickle; export the model to ONNX"),
    (rb"\x89HDF", "an HDF5 file, as Keras writes them; export the model to ONNX"),
    (rb"\x1f\x8b", "compressed with gzip; unpack it"),
    (rb"....TFL3", "a TensorFlow Lite model; convert it to ONNX"),
    (rb"....ORTM", "a model in ONNX Runtime's own format; use the .onnx file that it was made from"),
)
_SNIFFED_BYTES = 256


@dataclass(frozen=True, slots=True)
class DeclaredTensor:
    """An input or output as the file declares it: more than the loaded graph tells, and for files that do not load.

    Attributes:
        dtype: the contract's dtype name, or ONNX's, or for what is no tensor its kind (`sequence`, `map`, ...).
        shape: a number is a fixed axis, text a named dynamic one, None a dynamic one without a name; None instead of
            a shape: the file declares none.
        is_tensor: whether it is a dense tensor.
    """

    name: str
    dtype: str
    shape: tuple[int | str | None, ...] | None
    is_tensor: bool = True


@dataclass(frozen=True, slots=True)
class GraphFacts:
    """What a file says of itself; nothing of it is checked.

    Attributes:
        external_data: file names relative to the model's folder, as written in the file: not checked, not resolved.
        compiled_nodes: number of `EPContext` nodes, which hold code compiled for a device.
        ir_version: of the file format; 0 if it says none.
        opsets: version by operator domain; the standard domain is `ai.onnx`.
        producer: name and version of what wrote the file.
        inputs: of the main graph, in order, without those that are weights.
        outputs: of the main graph, in order.
        operators: how many nodes of each operator, as `Conv` or, outside the standard domain, `domain:Name`; those of
            subgraphs included, those of the file's own functions not.
        functions: operators that the file defines itself, spelled the same way.
    """

    external_data: tuple[str, ...] = ()
    compiled_nodes: int = 0
    ir_version: int = 0
    opsets: Mapping[str, int] = field(default_factory=dict)
    producer: str = ""
    inputs: tuple[DeclaredTensor, ...] = ()
    outputs: tuple[DeclaredTensor, ...] = ()
    operators: Mapping[str, int] = field(default_factory=dict)
    functions: frozenset[str] = frozenset()


def read_facts(path: Path) -> GraphFacts:
    """Walk the file at `path`.

    Raises:
        ModelRefused: missing, not a file, unreadable, empty, or no ONNX model. What this walk does not understand is
            never handed to the loader, which might: nodes with native code could hide there.
    """
    try:
        with path.open("rb") as file:
            if path.stat().st_size == 0:
                raise ModelRefused(f"{path} is empty; copy or export the model again")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                try:
                    return _Walker(data).facts()
                except NotProtobuf:
                    raise ModelRefused(f"{path}: {_no_model(data[:_SNIFFED_BYTES])}") from None
    except OSError as error:
        raise ModelRefused(f"{path} cannot be read: {error.strerror}; check the path and the permissions") from error


def refuse_compiled_nodes(path: Path, facts: GraphFacts) -> None:
    """Refuse a file with native code inside.

    Raises:
        ModelRefused: it has such nodes; the message says how to trust them.
    """
    if facts.compiled_nodes:
        raise ModelRefused(
            f"{path} holds {facts.compiled_nodes} EPContext node(s), native code that nobody can inspect; use the "
            "original model, or set runtime.trust_models = true if you compiled it yourself"
        )


@dataclass(frozen=True, slots=True)
class Identity:
    """What a model's files held when they were read.

    Attributes:
        sha256: of the model file and then of each external data file in name order, hexadecimal; the same as
            `cat model.onnx weights.bin | sha256sum`.
        stamps: path, bytes, modification time in nanoseconds and inode of each of these files.
    """

    sha256: str
    stamps: tuple[tuple[Path, int, int, int], ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of all files together."""
        return sum(stamp[1] for stamp in self.stamps)

    def still_holds(self) -> bool:
        """Whether the files are still the ones that were read."""
        try:
            return all(_stamp(stamp[0]) == stamp for stamp in self.stamps)
        except OSError:
            return False


def identify(path: Path, facts: GraphFacts) -> Identity:
    """Hash the model file and its external data.

    Data files outside the model's folder are left out: ONNX Runtime refuses such a model when it loads it.

    Raises:
        ModelRefused: a file cannot be read.
    """
    folder = path.parent.resolve()
    inside = (file for name in facts.external_data if (file := (folder / name).resolve()).is_relative_to(folder))
    digest = hashlib.sha256()
    stamps = []
    for file in (path, *inside):
        if file.is_file():
            try:
                stamps.append(_stamp(file))
                with file.open("rb") as stream:
                    while chunk := stream.read(_CHUNK_BYTES):
                        digest.update(chunk)
            except OSError as error:
                raise ModelRefused(f"{file} cannot be read: {error.strerror}; check the permissions") from error
    return Identity(digest.hexdigest(), tuple(stamps))


def _stamp(file: Path) -> tuple[Path, int, int, int]:
    status = file.stat()
    return file, status.st_size, status.st_mtime_ns, status.st_ino


def fingerprint(path: Path, facts: GraphFacts) -> str:
    """The hash alone; see `identify`."""
    return identify(path, facts).sha256


def _no_model(start: bytes) -> str:
    for pattern, what in _OTHER_FILES:
        if re.match(pattern, start, re.DOTALL):
            return f"this is not an ONNX model but {what}"
    return "this is not an ONNX model, or it is cut off; fetch it again and compare its size"


class _Walker:
    """Collects the facts of one file."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._external: set[str] = set()
        self._operators: Counter[str] = Counter()
        self._compiled_nodes = 0

    def facts(self) -> GraphFacts:
        whole = Field(0, 0, len(self._data))
        graph: Field | None = None
        ir_version, opsets, producer, functions = 0, {}, ["", ""], []
        for found in self._fields(whole):
            match found.number:
                case 1:
                    ir_version = found.value
                case 2 | 3:
                    producer[found.number - 2] = self._text(found)
                case 7:
                    graph = found
                case 8:
                    domain, version = self._opset(found)
                    opsets[domain] = version
                case 25:
                    functions.append(self._operator(self._first(found, 1), self._first(found, 10)))
        self._walk("Model", whole, 0)
        if graph is None:
            raise NotProtobuf
        inputs, outputs = self._border(graph)
        return GraphFacts(
            external_data=tuple(sorted(self._external)),
            compiled_nodes=self._compiled_nodes,
            ir_version=ir_version,
            opsets=opsets,
            producer=" ".join(part for part in producer if part),
            inputs=inputs,
            outputs=outputs,
            operators=dict(self._operators),
            functions=frozenset(functions),
        )

    def _walk(self, message: str, place: Field, depth: int, *, in_function: bool = False) -> None:
        if depth > _MAX_DEPTH:
            raise NotProtobuf
        nested = _NESTED[message]
        named: dict[int, Field] = {}
        for found in self._fields(place):
            child = nested.get(found.number)
            if child == "Entry":
                self._entry(found)
            elif child is not None:
                self._walk(child, found, depth + 1, in_function=in_function or child == "Function")
            else:
                named[found.number] = found
        if message == "Node":
            self._count(self._operator(named.get(4), named.get(7)), in_function=in_function)

    def _count(self, operator: str, *, in_function: bool) -> None:
        self._compiled_nodes += operator.rpartition(":")[2] == "EPContext"
        if not in_function:
            self._operators[operator] += 1

    def _operator(self, name: Field | None, domain: Field | None) -> str:
        prefix = self._text(domain) if domain else ""
        text = self._text(name) if name else ""
        return text if prefix in ("", _STANDARD_DOMAIN) else f"{prefix}:{text}"

    def _entry(self, place: Field) -> None:
        texts = {found.number: self._data[found.start : found.end] for found in self._fields(place)}
        if texts.get(1) == b"location":
            self._external.add(texts.get(2, b"").decode("utf-8", "replace"))

    def _opset(self, place: Field) -> tuple[str, int]:
        domain, version = _STANDARD_DOMAIN, 0
        for found in self._fields(place):
            if found.number == 1:
                domain = self._text(found) or _STANDARD_DOMAIN
            elif found.number == 2:
                version = found.value
        return domain, version

    def _border(self, graph: Field) -> tuple[tuple[DeclaredTensor, ...], tuple[DeclaredTensor, ...]]:
        """Inputs and outputs. Up to IR version 3, weights had to be listed among the inputs as well."""
        inputs, outputs, weights = [], [], set()
        for found in self._fields(graph):
            if found.number == 5:
                weights.add(self._first_text(found, 8))
            elif found.number == 11:
                inputs.append(self._declared(found))
            elif found.number == 12:
                outputs.append(self._declared(found))
        return tuple(one for one in inputs if one.name not in weights), tuple(outputs)

    def _declared(self, value_info: Field) -> DeclaredTensor:
        kind = self._first(value_info, 2)
        kinds = self._fields(kind) if kind else iter(())
        of_kind = next((one for one in kinds if one.number == _TENSOR_TYPE or one.number in _OTHER_TYPES), None)
        name = self._first_text(value_info, 1)
        if of_kind is None or of_kind.number != _TENSOR_TYPE:
            what = _OTHER_TYPES[of_kind.number] if of_kind else "undefined"
            return DeclaredTensor(name, what, None, is_tensor=False)
        code = self._first(of_kind, 1)
        shape = self._first(of_kind, 2)
        number = code.value if code else 0
        dtype = _DTYPES[number] if 0 <= number < len(_DTYPES) else f"type {number}"
        axes = None if shape is None else tuple(self._axis(one) for one in self._fields(shape) if one.number == 1)
        return DeclaredTensor(name, dtype, axes)

    def _axis(self, dimension: Field) -> int | str | None:
        for found in self._fields(dimension):
            if found.number == 1:
                return found.value if found.value >= 0 else None
            if found.number == 2:
                return self._text(found) or None
        return None

    def _first(self, place: Field, number: int) -> Field | None:
        return next((found for found in self._fields(place) if found.number == number), None)

    def _first_text(self, place: Field, number: int) -> str:
        found = self._first(place, number)
        return self._text(found) if found else ""

    def _text(self, found: Field) -> str:
        return self._data[found.start : min(found.end, found.start + _TEXT_BYTES)].decode("utf-8", "replace")

    def _fields(self, place: Field) -> Iterator[Field]:
        return fields(self._data, place.start, place.end)
