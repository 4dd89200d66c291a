"""Messages that no library sends, or that no broker takes again: they cost their sender at most, and no one else."""

import asyncio
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from tests import models
from tests.e2e.raw_client import RawClient, job, now_ms, raw_client
from tests.e2e.wire import field, long, short, wire
from tests.e2e.worker_process import CLIENT, Site, WorkerProcess, Workers

from inferq import Client
from inferq_schemas import DEAD_EXCHANGE, JOBS_EXCHANGE

X = np.ones((1, 3), np.float32)
BINARY = long(b"\xff\xfe\x00")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return models.scale(tmp_path, features=3)


@pytest.fixture
async def raw(site: Site) -> AsyncIterator[RawClient]:
    await site.add_model("scale")
    async with raw_client(site) as client:
        yield client


async def send(
    raw: RawClient, content: object, key: str, *, exchange: str = JOBS_EXCHANGE, **properties: bytes
) -> None:
    body = content if isinstance(content, bytes) else msgpack.packb(content)
    address = {"correlation_id": short(b"odd"), "reply_to": short(raw.reply_to.encode())}

    def publish() -> None:
        # Only the broker itself buries jobs; the rest any caller may send.
        url = raw.site.amqp_url(CLIENT) if exchange == JOBS_EXCHANGE else raw.site.broker.url
        with wire(url, raw.site.broker.tls_context) as connection:
            connection.publish(exchange, key, body, **(address | properties))

    await asyncio.to_thread(publish)


async def others_are_served(raw: RawClient, worker: WorkerProcess) -> None:
    assert (await raw.ask(job("scale", X), "scale.interactive")).ok
    assert worker.returncode is None
    assert "is down" not in worker.log()


@pytest.mark.parametrize(
    "header",
    [
        pytest.param(field(b"traceparent", b"S", BINARY), id="text that is not UTF-8"),
        pytest.param(field(b"traceparent", b"d", struct.pack(">d", 1e300)), id="a large double"),
        pytest.param(field(b"traceparent", b"T", struct.pack(">Q", 2**40)), id="a date"),
        pytest.param(field(b"inferq-attempt", b"l", struct.pack(">q", 2**63 - 1)), id="the last attempt of all"),
    ],
)
async def test_a_header_that_cannot_be_written_again_ends_no_worker(
    raw: RawClient, workers: Workers, model: Path, header: bytes
) -> None:
    worker = await workers.ready("--model", model)
    await send(raw, job("scale", X), "scale.interactive", headers=long(header))
    assert (await raw.reply("odd")).ok
    # Dead-lettered with time left, so it is handed on with its headers.
    await send(
        raw, job("scale", X), "scale.bulk", exchange=DEAD_EXCHANGE, headers=long(header), correlation_id=short(b"dead")
    )
    assert (await raw.reply("dead")).ok
    await others_are_served(raw, worker)


async def test_a_header_table_as_large_as_a_frame_can_still_be_parked(
    raw: RawClient, workers: Workers, model: Path
) -> None:
    worker = await workers.ready("--model", model)
    large = field(b"big", b"S", long(b"x" * 130_900))
    await send(raw, b"\xc1", "scale.bulk", headers=long(large), reply_to=short(b""))
    parked = await raw.parked("")
    assert "left out" in str(parked.headers["inferq-message"])
    await others_are_served(raw, worker)


async def test_a_deadline_in_a_far_future_is_handed_on_like_any_other(
    raw: RawClient, workers: Workers, model: Path
) -> None:
    worker = await workers.ready("--model", model)
    far = job("scale", X, deadline_unix_ms=now_ms() + 20 * 365 * 86_400_000)
    await send(raw, far, "scale.bulk", exchange=DEAD_EXCHANGE)
    assert (await raw.reply("odd")).ok
    await others_are_served(raw, worker)


async def test_a_client_may_ask_for_a_deadline_in_a_far_future(site: Site, workers: Workers, model: Path) -> None:
    await workers.ready("--model", model)
    async with Client(site.client_settings()) as client:
        assert (await client.infer("scale", {"x": X}, lane="bulk", deadline_s=60 * 86_400)).ok


async def test_unreadable_messages_are_each_answered_under_their_own_correlation(
    raw: RawClient, workers: Workers, model: Path
) -> None:
    # Both wait in the queue, so that they come in one turn of the worker's loop.
    names = [
        await raw.publish(body, "scale.bulk", headers={"inferq-accept": "bundle"}) for body in (b"\xc1a", b"\xc1b")
    ]
    await workers.ready("--model", model)
    assert [(await raw.reply(name)).status for name in names] == ["error", "error"]


async def test_a_stream_whose_bundles_a_worker_refuses_ends(site: Site, workers: Workers, model: Path) -> None:
    await workers.ready("--model", model, LIMITS__BUNDLE_JOBS="2")
    async with Client(site.client_settings()) as client:
        items = [{"x": X}] * 40
        codes = [
            answer.error and answer.error.code async for answer in client.infer_many("scale", items, bundle_jobs=8)
        ]
    assert codes == ["too_large"] * len(items)


DEEP = b""
for _ in range(3_000):
    DEEP = field(b"k", b"F", long(DEEP))


@pytest.mark.parametrize(
    "properties",
    [
        pytest.param({"correlation_id": short(b"\xff\xfe")}, id="correlation id"),
        pytest.param({"reply_to": short(b"reply.\xff")}, id="reply queue"),
        pytest.param({"content_type": short(b"\xff\xff")}, id="content type"),
        pytest.param({"timestamp": struct.pack(">Q", 2**63 - 1)}, id="date"),
        pytest.param({"headers": long(field(b"\xff", b"S", long(b"x")))}, id="name of a header"),
        pytest.param({"headers": long(DEEP)}, id="deep table"),
    ],
)
async def test_properties_that_cannot_be_read_drop_no_connection(
    raw: RawClient, workers: Workers, model: Path, properties: dict[str, Any]
) -> None:
    worker = await workers.ready("--model", model)
    await send(raw, job("scale", X, id="odd"), "scale.interactive", **properties)
    if properties.keys() & {"timestamp", "headers"}:
        assert (await raw.reply("odd")).ok
    await others_are_served(raw, worker)
    assert await raw.depth("inferq.scale.interactive") == 0


async def test_a_caller_whose_reply_queue_is_full_holds_nobody_else_up(
    raw: RawClient, workers: Workers, model: Path
) -> None:
    await workers.ready("--model", model)
    arguments: dict[str, Any] = {"x-max-length": 1, "x-overflow": "reject-publish"}
    await raw.listen("reply.full", arguments=arguments)
    for _ in range(300):
        await raw.publish(job("scale", X), "scale.interactive", reply_to="reply.full")
    assert (await raw.reply(await raw.publish(job("scale", X), "scale.interactive"), limit_s=8)).ok
