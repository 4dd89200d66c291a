"""What leaves the worker: replies, jobs moved on, jobs parked; and what is tried again."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, cast

import pytest
from prometheus_client import CollectorRegistry
from tests.fakes import FakePublisher, VirtualTime, delivery_of, job_of, metrics_of, request_of

from inferq.amqp import PublishForbidden, PublishUnknown, Refused, Unencodable, Unroutable
from inferq_schemas import DEFAULT_LIMITS, Result, Tensor, decode_jobs, decode_results, encode_job
from inferq_worker import publish
from inferq_worker.publish import Mover, Replies, ReplyAllowList
from inferq_worker.settings import RepliesSettings

if TYPE_CHECKING:
    from inferq_worker.work import Delivery, Request

ACCEPT = {"inferq-accept": "bundle"}


class Desk:
    """Replies and moves over one publisher."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        metrics = metrics_of(self.registry)
        self.publisher = FakePublisher()
        self.replies = Replies(cast("Any", self.publisher), metrics)
        self.mover = Mover(cast("Any", self.publisher), metrics)

    def send(self, *answers: tuple[Request, Result]) -> asyncio.Task[list[tuple[Request, bool]]]:
        return asyncio.get_running_loop().create_task(self.replies.send(answers))

    async def reply(self, **fields: Any) -> bool:
        """Whether a single reply was confirmed."""
        ((_, confirmed),) = await self.send((asker(**fields), answer()))
        return confirmed

    def fates(self) -> dict[str, float]:
        names = ("confirmed", "returned", "failed")
        found = {name: self.registry.get_sample_value("inferq_replies_total", {"fate": name}) for name in names}
        return {name: value for name, value in found.items() if value}


@pytest.fixture
async def desk() -> Desk:
    return Desk()


@pytest.fixture(autouse=True)
async def time(monkeypatch: pytest.MonkeyPatch) -> VirtualTime:
    return VirtualTime(monkeypatch, publish)


def answer(job_id: str = "a", **fields: Any) -> Result:
    return Result(job_id, "ok", **fields)


def asker(**fields: Any) -> Request:
    return request_of(delivery_of(**fields))


def lose(delivery: Delivery) -> None:
    cast("Any", delivery.settler)._channel.is_closed = True


def sizes(bodies: list[bytes]) -> list[int]:
    return sorted(len(decode_results(body)) for body in bodies)


@pytest.mark.parametrize("name", ["amq.rabbitmq.reply-to.g1h2.x", "amq.gen-AbC", "reply.service-7", "reply.a.b"])
def test_usual_reply_queues_are_allowed(name: str) -> None:
    assert ReplyAllowList(RepliesSettings().allow).allows(name)


@pytest.mark.parametrize(
    "name", ["", "inferq.m.interactive", "inferq.dead", "other", "xreply.a", "reply.", "reply.a\n", "amq.direct"]
)
def test_other_queues_are_not(name: str) -> None:
    assert not ReplyAllowList(RepliesSettings().allow).allows(name)


def test_our_own_queues_are_never_allowed() -> None:
    assert not ReplyAllowList((".*",)).allows("inferq.m.bulk")


def test_an_empty_list_allows_nothing() -> None:
    assert not ReplyAllowList(()).allows("reply.a")


async def test_a_reply_goes_to_its_queue_with_the_correlation_of_its_message(desk: Desk) -> None:
    assert await desk.reply(reply_to="reply.me", correlation_id="c7")
    (one,) = desk.publisher.published
    assert (one.exchange, one.routing_key, one.mandatory) == ("", "reply.me", True)
    assert one.properties.correlation_id == "c7"
    assert decode_results(one.body) == (answer(),)
    assert desk.fates() == {"confirmed": 1}


async def test_a_reply_carries_the_trace_and_no_other_header(desk: Desk) -> None:
    await desk.reply(headers={"traceparent": "t", "tracestate": "s", "x-death": [], "mine": 1})
    assert desk.publisher.published[0].headers == {"traceparent": "t", "tracestate": "s"}


async def test_direct_reply_to_is_not_mandatory(desk: Desk) -> None:
    await desk.reply(reply_to="amq.rabbitmq.reply-to.abc")
    assert not desk.publisher.published[0].mandatory


async def test_who_named_no_reply_queue_gets_no_reply(desk: Desk) -> None:
    assert await desk.send((asker(reply_to=None), answer())) == []
    assert desk.publisher.published == []


