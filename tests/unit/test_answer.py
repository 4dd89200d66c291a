"""Results from what came of a run: outputs, errors, times, signatures."""

from __future__ import annotations

from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from tests.fakes import UNIX_S, delivery_of, item_of, job_of, request_of

from inferq_schemas import BatchInfo, ServedBy
from inferq_worker import answer
from inferq_worker.answer import Answerer, RunTimes
from inferq_worker.errors import WorkError
from inferq_worker.runtime import RowError, SessionInfo, TensorSpec
from inferq_worker.runtime.fake import FAKE_INFO

if TYPE_CHECKING:
    from inferq_worker.work import Answer, Feeds, WorkItem

SERVED_BY = ServedBy("m", "3", "gpu", "CPUExecutionProvider", "w1")
TIMES = RunTimes(closed_s=1_000.010, ended_s=1_000.050)
GOOD: Feeds = {"y": np.ones((1, 4), np.float32)}


@pytest.fixture(autouse=True)
def now(monkeypatch: pytest.MonkeyPatch) -> None:
    """50 ms after receipt by the wall clock."""
    monkeypatch.setattr(answer, "time", SimpleNamespace(time=lambda: UNIX_S + 1_000.050))


def answered(
    *pairs: tuple[WorkItem, Feeds | RowError], role: str = "gpu", info: SessionInfo = FAKE_INFO
) -> list[Answer]:
    for item, _ in pairs:
        item.run_s = 0.030
    ran_in = BatchInfo(sum(item.rows for item, _ in pairs), "full")
    return list(Answerer(worker="w1", role=role).results(pairs, ran_in, TIMES, SERVED_BY, info))


def times(one: Answer) -> dict[str, float]:
    assert one.result.timing_ms is not None
    return asdict(one.result.timing_ms)


async def test_a_good_answer_has_its_outputs_and_says_who_gave_it_when_and_in_what_company() -> None:
    item = item_of(job_of(sent_unix_ms=int((UNIX_S + 999.980) * 1000)))
    (one,) = answered((item, GOOD))
    assert one.result.ok
    assert one.result.error is None
    assert np.array_equal(one.result.outputs["y"].to_numpy(), GOOD["y"])
    assert one.result.served_by == SERVED_BY
    assert one.result.batch == BatchInfo(1, "full")
    assert times(one) == pytest.approx({"broker": 20.0, "queue": 10.0, "batch": 10.0, "run": 30.0, "total": 70.0})
    assert (one.requests, one.digest, one.job, one.keep, one.from_store) == (
        tuple(item.requests),
        item.digest,
        item.job,
        True,
        False,
    )


async def test_a_job_whose_sender_told_no_time_is_timed_from_its_receipt() -> None:
    (one,) = answered((item_of(), GOOD))
    assert times(one) == pytest.approx({"broker": 0.0, "queue": 10.0, "batch": 10.0, "run": 30.0, "total": 50.0})


async def test_no_time_is_negative_whatever_the_senders_clock() -> None:
    (one,) = answered((item_of(job_of(sent_unix_ms=int((UNIX_S + 1_003) * 1000))), GOOD))
    assert times(one)["broker"] == 0.0
    assert times(one)["total"] == pytest.approx(50.0)


async def test_each_job_of_a_batch_gets_its_own_answer_in_order() -> None:
    bad = RowError("invalid_input", "index out of range")
    answers = answered((item_of(job_of("a")), GOOD), (item_of(job_of("b")), bad), (item_of(job_of("c")), GOOD))
    assert [(one.result.id, one.result.status) for one in answers] == [("a", "ok"), ("b", "error"), ("c", "ok")]
    error = answers[1].result.error
    assert error is not None
    assert (error.code, error.message) == ("invalid_input", "index out of range")
    assert answers[1].result.outputs == {}
    assert {one.result.batch for one in answers} == {BatchInfo(3, "full")}


@pytest.mark.parametrize(("deadline_s", "late"), [(None, False), (1_000.049, True), (1_000.051, False)])
async def test_an_answer_after_the_deadline_is_late(deadline_s: float | None, late: bool) -> None:
    (one,) = answered((item_of(deadline_s=deadline_s), GOOD))
    assert one.result.late is late


@pytest.mark.parametrize(("role", "fallback"), [("gpu", False), ("cpu", True)])
async def test_only_the_cpu_marks_its_answers_as_fallback(role: str, fallback: bool) -> None:
    (one,) = answered((item_of(), GOOD), role=role)
    assert one.result.fallback is fallback
    answerer = Answerer(worker="w", role=role)
    assert answerer.failure(item_of(), WorkError("internal", "no")).result.fallback is fallback
    assert answerer.served_by("m", "3", "p") == ServedBy("m", "3", role, "p", "w")


async def test_outputs_are_named_with_the_types_that_the_model_declares() -> None:
    info = replace(FAKE_INFO, outputs=(TensorSpec("y", "bfloat16", (None, 4)),))
    (one,) = answered((item_of(), {"y": np.ones((1, 4), np.uint16)}), info=info)
    assert one.result.outputs["y"].dtype == "bfloat16"


async def test_an_output_that_no_message_can_carry_fails_its_job_alone() -> None:
    deep: Feeds = {"y": np.ones((1,) * 9, np.float32)}
    answers = answered((item_of(job_of("a")), deep), (item_of(job_of("b")), GOOD))
    assert [one.result.status for one in answers] == ["error", "ok"]
    error = answers[0].result.error
    assert error is not None
    assert error.code == "inference_failed"


async def test_everybody_who_waits_for_a_job_is_in_its_answer() -> None:
    first, second = request_of(), request_of(delivery_of(reply_to="reply.other"))
    item = item_of(request=first)
    item.requests.append(second)
    (one,) = answered((item, GOOD))
    assert one.requests == (first, second)


async def test_a_job_that_will_not_run_is_answered_with_its_error() -> None:
    item = item_of()
    one = Answerer(worker="w", role="gpu").failure(item, WorkError("conflict", "no", keep=False))
    error = one.result.error
    assert error is not None
    assert (one.result.id, error.code, error.message, one.keep) == ("a", "conflict", "no", False)
    assert (one.digest, one.job) == (item.digest, item.job)
