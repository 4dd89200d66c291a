"""Many jobs of every size through several clients and workers: every answer right, none lost, workers killed or not."""

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack
from pathlib import Path

import numpy as np
import pytest
from tests import models
from tests.e2e.raw_client import RawClient, raw_client
from tests.e2e.worker_process import Site, WorkerProcess, Workers, until

from inferq import Answer, Client, Item
from inferq_schemas import PARKING_QUEUE

pytestmark = pytest.mark.timeout(240)

SINGLES, MULTI_ROW, BUNDLED = 1000, 2000, 7000
ROWS = (1, 2, 3, 5, 8, 40)
FEATURES = 4


def inputs(start: int, count: int, *, rows: tuple[int, ...] = ROWS) -> Iterator[np.ndarray]:
    """Arrays of 1 to 40 rows, each holding numbers that no other holds."""
    for n in range(start, start + count):
        shape = (rows[n % len(rows)], FEATURES)
        yield (n * 1000 + np.arange(shape[0] * FEATURES)).reshape(shape).astype(np.float32)


def wrong(answers: Mapping[int, Answer], sent: list[np.ndarray]) -> list[object]:
    """What is not as numpy has it; small integers are exact in float32."""
    faults: list[object] = [n for n in range(len(sent)) if n not in answers]
    for n, answer in answers.items():
        if answer.error is not None:
            faults.append(answer.error)
        elif not np.array_equal(answer.outputs["y"], 2 * sent[n] + 1):
            faults.append((n, sent[n], answer.outputs["y"]))
    return faults[:5]


async def ask_one_by_one(client: Client, sent: list[np.ndarray], at_once: int = 50) -> dict[int, Answer]:
    """A service: interactive jobs, a bounded number at a time."""
    gate = asyncio.Semaphore(at_once)

    async def ask(x: np.ndarray) -> Answer:
        async with gate:
            return await client.infer("scale", {"x": x})

    return dict(enumerate(await asyncio.gather(*(ask(x) for x in sent))))


async def stream(
    client: Client, sent: list[np.ndarray], *, bundle_jobs: int, model: str = "scale", prefix: str = ""
) -> dict[int, Answer]:
    """A pipeline: bulk jobs; asserts that none is answered twice."""
    items = (Item({"x": x}, id=f"{prefix}{n}" if prefix else None) for n, x in enumerate(sent))
    answers: dict[int, Answer] = {}
    async for answer in client.infer_many(model, items, bundle_jobs=bundle_jobs):
        assert answer.index is not None
        assert answer.index not in answers
        answers[answer.index] = answer
    return answers


async def test_ten_thousand_jobs_of_mixed_sizes_from_three_clients_are_all_answered_right(
    site: Site, workers: Workers, tmp_path: Path
) -> None:
    model = models.scale(tmp_path, features=FEATURES)
    first, second = workers.start("--model", model), workers.start("--model", model)
    await asyncio.gather(first.ready(), second.ready())
    singles = list(inputs(0, SINGLES))
    multi = list(inputs(SINGLES, MULTI_ROW, rows=(2, 7, 33)))
    bundled = list(inputs(SINGLES + MULTI_ROW, BUNDLED))

    async with AsyncExitStack() as opened:
        a, b, c = [await opened.enter_async_context(Client(site.client_settings())) for _ in range(3)]
        one, many, most = await asyncio.gather(
            ask_one_by_one(a, singles), stream(b, multi, bundle_jobs=1), stream(c, bundled, bundle_jobs=64)
        )

    assert wrong(one, singles) == []
    assert wrong(many, multi) == []
    assert wrong(most, bundled) == []
    async with raw_client(site) as raw:
        await nothing_is_left(raw, first, second)
    assert {answer.result.served_by.worker for answer in most.values() if answer.result.served_by} == {
        (await worker.page("/status"))[1]["worker"] for worker in (first, second)
    }, "both workers did their part"


async def test_a_worker_killed_in_the_middle_of_a_load_loses_no_job(
    site: Site, workers: Workers, tmp_path: Path
) -> None:
    model = models.scale(tmp_path, features=FEATURES)
    doomed, survivor = workers.start("--model", model), workers.start("--model", model)
    await asyncio.gather(doomed.ready(), survivor.ready())
    sent = list(inputs(0, 3000))

    async with Client(site.client_settings()) as client:
        under_way = asyncio.create_task(stream(client, sent, bundle_jobs=16))
        await until(lambda: _answered(doomed, 200), "the worker is in the middle of it")
        await doomed.kill()
        answers = await under_way

    assert wrong(answers, sent) == []
    async with raw_client(site) as raw:
        await nothing_is_left(raw, survivor)


async def test_the_only_worker_killed_loses_no_job(site: Site, workers: Workers, tmp_path: Path) -> None:
    """No survivor takes over: what the dead one held waits in the queues for the next."""
    model = models.scale(tmp_path, features=FEATURES)
    await workers.ready("--model", model)
    bulk, urgent = list(inputs(0, 3000)), list(inputs(3000, 600))

    async with Client(site.client_settings()) as pipeline, Client(site.client_settings()) as service:
        under_way = asyncio.gather(
            stream(pipeline, bulk, bundle_jobs=16, prefix="bulk-"), ask_one_by_one(service, urgent)
        )
        # Once: a job that happened to run in both of two killed workers would rightly be parked.
        await until(lambda: _answered(workers.started[-1], 300), "the worker is in the middle of it", 60)
        await workers.started[-1].kill()
        await workers.ready("--model", model)
        answers, replies = await under_way

    assert wrong(answers, bulk) == []
    assert wrong(replies, urgent) == []
    async with raw_client(site) as raw:
        await nothing_is_left(raw, workers.started[-1])


async def nothing_is_left(raw: RawClient, *alive: WorkerProcess) -> None:
    """Every message is settled and nothing was parked."""

    async def settled() -> bool:
        held = [await worker.in_hand() for worker in alive]
        return not any(held) and await raw.depth("inferq.scale.interactive", "inferq.scale.bulk") == 0

    await until(settled, "everything is settled")
    assert await raw.depth("inferq.scale.fallback", "inferq.dead", PARKING_QUEUE) == 0


async def _answered(worker: WorkerProcess, jobs: int) -> bool:
    assert worker.returncode is None
    return await worker.metric("inferq_batch_rows_sum") >= jobs
