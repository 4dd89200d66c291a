"""What the store makes of Redis' replies; what is said on the wire is tested with a real Redis."""

from __future__ import annotations

from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry
from redis.exceptions import OutOfMemoryError, ResponseError
from tests.fakes import WORKER, metrics_of

from inferq.outcome import Outcome
from inferq.settings import RedisSettings
from inferq_worker.errors import StoreUnavailable
from inferq_worker.store import Store

CANCELLED = Outcome.cancelled("a")


class FakePipeline:
    """Answers its commands with what it was told to, in order."""

    def __init__(self, replies: list[object]) -> None:
        self._replies = replies
        self._sent = 0

    def __getattr__(self, _command: str) -> Any:
        return self._send

    def _send(self, *_args: object, **_options: object) -> None:
        self._sent += 1

    async def execute(self, raise_on_error: bool) -> list[object]:
        assert not raise_on_error
        assert self._sent == len(self._replies)
        return self._replies


class FakeRedis:
    """A connected client whose only pipeline gets these replies."""

    def __init__(self, *replies: object) -> None:
        self._replies = list(replies)

    def pipeline(self, transaction: bool) -> FakePipeline:
        assert not transaction
        return FakePipeline(self._replies)


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


def store_on(registry: CollectorRegistry, *replies: object) -> Store:
    store = Store(cast("Any", FakeRedis(*replies)), RedisSettings(), WORKER, metrics_of(registry))
    store._up.set()
    return store


def errors(registry: CollectorRegistry, operation: str) -> float:
    return registry.get_sample_value("inferq_store_errors_total", {"operation": operation}) or 0.0


async def test_a_full_redis_still_tells_which_jobs_are_answered(registry: CollectorRegistry) -> None:
    store = store_on(registry, OutOfMemoryError("maxmemory"), [CANCELLED.encode(), None])
    assert await store.claim(store.record(["a", "b"]), ["a", "b"]) == [CANCELLED, None]
    assert errors(registry, "running") == 1


@pytest.mark.parametrize("replies", [(0, ResponseError("no")), (OutOfMemoryError("full"), ResponseError("no"))])
async def test_without_an_answer_about_the_outcomes_the_store_is_not_available(
    registry: CollectorRegistry, replies: tuple[object, ...]
) -> None:
    store = store_on(registry, *replies)
    with pytest.raises(StoreUnavailable, match="redis refused"):
        await store.claim(store.record(["a"]), ["a"])
    assert errors(registry, "lookup") == 1


async def test_an_outcome_that_could_not_be_forgotten_is_not_taken_for_the_answer(registry: CollectorRegistry) -> None:
    store = store_on(registry, ResponseError("no permission"), 1, [CANCELLED.encode()])
    with pytest.raises(StoreUnavailable):
        await store.claim(store.record(["a"]), ["a"], forget=["a"])


class LostPipeline(FakePipeline):
    """Its connection is reset between the connecting and the first bytes, on uvloop."""

    async def execute(self, raise_on_error: bool) -> list[object]:
        assert not raise_on_error
        raise RuntimeError("unable to perform operation on <TCPTransport closed=True>; the handler is closed")


class LostRedis(FakeRedis):
    def pipeline(self, transaction: bool) -> FakePipeline:
        assert not transaction
        return LostPipeline([])


async def test_a_connection_that_uvloop_has_closed_is_redis_away_and_not_the_end_of_the_worker() -> None:
    store = Store(cast("Any", LostRedis()), RedisSettings(), WORKER, metrics_of(CollectorRegistry()))

    with pytest.raises(StoreUnavailable, match="the handler is closed"):
        await store.beat()

    assert not store.up
