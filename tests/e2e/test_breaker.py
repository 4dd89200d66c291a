"""A model that fails is taken out of service and comes back: a CPU worker answers its jobs or they wait, none is lost.

The model is a table: an index outside of it fails the run, and no made-up input of the warm-up does. So the breaker
opens on jobs, and every probe passes.
"""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests import models
from tests.e2e.raw_client import RawClient, job, now_ms, raw_client, tensor
from tests.e2e.worker_process import WorkerProcess, Workers, until

from inferq_schemas import FALLBACK_EXCHANGE, Result

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.e2e.worker_process import Site

pytestmark = pytest.mark.timeout(180)
LANE, BULK, FALLBACK = "gather.interactive", "gather.bulk", "gather.fallback"
OUTSIDE = 99
OPENED = 'inferq_breaker_transitions_total{model="gather",reason="failures",state="open"}'
IS_OPEN = 'inferq_breaker_state{model="gather",state="open"}'
DIVERTED = 'inferq_jobs_diverted_total{model="gather",reason="breaker"}'


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return models.gather(tmp_path)


@pytest.fixture
async def raw(site: Site) -> AsyncIterator[RawClient]:
    await site.add_model("gather")
    async with raw_client(site) as client:
        yield client


def lookup(index: int, **fields: Any) -> dict[str, Any]:
    return job("gather", np.zeros(1), inputs={"i": tensor(np.array([[index]], np.int64))}, **fields)


def right(result: Result, index: int) -> bool:
    return result.ok and result.outputs["y"].to_numpy().tolist() == [[[index, 10 * index]]]


async def breaker(worker: WorkerProcess) -> dict[str, Any]:
    _, page = await worker.page("/status")
    found: dict[str, Any] = page["models"]["gather"]["breaker"]
    return found


async def is_open(worker: WorkerProcess) -> bool:
    return bool((await breaker(worker))["state"] == "open")


async def consumed(worker: WorkerProcess, model: str = "gather") -> list[str]:
    """Queues of the model that the worker consumes now."""
    _, page = await worker.page("/status")
    return [lane["queue"] for lane in page["lanes"] if f".{model}." in lane["queue"] and lane["consuming"]]


async def break_it(raw: RawClient, worker: WorkerProcess, routing_key: str = LANE, **options: Any) -> None:
    """Five failing runs, one after the other; each of their jobs is answered for itself."""
    for _ in range(5):
        failed = await raw.ask(lookup(OUTSIDE), routing_key, **options)
        assert failed.error is not None
        assert failed.error.code == "inference_failed"
    await until(lambda: is_open(worker), "the breaker is open")


async def test_while_it_is_open_the_lanes_rest_and_jobs_wait_in_their_queue_until_a_probe_closes_it(
    raw: RawClient, workers: Workers, model: Path
) -> None:
    worker = await workers.ready("--model", model, BREAKER__HALF_OPEN_AFTER_S="4")
    await break_it(raw, worker)
    opened_s = time.monotonic()
    assert await until(lambda: _rests(worker), "its lanes are paused", 3)
    status, page = await worker.page("/readyz")
    assert (status, page["checks"]["breakers"]["ok"]) == (503, False), "its only model cannot be run"
    assert await worker.metric(IS_OPEN) == 1

    names = {n: await raw.publish(lookup(n % 4), LANE) for n in range(20)}
    bundle = await raw.publish([lookup(n, deadline_unix_ms=None) for n in range(4)], BULK)
    assert await raw.depth("inferq.gather.interactive", "inferq.gather.bulk") == 21, "nobody takes them"
    assert raw.results(bundle) == []
    assert await worker.metric("inferq_jobs_requeued_total{") == 0, "nothing goes to and fro"

    for n, name in names.items():
        assert right(await raw.reply(name), n % 4)
    await until(lambda: len(raw.results(bundle)) == 4, "the bundle is answered as well")
    assert time.monotonic() - opened_s > 3
    found = await breaker(worker)
    assert (found["state"], found["opened_by"]) == ("closed", "failures")
    assert found["failed"] == 0, "what opened it is forgotten"
    await worker.ready()
    assert await consumed(worker) != []
    assert await worker.metric(OPENED) == 1


