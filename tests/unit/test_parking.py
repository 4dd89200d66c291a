"""What is parked, as operators see it: anything a stranger may have sent, and which of it is meant."""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.parked_messages import NOW_MS, message_of

from inferq.parking import Selection, key_of, parked, printable
from inferq_schemas import Job, Tensor, encode_bundle, encode_job

if TYPE_CHECKING:
    from collections.abc import Mapping


def job(job_id: str = "a", **fields: Any) -> Job:
    tensor = Tensor.from_numpy(np.zeros((1, 2), np.float32))
    return Job.model_validate({"id": job_id, "model": "m", "inputs": {"x": tensor}} | fields)


def test_a_parked_job_tells_what_it_is_and_why_it_is_there() -> None:
    headers = {
        "inferq-reason": "overloaded",
        "inferq-message": "GPU 90 ms",
        "inferq-parked-unix-ms": NOW_MS - 5000,
        "inferq-requeues": 2,
    }
    found = parked(message_of(encode_job(job(deadline_unix_ms=NOW_MS - 1)), headers=headers))

    assert (found.model, found.lane, found.reason, found.message) == ("m", "bulk", "overloaded", "GPU 90 ms")
    assert (found.job_ids, found.problem, found.requeues) == (("a",), None, 2)
    assert found.age_s(NOW_MS) == 5.0
    assert found.expired(NOW_MS)
    assert not found.expired(NOW_MS - 2)


@pytest.mark.parametrize(
    ("body", "routing_key", "headers"),
    [
        (b"", "", {}),
        (b"\xc1", "m.bulk", {"inferq-reason": 7, "inferq-parked-unix-ms": "soon", "inferq-requeues": [1]}),
        (b"\xff\x00", "M..", {"x-death": "no list", "inferq-job": 3}),
        (b"\x80", "m.bulk", {"x-death": [1]}),
        (b"\x90", "a.b.c", {"x-death": [{"reason": 1, "time": "then"}], "inferq-parked-unix-ms": True}),
    ],
)
def test_whatever_was_sent_is_listed_as_unreadable(body: bytes, routing_key: str, headers: Mapping[str, Any]) -> None:
    found = parked(message_of(body, routing_key=routing_key, headers=headers))

    assert found.problem is not None
    assert (found.reason, found.message, found.parked_unix_ms, found.requeues) == ("unknown", "", None, 0)
    assert found.body_start == body
    assert found.to_map(NOW_MS)["body_start_hex"] == body.hex()


def test_a_readable_job_under_a_routing_key_of_no_lane_cannot_be_sent_back() -> None:
    found = parked(message_of(encode_job(job()), routing_key="nowhere"))
    assert (found.model, found.job_ids) == ("", ("a",))
    assert "routing key" in str(found.problem)


def test_what_the_broker_parked_has_the_brokers_reason_and_time() -> None:
    when = dt.datetime(2026, 11, 30, tzinfo=dt.UTC)
    found = parked(message_of(encode_job(job()), headers={"x-death": [{"reason": "delivery_limit", "time": when}]}))
    assert (found.reason, found.parked_unix_ms) == ("delivery_limit", int(when.timestamp() * 1000))


def test_a_bundle_expires_with_its_most_patient_job() -> None:
    def expiry(*jobs: Job) -> int | None:
        return parked(message_of(encode_bundle(jobs))).expires_unix_ms

    assert expiry(job("a", deadline_unix_ms=5), job("b", deadline_unix_ms=7)) == 7
    assert expiry(job("a", deadline_unix_ms=5), job("b")) is None
    assert expiry(job("a", deadline_unix_ms=5), job("b", deadline_unix_ms=7, late="serve")) is None


def test_a_bundle_with_a_bad_job_cannot_be_sent_back_and_names_its_jobs() -> None:
    body = b"\x92" + encode_job(job()) + b"\x81\xa2id\xa1b"
    found = parked(message_of(body))
    assert found.job_ids == ("a", "b")
    assert found.problem is not None


def test_a_key_is_the_same_at_every_look_and_differs_between_messages() -> None:
    one = message_of(b"body", message_id="1", headers={"x-delivery-count": 1})
    again = message_of(b"body", message_id="1", headers={"x-delivery-count": 2})
    assert key_of(one) == key_of(again)
    assert (
        len({key_of(one), key_of(message_of(b"body", message_id="2")), key_of(message_of(b"bod", message_id="1"))}) == 3
    )
    assert key_of(message_of(b"body", message_id=None)) == key_of(message_of(b"body", message_id=None))


def test_filters_must_all_agree() -> None:
    found = parked(
        message_of(encode_job(job()), headers={"inferq-reason": "internal", "inferq-parked-unix-ms": NOW_MS - 60_000})
    )

    def takes(**fields: Any) -> bool:
        return Selection(**fields).takes(found, NOW_MS)

    assert takes()
    assert takes(models=frozenset({"m"}), reasons=frozenset({"internal", "x"}), names=frozenset({"a"}))
    assert not takes(models=frozenset({"m"}), reasons=frozenset({"x"}))
    assert not takes(models=frozenset({"n"}))
    assert takes(names=frozenset({found.key[:8]}))
    assert not takes(names=frozenset({found.key[:7]})), "too short to mean one"
    assert not takes(names=frozenset({"b"}))
    assert takes(older_s=60, younger_s=60)
    assert not takes(older_s=61)
    assert not takes(younger_s=59)
    assert not takes(unreadable=True)
    assert Selection().everything
    assert not Selection(older_s=1).everything


def test_a_message_of_unknown_age_is_neither_older_nor_younger() -> None:
    found = parked(message_of(b"x"))
    assert not Selection(older_s=0.001).takes(found, NOW_MS)
    assert not Selection(younger_s=1e9).takes(found, NOW_MS)
    assert Selection(unreadable=True).takes(found, NOW_MS)


def test_a_strangers_words_do_not_steer_the_terminal() -> None:
    assert printable("a\x1b[31m\nb\r") == "a\ufffd[31m\ufffdb\ufffd"
