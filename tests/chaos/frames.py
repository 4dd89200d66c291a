"""Follows the AMQP 0-9-1 frames that a client sends, so that a frame of ours can be put between them unharmed.

Only what that takes: where frames end, which channels are open, and whether a channel is in the middle of a message.
Frame layout: AMQP 0-9-1 specification, sections 2.3.5 and 4.2.
"""

from __future__ import annotations

import struct
from typing import Final

__all__ = ["ClientFrames", "unknown_ack"]

_HEADER: Final = struct.Struct(">BHI")
_METHOD, _CONTENT_HEADER, _BODY = 1, 2, 3
_END: Final = b"\xce"
_GREETING_BYTES: Final = 8
_CHANNEL_OPEN, _CHANNEL_CLOSE, _CHANNEL_CLOSE_OK, _PUBLISH, _CONSUME = (
    (20, 10),
    (20, 40),
    (20, 41),
    (60, 40),
    (60, 20),
)
_BASIC, _ACK = 60, 80
_NEVER_DELIVERED: Final = 2**40


def unknown_ack(channel: int) -> bytes:
    """An acknowledgement of a delivery that never was: the broker closes the channel over it, 406."""
    payload = struct.pack(">HHQB", _BASIC, _ACK, _NEVER_DELIVERED, 0)
    return _HEADER.pack(_METHOD, channel, len(payload)) + payload + _END


class ClientFrames:
    """One connection's frames from the client to the broker.

    Attributes:
        consuming: channels that were asked to consume.
    """

    def __init__(self) -> None:
        self.consuming: set[int] = set()
        self._open: set[int] = set()
        self._missing: dict[int, int | None] = {}
        self._buffer = bytearray()
        self._greeted = False

    def feed(self, data: bytes) -> bytes:
        """Take bytes in; returns those that are whole frames, so that what follows starts at a frame's start."""
        self._buffer += data
        end = 0
        if not self._greeted:
            if len(self._buffer) < _GREETING_BYTES:
                return b""
            self._greeted, end = True, _GREETING_BYTES
        while len(self._buffer) >= end + _HEADER.size:
            kind, channel, size = _HEADER.unpack_from(self._buffer, end)
            whole = _HEADER.size + size + len(_END)
            if len(self._buffer) < end + whole:
                break
            self._see(kind, channel, self._buffer[end + _HEADER.size : end + _HEADER.size + size])
            end += whole
        ready = bytes(self._buffer[:end])
        del self._buffer[:end]
        return ready

    def between_messages(self) -> list[int]:
        """Open channels into which a method may be put now."""
        return sorted(self._open - self._missing.keys())

    def _see(self, kind: int, channel: int, payload: bytes | bytearray) -> None:
        if kind == _METHOD:
            self._see_method(channel, struct.unpack_from(">HH", payload))
        elif kind == _CONTENT_HEADER:
            self._expect(channel, struct.unpack_from(">Q", payload, 4)[0])
        elif kind == _BODY:
            self._expect(channel, (self._missing.get(channel) or 0) - len(payload))

    def _see_method(self, channel: int, method: tuple[int, ...]) -> None:
        if method == _CHANNEL_OPEN:
            self._open.add(channel)
        elif method in (_CHANNEL_CLOSE, _CHANNEL_CLOSE_OK):
            self._open.discard(channel)
            self.consuming.discard(channel)
        elif method == _CONSUME:
            self.consuming.add(channel)
        elif method == _PUBLISH:
            self._missing[channel] = None

    def _expect(self, channel: int, body_bytes: int) -> None:
        if body_bytes > 0:
            self._missing[channel] = body_bytes
        else:
            self._missing.pop(channel, None)
