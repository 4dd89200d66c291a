"""Every error code that can be reached from outside is answered, to whoever sent the message and in words that help."""

from collections.abc import AsyncIterator, Iterator
from typing import Any

import msgpack
import numpy as np
import pytest
from tests import models
from tests.e2e.raw_client import RawClient, job, now_ms, raw_client, tensor
from tests.e2e.worker_process import OpenSite, Workers, until

from inferq_schemas import ErrorInfo, Result

BODY_BYTES = 65_536
X = np.array([[1, 2, 3]], np.float32)


@pytest.fixture(scope="module")
def shared(open_site: OpenSite, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    """One worker for all tests of this file; each has its own jobs, replies and place in parking."""
    folder = tmp_path_factory.mktemp("errors")
    with open_site(folder) as site:
        workers = Workers(site)
        files = [models.scale(folder, features=3), models.gather(folder), models.two_inputs_two_outputs(folder)]
        arguments = [part for file in files for part in ("--model", file)]
        workers.start(*arguments, LIMITS__BODY_BYTES=str(BODY_BYTES))
        yield workers
        workers.close()


@pytest.fixture
async def raw(shared: Workers) -> AsyncIterator[RawClient]:
    await shared.started[0].ready()
    async with raw_client(shared.site) as client:
        yield client


def failure(result: Result, code: str) -> ErrorInfo:
    assert result.status == "error"
    assert result.error is not None
    assert result.error.code == code, result.error.message
    return result.error


def without(fields: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name != key}


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"\xc1", id="no msgpack"),
        pytest.param(b"{}", id="json"),
        pytest.param(msgpack.packb({"v": 1}) + b"\x00", id="bytes behind the job"),
        pytest.param(msgpack.packb(7), id="a number"),
        pytest.param(msgpack.packb({"a": msgpack.ExtType(5, b"x")}), id="an extension type"),
        pytest.param(msgpack.packb([]), id="an empty bundle"),
        pytest.param(msgpack.packb({"id": 5}), id="an id that is no text"),
    ],
)
async def test_an_unreadable_body_is_answered_malformed_under_its_correlation_id(raw: RawClient, body: bytes) -> None:
    result = await raw.ask(body, "scale.bulk")

    assert failure(result, "malformed").message
    assert result.id == ""


@pytest.mark.parametrize(
    ("changes", "routing_key", "word"),
    [
        pytest.param({"model": "gather"}, "scale.interactive", "gather", id="another model than the routing key"),
        pytest.param({"surprise": 1}, "scale.interactive", "surprise", id="an unknown key"),
        pytest.param({"inputs": 5}, "scale.interactive", "inputs", id="inputs that are no map"),
        pytest.param({"deadline_unix_ms": "soon"}, "scale.interactive", "deadline_unix_ms", id="a deadline in words"),
    ],
)
async def test_a_job_that_breaks_the_contract_is_answered_malformed_with_its_id(
    raw: RawClient, changes: dict[str, Any], routing_key: str, word: str
) -> None:
    sent = job("scale", X) | changes

    result = await raw.ask(sent, routing_key)

    assert word in failure(result, "malformed").message
    assert result.id == sent["id"]


async def test_a_missing_key_is_malformed(raw: RawClient) -> None:
    result = await raw.ask(without(job("scale", X), "inputs"), "scale.interactive")

    assert "inputs" in failure(result, "malformed").message


async def test_a_content_type_that_is_not_msgpack_is_malformed(raw: RawClient) -> None:
    result = await raw.ask(job("scale", X), "scale.interactive", content_type="application/json")

    assert "application/json" in failure(result, "malformed").message


@pytest.mark.parametrize("content_type", [None, "application/x-msgpack"])
async def test_an_absent_or_older_content_type_is_accepted(raw: RawClient, content_type: str | None) -> None:
    assert (await raw.ask(job("scale", X), "scale.interactive", content_type=content_type)).ok


async def test_a_bundle_is_refused_where_the_lane_takes_single_jobs(raw: RawClient) -> None:
    result = await raw.ask([job("scale", X), job("scale", X)], "scale.interactive")

    assert "bulk" in failure(result, "malformed").message


async def test_one_bad_job_of_a_bundle_leaves_the_others_alone(raw: RawClient) -> None:
    good, bad, alien = job("scale", X), job("scale", X, surprise=1), job("scale", X.astype(np.float64))
    name = await raw.publish([good, bad, alien], "scale.bulk")

    await until(lambda: len(raw.results(name)) == 3, "three answers")
    by_id = {result.id: result for result in raw.results(name)}

    assert by_id[good["id"]].ok
    failure(by_id[bad["id"]], "malformed")
    failure(by_id[alien["id"]], "invalid_input")


async def test_another_contract_version_is_unsupported(raw: RawClient) -> None:
    failure(await raw.ask(job("scale", X, v=2), "scale.interactive"), "unsupported_version")


async def test_a_pinned_version_that_is_not_served_is_an_unknown_model(raw: RawClient) -> None:
    error = failure(await raw.ask(job("scale", X, version="9"), "scale.interactive"), "unknown_model")

    assert "version 1" in error.message, "it says what is served"


