"""A job on arrival: taken, diverted while there is slack, or refused early with both estimates; and late rescues."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import pytest
from prometheus_client import CollectorRegistry
from tests.fakes import (
    FakeChannel,
    FakeClock,
    FakePublisher,
    FakeStore,
    Published,
    delivery_of,
    item_of,
    job_of,
    metrics_of,
    request_of,
    settler_of,
)

from inferq.amqp import PublishUnknown, Unroutable
from inferq_schemas import FALLBACK_EXCHANGE, FALLBACK_LANE, JOBS_EXCHANGE, decode_jobs, decode_results
from inferq_worker.cpu import CpuPool, CpuWorker
from inferq_worker.device import Device
from inferq_worker.errors import WorkError
from inferq_worker.finish import Finisher
from inferq_worker.held import Held
from inferq_worker.publish import Mover, Replies
from inferq_worker.scheduling import LatencyTable, RunningP95
from inferq_worker.tasks import Tasks
from inferq_worker.triage import Triage

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

    from inferq_worker.work import Request, WorkItem

RUN_S, AFTER_S, CPU_S = 0.1, 0.003, 0.25
TARGET_ROWS = 4


@dataclass(slots=True)
class Ahead:
    """A policy with so many rows before any new job, of the new job's bucket or of another one."""

    rows: int = 0
    other_rows: int = 0

    def rows_ahead(self, due_s: float) -> Mapping[Hashable, int]:
        del due_s
        return {"b": self.rows, "other": self.other_rows}

    def target_rows(self, bucket: Hashable) -> int:
        del bucket
        return TARGET_ROWS


class Desk:
    """A triage on fakes: every batch takes a tenth of a second, a CPU worker a quarter for each row.

    Args:
        judges: False = the policy foresees nothing.
        cpu: whether a CPU worker lives.
    """

    def __init__(self, *, judges: bool = True, cpu: bool = True) -> None:
        self.clock, self.ahead, self.pool = FakeClock(), Ahead(), CpuPool()
        self.channel, self.publisher, self.registry = FakeChannel(), FakePublisher(), CollectorRegistry()
        self.metrics = metrics_of(self.registry)
        self.settler = settler_of(self.channel, self.metrics)
        self.tasks = Tasks(cast("Any", asyncio.get_running_loop()))
        self.device = Device(1, self.clock)
        self.latency = LatencyTable({1: RUN_S, TARGET_ROWS: RUN_S})
        self.slow = LatencyTable({1: 10 * RUN_S})
        if cpu:
            worker = CpuWorker(CPU_S, lanes=1, held_jobs=0, beat=1)
            self.pool.update({"c": worker}, gpu_workers=1, queued_jobs=0, now_s=self.clock.now())
        self.triage = Triage(
            policy=self.ahead if judges else None,
            latency_of=lambda bucket: self.slow if bucket == "other" else self.latency,
            device=self.device,
            cpus={"m": self.pool},
            after=RunningP95(AFTER_S),
            beyond=RunningP95(AFTER_S),
            finisher=Finisher(
                store=cast("Any", FakeStore()),
                replies=Replies(cast("Any", self.publisher), self.metrics),
                mover=Mover(cast("Any", self.publisher), self.metrics),
                metrics=self.metrics,
                tasks=self.tasks,
                claim_check_bytes=2**18,
                held=Held(2**20, lambda _pressed: None),
            ),
            clock=self.clock,
            metrics=self.metrics,
            tasks=self.tasks,
        )

    def request(self, lane: str = "interactive") -> Request:
        self.settler.open(tag := self.channel.deliver())
        return request_of(delivery_of(lane=lane, settler=self.settler, tag=tag, open_requests=1))

    def item(self, left_s: float, *rows: float, lane: str = "interactive", **fields: Any) -> WorkItem:
        """A job with so long to its deadline."""
        own = {name: fields.pop(name) for name in ("alone", "lane_rank") if name in fields}
        job = job_of("a", *rows, **fields)
        return item_of(job, request=self.request(lane), deadline_s=self.clock.now() + left_s, **own)

    def admits(self, item: WorkItem) -> bool:
        return self.triage.admits(item)

    async def moved(self) -> list[Published]:
        await self.tasks.idle()
        await self.settler.flushed()
        return self.publisher.published

    @property
    def diverted(self) -> float:
        at = {"model": "m", "reason": "deadline"}
        return self.registry.get_sample_value("inferq_jobs_diverted_total", at) or 0.0