async def test_replies_leave_as_bundles_only_where_that_was_asked_for(desk: Desk) -> None:
    bundle = delivery_of(headers=ACCEPT)
    pairs = [(request_of(bundle), answer(f"b{number}")) for number in range(3)]
    single = asker(), answer("s")
    confirmed = await desk.send(*pairs, single)
    assert {request for request, ok in confirmed if ok} == {request for request, _ in (*pairs, single)}
    assert sizes([one.body for one in desk.publisher.published]) == [1, 3]


async def test_answers_to_unreadable_messages_each_go_under_their_own_correlation(desk: Desk) -> None:
    pairs = [(asker(headers=ACCEPT, correlation_id=name), Result.failed("", "malformed", "no")) for name in ("A", "B")]
    await desk.send(*pairs, (asker(headers=ACCEPT, correlation_id="C"), answer("c")))
    told = {one.properties.correlation_id: decode_results(one.body)[0].id for one in desk.publisher.published}
    assert told == {"A": "", "B": "", "C": "c"}


async def test_bundles_go_to_each_reply_queue_on_its_own_and_stay_small(desk: Desk) -> None:
    pairs = [(asker(headers=ACCEPT, reply_to=f"reply.{number % 2}"), answer(str(number))) for number in range(140)]
    await desk.send(*pairs)
    for queue in ("reply.0", "reply.1"):
        assert sizes([one.body for one in desk.publisher.to(queue)]) == [6, 64]


async def test_large_replies_share_a_bundle_only_while_they_fit(desk: Desk) -> None:
    third = Tensor(dtype="uint8", shape=(3, 2**20), data=bytes(3 * 2**20))
    delivery = delivery_of(headers=ACCEPT)
    pairs = [(request_of(delivery), answer(str(number), outputs={"y": third})) for number in range(3)]
    assert all(ok for _, ok in await desk.send(*pairs))
    bodies = [one.body for one in desk.publisher.published]
    assert max(map(len, bodies)) <= DEFAULT_LIMITS.body_bytes
    assert sum(sizes(bodies)) == 3


LONG_TEXTS = ("x" * 60,) * 150_000
MANY_TEXTS = ("x" * 127,) * 65_500


@pytest.mark.parametrize(
    "tensor",
    [
        Tensor(dtype="uint8", shape=(9, 2**20), data=bytes(9 * 2**20)),
        Tensor(dtype="string", shape=(len(LONG_TEXTS),), data=LONG_TEXTS),
        # Their characters fit in a message; with the head that each text has in msgpack they do not.
        Tensor(dtype="string", shape=(len(MANY_TEXTS),), data=MANY_TEXTS),
    ],
    ids=["bytes", "texts", "heads of texts"],
)
async def test_an_answer_that_fits_in_no_message_is_told_and_costs_no_worker(desk: Desk, tensor: Tensor) -> None:
    ((_, confirmed),) = await desk.send((asker(), answer(outputs={"y": tensor})))
    assert confirmed
    (told,) = decode_results(desk.publisher.published[0].body)
    assert told.error is not None
    assert (told.id, told.error.code) == ("a", "too_large")


async def test_a_reply_queue_that_is_gone_is_not_tried_again(desk: Desk) -> None:
    desk.publisher.fail("reply.me", Unroutable("gone"))
    assert not await desk.reply()
    assert desk.publisher.attempts == ["reply.me"]
    assert desk.fates() == {"returned": 1}


async def test_a_gone_reply_queue_spoils_no_other_reply(desk: Desk) -> None:
    desk.publisher.fail("reply.gone", Unroutable("gone"))
    gone, here = asker(reply_to="reply.gone"), asker(reply_to="reply.here")
    assert dict(await desk.send((gone, answer("a")), (here, answer("b")))) == {gone: False, here: True}


async def test_a_publish_of_unknown_fate_is_repeated_until_it_is_confirmed(desk: Desk, time: VirtualTime) -> None:
    started_s = time.monotonic()
    desk.publisher.fail("reply.me", PublishUnknown("no confirm"), times=20)
    assert await desk.reply()
    assert len(desk.publisher.attempts) == 21
    assert time.monotonic() - started_s > 60
    assert desk.fates() == {"confirmed": 1}


async def test_a_publish_of_unknown_fate_is_given_up_once_the_job_was_taken_back(desk: Desk, time: VirtualTime) -> None:
    desk.publisher.fail("reply.me", PublishUnknown("no confirm"), times=1_000)
    delivery = delivery_of()
    sending = desk.send((request_of(delivery), answer()))
    await time.advance(60)
    assert not sending.done()
    lose(delivery)
    ((_, confirmed),) = await sending
    assert not confirmed
    assert desk.fates() == {"failed": 1}


