"""Deadlines under load: who is diverted to the CPU in time, who is refused early, and how soon expiry is told.

The GPU role runs on the CPU provider here, and is kept busy by jobs that take about a second each.
"""

import contextlib
import re
import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aio_pika.abc import AbstractIncomingMessage
from tests import models
from tests.e2e.raw_client import RawClient, job, now_ms, raw_client
from tests.e2e.worker_process import Site, WorkerProcess, Workers, until

from inferq_schemas import FALLBACK_EXCHANGE, Result, decode_jobs

pytestmark = pytest.mark.timeout(180)
LAYERS, WIDTH, ROWS = 300, 512, 512
FALLBACK = "inferq.slow.fallback"
DIVERTED = 'inferq_jobs_diverted_total{model="slow",reason="deadline"}'
X = np.full((1, WIDTH), 0.1, np.float32)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return models.slow(tmp_path, layers=LAYERS, width=WIDTH)


@pytest.fixture
async def raw(site: Site) -> AsyncIterator[RawClient]:
    await site.add_model("slow")
    async with raw_client(site) as client:
        yield client


async def gpu_worker(workers: Workers, *models: Path, max_rows: int = ROWS) -> WorkerProcess:
    arguments = [part for model in models for part in ("--model", model)]
    return await workers.ready(*arguments, BATCHING__MAX_ROWS=str(max_rows))


async def cpu_worker(workers: Workers, model: Path) -> WorkerProcess:
    return await workers.ready("--model", model, "--role", "cpu", BATCHING__MAX_ROWS="4")


async def keep_busy(raw: RawClient, gpu: WorkerProcess) -> tuple[str, int]:
    """Have the GPU role begin a run of about a second; returns the job's message, and half of that time in ms."""
    large = job("slow", np.zeros((ROWS, WIDTH), np.float32), deadline_unix_ms=None)
    await until(lambda: _run_age_s(gpu, at_most=0.0), "the device is free")
    name = await raw.publish(large, "slow.bulk")
    await until(lambda: _is_running(gpu), "it runs")
    _, page = await gpu.page("/status")
    return name, int(page["models"]["slow"]["run_ms_by_rows"][str(ROWS)] / 2)


async def serves_fallback(gpu: WorkerProcess) -> bool:
    _, page = await gpu.page("/status")
    return any(lane["queue"] == FALLBACK and lane["consuming"] for lane in page["lanes"])


async def rests(gpu: WorkerProcess) -> bool:
    return not await serves_fallback(gpu)


@contextlib.asynccontextmanager
async def tap(raw: RawClient) -> AsyncIterator[list[AbstractIncomingMessage]]:
    """See what passes through the fallback exchange."""
    seen: list[AbstractIncomingMessage] = []

    async def note(message: AbstractIncomingMessage) -> None:
        seen.append(message)

    queue = await raw.admin.declare_queue("tap", exclusive=True)
    await queue.bind(FALLBACK_EXCHANGE, "slow.*")
    await queue.consume(note, no_ack=True)
    yield seen


async def test_jobs_that_the_gpu_would_miss_are_answered_by_the_cpu_in_time(
    raw: RawClient, workers: Workers, model: Path
) -> None:
    gpu, _ = await gpu_worker(workers, model), await cpu_worker(workers, model)
    await until(lambda: rests(gpu), "the GPU worker knows of the CPU worker")
    results = dict[str, Result]()
    async with tap(raw) as seen:
        for _ in range(3):
            busy, half_ms = await keep_busy(raw, gpu)
            urgent = [job("slow", X, deadline_unix_ms=now_ms() + half_ms) for _ in range(3)]
            names = [await raw.publish(one, "slow.interactive") for one in urgent]
            results |= {name: await raw.reply(name) for name in names}
            assert raw.results(busy) == [], "answered while the GPU was busy"
            assert (await raw.reply(busy)).ok
        await until(lambda: len(seen) == 9, "nine were diverted")

    assert [(one.ok, one.fallback, one.late) for one in results.values()] == [(True, True, False)] * 9
    assert await gpu.metric(DIVERTED) == 9
    assert {decode_jobs(message.body)[0].id for message in seen} == {one.id for one in results.values()}
    for message in seen:
        headers: dict[str, Any] = dict(message.headers)
        assert headers["inferq-divert-reason"] == "deadline"
        assert isinstance(message.expiration, float)
        assert 0 < headers["inferq-divert-cpu-ms"] <= message.expiration * 1000 + 1 < headers["inferq-divert-gpu-ms"]
        assert message.reply_to == raw.reply_to