@pytest.fixture
async def desk() -> Desk:
    return Desk()


async def test_a_job_that_the_gpu_answers_in_time_is_taken(desk: Desk) -> None:
    assert desk.admits(desk.item(RUN_S + AFTER_S + 0.001))
    assert (await desk.moved(), desk.diverted) == ([], 0)


async def test_a_job_that_only_the_cpu_answers_in_time_is_diverted_with_both_estimates(desk: Desk) -> None:
    desk.ahead.rows = 5 * TARGET_ROWS
    assert not desk.admits(desk.item(0.5))
    (moved,) = await desk.moved()
    assert (moved.exchange, moved.routing_key) == (FALLBACK_EXCHANGE, "m.interactive")
    assert decode_jobs(moved.body)[0].id == "a"
    assert {name: moved.headers[name] for name in moved.headers if name.startswith("inferq-divert")} == {
        "inferq-divert-reason": "deadline",
        "inferq-divert-gpu-ms": 603,
        "inferq-divert-cpu-ms": 260,
    }
    assert moved.headers["inferq-attempt"] == 2
    assert moved.properties.expiration == "500"
    assert (moved.properties.reply_to, moved.properties.correlation_id) == ("reply.me", "c")
    assert desk.channel.fates == {1: "acked"}
    assert desk.diverted == 1


async def test_the_run_under_way_counts(desk: Desk) -> None:
    desk.device.enter(0.4).unwanted()
    assert not desk.admits(desk.item(0.45))
    assert (await desk.moved())[0].headers["inferq-divert-gpu-ms"] == 503


async def test_diversions_fill_the_gap_and_the_next_job_sees_it(desk: Desk) -> None:
    desk.ahead.rows = 10 * TARGET_ROWS
    assert [desk.admits(desk.item(0.55)) for _ in range(2)] == [False, False]
    with pytest.raises(WorkError):
        desk.admits(desk.item(0.55))
    assert desk.diverted == 2


@pytest.mark.parametrize(
    ("cpu", "fields", "told"),
    [
        (False, {}, "200 ms left; this worker would answer in 603 ms, and no CPU worker lives"),
        (True, {}, "200 ms left; this worker would answer in 603 ms, and a CPU worker would answer in 260 ms"),
        (True, {"fallback": "never"}, "and the job may not go to a CPU worker"),
    ],
)
async def test_a_job_that_nobody_answers_in_time_is_refused_with_both_estimates(
    cpu: bool, fields: dict[str, Any], told: str
) -> None:
    desk = Desk(cpu=cpu)
    desk.ahead.rows = 5 * TARGET_ROWS
    with pytest.raises(WorkError) as refused:
        desk.admits(desk.item(0.2, **fields))
    assert refused.value.code == "deadline_exceeded"
    assert told in refused.value.message
    assert (await desk.moved(), desk.diverted) == ([], 0)


async def test_a_job_that_may_not_fall_back_is_refused_although_the_cpu_had_time(desk: Desk) -> None:
    desk.ahead.rows = 5 * TARGET_ROWS
    with pytest.raises(WorkError, match="may not go to a CPU worker"):
        desk.admits(desk.item(0.5, fallback="never"))
    assert await desk.moved() == []


