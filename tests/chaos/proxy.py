"""A TCP proxy that misbehaves on demand: stands between a process under test and the broker or Redis.

Everything that TCP can do to a connection without lying about its bytes: cut it, hold it up, slow it down, keep one end
open while the other is gone, refuse new ones. Bytes are never changed or dropped; "lossy" is what loss looks like above
TCP: pauses, and now and then a reset.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from tests.chaos.frames import ClientFrames, unknown_ack

if TYPE_CHECKING:
    from collections.abc import Callable

_LOOPBACK = "127.0.0.1"
_CHUNK_BYTES = 64 * 1024
_RESET = struct.pack("ii", 1, 0)
"""SO_LINGER that makes close() send a reset."""


@dataclass(slots=True)
class Way:
    """What happens to bytes on one of the two ways through a proxy.

    Attributes:
        flows: while cleared, nothing passes and nothing is read: the sender's buffers fill up.
        delay_s: mean pause before each chunk of up to 64 KiB; drawn anew each time, exponentially.
        reset_share: share of chunks at which the connection is reset instead.
    """

    flows: asyncio.Event = field(default_factory=asyncio.Event)
    delay_s: float = 0.0
    reset_share: float = 0.0

    def __post_init__(self) -> None:
        self.flows.set()

    async def let_pass(self, chance: random.Random) -> None:
        """Wait as long as this way demands.

        Raises:
            ConnectionResetError: this chunk is where the connection ends.
        """
        await self.flows.wait()
        if self.delay_s:
            await asyncio.sleep(chance.expovariate(1 / self.delay_s))
            await self.flows.wait()
        if self.reset_share and chance.random() < self.reset_share:
            raise ConnectionResetError


class _Connection:
    """Two sockets and the two pumps between them."""

    def __init__(self, client: asyncio.StreamWriter, server: asyncio.StreamWriter) -> None:
        self.client = client
        self.server = server
        self.frames: ClientFrames | None = None
        self.client_stays = False

    def reset(self) -> None:
        for writer in (self.client, self.server):
            _reset(writer)

    def lose_server(self) -> None:
        """The server's side ends; the client hears nothing of it and keeps its connection."""
        self.client_stays = True
        _reset(self.server)

    def end(self) -> None:
        self.server.close()
        self.client.close()


class Proxy:
    """Listens on a loopback port of its own and passes on to another.

    Args:
        upstream_port: on the loopback; may be down for a while.
        amqp: follow the client's frames, so that `close_channels` works.
        seed: of pauses and resets.
    """

    def __init__(self, upstream_port: int, *, amqp: bool = False, seed: int = 0) -> None:
        self.port = 0
        self.to_server = Way()
        self.to_client = Way()
        self.refuses = False
        self._upstream_port = upstream_port
        self._amqp = amqp
        self._chance = random.Random(seed)  # noqa: S311 - faults, not secrets
        self._server: asyncio.Server | None = None
        self._open: set[_Connection] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, _LOOPBACK, 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def connections(self) -> int:
        """Connections that are open now."""
        return len(self._open)

    def cut(self) -> int:
        """Reset every connection, both ends; returns how many."""
        return self._each(_Connection.reset)

    def lose_server(self) -> int:
        """Half-open: the server's ends go, the clients' ends stay and stay silent until they are given up."""
        return self._each(_Connection.lose_server)

    def close_channels(self) -> int:
        """Have the broker close one channel of each connection, 406 PRECONDITION_FAILED; returns how many.

        A channel that consumes is preferred; where there is none, one that publishes has to do.
        """
        closed = 0
        for connection in self._open:
            frames = connection.frames
            free = frames.between_messages() if frames else []
            if frames is None or not free:
                continue
            consuming = [channel for channel in free if channel in frames.consuming]
            connection.server.write(unknown_ack(self._chance.choice(consuming or free)))
            closed += 1
        return closed

    def heal(self) -> None:
        """Misbehave no more; what was held up goes on, what was cut stays cut."""
        self.refuses = False
        for way in (self.to_server, self.to_client):
            way.delay_s = way.reset_share = 0.0
            way.flows.set()
        for connection in [one for one in self._open if one.client_stays]:
            _reset(connection.client)

    def _each(self, act: Callable[[_Connection], None]) -> int:
        found = list(self._open)
        for connection in found:
            act(connection)
        return len(found)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._serve(reader, writer)
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.refuses:
            _reset(writer)
            return
        try:
            from_server, to_server = await asyncio.open_connection(_LOOPBACK, self._upstream_port)
        except OSError:
            _reset(writer)
            return
        connection = _Connection(writer, to_server)
        connection.frames = ClientFrames() if self._amqp else None
        self._open.add(connection)
        try:
            async with asyncio.TaskGroup() as pumps:
                pumps.create_task(self._pump(reader, to_server, self.to_server, connection))
                pumps.create_task(self._pump(from_server, writer, self.to_client, connection))
        except* OSError:
            connection.reset()
        finally:
            self._open.discard(connection)
            connection.end()

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: Way, connection: _Connection
    ) -> None:
        frames = connection.frames if way is self.to_server else None
        try:
            while data := await reader.read(_CHUNK_BYTES):
                await way.let_pass(self._chance)
                ready = frames.feed(data) if frames else data
                if ready and not connection.client_stays:
                    writer.write(ready)
                    await writer.drain()
            await way.flows.wait()
        except OSError:
            if not connection.client_stays:
                raise
            # What the client still sends is taken and forgotten, as by a host that is gone without a word.
            while way is self.to_server and await reader.read(_CHUNK_BYTES):
                pass
        if not connection.client_stays:
            writer.write_eof()


def _reset(writer: asyncio.StreamWriter) -> None:
    sock = writer.get_extra_info("socket")
    if sock is not None and not writer.is_closing():
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    writer.transport.abort()
