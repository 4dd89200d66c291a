"""The broker or Redis goes away in the middle of a load: everything comes back by itself and no job is lost."""

import asyncio
import contextlib
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import quote, urlsplit

import numpy as np
import pytest
from infra.local import install, processes, redis, tls
from infra.local.errors import StackError
from tests import models
from tests.e2e.raw_client import RawClient, job, raw_client
from tests.e2e.worker_process import OpenSite, Site, WorkerProcess, Workers, until
from tests.hardened import HardenedSite

from inferq import Client, Item

pytestmark = pytest.mark.timeout(180)


def cut_connections(site: Site, whose: str) -> int:
    """Close the vhost's connections whose name holds `whose`, as an operator would; returns how many."""
    found = site.broker.management.call("GET", f"/api/vhosts/{quote(site.broker.vhost, safe='')}/connections")
    cut = 0
    for connection in found:
        if whose in connection.get("client_properties", {}).get("connection_name", ""):
            # The list lags behind: it may name one that has gone.
            with contextlib.suppress(StackError):
                site.broker.management.call("DELETE", f"/api/connections/{quote(connection['name'], safe='')}")
                cut += 1
    return cut


def number(n: int) -> np.ndarray:
    return np.full((1 + n % 3, 3), n, np.float32)


@pytest.mark.parametrize("whose", ["inferq gpu", "inferq"])
async def test_connections_that_are_cut_under_load_come_back_and_no_job_is_lost(
    site: Site, workers: Workers, tmp_path: Path, whose: str
) -> None:
    worker = await workers.ready("--model", models.scale(tmp_path, features=3))
    stop = asyncio.Event()

    def items() -> Iterator[Item]:
        n = 0
        while not stop.is_set():
            yield Item({"x": number(n)}, id=f"cut-{n}")
            n += 1

    async def load(client: Client) -> dict[int, object]:
        faults: dict[int, object] = {}
        async for answer in client.infer_many("scale", items(), bundle_jobs=8, window_jobs=128):
            assert answer.index is not None
            right = answer.ok and np.array_equal(answer.outputs["y"], 2 * number(answer.index) + 1)
            faults[answer.index] = None if right else answer.error or "wrong"
        return faults

    async with Client(site.client_settings()) as client:
        under_way = asyncio.create_task(load(client))
        await until(lambda: cut_connections(site, whose) >= 2, "the worker's two connections are cut")
        await until(lambda: worker.metric('inferq_broker_reconnects_total{link="consume"}'), "it is back")
        answered = await worker.metric("inferq_batch_rows_sum")
        await until(lambda: under_way.done() or _more(worker, answered + 100), "it works again")
        stop.set()
        faults = await asyncio.wait_for(under_way, 60)

    assert sorted(faults) == list(range(len(faults)))
    assert [fault for fault in faults.values() if fault is not None] == []
    await until(worker.is_ready, "it is ready")
    async with raw_client(site) as raw:
        await until(lambda: _settled(raw, worker), "everything is settled")
        assert await raw.empty_parking() == []


