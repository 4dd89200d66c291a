"""`inferq pause` and `resume` with real workers: jobs wait in their queue, also across restarts and without Redis."""

from __future__ import annotations

import asyncio
import getpass
import json
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests import models
from tests.e2e.raw_client import RawClient, job, raw_client
from tests.e2e.worker_process import Site, WorkerProcess, Workers, until

from inferq.keys import paused_key

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytestmark = pytest.mark.timeout(150)
X = np.array([[1, 2, 3]], np.float32)
BULK = "inferq.scale.bulk"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return models.scale(tmp_path, features=3)


@pytest.fixture
async def raw(site: Site) -> AsyncIterator[RawClient]:
    await site.add_model("scale")
    async with raw_client(site) as client:
        yield client


async def lane(worker: WorkerProcess, queue: str) -> dict[str, Any]:
    _, page = await worker.page("/status")
    found: dict[str, Any] = next(one for one in page["lanes"] if one["queue"] == queue)
    return found


async def test_a_paused_lane_waits_across_a_restart_and_others_go_on(
    site: Site, raw: RawClient, workers: Workers, model: Path
) -> None:
    worker = await workers.ready("--model", model)
    paused = await site.inferq("pause", "scale.bulk", "--why", "night shift")
    assert paused.returncode == 0, paused.stderr
    assert "no worker takes jobs of inferq.scale.bulk" in paused.stdout

    waiting = await raw.publish(job("scale", X, deadline_unix_ms=None), "scale.bulk")
    assert (await raw.reply(await raw.publish(job("scale", X), "scale.interactive"))).ok
    _, page = await worker.page("/status")
    assert [(one["target"], one["why"]) for one in page["pauses"]] == [("scale.bulk", "night shift")]
    assert page["pauses"][0]["by"].startswith(f"{getpass.getuser()}@")
    assert (await lane(worker, BULK))["paused_by"] == ["operator"]
    assert await worker.metric('inferq_lane_paused{lane="bulk",model="scale",reason="operator"}') == 1
    assert (await worker.page("/readyz"))[0] == 200, "it does as it was told"

    await worker.stop()
    worker = await workers.ready("--model", model)
    assert (await raw.reply(await raw.publish(job("scale", X), "scale.interactive"))).ok
    assert not (await lane(worker, BULK))["consuming"]
    assert await raw.depth(BULK) == 1

    resumed = await site.inferq("resume", "scale")
    assert (resumed.returncode, resumed.stdout) == (0, "resumed scale.bulk\n")
    started_s = time.monotonic()
    assert (await raw.reply(waiting)).ok
    assert time.monotonic() - started_s < 10
    assert await worker.metric('inferq_lane_paused{lane="bulk",model="scale",reason="operator"}') == 0


async def test_a_pause_for_a_while_ends_by_itself_and_is_listed_until_then(
    site: Site, raw: RawClient, workers: Workers, model: Path
) -> None:
    worker = await workers.ready("--model", model)
    assert (await site.inferq("pause", "scale", "--for", "15s")).returncode == 0
    listed = await site.inferq("pause", "--json")
    (entry,) = [json.loads(line) for line in listed.stdout.splitlines()]
    assert entry["until_unix_ms"] - entry["since_unix_ms"] == 15_000
    refused = await site.inferq("resume", "scale.bulk")
    assert (refused.returncode, "stays paused with its whole model" in refused.stderr) == (1, True)

    waiting = await raw.publish(job("scale", X, deadline_unix_ms=None), "scale.bulk")
    assert (await raw.reply(waiting)).ok
    assert (await lane(worker, BULK))["consuming"]
    assert (await site.inferq("pause")).stdout == "nothing is paused\n"


async def test_a_pause_holds_when_redis_forgets_to_answer(
    site: Site, raw: RawClient, workers: Workers, model: Path
) -> None:
    worker = await workers.ready("--model", model)
    assert (await site.inferq("pause", "scale.bulk")).returncode == 0
    async with site.redis() as redis:
        # Of another type: the worker's question is refused, as by a Redis that is away.
        await redis.delete(paused_key(site.prefix))
        await redis.set(paused_key(site.prefix), b"no hash")
        before = await worker.metric('inferq_store_errors_total{operation="running"}')
        await until(lambda: asked(worker, before + 2), "it asked and got no answer")
        assert (await lane(worker, BULK))["paused_by"] == ["operator"]
        await redis.delete(paused_key(site.prefix))
    await until(lambda: consumes(worker), "nothing is paused any more")
    del raw


async def asked(worker: WorkerProcess, times: float) -> bool:
    return await worker.metric('inferq_store_errors_total{operation="running"}') >= times


async def consumes(worker: WorkerProcess) -> bool:
    return bool((await lane(worker, BULK))["consuming"])


async def test_a_mistyped_name_is_refused(site: Site, raw: RawClient) -> None:
    del raw
    wrong, badly_named, unpaused = await asyncio.gather(
        site.inferq("pause", "scale.bulkk"), site.inferq("pause", "Scale"), site.inferq("resume", "scale")
    )
    assert (wrong.returncode, "nothing was paused" in wrong.stderr) == (2, True)
    assert (badly_named.returncode, "is no model name" in badly_named.stderr) == (2, True)
    assert (unpaused.returncode, "is not paused" in unpaused.stderr) == (1, True)
