"""What a GPU worker makes of the CPU workers that it sees: when it diverts, and when it serves their queue itself."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Any, cast

import pytest
from pydantic import SecretStr
from tests.fakes import metrics_of

from inferq.pauses import Pause
from inferq.settings import BrokerSettings
from inferq_worker.broker import Broker, lanes_of
from inferq_worker.budget import Windows
from inferq_worker.cpu import STALE_AFTER_S, CpuPool, CpuWorker
from inferq_worker.errors import StoreUnavailable
from inferq_worker.models import ModelFile
from inferq_worker.settings import LanesSettings

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

CPU = CpuWorker(0.1, lanes=2, held_jobs=0, beat=1)


class Registry:
    """The part of the store that knows the workers."""

    def __init__(self) -> None:
        self.cpus: Mapping[str, CpuWorker] = {"c": CPU}
        self.away = False

    async def cpu_workers(self, model: str) -> tuple[Mapping[str, CpuWorker], int]:
        assert model == "m"
        if self.away:
            raise StoreUnavailable("redis is away")
        return self.cpus, 3


@pytest.fixture
def broker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Broker:
    url = SecretStr("amqp://guest:guest@127.0.0.1:1/")
    broker = Broker(BrokerSettings(url=url), role="gpu", worker="w", metrics=metrics_of())
    lanes = lanes_of(ModelFile("m", "1", tmp_path), "gpu", Windows(LanesSettings()), 32)
    broker.consume(lanes, lambda _: 0, lambda _: 0, dead_window=64)

    async def depth(queue: str) -> int | None:
        return 7 if queue == "inferq.m.fallback" else None

    monkeypatch.setattr(broker, "_depth", depth)
    monkeypatch.setattr("inferq_worker.broker._FALLBACK_EVERY_S", 0.0)
    return broker


def serves_fallback(broker: Broker) -> bool:
    (fallback,) = [one for one in broker.consumers if one.lane.name == "fallback"]
    return not fallback.paused_by


async def test_cpu_workers_are_known_at_once_and_their_queue_is_left_to_them(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inferq_worker.broker._FALLBACK_EVERY_S", 3600.0)
    pool = CpuPool()
    watch = asyncio.ensure_future(broker.watch_fallback(cast("Any", Registry()), {"m": pool}))
    await looks(3)
    assert (pool.lives(time.monotonic()), pool.queued_jobs, pool.gpu_workers) == (True, 7, 3)
    assert not serves_fallback(broker)
    watch.cancel()


async def test_the_fallback_queue_is_served_while_no_cpu_worker_lives_and_left_when_one_comes(broker: Broker) -> None:
    pool, registry = CpuPool(), Registry()
    watch = asyncio.ensure_future(broker.watch_fallback(cast("Any", registry), {"m": pool}))
    seen = []
    for cpus in ({}, {"c": CPU}, {}):
        registry.cpus = cpus
        await looks(20)
        seen.append((serves_fallback(broker), pool.lives(time.monotonic())))
    assert seen == [(True, False), (False, True), (True, False)]
    watch.cancel()


async def test_while_the_store_is_away_the_last_picture_stands_until_it_has_aged(broker: Broker) -> None:
    pool, registry = CpuPool(), Registry()
    watch = asyncio.ensure_future(broker.watch_fallback(cast("Any", registry), {"m": pool}))
    await looks(20)
    registry.away = True
    await looks(20)
    now_s = time.monotonic()
    assert (pool.lives(now_s), pool.lives(now_s + STALE_AFTER_S)) == (True, False)
    assert not serves_fallback(broker), "the store cannot say that they are gone"
    watch.cancel()


async def test_a_lane_that_pauses_for_its_model_is_not_resumed_for_other_reasons(broker: Broker) -> None:
    pool, registry = CpuPool(), Registry()
    registry.cpus = {}
    await broker.pause_model("m", True)
    watch = asyncio.ensure_future(broker.watch_fallback(cast("Any", registry), {"m": pool}))
    await looks(20)
    broker.pause_bulk(False)
    await looks(20)
    lanes = {one.lane.name: one.paused_by for one in broker.consumers}
    assert lanes == {"interactive": ["breaker"], "bulk": ["breaker"], "fallback": ["breaker"], "dead": []}
    assert [lane["paused_by"] for lane in broker.status()] == [["breaker"]] * 3 + [[]]

    await broker.pause_model("m", False)
    assert [one.paused_by for one in broker.consumers] == [[]] * 4, "no CPU worker lives: its lane is served too"
    watch.cancel()


async def looks(turns: int) -> None:
    """Let the watch go on for some turns of the loop."""
    for _ in range(turns):
        await asyncio.sleep(0)


async def test_the_reason_of_a_broker_that_is_away_is_known_before_there_are_consumers() -> None:
    url = SecretStr("amqp://guest:guest@127.0.0.1:1/")
    broker = Broker(BrokerSettings(url=url), role="gpu", worker="w", metrics=metrics_of())
    broker.consuming.up.set()
    broker.publishing.up.set()
    assert broker.problems() == ["the queues are being checked"], "connected, but ready for nothing"
    broker.consuming.up.clear()
    broker.publishing.up.clear()
    running = asyncio.create_task(broker.run())
    async with asyncio.timeout(20):
        while "not connected yet" in str(broker.problems()):  # noqa: ASYNC110 - another task changes it
            await asyncio.sleep(0)
    assert "consuming connection is down" in broker.problems()[0]
    assert broker.consumers == []
    running.cancel()
    await asyncio.wait([running])


def paused_lanes(broker: Broker) -> list[str]:
    return [one.lane.name for one in broker.consumers if "operator" in one.paused_by]


async def test_what_operators_paused_is_not_consumed_until_they_resume_it(broker: Broker) -> None:
    broker.obey({"m.bulk": Pause("m.bulk", "ann", "", 0), "other": Pause("other", "ann", "", 0)})
    assert paused_lanes(broker) == ["bulk"]
    broker.obey({"m": Pause("m", "ann", "", 0)})
    assert paused_lanes(broker) == ["interactive", "bulk", "fallback"], "and never the dead-letter queue"
    assert [one["paused_by"] for one in broker.status()][:2] == [["operator"], ["operator"]]
    broker.obey({"m": Pause("m", "ann", "", 0, until_unix_ms=1)})
    assert paused_lanes(broker) == [], "it has ended by itself"


async def test_a_lane_is_consumed_again_only_when_no_reason_against_it_is_left(broker: Broker) -> None:
    (bulk,) = [one for one in broker.consumers if one.lane.name == "bulk"]
    broker.obey({"m.bulk": Pause("m.bulk", "ann", "", 0)})
    broker.pause_bulk(True)
    broker.obey({})
    assert bulk.paused_by == ["bytes"]
    broker.obey({"m.bulk": Pause("m.bulk", "ann", "", 0)})
    broker.pause_bulk(False)
    assert bulk.paused_by == ["operator"]


async def test_nothing_is_diverted_to_a_fallback_queue_that_operators_paused(broker: Broker) -> None:
    pool = CpuPool()
    watch = asyncio.ensure_future(broker.watch_fallback(cast("Any", Registry()), {"m": pool}))
    await looks(20)
    assert pool.lives(time.monotonic())
    broker.obey({"m.fallback": Pause("m.fallback", "ann", "", 0)})
    await looks(20)
    assert (pool.lives(time.monotonic()), serves_fallback(broker)) == (False, False)
    watch.cancel()


async def test_the_watch_ends_though_a_library_swallows_its_cancellation(broker: Broker) -> None:
    asked = asyncio.Event()

    class Swallowing(Registry):
        async def cpu_workers(self, model: str) -> tuple[Mapping[str, CpuWorker], int]:
            if not asked.is_set():
                asked.set()
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.Event().wait()
            return await super().cpu_workers(model)

    watch = asyncio.create_task(broker.watch_fallback(cast("Any", Swallowing()), {"m": CpuPool()}))
    await asked.wait()
    watch.cancel()
    await asyncio.wait([watch], timeout=1)
    ended = watch.cancelled()
    watch.cancel()
    assert ended


async def test_a_lane_that_is_stopped_is_never_consumed_again(broker: Broker) -> None:
    (fallback,) = [one for one in broker.consumers if one.lane.name == "fallback"]
    await fallback.stop()

    async def consume_again() -> None:
        raise AssertionError

    fallback._consume_again = consume_again  # type: ignore[method-assign]  # must not be reached
    await fallback.switch("cpu_worker", paused=False)


@pytest.mark.parametrize("role", ["gpu", "cpu"])
def test_no_window_exceeds_what_memory_allows(tmp_path: Path, role: str) -> None:
    windows = Windows(LanesSettings(), most_urgent=40, most_patient=3)
    lanes = lanes_of(ModelFile("m", "1", tmp_path), role, windows, 32)
    for lane in lanes:
        most = 3 if lane.rank else 40
        assert (lane.window, lane.window_max) == (most, most)
    assert len(lanes) == (3 if role == "gpu" else 1)