@dataclass
class OwnRedis:
    """A Redis that a test may end and start again, on one port; as secure as that of the site that it is for."""

    site: Site
    port: int
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """As administrator, who has the same login as on the site's usual Redis."""
        parts = urlsplit(self.site.redis_url)
        login, at, _ = parts.netloc.rpartition("@")
        return parts._replace(netloc=f"{login}{at}{processes.LOOPBACK}:{self.port}").geturl()

    def start(self) -> None:
        file = self.site.folder / "redis.conf"
        file.write_text("\n".join(self._configuration()))
        options = ("--bind", processes.LOOPBACK, "--save", "", "--appendonly", "no", "--dir", str(self.site.folder))
        self.process = subprocess.Popen([install.find("redis-server"), file, *options], stdout=subprocess.DEVNULL)

    def _configuration(self) -> list[str]:
        if not isinstance(self.site, HardenedSite):
            return [f"port {self.port}"]
        login = urlsplit(self.site.redis_url).netloc.rpartition("@")[0]
        return [tls.redis_configuration(self.site.tls, self.port, login), *self.site.redis_users()[1:]]

    async def answers(self) -> None:
        await until(lambda: redis.answers(self.port, tls=self.site.broker.tls_context), "Redis answers")

    def send(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def end(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


@pytest.fixture
async def own_redis(open_site: OpenSite, tmp_path: Path) -> AsyncIterator[OwnRedis]:
    if "redis-server" in install.missing():
        pytest.skip("redis-server is not installed, and this test needs one to end")
    with open_site(tmp_path) as site:
        server = OwnRedis(site, processes.free_ports(1)[0])
        server.start()
        await server.answers()
        yield server
        server.end()


@pytest.fixture
def site(request: pytest.FixtureRequest, open_site: OpenSite, tmp_path: Path) -> Iterator[Site]:
    """Tests that ask for a Redis of their own work with it."""
    if "own_redis" in request.fixturenames:
        own: OwnRedis = request.getfixturevalue("own_redis")
        yield replace(own.site, redis_url=own.url)
        return
    with open_site(tmp_path) as opened:
        yield opened


async def ask(raw: RawClient, n: int, lane: str, **fields: object) -> str:
    return await raw.publish(job("scale", number(n), id=f"{lane}-{n}", **fields), f"scale.{lane}")


@pytest.mark.parametrize("how", ["ended", "stuck"])
async def test_with_redis_away_urgent_jobs_are_answered_and_the_others_once_it_is_back(
    own_redis: OwnRedis, site: Site, workers: Workers, tmp_path: Path, how: str
) -> None:
    worker = await workers.ready("--model", models.scale(tmp_path, features=3), REDIS__SOCKET_TIMEOUT_S="0.5")
    async with raw_client(site) as raw:
        before = [await ask(raw, n, "interactive") for n in range(50)]
        own_redis.end() if how == "ended" else own_redis.send(signal.SIGSTOP)
        bulk = [await ask(raw, n, "bulk", deadline_unix_ms=None) for n in range(100, 130)]
        urgent = [await ask(raw, n, "interactive") for n in range(200, 300)]

        replies = [await raw.reply(name) for name in before + urgent]
        assert [result.error for result in replies if not result.ok] == []
        await until(lambda: _page(worker, "/readyz", 503), "it says that Redis is away")
        await until(lambda: _gauge(worker, "inferq_redis_available", 0), "the gauge says so too")
        assert await worker.metric("inferq_result_unstored_total") >= 100
        assert [name for name in bulk if raw.results(name)] == [], "nobody is told what is not stored"

        own_redis.start() if how == "ended" else own_redis.send(signal.SIGCONT)
        late = [await raw.reply(name) for name in bulk]

        assert [result.error for result in late if not result.ok] == []
        assert (await raw.outcome("bulk-100")).result == late[0]
        for n, result in zip([*range(50), *range(200, 300), *range(100, 130)], replies + late, strict=True):
            np.testing.assert_array_equal(result.outputs["y"].to_numpy(), 2 * number(n) + 1)
        await until(worker.is_ready, "it is ready again")
        await until(lambda: _settled(raw, worker), "everything is settled")
        assert len(raw.replies) == len(before) + len(bulk) + len(urgent), "one answer each"
        assert await raw.empty_parking() == []


async def test_a_restart_of_redis_under_a_load_of_bundles_loses_no_job(
    own_redis: OwnRedis, site: Site, workers: Workers, tmp_path: Path
) -> None:
    worker = await workers.ready("--model", models.scale(tmp_path, features=3))
    answers: dict[int, object] = {}
    async with Client(site.client_settings()) as client:

        async def load() -> None:
            items = ({"x": number(n)} for n in range(4000))
            async for answer in client.infer_many("scale", items, bundle_jobs=16, window_jobs=256):
                assert answer.index is not None
                right = answer.ok and np.array_equal(answer.outputs["y"], 2 * number(answer.index) + 1)
                answers[answer.index] = None if right else answer.error or "wrong"

        under_way = asyncio.create_task(load())
        await until(lambda: len(answers) > 500, "it is under way")
        own_redis.end()
        await until(lambda: _page(worker, "/readyz", 503), "the worker has seen it")
        own_redis.start()
        await under_way

    assert sorted(answers) == list(range(4000))
    assert [fault for fault in answers.values() if fault is not None] == []


async def _more(worker: WorkerProcess, rows: float) -> bool:
    return await worker.metric("inferq_batch_rows_sum") > rows


async def _gauge(worker: WorkerProcess, series: str, value: float) -> bool:
    return await worker.metric(series) == value


async def _page(worker: WorkerProcess, name: str, status: int) -> bool:
    return (await worker.page(name))[0] == status


async def _settled(raw: RawClient, worker: WorkerProcess) -> bool:
    return await worker.in_hand() == 0 and await raw.depth("inferq.scale.interactive", "inferq.scale.bulk") == 0
