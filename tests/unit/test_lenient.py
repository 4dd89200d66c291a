"""Properties that no library sends decode all the same, and those that it does come out as they always did."""

from __future__ import annotations

import datetime as dt
import struct

import pytest
from pamqp import commands, decode, frame, header
from tests.unit.test_amqp import header_frame, long_string, short_string

import inferq.amqp  # noqa: F401 - installs the tolerant decoders


def field(name: bytes, kind: bytes, raw: bytes) -> bytes:
    return short_string(name) + kind + raw


def properties_of(raw: bytes) -> commands.Basic.Properties:
    _, _, found = frame.unmarshal(raw)
    assert isinstance(found, header.ContentHeader)
    return found.properties


@pytest.mark.parametrize("name", ["content_type", "correlation_id", "reply_to"])
def test_text_that_is_not_utf_8_decodes_with_a_mark(name: str) -> None:
    found = properties_of(header_frame(**{name: short_string(b"a\xff")}))
    assert getattr(found, name) == "a\ufffd"


def test_a_header_name_that_is_not_utf_8_decodes_with_a_mark() -> None:
    found = properties_of(header_frame(headers=long_string(field(b"\xff", b"S", long_string(b"x")))))
    assert found.headers == {"\ufffd": "x"}


@pytest.mark.parametrize("seconds", [2**63 - 1, 2**63, 2**64 - 1])
def test_a_date_out_of_range_is_the_latest_that_there_is(seconds: int) -> None:
    far = struct.pack(">Q", seconds)
    found = properties_of(header_frame(timestamp=far, headers=long_string(field(b"at", b"T", far))))
    assert found.timestamp == dt.datetime.max.replace(tzinfo=dt.UTC)
    assert found.headers == {"at": found.timestamp}


def test_what_is_nested_too_deeply_is_left_out() -> None:
    deep = b""
    for _ in range(5_000):
        deep = field(b"k", b"F", long_string(deep))
    found = properties_of(header_frame(headers=long_string(deep + field(b"after", b"t", b"\x01"))))
    assert found.headers is not None
    assert found.headers["after"] is True
    assert isinstance(found.headers["k"], dict)


def test_a_field_of_unknown_kind_costs_itself_and_what_follows() -> None:
    table = field(b"a", b"b", b"\x05") + field(b"odd", b"?", b"") + field(b"b", b"b", b"\x06")
    found = properties_of(header_frame(headers=long_string(table), correlation_id=short_string(b"c")))
    assert (found.headers, found.correlation_id) == ({"a": 5}, "c")


def test_known_fields_decode_as_pamqp_decodes_them() -> None:
    death = field(b"reason", b"S", long_string(b"expired")) + field(b"count", b"l", struct.pack(">q", 3))
    table = b"".join(
        (
            field(b"t", b"t", b"\x01"),
            field(b"b", b"b", b"\xff"),
            field(b"u", b"u", b"\xff\xff"),
            field(b"I", b"I", struct.pack(">i", -7)),
            field(b"d", b"d", struct.pack(">d", 1e300)),
            field(b"D", b"D", b"\x02\x00\x00\x00\x05"),
            field(b"T", b"T", struct.pack(">Q", 1_700_000_000)),
            field(b"V", b"V", b""),
            field(b"bytes", b"S", long_string(b"\xff")),
            field(b"x", b"x", long_string(b"\x00")),
            field(b"x-death", b"A", long_string(b"F" + long_string(death))),
        )
    )
    found = properties_of(header_frame(headers=long_string(table)))
    assert found.headers == decode.field_table(long_string(table))[1]