async def test_a_bundle_is_repeated_as_long_as_one_of_its_jobs_is_still_ours(desk: Desk, time: VirtualTime) -> None:
    desk.publisher.fail("reply.me", PublishUnknown("no confirm"), times=1_000)
    gone, ours = delivery_of(headers=ACCEPT), delivery_of(headers=ACCEPT)
    sending = desk.send((request_of(gone), answer("a")), (request_of(ours), answer("b")))
    lose(gone)
    await time.advance(60)
    assert not sending.done()
    lose(ours)
    assert [ok for _, ok in await sending] == [False, False]


@pytest.mark.parametrize("error", [Refused("full"), PublishForbidden("no permission")])
async def test_a_full_or_forbidden_reply_queue_is_tried_for_two_seconds_and_then_spared(
    desk: Desk, time: VirtualTime, error: Exception
) -> None:
    started_s = time.monotonic()
    desk.publisher.fail("reply.me", error, times=1_000)
    assert not await desk.reply()
    assert 2 <= time.monotonic() - started_s < 3
    tries = len(desk.publisher.attempts)
    assert [await desk.reply() for _ in range(50)] == [False] * 50
    assert len(desk.publisher.attempts) == tries
    assert time.monotonic() - started_s < 3
    assert desk.fates() == {"failed": 51}


async def test_a_reply_queue_that_was_spared_is_probed_and_used_again(desk: Desk, time: VirtualTime) -> None:
    desk.publisher.fail("reply.me", Refused("full"), times=8)
    assert not await desk.reply()
    desk.publisher._errors.clear()
    assert not await desk.reply()
    await time.advance(10)
    assert await desk.reply()
    assert await desk.reply()


async def test_a_reply_of_unknown_fate_is_not_repeated_into_an_alarm(desk: Desk, time: VirtualTime) -> None:
    desk.publisher.fail("reply.me", PublishUnknown("no confirm"))
    desk.publisher.is_blocked = True
    sending = desk.send((asker(), answer()))
    await time.advance(3_600)
    assert len(desk.publisher.attempts) == 1
    desk.publisher.is_blocked = False
    assert [ok for _, ok in await sending] == [True]
    assert len(desk.publisher.attempts) == 2


async def test_a_job_taken_back_during_an_alarm_is_not_waited_for(desk: Desk, time: VirtualTime) -> None:
    desk.publisher.fail("reply.me", PublishUnknown("no confirm"))
    desk.publisher.is_blocked = True
    delivery = delivery_of()
    sending = desk.send((request_of(delivery), answer()))
    await time.advance(60)
    lose(delivery)
    assert [ok for _, ok in await sending] == [False]


async def test_a_reply_queue_that_is_full_for_a_moment_gets_its_reply(desk: Desk) -> None:
    desk.publisher.fail("reply.me", Refused("full"), times=3)
    assert await desk.reply()


async def test_a_parked_job_carries_its_reason_and_no_x_headers(desk: Desk) -> None:
    job = job_of()
    headers = {"x-death": [{"reason": "expired"}], "X-First-Death-Queue": "q", "traceparent": "t"}
    delivery = delivery_of(b"bundle", lane="bulk", headers=headers, correlation_id="c", reply_to="reply.me")
    await desk.mover.park(delivery, job, Result.failed("a", "inference_failed", "boom" * 500))
    (one,) = desk.publisher.published
    assert (one.exchange, one.routing_key, one.mandatory) == ("inferq.parking", "m.bulk", True)
    assert decode_jobs(one.body) == (job,)
    assert one.headers["inferq-reason"] == "inference_failed"
    assert one.headers["inferq-job"] == "a"
    assert len(one.headers["inferq-message"]) == 500
    assert one.headers["inferq-parked-unix-ms"] > 1_000_000_000_000
    assert one.headers["traceparent"] == "t"
    assert (one.properties.correlation_id, one.properties.reply_to) == ("c", "reply.me")
    assert desk.registry.get_sample_value("inferq_jobs_parked_total", {"model": "m", "code": "inference_failed"}) == 1


async def test_a_job_that_is_parked_because_its_good_answer_reached_nobody_says_so(desk: Desk) -> None:
    await desk.mover.park(delivery_of(), job_of(), answer("a"))
    (one,) = desk.publisher.published
    assert one.headers["inferq-reason"] == "internal"
    assert "reply queue is gone and Redis could not store the answer" in one.headers["inferq-message"]


