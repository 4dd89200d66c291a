"""How a parked job goes back: what of it stays, what is new, and in which order things happen."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest
from tests.parked_messages import message_of

from inferq.amqp import PublishFailed, PublishForbidden, PublishUnknown, Refused, Unroutable
from inferq.parking import parked
from inferq.requeue import NewDeadline, Requeuer, Stays, fresh_headers, why_it_stays
from inferq_schemas import Job, Tensor, decode_jobs, encode_bundle, encode_job

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from aiormq.abc import DeliveredMessage


def job(job_id: str = "a", **fields: Any) -> Job:
    tensor = Tensor.from_numpy(np.zeros((1, 2), np.float32))
    return Job.model_validate({"id": job_id, "model": "m", "inputs": {"x": tensor}} | fields)


class Desk:
    """A store and a publisher in one, that write down what happens in which order."""

    def __init__(self, *, error: PublishFailed | None = None, inputs: bool = True) -> None:
        self.journal: list[str] = []
        self.sent: list[dict[str, Any]] = []
        self._error = error
        self._inputs = inputs

    async def forget(self, job_ids: Sequence[str]) -> dict[str, tuple[bytes, int]]:
        self.journal.append(f"forgot {','.join(job_ids)}")
        return dict.fromkeys(job_ids, (b"outcome", 1000))

    async def remember(self, forgotten: Mapping[str, tuple[bytes, int]]) -> None:
        self.journal.append(f"remembered {','.join(forgotten)}")

    async def hold_inputs(self, held: Job, *, now_ms: int) -> bool:
        del held, now_ms
        return self._inputs

    async def publish(self, body: bytes, **how: Any) -> None:
        self.journal.append("published")
        self.sent.append({"body": body, **how})
        if self._error is not None:
            raise self._error


async def send(desk: Desk, message: DeliveredMessage, deadline: NewDeadline | None = None) -> None:
    requeuer = Requeuer(cast("Any", desk), cast("Any", desk), deadline or NewDeadline(), cpu_reserve_ratio=0.5)
    await requeuer.send(message, parked(message))


def now_ms() -> int:
    return time.time_ns() // 1_000_000


async def test_the_outcome_goes_before_the_job_is_sent_to_its_lane() -> None:
    desk = Desk()
    await send(desk, message_of(encode_job(job()), reply_to="reply.me", correlation_id="c"))

    assert desk.journal == ["forgot a", "published"]
    (sent,) = desk.sent
    assert (sent["exchange"], sent["routing_key"]) == ("inferq.jobs", "m.bulk")
    assert (sent["properties"].reply_to, sent["properties"].correlation_id) == ("reply.me", "c")
    assert sent["properties"].expiration is None
    assert sent["properties"].message_id != "id", "an id of a publish is never used twice"
    assert decode_jobs(sent["body"]) == (job(),)


async def test_a_new_deadline_counts_from_now_and_leaves_the_jobs_identity_alone() -> None:
    desk, old = Desk(), job(deadline_unix_ms=5, sent_unix_ms=1)
    before = now_ms()
    await send(desk, message_of(encode_job(old)), NewDeadline("new", 10.0))

    (again,) = decode_jobs(desk.sent[0]["body"])
    assert isinstance(again, Job)
    assert again.deadline_unix_ms is not None
    assert again.sent_unix_ms is not None
    assert again.deadline_unix_ms - again.sent_unix_ms == 10_000
    assert before <= again.sent_unix_ms <= now_ms()
    assert again.digest() == old.digest()
    assert 4000 < int(desk.sent[0]["properties"].expiration) <= 5000, "half is kept for the CPU"


async def test_without_deadline_nothing_expires() -> None:
    desk = Desk()
    await send(desk, message_of(encode_job(job(deadline_unix_ms=5))), NewDeadline("none"))
    (again,) = decode_jobs(desk.sent[0]["body"])
    assert isinstance(again, Job)
    assert again.deadline_unix_ms is None
    assert desk.sent[0]["properties"].expiration is None


async def test_a_bundle_goes_as_a_bundle_and_all_its_outcomes_go() -> None:
    desk = Desk()
    await send(desk, message_of(encode_bundle([job("a"), job("b")])))
    assert desk.journal == ["forgot a,b", "published"]
    assert len(decode_jobs(desk.sent[0]["body"])) == 2


@pytest.mark.parametrize("error", [Unroutable("no queue"), Refused("full")])
async def test_a_job_that_no_queue_takes_stays_and_keeps_its_outcome(error: PublishFailed) -> None:
    desk = Desk(error=error)
    with pytest.raises(Stays, match=str(error)):
        await send(desk, message_of(encode_job(job())))
    assert desk.journal == ["forgot a", "published", "remembered a"]


async def test_a_publish_that_is_unknown_leaves_the_outcome_deleted() -> None:
    desk = Desk(error=PublishUnknown("no confirm"))
    with pytest.raises(PublishUnknown):
        await send(desk, message_of(encode_job(job())))
    assert desk.journal == ["forgot a", "published"], "the job may be on its way and must run"


async def test_a_broker_that_forbids_ends_it_all_and_outcomes_are_as_they_were() -> None:
    desk = Desk(error=PublishForbidden("403"))
    with pytest.raises(PublishForbidden):
        await send(desk, message_of(encode_job(job())))
    assert desk.journal[-1] == "remembered a"


async def test_a_job_whose_inputs_have_expired_stays() -> None:
    desk = Desk(inputs=False)
    with pytest.raises(Stays, match="have expired"):
        await send(desk, message_of(encode_job(job())))
    assert desk.journal == []


def test_what_would_only_fail_again_stays() -> None:
    def why(body: bytes, deadline: NewDeadline, routing_key: str = "m.bulk") -> str | None:
        return why_it_stays(parked(message_of(body, routing_key=routing_key)), deadline, now_ms())

    late, endless = encode_job(job(deadline_unix_ms=5)), encode_job(job())
    assert "expire again" in str(why(late, NewDeadline()))
    assert why(late, NewDeadline("new", 1.0)) is None
    assert why(late, NewDeadline("none")) is None
    assert why(endless, NewDeadline()) is None
    assert "requires a deadline" in str(why(late, NewDeadline("none"), "m.interactive"))
    assert "only be dropped" in str(why(b"\xc1", NewDeadline("new", 1.0)))
    assert "only be dropped" in str(why(endless, NewDeadline(), "nowhere"))


def test_the_senders_headers_stay_and_all_others_start_anew() -> None:
    headers = {
        "traceparent": "00-1",
        "tenant": "t",
        "inferq-accept": "bundle",
        "inferq-attempt": 4,
        "inferq-reason": "internal",
        "inferq-divert-reason": "deadline",
        "x-death": [{}],
        "x-delivery-count": 3,
        "odd": object(),
    }
    assert fresh_headers(headers) == {
        "traceparent": "00-1",
        "tenant": "t",
        "inferq-accept": "bundle",
        "inferq-requeues": 1,
    }
    assert fresh_headers({"inferq-requeues": 1})["inferq-requeues"] == 2
    assert fresh_headers({"inferq-requeues": "x"})["inferq-requeues"] == 1