async def test_a_pinned_version_that_is_served_is_answered(raw: RawClient) -> None:
    assert (await raw.ask(job("scale", X, version="1"), "scale.interactive")).ok


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        pytest.param({"x": tensor(X.astype(np.float64))}, ["inputs.x.dtype", "float64", "float32"], id="dtype"),
        pytest.param({"x": tensor(np.zeros((1, 4), np.float32))}, ["inputs.x.shape", "[1, 4]", "[n, 3]"], id="shape"),
        pytest.param({"x": tensor(np.zeros((1, 3, 1), np.float32))}, ["inputs.x.shape", "[1, 3, 1]"], id="rank"),
        pytest.param({"z": tensor(X)}, ["unknown z", "missing x", "takes x"], id="names"),
        pytest.param({"x": {"dtype": "float32", "shape": [0, 3], "data": b""}}, ["inputs.x.shape"], id="no rows"),
        pytest.param({"x": {"dtype": "float32", "shape": [2, 3], "data": b"123"}}, ["inputs.x"], id="too few bytes"),
        pytest.param(
            {"x": {"dtype": "float32", "shape": [1, 3], "ref": "somebody:{else}:result"}},
            ["inputs.x.ref"],
            id="a reference to another key",
        ),
    ],
)
async def test_an_input_the_model_cannot_take_is_answered_with_what_it_takes(
    raw: RawClient, inputs: dict[str, Any], words: list[str]
) -> None:
    sent = job("scale", X, inputs=inputs)

    result = await raw.ask(sent, "scale.interactive")

    message = failure(result, "invalid_input").message
    assert [word for word in words if word not in message] == [], message
    assert result.id == sent["id"]


async def test_a_sender_whose_clock_is_an_hour_ahead_is_told_so(raw: RawClient) -> None:
    sent = job("scale", X, sent_unix_ms=now_ms() + 3_600_000, deadline_unix_ms=now_ms() + 3_700_000)

    message = failure(await raw.ask(sent, "scale.interactive"), "invalid_input").message

    assert "ahead" in message
    assert "clock" in message


async def test_the_interactive_lane_requires_a_deadline(raw: RawClient) -> None:
    sent = job("scale", X, deadline_unix_ms=None)

    message = failure(await raw.ask(sent, "scale.interactive"), "invalid_input").message

    assert "deadline_unix_ms" in message
    assert "bulk" in message, "it says where jobs without a deadline go"


async def test_rows_that_differ_between_inputs_are_invalid(raw: RawClient) -> None:
    three, two = np.zeros((3, 3), np.float32), np.zeros((2, 3), np.float32)
    inputs = {"a": tensor(three), "b": tensor(two), "k": tensor(np.zeros(3, np.int64))}

    result = await raw.ask(job("two", X, inputs=inputs), "two.interactive")

    assert "inputs.b" in failure(result, "invalid_input").message


@pytest.mark.parametrize("reply_to", ["inferq.parking", "inferq.scale.bulk", "somebodys-queue"])
async def test_a_reply_address_that_is_not_allowed_leaves_the_failure_in_the_store_and_nothing_there(
    raw: RawClient, reply_to: str
) -> None:
    sent = job("scale", X)

    await raw.publish(sent, "scale.interactive", reply_to=reply_to)
    outcome = await raw.outcome(sent["id"])

    assert reply_to in failure(outcome.result, "invalid_input").message
    if reply_to.startswith("inferq."):
        assert await raw.depth(reply_to) == 0


async def test_a_body_above_the_limit_is_too_large(raw: RawClient) -> None:
    rows = BODY_BYTES // X.nbytes + 1

    error = failure(await raw.ask(job("scale", np.zeros((rows, 3), np.float32)), "scale.interactive"), "too_large")

    assert str(BODY_BYTES) in error.message


async def test_a_bundle_of_too_many_jobs_is_too_large(raw: RawClient) -> None:
    bundle = [job("scale", X, sent_unix_ms=None, deadline_unix_ms=None, id=f"many-{n}") for n in range(257)]

    failure(await raw.ask(bundle, "scale.bulk"), "too_large")


async def test_a_deadline_that_has_passed_is_answered_stored_and_parked(raw: RawClient) -> None:
    sent = job("scale", X, sent_unix_ms=now_ms() - 2000, deadline_unix_ms=now_ms() - 1000)

    result = await raw.ask(sent, "scale.interactive")

    failure(result, "deadline_exceeded")
    assert (await raw.outcome(sent["id"])).result == result
    parked = await raw.parked(sent["id"])
    assert parked.headers["inferq-reason"] == "deadline_exceeded"
    assert parked.routing_key == "scale.interactive"


async def test_a_caller_who_wants_a_late_answer_gets_one_that_says_so(raw: RawClient) -> None:
    sent = job("scale", X, sent_unix_ms=now_ms() - 2000, deadline_unix_ms=now_ms() - 1000, late="serve")

    result = await raw.ask(sent, "scale.interactive")

    assert result.ok
    assert result.late


async def test_a_row_that_fails_the_run_fails_alone_and_is_parked(raw: RawClient) -> None:
    indices = (0, 1, 99, 2, 3)
    bundle = [job("gather", X, inputs={"i": tensor(np.array([[index]], np.int64))}) for index in indices]
    name = await raw.publish(bundle, "gather.bulk")

    await until(lambda: len(raw.results(name)) == 5, "five answers")
    by_id = {result.id: result for result in raw.results(name)}

    bad = by_id.pop(bundle[2]["id"])
    failure(bad, "inference_failed")
    for one, index in zip(bundle, indices, strict=True):
        if index != 99:
            np.testing.assert_array_equal(by_id[one["id"]].outputs["y"].to_numpy(), [[[index, 10 * index]]])
    parked = await raw.parked(bad.id)
    assert parked.headers["inferq-reason"] == "inference_failed"
    assert (await raw.outcome(bad.id)).result == bad


async def test_the_callers_own_faults_are_not_parked(raw: RawClient) -> None:
    sent = job("scale", X.astype(np.float64))

    failure(await raw.ask(sent, "scale.interactive"), "invalid_input")

    settled = await raw.ask(job("scale", X), "scale.interactive")
    assert settled.ok
    assert sent["id"] not in {message.headers.get("inferq-job") for message in await raw.empty_parking()}
