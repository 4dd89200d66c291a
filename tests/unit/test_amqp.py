"""Message properties and the publisher's errors, without a broker."""

from __future__ import annotations

import struct

_FLAGS = {"content_type": 15, "headers": 13, "correlation_id": 10, "reply_to": 9, "timestamp": 6}


def short_string(raw: bytes) -> bytes:
    return bytes([len(raw)]) + raw


def long_string(raw: bytes) -> bytes:
    return struct.pack(">I", len(raw)) + raw


def header_frame(**raw: bytes) -> bytes:
    """A content header with these properties, already encoded."""
    flags = sum(1 << _FLAGS[name] for name in raw)
    ordered = b"".join(raw[name] for name in sorted(raw, key=lambda name: -_FLAGS[name]))
    payload = struct.pack(">HHQH", 60, 0, 0, flags) + ordered
    return struct.pack(">BHI", 2, 1, len(payload)) + payload + b"\xce"
