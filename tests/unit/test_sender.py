"""The sender against a publisher that answers as told; the real broker is in tests/integration/test_client.py."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import pytest

from inferq.amqp import Link, Properties, Publisher, PublishForbidden, PublishUnknown, Refused, Unroutable
from inferq.errors import (
    BrokerBlocked,
    BrokerForbids,
    InferqError,
    JobTooLarge,
    QueueFull,
    SendUnknown,
    UnknownModel,
)
from inferq.jobs import JobOptions, build_job
from inferq.sender import JobSender, _final, encode_jobs
from inferq_schemas import Job, decode_jobs


@dataclass
class Told:
    """Publisher and link in one: raises what it is told, then confirms."""

    errors: Iterator[Exception | None]
    is_blocked: Iterator[bool] = field(default_factory=lambda: iter(()))
    sent: list[tuple[bytes, str, Properties]] = field(default_factory=list)

    async def publish(self, body: bytes, *, routing_key: str, properties: Properties, **_: Any) -> None:
        self.sent.append((body, routing_key, properties))
        error = next(self.errors, None)
        if error is not None:
            raise error

    async def blocked(self) -> bool:
        return next(self.is_blocked, False)


def job(job_id: str = "a", **options: Any) -> Job:
    return build_job("m", {"x": [[1]]}, JobOptions(**options), now_ms=time.time_ns() // 1_000_000, job_id=job_id)


async def send(
    told: Told, jobs: Sequence[Job] | None = None, *, patience_s: float = 5, reply_to: str | None = "reply.1"
) -> None:
    sender = JobSender(cast("Link", told), cast("Publisher", told), publish_timeout_s=1, cpu_reserve_ratio=0.3)
    await sender.send(
        jobs or [job()],
        lane="bulk",
        correlation_id="c",
        reply_to=reply_to,
        give_up_s=time.monotonic() + patience_s,
    )


async def test_a_lone_job_travels_as_a_map_and_asks_for_no_bundle() -> None:
    told = Told(iter([]))
    await send(told)

    body, key, properties = told.sent[0]
    assert [found.id for found in decode_jobs(body, bundle=False)] == ["a"]
    assert key == "m.bulk"
    assert (properties.correlation_id, properties.reply_to, properties.headers) == ("c", "reply.1", {})


async def test_several_jobs_travel_as_a_bundle_and_ask_for_one_back() -> None:
    told = Told(iter([]))
    await send(told, [job("a"), job("b")])

    assert [found.id for found in decode_jobs(told.sent[0][0])] == ["a", "b"]
    assert told.sent[0][2].headers == {"inferq-accept": "bundle"}


async def test_without_a_reply_queue_nothing_is_asked_back() -> None:
    told = Told(iter([]))
    await send(told, [job("a"), job("b")], reply_to=None)

    assert (told.sent[0][2].reply_to, told.sent[0][2].headers) == (None, {})


async def test_an_unknown_publish_is_repeated_with_the_same_job_and_a_fresh_message_id() -> None:
    told = Told(iter([PublishUnknown("no confirm"), None]))
    await send(told)

    (first, _, one), (second, _, two) = told.sent
    assert first == second
    assert one.message_id != two.message_id


async def test_a_full_queue_is_tried_again_until_it_has_room() -> None:
    told = Told(iter([Refused("full"), Refused("full"), None]))
    await send(told)

    assert len(told.sent) == 3


@pytest.mark.parametrize(
    ("errors", "expected"),
    [
        ([Unroutable("x")], UnknownModel),
        ([Refused("x")] * 9, QueueFull),
        ([PublishUnknown("x")] * 9, SendUnknown),
        ([PublishForbidden("404")] * 9, BrokerForbids),
        # The first try may have arrived, so nobody can say that the job is in no queue.
        ([PublishUnknown("x"), *[Refused("x")] * 9], SendUnknown),
        ([PublishUnknown("x"), Unroutable("x")], SendUnknown),
    ],
)
async def test_when_time_is_up_the_error_says_what_is_known(
    errors: list[Exception], expected: type[InferqError]
) -> None:
    with pytest.raises(expected) as raised:
        await send(Told(iter(errors)), patience_s=0.3)

    assert type(raised.value) is expected


@pytest.mark.parametrize(
    ("lane", "said"),
    [
        ("bulk", "in lane 'bulk': check the model's name, or add the model with `inferq topology add-model m`"),
        (
            "nope",
            "in lane 'nope': check the lane (the default lanes are interactive, bulk) and the model's name, or add",
        ),
    ],
)
async def test_a_lane_that_is_not_there_is_not_called_an_unknown_model(lane: str, said: str) -> None:
    assert str(_final(Unroutable("x"), "m", lane)).startswith(f"no queue for model 'm' {said}")


async def test_the_command_that_adds_a_lane_keeps_the_default_ones() -> None:
    assert str(_final(Unroutable("x"), "m", "nope")).endswith("add-model m --lanes interactive,bulk,nope`")


async def test_a_channel_that_a_neighbour_broke_is_tried_once_more() -> None:
    told = Told(iter([PublishForbidden("a neighbour's fault"), None]))
    await send(told)

    assert len(told.sent) == 2


async def test_a_blocked_broker_is_waited_for() -> None:
    told = Told(iter([]), is_blocked=iter([True, True, False]))
    await send(told)

    assert len(told.sent) == 1


async def test_a_broker_that_stays_blocked_is_named_and_nothing_was_sent() -> None:
    told = Told(iter([]), is_blocked=iter([True] * 100))

    with pytest.raises(BrokerBlocked, match="was not sent"):
        await send(told, patience_s=0.1)

    assert told.sent == []


async def test_expiration_follows_the_time_that_is_left() -> None:
    told = Told(iter([]))
    await send(told, [job(deadline_s=10)])

    assert 6500 < int(told.sent[0][2].expiration or 0) <= 7000


def test_a_body_above_the_limit_is_refused_with_the_mend() -> None:
    large = build_job("m", {"x": np.zeros((1, 3_000_000), np.float32)}, JobOptions(), now_ms=1)

    with pytest.raises(JobTooLarge, match="fewer rows"):
        encode_jobs([large])
