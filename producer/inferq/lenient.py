"""Message properties of any kind decode: a sender's mistake costs its own message, not the connection that reads it.

pamqp raises on text that is not UTF-8, on dates out of range, on unknown field types and on very deep tables. aiormq
then drops the connection, the broker delivers the same message again, and so on up to the delivery limit, for every
lane of the worker. Stands below `amqp`, which installs it; what pamqp decodes by itself comes out the same.
"""

from __future__ import annotations

import datetime as dt
import struct
from typing import TYPE_CHECKING, Final

from pamqp import decode

if TYPE_CHECKING:
    from pamqp.common import FieldArray, FieldTable, FieldValue

__all__ = ["install"]

_MAX_DEPTH: Final = 16
"""Tables and arrays below this depth come out empty; the broker's own `x-death` has two levels."""
_LATEST: Final = dt.datetime.max.replace(tzinfo=dt.UTC)
_FIXED_BYTES: Final = 8
"""The longest value of a kind that names no length of its own."""
_SIZED: Final = frozenset((b"S", b"x"))
_UNREADABLE: Final = (ArithmeticError, KeyError, OSError, TypeError, ValueError, struct.error)


def install() -> None:
    """Put the tolerant decoders where pamqp looks decoders up by the name of a type; doing it twice is harmless."""
    decode.METHODS.update(shortstr=_short_string, table=_table, timestamp=_timestamp)
    decode.TABLE_MAPPING[b"T"] = _timestamp


def _short_string(raw: bytes) -> tuple[int, str]:
    if not raw:
        raise ValueError("a short string without its length")
    end = 1 + raw[0]
    return end, raw[1:end].decode("utf-8", "replace")


def _timestamp(raw: bytes) -> tuple[int, dt.datetime]:
    try:
        return decode.timestamp(raw)
    except _UNREADABLE:
        return 8, _LATEST


def _table(raw: bytes) -> tuple[int, FieldTable]:
    end = 4 + _size(raw, 0)
    return end, _fields(raw[4:end], 0)


def _fields(raw: bytes, depth: int) -> FieldTable:
    fields: FieldTable = {}
    at = 0
    while at < len(raw) and depth < _MAX_DEPTH:
        key_end = at + 1 + raw[at]
        name = raw[at + 1 : key_end].decode("utf-8", "replace")
        try:
            fields[name], at = _value(raw, key_end, depth)
        except _UNREADABLE:
            # Of unknown length, so the fields behind it cannot be found.
            break
    return fields


def _items(raw: bytes, depth: int) -> FieldArray:
    items: FieldArray = []
    at = 0
    while at < len(raw) and depth < _MAX_DEPTH:
        try:
            item, at = _value(raw, at, depth)
        except _UNREADABLE:
            break
        items.append(item)
    return items


def _value(raw: bytes, at: int, depth: int) -> tuple[FieldValue | FieldTable | FieldArray, int]:
    """The value whose kind stands at `at`, and where the next field begins.

    Only its own bytes are cut out: pamqp copies the rest of the table for each field, a second for 40 000 small ones.
    """
    kind, start = raw[at : at + 1], at + 1
    if kind in (b"F", b"A"):
        end = start + 4 + _size(raw, start)
        inner = raw[start + 4 : end]
        return (_fields(inner, depth + 1) if kind == b"F" else _items(inner, depth + 1)), end
    limit = start + (4 + _size(raw, start) if kind in _SIZED else _FIXED_BYTES)
    consumed, value = decode.TABLE_MAPPING[kind](raw[start:limit])
    return value, start + consumed


def _size(raw: bytes, at: int) -> int:
    (size,) = struct.unpack_from(">I", raw, at)
    return int(size)
