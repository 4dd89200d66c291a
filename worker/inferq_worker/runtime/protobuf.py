"""Walks the protobuf wire format without a schema: field numbers, and where their values lie.

Nothing is copied: a field of a gigabyte is a pair of offsets until somebody asks for its bytes.
"""

import mmap
from collections.abc import Iterator
from typing import NamedTuple

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_SIGN_BIT, _TWO_COMPLEMENT = 1 << 63, 1 << 64


class NotProtobuf(Exception):  # noqa: N818 - says what was found; stays inside the runtime
    """These bytes are no protobuf message."""


class Field(NamedTuple):
    """One field of a message. A tuple, because a large graph has millions.

    Attributes:
        number: as in the .proto file.
        start: offset of the first byte of a length-delimited value.
        end: offset after its last byte.
        value: of a varint field, as int64; 0 for a length-delimited one.
    """

    number: int
    start: int
    end: int
    value: int = 0


def fields(data: mmap.mmap | bytes, start: int, end: int) -> Iterator[Field]:
    """The varint and length-delimited fields of the message at `data[start:end]`, in file order.

    Raises:
        NotProtobuf: as soon as the bytes make no sense.
    """
    at = start
    while at < end:
        key, at = _varint(data, at, end)
        kind = key & 7
        if kind == _VARINT:
            value, at = _varint(data, at, end)
            yield Field(key >> 3, at, at, value - _TWO_COMPLEMENT if value & _SIGN_BIT else value)
        elif kind == _BYTES:
            size, at = _varint(data, at, end)
            yield Field(key >> 3, at, _bounded(at + size, end))
            at += size
        elif kind in (_FIXED32, _FIXED64):
            at = _bounded(at + (8 if kind == _FIXED64 else 4), end)
        else:
            raise NotProtobuf


def _bounded(at: int, end: int) -> int:
    if at > end:
        raise NotProtobuf
    return at


def _varint(data: mmap.mmap | bytes, at: int, end: int) -> tuple[int, int]:
    value = shift = 0
    while at < end and shift < 70:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise NotProtobuf