async def test_a_job_that_is_welcome_late_is_diverted_in_time_or_taken_but_never_refused(desk: Desk) -> None:
    desk.ahead.rows = 5 * TARGET_ROWS
    assert not desk.admits(desk.item(0.5, late="serve"))
    assert desk.admits(desk.item(0.2, late="serve"))


async def test_a_job_that_is_in_time_only_if_its_own_batch_stays_small_is_diverted_or_else_taken() -> None:
    for cpu, taken in ((True, False), (False, True)):
        desk = Desk(cpu=cpu)
        desk.latency = LatencyTable({1: 0.05, TARGET_ROWS: 0.2})
        desk.ahead.rows = TARGET_ROWS
        assert desk.admits(desk.item(0.35)) is taken


async def test_large_jobs_are_judged_by_all_their_rows(desk: Desk) -> None:
    rows = [1.0] * 8 * TARGET_ROWS
    with pytest.raises(WorkError, match="answer in 803 ms"):
        desk.admits(desk.item(0.7, *rows))


async def test_large_jobs_are_judged_by_the_runs_of_all_their_steps(desk: Desk) -> None:
    item = desk.item(0.2, *[1.0] * (TARGET_ROWS + 1))
    item.step_rows = TARGET_ROWS
    with pytest.raises(WorkError, match="answer in 203 ms"):
        desk.admits(item)


async def test_what_another_model_runs_before_is_reckoned_with_its_own_run_time(desk: Desk) -> None:
    desk.ahead.other_rows = 1
    assert desk.admits(desk.item(1.2, fallback="never"))
    with pytest.raises(WorkError, match="answer in 1103 ms"):
        desk.admits(desk.item(1.0, fallback="never"))


@pytest.mark.parametrize("kind", [{"lane_rank": 1, "lane": "bulk"}, {"alone": True}, {"left_s": None}])
async def test_bulk_jobs_suspects_and_jobs_without_deadline_are_not_judged(desk: Desk, kind: dict[str, Any]) -> None:
    desk.ahead.rows = 100 * TARGET_ROWS
    item = desk.item(0.5, **{"lane": "interactive"} | {name: kind[name] for name in kind if name != "left_s"})
    item.deadline_s = None if "left_s" in kind else item.deadline_s
    assert desk.admits(item)
    assert await desk.moved() == []


async def test_nothing_is_judged_by_a_policy_that_foresees_nothing_or_while_run_times_are_unknown() -> None:
    blind, fresh = Desk(judges=False), Desk()
    blind.ahead.rows = fresh.ahead.rows = 100 * TARGET_ROWS
    fresh.latency = LatencyTable()
    assert blind.admits(blind.item(0.2))
    assert fresh.admits(fresh.item(0.2))


async def test_a_job_from_the_fallback_lane_is_never_diverted_again(desk: Desk) -> None:
    desk.ahead.rows = 5 * TARGET_ROWS
    item = desk.item(0.5, lane=FALLBACK_LANE, lane_rank=2)
    assert desk.admits(item)
    assert not desk.triage.rescues(item, reason="deadline")
    first = desk.item(0.5, lane=FALLBACK_LANE)
    with pytest.raises(WorkError):
        desk.admits(first)
    assert (await desk.moved(), desk.diverted) == ([], 0)


async def test_a_job_that_also_came_from_the_fallback_lane_is_not_diverted(desk: Desk) -> None:
    item = desk.item(0.5)
    item.requests.append(desk.request(FALLBACK_LANE))
    assert not desk.triage.rescues(item, reason="deadline")


async def test_a_job_given_up_is_rescued_if_the_cpu_has_time_for_all_who_wait_for_it(desk: Desk) -> None:
    item = desk.item(0.3)
    item.requests.append(desk.request())
    assert desk.triage.rescues(item, reason="deadline")
    moved = await desk.moved()
    assert [one.exchange for one in moved] == [FALLBACK_EXCHANGE] * 2
    assert "inferq-divert-gpu-ms" not in moved[0].headers
    assert moved[0].headers["inferq-divert-cpu-ms"] == 260
    assert desk.channel.fates == {1: "acked", 2: "acked"}
    assert desk.diverted == 1