async def test_headers_that_cannot_be_written_stay_behind_and_parking_says_so(desk: Desk) -> None:
    delivery = delivery_of(headers={"app": b"\xff", "mine": 1}, correlation_id="\ufffd" * 99)
    await desk.mover.park(delivery, job_of(), Result.failed("a", "internal", "boom"))
    (one,) = desk.publisher.published
    assert one.headers["mine"] == 1
    assert "app" not in one.headers
    assert one.headers["inferq-message"] == "boom (1 headers of the sender were left out)"
    assert one.properties.correlation_id is None


async def test_a_message_that_cannot_be_written_is_parked_without_what_its_sender_chose(desk: Desk) -> None:
    desk.publisher.fail("inferq.parking", Unencodable("odd"))
    await desk.mover.park(delivery_of(headers={"mine": 1}), job_of(), Result.failed("a", "internal", "boom"))
    (one,) = desk.publisher.published
    assert "mine" not in one.headers
    assert (one.properties.correlation_id, one.properties.reply_to) == (None, None)
    assert one.headers["inferq-job"] == "a"


async def test_a_reply_that_cannot_be_written_is_given_up_at_once(desk: Desk) -> None:
    desk.publisher.fail("reply.me", Unencodable("odd"), times=2)
    assert not await desk.reply()
    assert len(desk.publisher.attempts) == 1
    assert desk.fates() == {"failed": 1}


async def test_a_reply_that_fails_in_no_foreseen_way_spoils_no_other(desk: Desk) -> None:
    desk.publisher.fail("reply.odd", RuntimeError("bug"))
    odd, good = asker(reply_to="reply.odd"), asker(reply_to="reply.good")
    assert dict(await desk.send((odd, answer("a")), (good, answer("b")))) == {odd: False, good: True}


async def test_a_reply_leaves_odd_trace_and_correlation_behind(desk: Desk) -> None:
    assert await desk.reply(headers={"traceparent": b"\xff", "tracestate": "s"}, correlation_id="\ufffd" * 99)
    (one,) = desk.publisher.published
    assert (one.headers, one.properties.correlation_id) == ({"tracestate": "s"}, None)


async def test_a_job_that_could_not_be_read_is_parked_as_it_came(desk: Desk) -> None:
    await desk.mover.park(delivery_of(b"garbage"), None, Result.failed("", "malformed", "no"))
    assert desk.publisher.published[0].body == b"garbage"


async def test_a_job_that_cannot_be_parked_says_so(desk: Desk) -> None:
    desk.publisher.fail("inferq.parking", PublishUnknown("no confirm"))
    with pytest.raises(PublishUnknown):
        await desk.mover.park(delivery_of(), job_of(), Result.failed("a", "internal", "no"))
    assert desk.registry.get_sample_value("inferq_jobs_parked_total", {"model": "m", "code": "internal"}) == 0


@pytest.mark.parametrize(("before", "after"), [({}, 2), ({"inferq-attempt": 4}, 5), ({"inferq-attempt": "x"}, 2)])
async def test_a_job_passed_on_keeps_its_address_and_counts_its_attempts(
    desk: Desk, before: dict[str, object], after: int
) -> None:
    delivery = delivery_of(lane="bulk", headers=before | {"x-delivery-count": 3}, correlation_id="c")
    body = encode_job(job_of())
    await desk.mover.pass_on(delivery, body, exchange="inferq.fallback", expiration_ms=1_500)
    (one,) = desk.publisher.published
    assert (one.exchange, one.routing_key, one.body) == ("inferq.fallback", "m.bulk", body)
    assert (one.properties.expiration, one.properties.reply_to) == ("1500", "reply.me")
    assert one.headers == {"inferq-attempt": after}


async def test_a_bare_job_is_passed_on_without_headers_and_time_limit(desk: Desk) -> None:
    delivery = delivery_of(headers={"mine": 1}, correlation_id="c")
    await desk.mover.pass_on(delivery, b"", exchange="inferq.jobs", expiration_ms=5, bare=True)
    (one,) = desk.publisher.published
    assert (one.headers, one.properties.expiration) == ({"inferq-attempt": 2}, None)
    assert (one.properties.correlation_id, one.properties.reply_to) == ("c", "reply.me")


async def test_a_job_without_time_limit_is_passed_on_without_one(desk: Desk) -> None:
    await desk.mover.pass_on(delivery_of(), b"", exchange="inferq.jobs", expiration_ms=None)
    assert desk.publisher.published[0].properties.expiration is None


async def test_jobs_are_passed_on_to_job_exchanges_only(desk: Desk) -> None:
    with pytest.raises(ValueError, match=r"inferq\.parking"):
        await desk.mover.pass_on(delivery_of(), b"", exchange="inferq.parking", expiration_ms=None)
