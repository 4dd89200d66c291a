"""Jobs that come a second time, judged by the running records of the store."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry
from tests.fakes import WORKER, FakeStore, VirtualTime, metrics_of

from inferq_worker.errors import WorkError
from inferq_worker.poison import RunRecord
from inferq_worker.redelivered import Redelivered


class Desk:
    """A judge and its store."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.store = FakeStore()
        self.judge = Redelivered(cast("Any", self.store), WORKER, metrics_of(self.registry))

    def left_behind(self, worker: str, *ids: str) -> None:
        record = RunRecord(f"{worker}/{len(self.store.running)}", worker, frozenset(ids), 0)
        self.store.running[record.key] = record

    @property
    def suspects(self) -> float:
        return self.registry.get_sample_value("inferq_suspects_total", {"model": "m"}) or 0.0


@pytest.fixture
async def desk() -> Desk:
    return Desk()


@pytest.fixture
async def time(monkeypatch: pytest.MonkeyPatch) -> VirtualTime:
    return VirtualTime(monkeypatch)


async def test_a_job_that_was_in_no_unfinished_run_batches_as_usual(desk: Desk) -> None:
    desk.left_behind("dead", "b", "c")
    assert not await desk.judge.runs_alone("a", "m")
    assert desk.suspects == 0


async def test_a_job_of_an_unfinished_run_runs_alone_and_is_counted(desk: Desk) -> None:
    desk.left_behind("dead", "a", "b")
    assert await desk.judge.runs_alone("a", "m")
    assert desk.suspects == 1


async def test_a_suspect_that_ended_its_worker_alone_fails_and_its_solo_record_goes(desk: Desk) -> None:
    desk.left_behind("second", "a")
    desk.left_behind("first", "a", "b")
    with pytest.raises(WorkError) as caught:
        await desk.judge.runs_alone("a", "m")
    assert caught.value.code == "inference_failed"
    assert [record.ids for record in desk.store.running.values()] == [{"a", "b"}]


async def test_a_suspect_that_runs_alone_elsewhere_waits_until_that_worker_is_known_to_be_dead(
    desk: Desk, time: VirtualTime
) -> None:
    desk.left_behind("dead", "a", "b")
    desk.left_behind("busy", "a")
    desk.store.alive.add("busy")
    waiting = asyncio.create_task(desk.judge.runs_alone("a", "m"))
    await time.advance(30)
    assert not waiting.done()
    desk.store.alive.discard("busy")
    with pytest.raises(WorkError):
        await waiting


async def test_a_suspect_that_runs_alone_elsewhere_is_let_go_once_that_run_ends(desk: Desk, time: VirtualTime) -> None:
    desk.left_behind("dead", "a", "b")
    desk.left_behind("busy", "a")
    desk.store.alive.add("busy")
    waiting = asyncio.create_task(desk.judge.runs_alone("a", "m"))
    await time.advance(2)
    desk.store.running.clear()
    assert not await waiting
    assert desk.suspects == 0


async def test_with_redis_away_the_job_runs_alone(desk: Desk) -> None:
    desk.store.go_away()
    assert await desk.judge.runs_alone("a", "m")


async def test_a_burst_of_redeliveries_asks_once(desk: Desk) -> None:
    desk.left_behind("dead", "a1", "a2")
    alone = await asyncio.gather(*(desk.judge.runs_alone(f"a{number}", "m") for number in range(50)))
    assert [number for number, one in enumerate(alone) if one] == [1, 2]
    assert desk.store.asked == [("runs", ())]


async def test_who_comes_later_asks_anew(desk: Desk) -> None:
    assert not await desk.judge.runs_alone("a", "m")
    desk.left_behind("dead", "a", "b")
    assert await desk.judge.runs_alone("a", "m")


async def test_one_that_is_cancelled_does_not_take_the_others_answer_with_it(desk: Desk) -> None:
    desk.left_behind("dead", "b", "c")
    gone = asyncio.create_task(desk.judge.runs_alone("a", "m"))
    stays = asyncio.create_task(desk.judge.runs_alone("b", "m"))
    await asyncio.sleep(0)
    gone.cancel()
    assert await stays
