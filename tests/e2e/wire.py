"""Publishes over AMQP by hand: properties and header tables as raw bytes, which no library would send."""

import contextlib
import socket
import ssl
import struct
from collections.abc import Iterator
from urllib.parse import unquote, urlsplit

_FLAGS = {"content_type": 15, "headers": 13, "correlation_id": 10, "reply_to": 9, "expiration": 8, "timestamp": 6}
_FRAME_ROOM = 8
_ACK = (60, 80)


def short(raw: bytes) -> bytes:
    """A short string; also the name of a field."""
    return bytes([len(raw)]) + raw


def long(raw: bytes) -> bytes:
    """A long string, or a table around its fields."""
    return struct.pack(">I", len(raw)) + raw


def field(name: bytes, kind: bytes, raw: bytes) -> bytes:
    """One field of a header table."""
    return short(name) + kind + raw


class Wire:
    """One connection and one channel with confirms; blocking."""

    def __init__(self, url: str, tls: ssl.SSLContext | None = None) -> None:
        parts = urlsplit(url)
        host = parts.hostname or ""
        plain = socket.create_connection((host, parts.port or 5672), 10)
        self._socket = plain if tls is None else tls.wrap_socket(plain, server_hostname=host)
        self._socket.sendall(b"AMQP\x00\x00\x09\x01")
        self._read()
        login = b"\0" + (parts.username or "guest").encode() + b"\0" + (parts.password or "guest").encode()
        self._method(0, 10, 11, long(b"") + short(b"PLAIN") + long(login) + short(b"en_US"))
        channels, self._frame_max, _ = struct.unpack(">HIH", self._read()[4:12])
        self._method(0, 10, 31, struct.pack(">HIH", channels, self._frame_max, 0))
        self._method(0, 10, 40, short(unquote(parts.path[1:]).encode()) + b"\0\0")
        self._read()
        for class_id, method_id in ((20, 10), (85, 10)):
            self._method(1, class_id, method_id, b"\0")
            self._read()

    def publish(self, exchange: str, routing_key: str, body: bytes, **raw: bytes) -> None:
        """Publish with properties that are encoded already, and wait for the confirm."""
        target = b"\0\0" + short(exchange.encode()) + short(routing_key.encode()) + b"\0"
        self._method(1, 60, 40, target)
        raw = {"content_type": short(b"application/msgpack"), **raw}
        flags = sum(1 << _FLAGS[name] for name in raw)
        properties = b"".join(raw[name] for name in sorted(raw, key=lambda name: -_FLAGS[name]))
        self._frame(2, 1, struct.pack(">HHQH", 60, 0, len(body), flags) + properties)
        step = self._frame_max - _FRAME_ROOM
        for at in range(0, len(body), step):
            self._frame(3, 1, body[at : at + step])
        answer = self._read()
        assert struct.unpack(">HH", answer[:4]) == _ACK, answer

    def close(self) -> None:
        """Drop the connection; what was confirmed stays."""
        self._socket.close()

    def _method(self, channel: int, class_id: int, method_id: int, arguments: bytes) -> None:
        self._frame(1, channel, struct.pack(">HH", class_id, method_id) + arguments)

    def _frame(self, kind: int, channel: int, payload: bytes) -> None:
        self._socket.sendall(struct.pack(">BHI", kind, channel, len(payload)) + payload + b"\xce")

    def _read(self) -> bytes:
        _, _, size = struct.unpack(">BHI", self._exactly(7))
        return self._exactly(size + 1)[:-1]

    def _exactly(self, size: int) -> bytes:
        found = b""
        while len(found) < size:
            more = self._socket.recv(size - len(found))
            assert more, "the broker closed the connection"
            found += more
        return found


@contextlib.contextmanager
def wire(url: str, tls: ssl.SSLContext | None = None) -> Iterator[Wire]:
    """Have a connection for the length of a `with`."""
    connection = Wire(url, tls)
    try:
        yield connection
    finally:
        connection.close()
