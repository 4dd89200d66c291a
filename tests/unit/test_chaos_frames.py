"""Following AMQP frames: whole ones pass, cut ones wait, and nobody is interrupted in the middle of a message."""

import pytest
from pamqp import frame
from pamqp.body import ContentBody
from pamqp.commands import Basic, Channel
from pamqp.header import ContentHeader, ProtocolHeader
from tests.chaos.frames import ClientFrames, unknown_ack

GREETING = ProtocolHeader().marshal()
OPEN = frame.marshal(Channel.Open(), 1)
PUBLISH = frame.marshal(Basic.Publish(exchange="inferq.jobs", routing_key="m.bulk"), 1)
BODY = b"x" * 100
HEADER = frame.marshal(ContentHeader(body_size=len(BODY), properties=Basic.Properties()), 1)
CONTENT = frame.marshal(ContentBody(BODY), 1)


@pytest.mark.parametrize("step", [1, 3, 7, 1000])
def test_every_byte_passes_in_order_and_only_in_whole_frames(step: int) -> None:
    frames, sent = ClientFrames(), GREETING + OPEN + PUBLISH + HEADER + CONTENT
    passed = b""

    for at in range(0, len(sent), step):
        passed += frames.feed(sent[at : at + step])
        ends = [len(part) for part in (GREETING, OPEN, PUBLISH, HEADER, CONTENT)]
        assert len(passed) in {sum(ends[:count]) for count in range(6)}

    assert passed == sent


def test_a_channel_in_the_middle_of_a_message_is_left_alone() -> None:
    frames = ClientFrames()
    frames.feed(GREETING + OPEN)
    assert frames.between_messages() == [1]

    for part in (PUBLISH, HEADER):
        frames.feed(part)
        assert frames.between_messages() == []
    frames.feed(CONTENT)

    assert frames.between_messages() == [1]


def test_a_message_without_a_body_ends_with_its_header() -> None:
    frames = ClientFrames()
    frames.feed(GREETING + OPEN + PUBLISH + frame.marshal(ContentHeader(body_size=0, properties=Basic.Properties()), 1))

    assert frames.between_messages() == [1]


def test_it_knows_who_consumes_and_who_has_closed() -> None:
    frames = ClientFrames()
    frames.feed(GREETING + OPEN + frame.marshal(Basic.Consume(queue="q"), 1) + frame.marshal(Channel.Open(), 2))
    assert frames.consuming == {1}

    frames.feed(frame.marshal(Channel.Close(200, "", 0, 0), 1))

    assert frames.consuming == set()
    assert frames.between_messages() == [2]


def test_the_frame_that_is_put_in_is_an_ack_of_a_delivery_that_never_was() -> None:
    _, channel, ack = frame.unmarshal(unknown_ack(7))

    assert channel == 7
    assert isinstance(ack, Basic.Ack)
    assert ack.delivery_tag == 2**40
    assert not ack.multiple
