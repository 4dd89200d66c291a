"""Message properties and the publisher's errors, without a broker."""

from __future__ import annotations

import asyncio
import struct
from typing import TYPE_CHECKING, Any, cast

import pytest
from pamqp.header import ContentHeader
from pydantic import SecretStr
from tests.fakes import VirtualTime

from inferq.amqp import MAX_EXPIRATION_MS, BrokerUnreachable, Link, Publisher, PublishUnknown, Unencodable, properties
from inferq.settings import BrokerSettings

if TYPE_CHECKING:
    from inferq.amqp import Properties

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


class WritingChannel:
    """Writes a message as aiormq does, and sends it nowhere."""

    is_closed = False

    async def basic_publish(self, _body: bytes, *, properties: Properties, **_: object) -> None:
        ContentHeader(properties=properties).marshal()


class SilentChannel(WritingChannel):
    """Takes a message and never confirms it."""

    async def basic_publish(self, _body: bytes, **_: object) -> None:
        await asyncio.Event().wait()


class UpLink:
    """A link that is up."""

    def __init__(self, channel: WritingChannel | None = None, *, is_blocked: bool = False) -> None:
        self._channel = channel or WritingChannel()
        self.is_blocked = is_blocked
        self.up = asyncio.Event()
        self.up.set()

    async def channel(self) -> WritingChannel:
        return self._channel


async def publish(**fields: Any) -> None:
    publisher = Publisher(cast("Any", UpLink()), timeout_s=1)
    await publisher.publish(b"", exchange="e", routing_key="k", properties=properties(**fields))


@pytest.mark.parametrize("value", [b"\xff", 1e300, 2**63, object()], ids=repr)
async def test_a_header_that_amqp_cannot_carry_is_told_apart_from_a_lost_message(value: object) -> None:
    with pytest.raises(Unencodable):
        await publish(headers={"mine": value})


@pytest.mark.parametrize("text", ["x" * 256, "\ud800"])
async def test_an_address_that_amqp_cannot_carry_is_told_too(text: str) -> None:
    with pytest.raises(Unencodable):
        await publish(correlation_id=text)


async def test_the_patient_wait_out_an_alarm_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    time = VirtualTime(monkeypatch)
    link = UpLink(SilentChannel(), is_blocked=True)
    publisher = Publisher(cast("Any", link), timeout_s=10)
    patient = asyncio.create_task(
        publisher.publish(b"", exchange="e", routing_key="k", properties=properties(), patient=True)
    )
    with pytest.raises(PublishUnknown):
        await publisher.publish(b"", exchange="e", routing_key="k", properties=properties())
    await time.advance(3_600)
    assert not patient.done()
    link.is_blocked = False
    await time.advance(20)
    with pytest.raises(PublishUnknown):
        patient.result()


class DroppedChannel(SilentChannel):
    """Its connection is lost under a message, and the library cancels who waits."""

    async def basic_publish(self, _body: bytes, **_: object) -> None:
        confirmation: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_soon(confirmation.cancel)
        await confirmation


async def test_a_publish_that_the_library_cancels_is_an_error_to_its_caller() -> None:
    publisher = Publisher(cast("Any", UpLink(DroppedChannel())), timeout_s=10)
    with pytest.raises(PublishUnknown, match="lost with its connection"):
        await publisher.publish(b"", exchange="e", routing_key="k", properties=properties())


async def test_a_publish_that_its_caller_cancels_is_cancelled() -> None:
    publisher = Publisher(cast("Any", UpLink(SilentChannel())), timeout_s=10)
    task = asyncio.create_task(publisher.publish(b"", exchange="e", routing_key="k", properties=properties()))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_plain_properties_are_written() -> None:
    await publish(correlation_id="c", reply_to="r", expiration_ms=5, headers={"a": 1, "b": "x"})


@pytest.mark.parametrize(("asked_ms", "sent"), [(-5, "0"), (1_500, "1500"), (2**53, str(MAX_EXPIRATION_MS))])
def test_an_expiration_stays_within_what_a_broker_takes(asked_ms: int, sent: str) -> None:
    assert properties(expiration_ms=asked_ms).expiration == sent


async def test_a_link_that_was_never_up_says_why_it_is_down() -> None:
    link = Link(BrokerSettings(url=SecretStr("amqp://127.0.0.1:1/")), name="test")
    assert link.last_error == "not connected yet"
    with pytest.raises(BrokerUnreachable, match="not connected yet"):
        await link.wait_up(0.01)
