"""A connection's end is a connection error wherever it falls; what arrived before it is read first."""

import asyncio

import pytest
from aiormq.connection import FrameReceiver
from aiormq.exceptions import AMQPConnectionError
from pamqp import frame
from pamqp.heartbeat import Heartbeat

import inferq.amqp  # noqa: F401 - installs it

HEARTBEAT = frame.marshal(Heartbeat(), 0)


def receiver(received: bytes) -> FrameReceiver:
    """Of a connection that has ended behind these bytes."""
    reader = asyncio.StreamReader()
    reader.feed_data(received)
    reader.feed_eof()
    return FrameReceiver(reader)


@pytest.mark.parametrize("received", [b"", HEARTBEAT[:1], HEARTBEAT[:-1]])
async def test_the_end_of_a_connection_is_a_connection_error(received: bytes) -> None:
    with pytest.raises(AMQPConnectionError):
        await receiver(received).get_frame()


async def test_a_reader_hears_of_the_end_after_the_last_frame() -> None:
    frames = receiver(HEARTBEAT)
    _, _, last = await anext(frames)
    assert isinstance(last, Heartbeat)
    with pytest.raises(AMQPConnectionError):
        await anext(frames)