async def test_a_cpu_worker_answers_in_time_what_was_in_hand_and_the_rest_goes_back_once(
    raw: RawClient, workers: Workers, model: Path
) -> None:
    limits = {"BREAKER__FAILURES_IN_ROW": "3", "BREAKER__HALF_OPEN_AFTER_S": "6"}
    gpu = await workers.ready("--model", model, BATCHING__MAX_ROWS="1", **limits)
    cpu = await workers.ready("--model", model, "--role", "cpu")
    await until(lambda: _leaves_the_fallback_alone(gpu), "the GPU worker knows of the CPU worker")
    good = [lookup(n % 4, fallback="allow" if n % 3 else "never") for n in range(60)]
    # Due first, and so run one after the other, while what came before them waits.
    bad = [lookup(OUTSIDE, deadline_unix_ms=now_ms() + 20_000, fallback="never") for _ in range(5)]
    names = await asyncio.gather(*(raw.publish(one, LANE) for one in [*good, *bad]))
    await until(lambda: is_open(gpu), "the breaker is open")
    opened_s = time.monotonic()

    results = [await raw.reply(name) for name in names]
    assert [n for n in range(60) if not right(results[n], n % 4)] == []
    assert [one.error.code for one in results[60:] if one.error] == ["inference_failed"] * 5
    assert not any(
        one.fallback for one, sent in zip(results, [*good, *bad], strict=True) if sent["fallback"] == "never"
    )
    diverted = int(await gpu.metric(DIVERTED))
    assert sum(one.fallback for one in results) == diverted > 0
    assert await cpu.metric('inferq_fallback_latency_seconds_count{model="gather"}') == diverted
    assert time.monotonic() - opened_s > 4, "those that may not fall back waited for the probe"
    requeued = await gpu.metric('inferq_jobs_requeued_total{lane="interactive",model="gather"}')
    assert 0 < requeued <= 65 - diverted, "once each"
    assert await raw.depth("inferq.gather.interactive", "inferq.gather.fallback") == 0
    await until(partial(_settled, gpu), "all is settled")
    await until(partial(_settled, cpu), "all is settled")
    assert len({result.id for _, result in raw.replies}) == len(raw.replies) == 65, "each was answered once"


async def test_jobs_published_while_it_is_open_reach_the_cpu_worker_by_their_expiration(
    raw: RawClient, workers: Workers, model: Path
) -> None:
    """Nobody consumes the lane, so the broker's own clock moves them, with the CPU's reserve of time left."""
    gpu = await workers.ready("--model", model, BREAKER__HALF_OPEN_AFTER_S="60", BREAKER__HALF_OPEN_MAX_S="60")
    await workers.ready("--model", model, "--role", "cpu")
    await until(lambda: _leaves_the_fallback_alone(gpu), "the GPU worker knows of the CPU worker")
    await break_it(raw, gpu)
    await until(lambda: _rests(gpu), "its lanes are paused")
    result = await raw.ask(lookup(2, deadline_unix_ms=now_ms() + 3000), LANE, expiration_ms=1000)
    assert right(result, 2)
    assert (result.fallback, result.late) == (True, False)


async def test_a_cpu_worker_whose_model_fails_leaves_its_queue_to_the_gpu_role(
    raw: RawClient, workers: Workers, model: Path
) -> None:
    gpu = await workers.ready("--model", model)
    cpu = await workers.ready("--model", model, "--role", "cpu", BREAKER__HALF_OPEN_AFTER_S="30")
    await until(lambda: _leaves_the_fallback_alone(gpu), "the GPU worker knows of the CPU worker")
    await break_it(raw, cpu, LANE, exchange=FALLBACK_EXCHANGE)
    await until(lambda: _rests(cpu), "its lane is paused")
    result = await raw.ask(lookup(3), LANE, exchange=FALLBACK_EXCHANGE)
    assert right(result, 3)
    assert result.served_by is not None
    assert result.served_by.role == "gpu", "adopted, as if the CPU worker had ended"
    assert await is_open(cpu)


async def test_another_model_of_the_same_worker_goes_on(
    raw: RawClient, workers: Workers, model: Path, tmp_path: Path
) -> None:
    await raw.site.add_model("scale")
    scale = models.scale(tmp_path, features=3)
    worker = await workers.ready("--model", model, "--model", scale, BREAKER__HALF_OPEN_AFTER_S="30")
    await break_it(raw, worker)
    await until(lambda: _rests(worker), "its lanes are paused")
    result = await raw.ask(job("scale", np.ones((1, 3), np.float32)), "scale.interactive")
    assert result.ok
    assert await worker.is_ready(), "one of two models can be run"
    assert await consumed(worker, "scale") != []
    name = await raw.publish(lookup(1), LANE)
    assert await worker.stop() == 0, "a drain does not wait for probes"
    assert raw.results(name) == []
    assert await raw.depth("inferq.gather.interactive") == 1


async def _rests(worker: WorkerProcess) -> bool:
    return await consumed(worker) == []


async def _leaves_the_fallback_alone(worker: WorkerProcess) -> bool:
    queues = await consumed(worker)
    return bool(queues) and "inferq.gather.fallback" not in queues


async def _settled(worker: WorkerProcess) -> bool:
    return await worker.in_hand() == 0
