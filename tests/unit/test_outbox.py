"""Answers that need no run: sent together, stored where there is a key. And what goes back unanswered."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry
from tests.fakes import (
    WORKER,
    FakeChannel,
    FakePublisher,
    FakeStore,
    delivery_of,
    item_of,
    job_of,
    metrics_of,
    request_of,
    settler_of,
)

from inferq.outcome import Outcome
from inferq_schemas import Result, decode_results
from inferq_worker.answer import Answerer
from inferq_worker.errors import WorkError
from inferq_worker.finish import Finisher
from inferq_worker.held import Held
from inferq_worker.outbox import Outbox
from inferq_worker.publish import Mover, Replies
from inferq_worker.tasks import Tasks
from inferq_worker.work import Request

LATE = WorkError("deadline_exceeded", "too late")
WRONG = WorkError("invalid_input", "no such input")


class Desk:
    """An outbox, and what left through it."""

    def __init__(self, role: str) -> None:
        self.channel, self.store, self.publisher = FakeChannel(), FakeStore(), FakePublisher()
        metrics = metrics_of(CollectorRegistry(), role=role)
        self.settler = settler_of(self.channel, metrics)
        self.held = Held(2**20, lambda _pressed: None)
        self.tasks = Tasks(cast("Any", asyncio.get_running_loop()))
        self.answerer = Answerer(worker=WORKER, role=role)
        finisher = Finisher(
            store=cast("Any", self.store),
            replies=Replies(cast("Any", self.publisher), metrics),
            mover=Mover(cast("Any", self.publisher), metrics),
            metrics=metrics,
            tasks=self.tasks,
            claim_check_bytes=2**18,
            held=self.held,
        )
        self.outbox = Outbox(finisher, self.answerer, self.tasks)

    def request(self, jobs: int = 1) -> Request:
        self.settler.open(tag := self.channel.deliver())
        delivery = delivery_of(b"body", settler=self.settler, tag=tag, open_requests=jobs)
        self.held.take(delivery)
        return request_of(delivery)

    async def sent(self) -> dict[str, Result]:
        await self.tasks.idle()
        await self.settler.flushed()
        results = [result for one in self.publisher.to("reply.me") for result in decode_results(one.body)]
        return {result.id: result for result in results}

    def commands(self, operation: str) -> list[tuple[str, ...]]:
        return [ids for name, ids in self.store.asked if name == operation]


@pytest.fixture
async def desk() -> Desk:
    return Desk("gpu")


def code(result: Result) -> str:
    return result.error.code if result.error else "ok"


async def test_a_refusal_is_stored_told_and_acked(desk: Desk) -> None:
    job = job_of("a")
    desk.outbox.refuse(desk.request(), WRONG, "a", job=job)
    assert code((await desk.sent())["a"]) == "invalid_input"
    assert Outcome(job.digest(), (await desk.sent())["a"]) == desk.store.get("a")
    assert desk.channel.fates == {1: "acked"}
    assert desk.held.deliveries == 0


async def test_what_leaves_in_one_turn_is_stored_in_one_round_trip(desk: Desk) -> None:
    for number in range(1000):
        item = item_of(job_of(f"j{number}"), request=desk.request())
        desk.outbox.fail(item, LATE)
    assert len(await desk.sent()) == 1000
    assert [len(ids) for ids in desk.commands("keep")] == [1000]
    assert set(desk.channel.fates.values()) == {"acked"}


async def test_the_next_turn_is_sent_by_itself(desk: Desk) -> None:
    desk.outbox.fail(item_of(job_of("a"), request=desk.request()), LATE)
    await desk.sent()
    desk.outbox.fail(item_of(job_of("b"), request=desk.request()), LATE)
    assert set(await desk.sent()) == {"a", "b"}
    assert desk.commands("keep") == [("a",), ("b",)]


async def test_a_refusal_without_id_is_told_and_stored_nowhere(desk: Desk) -> None:
    desk.outbox.refuse(desk.request(), WRONG, "")
    assert code((await desk.sent())[""]) == "invalid_input"
    assert desk.store.outcomes == {}
    assert desk.channel.fates == {1: "acked"}


async def test_a_refusal_of_a_job_that_could_not_be_read_is_stored_under_its_own_digest(desk: Desk) -> None:
    desk.outbox.refuse(desk.request(), WRONG, "a", digest=b"d" * 16)
    await desk.sent()
    stored = desk.store.get("a")
    assert stored is not None
    assert stored.digest == b"d" * 16


async def test_a_failure_that_must_not_be_kept_is_told_and_not_stored(desk: Desk) -> None:
    conflict = WorkError("conflict", "other content", keep=False)
    desk.outbox.refuse(desk.request(), conflict, "a", job=job_of("a"))
    desk.outbox.fail(item_of(job_of("b"), request=desk.request()), conflict)
    assert {name: code(result) for name, result in (await desk.sent()).items()} == {"a": "conflict", "b": "conflict"}
    assert desk.commands("keep") == []


async def test_everybody_who_waits_for_a_job_is_told(desk: Desk) -> None:
    item = item_of(job_of("a"), request=desk.request())
    item.requests.append(desk.request())
    desk.outbox.fail(item, LATE)
    await desk.sent()
    assert [one.routing_key for one in desk.publisher.published if not one.exchange] == ["reply.me"] * 2
    assert desk.channel.fates == {1: "acked", 2: "acked"}


async def test_a_stored_outcome_is_repeated_and_not_stored_again(desk: Desk) -> None:
    job = job_of("a")
    outcome = Outcome(job.digest(), Result("a", "ok"))
    desk.outbox.repeat(item_of(job, request=desk.request()), outcome)
    assert code((await desk.sent())["a"]) == "ok"
    assert desk.commands("keep") == []


@pytest.mark.parametrize("role", ["gpu", "cpu"])
async def test_answers_of_the_cpu_role_say_so(role: str) -> None:
    desk = Desk(role)
    desk.outbox.refuse(desk.request(), WRONG, "a", job=job_of("a"))
    desk.outbox.fail(item_of(job_of("b"), request=desk.request()), LATE)
    assert [result.fallback for result in (await desk.sent()).values()] == [role == "cpu"] * 2


async def test_a_message_goes_back_once_its_other_jobs_are_done_with(desk: Desk) -> None:
    first = desk.request(jobs=2)
    second = Request(first.delivery, first.lane)
    desk.outbox.give_back(first)
    await desk.settler.flushed()
    assert desk.channel.fates == {}
    desk.outbox.fail(item_of(job_of("b"), request=second), LATE)
    await desk.sent()
    assert desk.channel.fates == {1: "requeued"}
