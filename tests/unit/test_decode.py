"""Deliveries to jobs: what is read, what is refused as a whole, and what is refused alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from tests.fakes import delivery_of, job_of

from inferq_schemas import DEFAULT_LIMITS, Job, Limits, RejectedJob, encode_bundle, encode_job
from inferq_worker.decode import deadline_s, decode
from inferq_worker.errors import WorkError

if TYPE_CHECKING:
    from inferq_worker.work import Delivery

SENT_MS = 1_800_000_000_000


def refusal(delivery: Delivery, limits: Limits = DEFAULT_LIMITS) -> WorkError:
    with pytest.raises(WorkError) as caught:
        decode(delivery, limits)
    return caught.value


def single(delivery: Delivery) -> Job | RejectedJob:
    _, (job,) = decode(delivery, DEFAULT_LIMITS)
    return job


def urgent(**fields: Any) -> Job:
    return job_of(deadline_unix_ms=SENT_MS, **fields)


def test_a_job_is_read_with_the_lane_of_its_routing_key() -> None:
    job = urgent()
    assert decode(delivery_of(encode_job(job)), DEFAULT_LIMITS) == ("interactive", (job,))


def test_the_fallback_queue_keeps_the_lane_that_the_sender_chose() -> None:
    delivery = delivery_of(encode_job(job_of()), lane="fallback", routing_key="m.bulk")
    assert decode(delivery, DEFAULT_LIMITS)[0] == "bulk"


def test_a_bundle_is_read_in_order() -> None:
    jobs = (job_of("a"), job_of("b"), job_of("c"))
    assert decode(delivery_of(encode_bundle(jobs), lane="bulk"), DEFAULT_LIMITS) == ("bulk", jobs)


@pytest.mark.parametrize("content_type", [None, "", "application/msgpack", "application/x-msgpack"])
def test_msgpack_may_be_called_so_or_not_called_at_all(content_type: str | None) -> None:
    assert isinstance(single(delivery_of(encode_job(urgent()), content_type=content_type)), Job)


def test_another_content_type_is_refused_by_name() -> None:
    error = refusal(delivery_of(encode_job(urgent()), content_type="application/json"))
    assert error.code == "malformed"
    assert "application/json" in error.message


@pytest.mark.parametrize("body", [b"", b"\xc1", b"\x93\x01", b"\x01", b"\x90", b"hello", b"\x80\x80"])
def test_a_body_that_is_no_job_is_malformed_as_a_whole(body: bytes) -> None:
    assert refusal(delivery_of(body, lane="bulk")).code == "malformed"


def test_a_body_above_the_limit_is_too_large() -> None:
    delivery = delivery_of(encode_job(urgent()))
    assert refusal(delivery, Limits(body_bytes=10)).code == "too_large"


def test_a_bundle_in_a_lane_of_single_jobs_is_malformed() -> None:
    error = refusal(delivery_of(encode_bundle([urgent()])))
    assert error.code == "malformed"
    assert "bulk" in error.message


@pytest.mark.parametrize("key", ["", "m", "m.", ".bulk", "m.bulk.more", "M.bulk"])
def test_a_routing_key_that_names_no_lane_is_malformed(key: str) -> None:
    assert refusal(delivery_of(encode_job(job_of()), routing_key=key)).code == "malformed"


def test_one_bad_job_leaves_its_neighbours_alone() -> None:
    good, other = job_of("good"), job_of("other", model="m")
    body = encode_bundle([good, other]).replace(b"other", b"oth r")
    _, jobs = decode(delivery_of(body, lane="bulk"), DEFAULT_LIMITS)
    assert jobs[0] == good
    assert isinstance(jobs[1], RejectedJob)
    assert jobs[1].id == ""


def test_a_job_for_another_model_than_its_routing_key_is_malformed() -> None:
    job = single(delivery_of(encode_job(urgent(model="other"))))
    assert isinstance(job, RejectedJob)
    assert (job.id, job.error.code) == ("a", "malformed")
    assert "'other'" in job.error.message
    assert "m.interactive" in job.error.message


def test_the_interactive_lane_wants_a_deadline() -> None:
    job = single(delivery_of(encode_job(job_of())))
    assert isinstance(job, RejectedJob)
    assert job.error.code == "invalid_input"
    assert "deadline_unix_ms" in job.error.message


def test_clients_do_not_publish_to_the_fallback_themselves() -> None:
    error = refusal(delivery_of(encode_job(job_of()), lane="fallback"))
    assert error.code == "malformed"
    assert "fallback" in error.message


def test_the_deadline_counts_from_the_moment_of_receipt() -> None:
    delivery = delivery_of(received_s=50.0, received_unix_ms=SENT_MS + 200)
    job = job_of(sent_unix_ms=SENT_MS, deadline_unix_ms=SENT_MS + 1_000)
    assert deadline_s(job, delivery) == pytest.approx(50.8)


def test_a_deadline_in_the_past_lies_before_the_receipt() -> None:
    delivery = delivery_of(received_s=50.0, received_unix_ms=SENT_MS + 3_000)
    assert deadline_s(job_of(deadline_unix_ms=SENT_MS), delivery) == pytest.approx(47.0)


def test_a_job_without_deadline_has_none() -> None:
    assert deadline_s(job_of(), delivery_of()) is None


def test_a_sender_slightly_ahead_gets_no_more_than_its_budget() -> None:
    delivery = delivery_of(received_s=50.0, received_unix_ms=SENT_MS - 2_000)
    job = job_of(sent_unix_ms=SENT_MS, deadline_unix_ms=SENT_MS + 1_000)
    assert deadline_s(job, delivery) == pytest.approx(51.0)


def test_a_sender_far_ahead_is_told_of_its_clock() -> None:
    delivery = delivery_of(received_unix_ms=SENT_MS - 6_000)
    with pytest.raises(WorkError, match="6000 ms ahead") as caught:
        deadline_s(job_of(sent_unix_ms=SENT_MS, deadline_unix_ms=SENT_MS + 1_000), delivery)
    assert caught.value.code == "invalid_input"