async def test_without_a_cpu_worker_nothing_is_diverted_and_the_refusal_comes_early(
    raw: RawClient, workers: Workers, model: Path
) -> None:
    gpu = await gpu_worker(workers, model)
    async with tap(raw) as seen:
        busy, half_ms = await keep_busy(raw, gpu)
        due_ms = now_ms() + half_ms
        result = await raw.ask(job("slow", X, deadline_unix_ms=due_ms), "slow.interactive")
        left_ms = due_ms - now_ms()
        assert raw.results(busy) == []

        assert result.error is not None
        assert result.error.code == "deadline_exceeded"
        told = re.search(
            r"(\d+) ms left; this worker would answer in (\d+) ms, and no CPU worker", result.error.message
        )
        assert told is not None, result.error.message
        assert int(told[1]) <= half_ms < int(told[2])
        assert left_ms > half_ms / 2, "well before its deadline"
        assert (await raw.reply(busy)).ok
        assert seen == []
    assert await gpu.metric(DIVERTED) == 0


async def test_a_job_that_forbids_the_cpu_is_refused_early_although_the_cpu_had_time(
    raw: RawClient, workers: Workers, model: Path
) -> None:
    gpu, cpu = await gpu_worker(workers, model), await cpu_worker(workers, model)
    await until(lambda: rests(gpu), "the GPU worker knows of the CPU worker")
    _, half_ms = await keep_busy(raw, gpu)
    asked = job("slow", X, deadline_unix_ms=now_ms() + half_ms, fallback="never")
    result = await raw.ask(asked, "slow.interactive")

    assert result.error is not None
    assert "the job may not go to a CPU worker" in result.error.message
    assert await cpu.metric("inferq_batch_rows_sum") == 0


