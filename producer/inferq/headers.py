"""Which headers and addresses of a sender travel on: only what AMQP carries again, and only so much of it. Pure.

A header table must fit in one frame, together with what the worker adds; and what a reader of AMQP decodes is not
always what a writer of AMQP encodes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from inferq_schemas import ATTEMPT_HEADER

if TYPE_CHECKING:
    from collections.abc import Mapping

_TRACE_CHARS = 512
_MAX_HEADERS = 64
_MAX_BYTES = 16 * 1024
_NAME_BYTES = 128
_SHORT_BYTES = 255
_FLOAT_LIMIT = 3.4e38
"""Floats go out in 32 bits."""
_MOST_ATTEMPTS = 1_000_000


def trace(headers: Mapping[str, object]) -> dict[str, object]:
    """The W3C trace context, for replies."""
    found = {name: headers.get(name) for name in ("traceparent", "tracestate")}
    return {name: value for name, value in found.items() if isinstance(value, str) and len(value) <= _TRACE_CHARS}


def kept(headers: Mapping[str, object]) -> tuple[dict[str, object], int]:
    """The headers that travel on with a job, and how many of its sender's were left out.

    Left out without being counted are the broker's own (`x-*`). Ours go before the sender's where room is short.
    """
    senders = {name: value for name, value in headers.items() if not name.lower().startswith("x-")}
    found: dict[str, object] = {}
    room_bytes = _MAX_BYTES
    for name in sorted(senders, key=lambda name: not name.startswith("inferq-")):
        size = _field_bytes(name, senders[name])
        if size is not None and size <= room_bytes and len(found) < _MAX_HEADERS:
            found[name] = senders[name]
            room_bytes -= size
    return found, len(senders) - len(found)


def next_attempt(headers: Mapping[str, object]) -> int:
    """Number of the attempt that begins when the job is passed on; >= 2."""
    attempt = headers.get(ATTEMPT_HEADER)
    return min(max(attempt, 1), _MOST_ATTEMPTS) + 1 if isinstance(attempt, int) else 2


def short(text: str | None) -> str | None:
    """The text, or None where it does not fit in an AMQP short string: a mark for a bad byte takes three."""
    return None if text is None or len(text.encode(errors="replace")) > _SHORT_BYTES else text


def _field_bytes(name: str, value: object) -> int | None:
    """At most so many bytes in the table; None: it is not passed on."""
    name_bytes = len(name.encode(errors="replace"))
    if name_bytes > _NAME_BYTES:
        return None
    match value:
        case str():
            return name_bytes + len(value.encode(errors="replace")) + 6
        case int() if -(2**63) <= value < 2**63:
            return name_bytes + 10
        case float() if abs(value) <= _FLOAT_LIMIT:
            return name_bytes + 6
    return None
