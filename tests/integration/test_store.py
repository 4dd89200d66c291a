"""The worker's store against a real Redis: what is written once, what stays, and what happens while Redis is away."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest
from prometheus_client import CollectorRegistry
from pydantic import SecretStr
from redis.asyncio import Redis
from tests.fakes import metrics_of

from inferq.keys import done_channel, is_at, output_key, result_key
from inferq.outcome import Outcome
from inferq.redis_pools import open_redis
from inferq.settings import RedisSettings
from inferq_schemas import Result
from inferq_worker.cpu import CpuWorker
from inferq_worker.errors import StoreUnavailable
from inferq_worker.poison import RunRecord
from inferq_worker.store import HEARTBEAT_TTL_S, Store

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from tests.stack import Stack

pytestmark = pytest.mark.timeout(60)
TTL_S, REPLIED_TTL_S = 100, 10
CPU = CpuWorker(0.25, lanes=2, held_jobs=3, beat=1)


class Relay:
    """A Redis that can go away: a listener before the real one, on a port of its own."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._target = (parts.hostname or "127.0.0.1", parts.port or 6379)
        self._parts = parts
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self.silent = False
        self.port = 0

    @property
    def url(self) -> str:
        user = self._parts.netloc.rpartition("@")[0]
        return self._parts._replace(
            netloc=f"{user}@127.0.0.1:{self.port}" if user else f"127.0.0.1:{self.port}"
        ).geturl()

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Connections end, and new ones are refused."""
        if self._server is not None:
            self._server.close()
        for writer in self._writers:
            writer.close()
        self._writers.clear()
        self._server = None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        behind, ahead = await asyncio.open_connection(*self._target)
        self._writers |= {writer, ahead}
        await asyncio.gather(self._pump(reader, ahead, mute=False), self._pump(behind, writer, mute=True))

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, mute: bool) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(65_536):
                if not (mute and self.silent):
                    sink.write(data)
        sink.close()


class Site:
    """Stores of several workers on one prefix, and a plain client to look behind them."""

    def __init__(self, url: str, prefix: str) -> None:
        self.url, self.prefix = url, prefix
        self.redis = Redis.from_url(url)
        self.registry = CollectorRegistry()
        self._metrics = metrics_of(self.registry)
        self._open: list[Redis] = [self.redis]

    def store(self, worker: str = "w1", *, url: str | None = None, ttl_s: int = TTL_S) -> Store:
        settings = RedisSettings(
            url=SecretStr(url or self.url),
            prefix=self.prefix,
            socket_timeout_s=0.5,
            connect_timeout_s=0.5,
            result_ttl_s=ttl_s,
            replied_ttl_s=REPLIED_TTL_S,
        )
        client = open_redis(settings, retries=0)
        self._open.append(client)
        return Store(client, settings, worker, self._metrics)

    async def up(self, worker: str = "w1", *, url: str | None = None, ttl_s: int = TTL_S) -> Store:
        store = self.store(worker, url=url, ttl_s=ttl_s)
        await store.beat()
        return store

    def key(self, job_id: str) -> str:
        return result_key(self.prefix, job_id)

    async def connections(self) -> int:
        """How many Redis has ever accepted."""
        figures = await self.redis.info("stats")
        return int(figures["total_connections_received"])

    async def close(self) -> None:
        for client in self._open:
            await client.aclose()


@pytest.fixture
async def site(stack: Stack, redis_prefix: str) -> AsyncIterator[Site]:
    site = Site(stack.redis_url, redis_prefix)
    yield site
    await site.close()


@pytest.fixture
async def relay(stack: Stack) -> AsyncIterator[Relay]:
    relay = Relay(stack.redis_url)
    await relay.open()
    yield relay
    await relay.close()


def outcome(job_id: str, digest: bytes = b"d" * 16) -> Outcome:
    return Outcome(digest, Result(job_id, "ok"))


async def refused(command: Awaitable[object]) -> str:
    with pytest.raises(StoreUnavailable) as error:
        await command
    return str(error.value)


async def test_a_burst_finds_every_connection_open(site: Site) -> None:
    before = await site.connections()
    store = await site.up()
    await store.connect()
    opened = await site.connections() - before
    await asyncio.gather(*(store.end(store.record([str(n)])) for n in range(50)))
    assert await site.connections() - before == opened == RedisSettings().max_connections


async def test_connecting_ahead_waits_for_no_redis_that_is_away(site: Site) -> None:
    await site.store(url="redis://127.0.0.1:1").connect()


async def test_a_claim_tells_what_is_known_in_order_and_leaves_a_record(site: Site) -> None:
    store = await site.up()
    await store.keep([outcome("b")])
    record = store.record(["a", "b", "c"])
    assert await store.claim(record, ["a", "b", "c"]) == [None, outcome("b"), None]
    assert await store.runs() == ([record], frozenset({"w1"}))
    assert await store.look_up(["b", "a"]) == [outcome("b"), None]


async def test_a_claim_forgets_outcomes_that_are_to_be_made_anew(site: Site) -> None:
    store = await site.up()
    await store.keep([outcome("a"), outcome("b")])
    assert await store.claim(store.record(["a", "b"]), ["a", "b"], forget=["a"]) == [None, outcome("b")]


async def test_keeping_stores_for_a_while_and_ends_the_record(site: Site) -> None:
    store = await site.up()
    record = store.record(["a"])
    await store.claim(record, ["a"])
    assert await store.keep([outcome("a")], ended=record) == [outcome("a")]
    assert (await store.runs())[0] == []
    assert 0 < await site.redis.ttl(site.key("a")) <= TTL_S


async def test_the_first_outcome_wins_and_everybody_learns_of_it(site: Site) -> None:
    first, second = await site.up("w1"), await site.up("w2")
    mine, theirs = outcome("a", b"1" * 16), outcome("a", b"2" * 16)
    assert await first.keep([mine]) == [mine]
    assert await second.keep([theirs, outcome("b")]) == [mine, outcome("b")]
    assert await first.look_up(["a"]) == [mine]


async def test_of_many_who_store_at_once_all_but_one_learn_who_was_first(site: Site) -> None:
    stores = [await site.up(f"w{n}") for n in range(8)]
    kept = await asyncio.gather(*(store.keep([outcome("a", str(n).encode() * 16)]) for n, store in enumerate(stores)))
    assert len({one[0].digest for one in kept}) == 1


async def test_a_cancellation_that_was_first_is_what_keeping_gives_back(site: Site) -> None:
    store = await site.up()
    await site.redis.set(site.key("a"), Outcome.cancelled("a").encode(), nx=True)
    assert await store.keep([outcome("a")]) == [Outcome.cancelled("a")]


async def test_an_outcome_that_cannot_be_read_counts_as_absent(site: Site) -> None:
    store = await site.up()
    await site.redis.set(site.key("a"), b"\xc1 from another world")
    assert await store.look_up(["a"]) == [None]
    assert await store.keep([outcome("a")]) == [outcome("a")]


async def test_who_waits_on_redis_is_told_that_there_is_something_to_read(site: Site) -> None:
    store = await site.up()
    async with site.redis.pubsub() as listener:
        await listener.subscribe(done_channel(site.prefix, "a"))
        assert await listener.get_message(timeout=5) is not None
        await store.keep([outcome("a"), outcome("b")], hint=["a"])
        heard = await listener.get_message(ignore_subscribe_messages=True, timeout=5)
    assert heard is not None
    assert await site.redis.exists(site.key("a"))


async def test_what_has_been_replied_lives_shorter(site: Site) -> None:
    store = await site.up()
    await store.keep([outcome("a"), outcome("b")])
    await store.shorten(["a"])
    assert 0 < await site.redis.ttl(site.key("a")) <= REPLIED_TTL_S
    assert await site.redis.ttl(site.key("b")) > REPLIED_TTL_S


async def test_a_run_without_outcome_is_ended(site: Site) -> None:
    store = await site.up()
    record, other = store.record(["a"]), store.record(["b"])
    for one in (record, other):
        await store.claim(one, sorted(one.ids))
    await store.end(record)
    await store.end(record)
    assert (await store.runs())[0] == [other]


async def test_runs_of_a_worker_whose_heartbeat_lapsed_stay_and_show_that_it_is_gone(site: Site) -> None:
    here, gone = await site.up("here"), await site.up("gone")
    mine, left = here.record(["a"]), gone.record(["b"])
    await here.claim(mine, ["a"])
    await gone.claim(left, ["b"])
    await site.redis.delete(f"{site.prefix}:worker:gone")
    records, alive = await here.runs()
    assert {record.key for record in records} == {mine.key, left.key}
    assert alive == {"here"}


async def test_records_older_than_any_outcome_are_swept(site: Site) -> None:
    store = await site.up()
    ancient = RunRecord("dead/1", "dead", frozenset({"a"}), int(time.time() * 1000) - TTL_S * 1000 - 5000)
    await store.claim(ancient, ["a"])
    assert (await store.runs())[0] == []
    assert await site.redis.hlen(f"{site.prefix}:running") == 0


async def test_solo_records_of_a_parked_job_are_forgotten_and_no_others(site: Site) -> None:
    store = await site.up()
    solo, shared = store.record(["a"]), store.record(["a", "b"])
    for record in (solo, shared):
        await store.claim(record, sorted(record.ids))
    await store.forget_runs("a", (await store.runs())[0])
    assert (await store.runs())[0] == [shared]


async def test_a_heartbeat_lasts_for_its_time(site: Site) -> None:
    await site.up()
    assert 0 < await site.redis.ttl(f"{site.prefix}:worker:w1") <= HEARTBEAT_TTL_S
    assert site.registry.get_sample_value("inferq_redis_available") == 1


async def test_gpu_workers_see_the_cpu_workers_of_a_model_and_their_own_number(site: Site) -> None:
    gpus = [site.store(f"gpu{n}") for n in range(3)]
    for gpu in gpus:
        await gpu.beat(gpu_models=["m", "other"])
    assert await gpus[0].cpu_workers("m") == ({}, 3)
    for name in ("c1", "c2"):
        await site.store(name).beat(cpu={"m": CPU})
    assert await gpus[0].cpu_workers("m") == ({"c1": CPU, "c2": CPU}, 3)
    assert await gpus[0].cpu_workers("other") == ({}, 3)
    assert await gpus[0].cpu_workers("unheard-of") == ({}, 0)


async def test_each_beat_brings_the_figures_up_to_date(site: Site) -> None:
    cpu, gpu = site.store("c"), await site.up("gpu")
    for beat in (1, 2):
        await cpu.beat(cpu={"m": CpuWorker(0.25, 2, held_jobs=beat, beat=beat)})
    assert (await gpu.cpu_workers("m"))[0] == {"c": CpuWorker(0.25, 2, held_jobs=2, beat=2)}


async def test_entries_of_workers_that_ended_without_a_word_go_in_time(site: Site) -> None:
    gpu = await site.up("gpu")
    await site.store("c").beat(cpu={"m": CPU})
    await site.store("gone").beat(cpu={"m": CPU}, gpu_models=["m"])
    await gpu.beat(gpu_models=["m"])
    assert await gpu.cpu_workers("m") == ({"c": CPU, "gone": CPU}, 2)
    # Redis lets the heartbeat lapse; what any worker's wall clock says counts for nothing.
    await site.redis.delete(f"{site.prefix}:worker:gone")
    assert await gpu.cpu_workers("m") == ({"c": CPU}, 1)
    await site.store("c").beat(cpu={"other": CPU, "m": CPU})
    assert await site.redis.hkeys(f"{site.prefix}:cpu:m") == [b"c"], "swept"
    assert await site.redis.smembers(f"{site.prefix}:gpu:m") == {b"gpu"}
    assert 0 < await site.redis.ttl(f"{site.prefix}:cpu:m") <= HEARTBEAT_TTL_S
    assert 0 < await site.redis.ttl(f"{site.prefix}:gpu:m") <= HEARTBEAT_TTL_S


async def test_who_retires_is_gone_at_once(site: Site) -> None:
    gpu, cpu, stays = site.store("gpu"), site.store("c"), await site.up("stays")
    await gpu.beat(gpu_models=["m"])
    await cpu.beat(cpu={"m": CPU})
    await stays.beat(gpu_models=["m"])
    await gpu.retire(gpu_models=["m"])
    await cpu.retire(cpu_models=["m"])
    assert await stays.cpu_workers("m") == ({}, 1)
    assert await site.redis.exists(f"{site.prefix}:worker:gpu", f"{site.prefix}:worker:c") == 0


async def test_payloads_come_in_order_and_outputs_lie_beside_the_outcome(site: Site) -> None:
    store = await site.up()
    await site.redis.set(store.input_ref("a", "x"), b"raw")
    assert await store.payloads([store.input_ref("a", name) for name in ("y", "x")]) == [None, b"raw"]
    refs = await store.put_outputs("a", {"big": b"bytes", "bigger": b"more"})
    assert all(is_at(ref, output_key(site.prefix, "a", name)) for name, ref in refs.items())
    assert await site.redis.get(refs["big"]) == b"bytes"
    assert 0 < await site.redis.ttl(refs["bigger"]) <= TTL_S


async def test_what_another_attempt_computed_is_not_overwritten(site: Site) -> None:
    store = await site.up()
    (first,) = (await store.put_outputs("a", {"y": b"one"})).values()
    (second,) = (await store.put_outputs("a", {"y": b"two"})).values()
    assert [await site.redis.get(ref) for ref in (first, second)] == [b"one", b"two"]


async def test_what_redis_refuses_although_it_answers_is_known_until_it_does_so_no_more(site: Site) -> None:
    store = await site.up()
    await site.redis.config_set("maxmemory", "1")
    try:
        with pytest.raises(StoreUnavailable, match="maxmemory"):
            await store.keep([outcome("a")])
        assert store.up
        assert "maxmemory" in (store.refusal or "")
    finally:
        await site.redis.config_set("maxmemory", "0")
    await store.keep([outcome("a")])
    assert store.refusal is None


async def test_before_the_first_heartbeat_nothing_is_asked(site: Site) -> None:
    store = site.store()
    assert not store.up
    assert "not asked yet" in await refused(store.look_up(["a"]))
    await store.beat()
    assert await store.look_up(["a"]) == [None]


@pytest.mark.parametrize(
    "command",
    [
        lambda store: store.claim(store.record(["a"]), ["a"]),
        lambda store: store.keep([outcome("a")]),
        lambda store: store.look_up(["a"]),
        lambda store: store.end(store.record(["a"])),
        lambda store: store.shorten(["a"]),
        lambda store: store.runs(),
        lambda store: store.beat(cpu={"m": CPU}),
        lambda store: store.cpu_workers("m"),
        lambda store: store.pauses(),
        lambda store: store.retire(gpu_models=["m"]),
        lambda store: store.payloads([store.input_ref("a", "x")]),
        lambda store: store.put_outputs("a", {"y": b"1"}),
    ],
)
async def test_redis_that_goes_away_fails_what_is_asked_and_is_noticed(
    site: Site, relay: Relay, command: Callable[[Store], Awaitable[object]]
) -> None:
    store = await site.up(url=relay.url)
    await relay.close()
    await refused(command(store))
    assert not store.up
    assert store.last_error


async def test_while_redis_is_away_only_heartbeats_ask_and_who_waits_is_woken_when_it_is_back(
    site: Site, relay: Relay
) -> None:
    store = await site.up(url=relay.url)
    await relay.close()
    await refused(store.beat())
    assert site.registry.get_sample_value("inferq_redis_available") == 0
    await relay.open()
    assert "redis is away" in await refused(store.look_up(["a"])), "nobody but the heartbeat finds out"
    waiting = asyncio.ensure_future(store.wait_up())
    await store.beat()
    await asyncio.wait_for(waiting, 5)
    assert site.registry.get_sample_value("inferq_redis_available") == 1
    assert await store.look_up(["a"]) == [None]


async def test_a_redis_that_does_not_answer_costs_one_time_out_and_no_more(site: Site, relay: Relay) -> None:
    store = await site.up(url=relay.url)
    relay.silent = True
    await refused(store.keep([outcome("a")]))
    started_s = time.monotonic()
    for _ in range(100):
        await refused(store.look_up(["a"]))
    assert time.monotonic() - started_s < 0.4, "known to be away: nobody waits in turn"


async def test_an_outcome_whose_confirmation_got_lost_is_kept_again_as_the_same(site: Site, relay: Relay) -> None:
    store = await site.up(url=relay.url)
    relay.silent = True
    await refused(store.keep([outcome("a")]))
    relay.silent = False
    await store.beat()
    assert await store.keep([outcome("a")]) == [outcome("a")]
    assert await site.redis.get(site.key("a")) == outcome("a").encode(), "the first attempt had arrived"


async def test_a_refusal_by_redis_is_an_error_and_redis_is_not_away(site: Site) -> None:
    store = await site.up()
    await site.redis.set(f"{site.prefix}:running", b"no hash")
    assert "WRONGTYPE" in await refused(store.keep([outcome("a")], ended=store.record(["a"])))
    assert store.up


async def test_a_claim_whose_record_is_refused_still_tells_what_is_known(site: Site) -> None:
    store = await site.up()
    await store.keep([outcome("b")])
    await site.redis.set(f"{site.prefix}:running", b"no hash")
    assert await store.claim(store.record(["a", "b"]), ["a", "b"]) == [None, outcome("b")]
    assert store.up