async def test_expiry_is_told_within_ten_milliseconds_while_the_device_is_busy(
    raw: RawClient, workers: Workers, model: Path
) -> None:
    gpu = await gpu_worker(workers, model)
    arrived_ms: dict[str, float] = {}

    async def note(message: AbstractIncomingMessage) -> None:
        at_ms = time.time() * 1000
        await raw.take(message)
        arrived_ms.update({result.id: at_ms for name, result in raw.replies if result.id not in arrived_ms})

    await raw.listen("reply.timed", note)
    due_ms: dict[str, int] = {}
    noticed_ms: list[float] = []
    for _ in range(2):
        busy, half_ms = await keep_busy(raw, gpu)
        start_ms = now_ms() + 100
        bundle = [job("slow", X, deadline_unix_ms=start_ms + n * half_ms // 80) for n in range(80)]
        due_ms |= {one["id"]: one["deadline_unix_ms"] for one in bundle}
        name = await raw.publish(bundle, "slow.bulk", reply_to="reply.timed")
        await until(partial(_has_all, raw, name, 80), "all have expired")
        assert raw.results(busy) == [], "while the device was busy"
        assert {one.error.code for one in raw.results(name) if one.error} == {"deadline_exceeded"}
        await raw.reply(busy)
        noticed_ms += _noticed_ms(raw.results(name), due_ms)

    answered_ms = [arrived_ms[name] - due_ms[name] for name in due_ms]
    for what, lag_ms in (("noticed", noticed_ms), ("answered", answered_ms)):
        print(what, "late by, ms:", np.percentile(lag_ms, [0, 50, 95, 100]))  # noqa: T201 - pytest shows it
    assert min(answered_ms) >= 0
    assert np.percentile(noticed_ms, 95) < 10
    assert np.percentile(answered_ms, 95) < 100, "through the store and the broker, on a machine with other work"


async def test_the_gpu_worker_adopts_the_fallback_queue_while_no_cpu_worker_lives(
    raw: RawClient, workers: Workers, model: Path
) -> None:
    gpu = await gpu_worker(workers, model, max_rows=4)
    await until(lambda: serves_fallback(gpu), "nobody else is there", 5)
    cpu = await cpu_worker(workers, model)
    await until(lambda: rests(gpu), "the CPU worker is seen", 5)
    assert (await _through_fallback(raw)).served_by.role == "cpu"

    await cpu.kill()
    await until(lambda: serves_fallback(gpu), "the CPU worker's silence is noticed", 12)
    assert (await _through_fallback(raw)).served_by.role == "gpu"

    cpu = await cpu_worker(workers, model)
    await until(lambda: rests(gpu), "a CPU worker is back", 5)
    assert await cpu.stop() == 0
    await until(lambda: serves_fallback(gpu), "it took its leave", 4)


async def test_two_models_on_one_device_are_both_served_and_the_urgent_one_in_time(
    raw: RawClient, workers: Workers, model: Path, tmp_path: Path
) -> None:
    await raw.site.add_model("scale")
    gpu = await gpu_worker(workers, model, models.scale(tmp_path, features=3), max_rows=16)
    bundles = [[job("slow", X, deadline_unix_ms=None) for _ in range(32)] for _ in range(40)]
    slow = [await raw.publish(bundle, "slow.bulk") for bundle in bundles]
    await until(lambda: _is_running(gpu), "it is at work")
    urgent = {}
    for n in range(25):
        x = np.full((1, 3), n, np.float32)
        asked = job("scale", x, deadline_unix_ms=now_ms() + 1500)
        urgent[n] = await raw.ask(asked, "scale.interactive")
    at_work = sum(len(raw.results(name)) for name in slow)
    assert at_work < 40 * 32, "all of this while the other model had work"

    await until(lambda: sum(len(raw.results(name)) for name in slow) == 40 * 32, "the other model's jobs", 90)
    assert all(result.ok for name in slow for result in raw.results(name))
    assert [(one.ok, one.late, one.fallback) for one in urgent.values()] == [(True, False, False)] * 25
    for n, one in urgent.items():
        np.testing.assert_array_equal(one.outputs["y"].to_numpy(), np.full((1, 3), 2 * n + 1, np.float32))


async def _through_fallback(raw: RawClient) -> Any:
    """Who answered a job that came through the fallback queue, as if it had been diverted."""
    return await raw.ask(job("slow", X), "slow.interactive", exchange=FALLBACK_EXCHANGE)


def _has_all(raw: RawClient, name: str, results: int) -> bool:
    return len(raw.results(name)) == results


def _noticed_ms(results: list[Result], due_ms: dict[str, int]) -> list[float]:
    """How long after its deadline each job of one message was given up, by the worker's own clock.

    The worker tells how long it had held a job. All came at one moment, which is that of the job noticed soonest.
    """
    told = {one.id: re.search(r"after (\d+) ms", one.error.message if one.error else "") for one in results}
    held_ms = {name: int(match[1]) for name, match in told.items() if match is not None}
    assert len(held_ms) == len(results)
    came_ms = max(due_ms[name] - held_ms[name] for name in held_ms)
    return [came_ms + held_ms[name] - due_ms[name] for name in held_ms]


async def _run_age_s(gpu: WorkerProcess, *, at_most: float) -> bool:
    _, page = await gpu.page("/livez")
    return bool(page["checks"]["run"]["age_s"] <= at_most)


async def _is_running(gpu: WorkerProcess) -> bool:
    return not await _run_age_s(gpu, at_most=0.0)