@pytest.mark.parametrize("fields", [{"left_s": 0.25}, {"fallback": "never"}, {"alone": True}])
async def test_a_job_that_the_cpu_would_miss_or_must_not_run_is_not_rescued(desk: Desk, fields: dict[str, Any]) -> None:
    item = desk.item(**({"left_s": 0.5} | fields))
    assert not desk.triage.rescues(item, reason="deadline")
    assert (await desk.moved(), desk.diverted) == ([], 0)


async def test_without_cpu_workers_nothing_is_rescued() -> None:
    desk = Desk(cpu=False)
    assert not desk.triage.rescues(desk.item(0.5), reason="deadline")


async def test_a_model_without_fallback_diverts_nothing(desk: Desk) -> None:
    desk.ahead.rows = 5 * TARGET_ROWS
    with pytest.raises(WorkError, match="no CPU worker lives"):
        desk.admits(desk.item(0.5, model="other"))


async def test_a_diversion_whose_confirmation_got_lost_is_made_again(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inferq_worker.finish._RETRY_MIN_S", 0.0)
    desk.publisher.fail(FALLBACK_EXCHANGE, PublishUnknown("lost"))
    desk.ahead.rows = 5 * TARGET_ROWS
    assert not desk.admits(desk.item(0.5))
    assert [one.exchange for one in await desk.moved()] == [FALLBACK_EXCHANGE]
    assert desk.diverted == 1


async def test_a_job_that_no_fallback_queue_takes_goes_back_to_its_lane(desk: Desk) -> None:
    desk.publisher.fail(FALLBACK_EXCHANGE, Unroutable("no queue"))
    desk.ahead.rows = 5 * TARGET_ROWS
    assert not desk.admits(desk.item(0.5))
    assert [one.exchange for one in await desk.moved()] == [JOBS_EXCHANGE]
    assert desk.channel.fates == {1: "acked"}


async def test_a_job_that_no_queue_takes_any_more_is_answered(desk: Desk) -> None:
    for exchange in (FALLBACK_EXCHANGE, JOBS_EXCHANGE):
        desk.publisher.fail(exchange, Unroutable("no queue"))
    desk.ahead.rows = 5 * TARGET_ROWS
    assert not desk.admits(desk.item(0.5))
    await desk.moved()
    (result,) = [result for one in desk.publisher.to("reply.me") for result in decode_results(one.body)]
    assert result.error is not None
    assert result.error.code == "deadline_exceeded"
    assert desk.channel.fates == {1: "acked"}


async def test_a_job_that_cannot_run_here_goes_to_a_cpu_worker_that_is_in_time(desk: Desk) -> None:
    assert desk.triage.rescues(desk.item(CPU_S + 0.02), reason="breaker", patience_until_s=0)
    assert not desk.triage.rescues(desk.item(CPU_S + 0.02), reason="breaker", patience_until_s=0), (
        "behind the first one it would be late"
    )
    (moved,) = await desk.moved()
    assert moved.headers["inferq-divert-reason"] == "breaker"
    assert moved.properties.expiration is not None
    assert desk.diverted == 0, "not for its deadline"


async def test_a_job_without_deadline_goes_to_the_cpu_if_that_answers_before_the_model_may_be_back(desk: Desk) -> None:
    def patient() -> WorkItem:
        return item_of(job_of("a"), request=desk.request("bulk"))

    soon_s = desk.clock.now() + CPU_S
    assert not desk.triage.rescues(patient(), reason="breaker", patience_until_s=soon_s)
    assert desk.triage.rescues(patient(), reason="breaker", patience_until_s=soon_s + 0.02)
    (moved,) = await desk.moved()
    assert moved.properties.expiration is None
