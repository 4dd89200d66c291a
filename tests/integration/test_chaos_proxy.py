"""The proxy that misbehaves on demand, with real sockets and a real broker behind it."""

import asyncio
from collections.abc import AsyncIterator

import aio_pika
import pytest
from tests.chaos.proxy import Proxy
from tests.chaos.servers import port_of, with_port
from tests.e2e.worker_process import until
from tests.stack import Broker

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Echo:
    """A server that says what it hears."""

    def __init__(self) -> None:
        self.heard = b""
        self.ended = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1000):
                self.heard += data
                writer.write(data)
        except OSError:
            pass
        finally:
            self.ended.set()
            writer.close()


@pytest.fixture
async def echo() -> Echo:
    return Echo()


@pytest.fixture
async def proxy(echo: Echo) -> AsyncIterator[Proxy]:
    server = await asyncio.start_server(echo.serve, "127.0.0.1", 0)
    async with server, Proxy(server.sockets[0].getsockname()[1]) as made:
        yield made


@pytest.fixture
async def client(proxy: Proxy) -> AsyncIterator[Streams]:
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    yield reader, writer
    writer.close()


async def say(client: Streams, words: bytes) -> bytes:
    client[1].write(words)
    return await asyncio.wait_for(client[0].readexactly(len(words)), 10)


async def test_what_is_not_told_to_misbehave_passes_both_ways(client: Streams) -> None:
    assert await say(client, b"hello") == b"hello"


async def test_a_cut_resets_both_ends_and_a_refusal_lasts_until_it_is_healed(
    proxy: Proxy, client: Streams, echo: Echo
) -> None:
    await say(client, b"hello")

    proxy.refuses = True
    assert proxy.cut() == 1

    with pytest.raises(ConnectionResetError):
        await client[0].read(1)
    await asyncio.wait_for(echo.ended.wait(), 10)
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    with pytest.raises(ConnectionResetError):
        await reader.read(1)
    writer.close()
    proxy.heal()
    again = await asyncio.open_connection("127.0.0.1", proxy.port)
    assert await say(again, b"back") == b"back"
    again[1].close()


async def test_with_one_way_held_up_what_is_sent_arrives_and_the_answer_comes_after_the_healing(
    proxy: Proxy, client: Streams, echo: Echo
) -> None:
    await say(client, b"hello")
    proxy.to_client.flows.clear()
    client[1].write(b"confirm me")
    await until(lambda: echo.heard.endswith(b"confirm me"), "it arrived")
    answer = asyncio.create_task(client[0].readexactly(10))
    await asyncio.wait({answer}, timeout=0.1)
    assert not answer.done()

    proxy.heal()

    assert await asyncio.wait_for(answer, 10) == b"confirm me"


async def test_half_open_the_server_is_gone_and_the_client_hears_nothing_of_it(
    proxy: Proxy, client: Streams, echo: Echo
) -> None:
    await say(client, b"hello")

    proxy.lose_server()

    await asyncio.wait_for(echo.ended.wait(), 10)
    client[1].write(b"anybody there?")
    await client[1].drain()
    silence = asyncio.create_task(client[0].read(1))
    await asyncio.wait({silence}, timeout=0.2)
    assert not silence.done()
    proxy.heal()
    with pytest.raises(ConnectionResetError):
        await silence
    assert echo.heard == b"hello"


@pytest.mark.stack
async def test_the_broker_closes_the_channel_and_not_the_connection(broker: Broker) -> None:
    async def ignore(_: object) -> None:
        pass

    async with Proxy(port_of(broker.url), amqp=True) as proxy:
        connection = await aio_pika.connect(with_port(broker.url, proxy.port))
        channel = await connection.channel()
        queue = await channel.declare_queue("q", exclusive=True)
        await queue.consume(ignore)

        assert proxy.close_channels() == 1

        await until(lambda: channel.is_closed, "the broker has closed the channel")
        assert not connection.is_closed
        other = await connection.channel()
        await other.declare_queue("q2", exclusive=True)
        await connection.close()
