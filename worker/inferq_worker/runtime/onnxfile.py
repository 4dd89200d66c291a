"""Reads just enough of an .onnx file to judge and fingerprint it before native code sees it.

A walk over the protobuf wire format (field numbers from onnx.proto3), because the `onnx` package is no dependency of
the worker. Tensors are skipped, not read, so gigabytes of weights cost nothing. Never loads a model.
"""

import hashlib
import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from inferq_worker.runtime.interface import ModelRefused

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_CHUNK_BYTES = 2**20
_MAX_DEPTH = 64  # subgraphs inside subgraphs; a file that goes deeper is an attack on the stack

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


@dataclass(frozen=True, slots=True)
class GraphFacts:
    """What a file says of itself.

    Attributes:
        external_data: file names relative to the model's folder, as written in the file: not checked, not resolved.
        compiled_nodes: number of `EPContext` nodes, which hold code compiled for a device.
    """

    external_data: tuple[str, ...]
    compiled_nodes: int


class _NotProtobuf(Exception):  # noqa: N818 - a signal inside this module
    pass


def read_facts(path: Path) -> GraphFacts:
    """Walk the file at `path`.

    Returns:
        The facts; empty ones for a file that is no protobuf, so that the loader reports it with its own words.

    Raises:
        ModelRefused: missing, not a file, unreadable or empty.
    """
    try:
        with path.open("rb") as file:
            if path.stat().st_size == 0:
                raise ModelRefused(f"{path} is empty; copy or export the model again")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                walker = _Walker(data)
                try:
                    walker.walk("Model", 0, len(data), 0)
                except _NotProtobuf:
                    return GraphFacts((), 0)
                return GraphFacts(tuple(sorted(walker.external)), walker.compiled_nodes)
    except OSError as error:
        raise ModelRefused(f"{path} cannot be read: {error.strerror}; check the path and the permissions") from error


def fingerprint(path: Path, facts: GraphFacts) -> str:
    """SHA-256, hexadecimal, of the model file and then of each external data file in name order.

    The same as `cat model.onnx weights.bin | sha256sum`. Data files outside the model's folder are left out: ONNX
    Runtime refuses such a model when it loads it.
    """
    digest = hashlib.sha256()
    folder = path.parent.resolve()
    inside = (file for name in facts.external_data if (file := (folder / name).resolve()).is_relative_to(folder))
    for file in (path, *inside):
        if file.is_file():
            with file.open("rb") as stream:
                while chunk := stream.read(_CHUNK_BYTES):
                    digest.update(chunk)
    return digest.hexdigest()


class _Walker:
    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.external: set[str] = set()
        self.compiled_nodes = 0

    def walk(self, message: str, start: int, end: int, depth: int) -> None:
        if depth > _MAX_DEPTH:
            raise _NotProtobuf
        nested = _NESTED[message]
        for field, first, last in self._fields(start, end):
            child = nested.get(field)
            if child == "Entry":
                self._entry(first, last)
            elif child is not None:
                self.walk(child, first, last, depth + 1)
            elif message == "Node" and field == 4 and self._data[first:last] == b"EPContext":
                self.compiled_nodes += 1

    def _entry(self, start: int, end: int) -> None:
        texts = {field: self._data[first:last] for field, first, last in self._fields(start, end)}
        if texts.get(1) == b"location":
            self.external.add(texts.get(2, b"").decode("utf-8", "replace"))

    def _fields(self, start: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Yield (field number, first byte, last byte + 1) of each length-delimited field."""
        at = start
        while at < end:
            key, at = self._varint(at, end)
            kind = key & 7
            if kind == _VARINT:
                _, at = self._varint(at, end)
            elif kind == _BYTES:
                size, at = self._varint(at, end)
                yield key >> 3, at, self._bounded(at + size, end)
                at += size
            elif kind in (_FIXED32, _FIXED64):
                at = self._bounded(at + (8 if kind == _FIXED64 else 4), end)
            else:
                raise _NotProtobuf

    @staticmethod
    def _bounded(at: int, end: int) -> int:
        if at > end:
            raise _NotProtobuf
        return at

    def _varint(self, at: int, end: int) -> tuple[int, int]:
        value = shift = 0
        while at < end and shift < 70:
            byte = self._data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value, at
            shift += 7
        raise _NotProtobuf
