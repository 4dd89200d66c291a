"""The client against a real broker and Redis, and a fake worker that knows only the contract."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
from pydantic import SecretStr
from tests.e2e.worker_process import until
from tests.integration.fake_worker import FakeWorker, fake_worker
from tests.stack import Broker, Stack

from inferq import (
    AnswerTimeout,
    Client,
    ClientClosed,
    InvalidJob,
    Item,
    JobFailed,
    JobTooLarge,
    QueueFull,
    StoreUnavailable,
    UnknownModel,
)
from inferq.keys import input_key, is_at, result_key
from inferq.outcome import Outcome
from inferq.results import ResultStore
from inferq.settings import BrokerSettings, ClientSettings, RedisSettings
from inferq_schemas import Job, ModelTopology, Result, Tensor, Topology

MODEL = "double"
X = np.arange(6, dtype=np.float32).reshape(2, 3)


@pytest.fixture
def topology(broker: Broker) -> Broker:
    broker.load(Topology([ModelTopology(MODEL)]).definitions(broker.vhost))
    return broker


@pytest.fixture
def settings(topology: Broker, stack: Stack, redis_prefix: str) -> ClientSettings:
    return ClientSettings(
        broker=BrokerSettings(url=SecretStr(topology.url), reconnect_min_s=0.05, publish_timeout_s=5),
        redis=RedisSettings(url=SecretStr(stack.redis_url), prefix=redis_prefix),
    )


@pytest.fixture
async def worker(settings: ClientSettings, stack: Stack) -> AsyncIterator[FakeWorker]:
    prefix = settings.redis.prefix
    async with fake_worker(
        settings.broker.url.get_secret_value(), MODEL, redis_url=stack.redis_url, prefix=prefix
    ) as fake:
        yield fake


@pytest.fixture
async def client(settings: ClientSettings) -> AsyncIterator[Client]:
    async with Client(settings) as opened:
        yield opened


@pytest.fixture
async def redis_client(settings: ClientSettings) -> AsyncIterator[Client]:
    async with Client(settings, reply="redis") as opened:
        yield opened


async def test_infer_gives_arrays_and_who_answered(client: Client, worker: FakeWorker) -> None:
    answer = await client.infer(MODEL, {"x": X})

    np.testing.assert_array_equal(answer.outputs["x2"], X * 2)
    assert answer.outputs["x2"].dtype == np.float32
    assert answer.result.served_by is not None
    assert answer.result.served_by.worker == "fake"


async def test_a_job_carries_what_the_contract_wants(client: Client, worker: FakeWorker) -> None:
    await client.infer(MODEL, {"x": [[1.5]]}, deadline_s=10, id="a-job", params={"top_k": 3})

    message, job = worker.properties[0], worker.seen[0]
    assert message.correlation_id == job.id == "a-job"
    assert message.reply_to is not None
    assert message.reply_to.startswith("reply.")
    assert message.message_id not in {None, "a-job"}
    assert message.content_type == "application/msgpack"
    # 30 % of the time left is for the CPU.
    assert 6.5 <= float(str(message.expiration)) <= 7.0
    assert job.inputs["x"].dtype == "float32"
    assert job.params == {"top_k": 3}


async def test_many_calls_at_once_get_each_its_own_answer(client: Client, worker: FakeWorker) -> None:
    answers = await asyncio.gather(*(client.infer(MODEL, {"x": np.full((1, 2), n, np.int64)}) for n in range(50)))

    assert [int(answer.outputs["x2"][0, 0]) for answer in answers] == [2 * n for n in range(50)]


async def test_a_failed_job_raises_its_code(client: Client, worker: FakeWorker) -> None:
    worker.fails = {"bad": "invalid_input"}

    with pytest.raises(JobFailed) as raised:
        await client.infer(MODEL, {"x": X}, id="bad")

    assert raised.value.code == "invalid_input"
    assert raised.value.message == "as the test wants"


async def test_a_submitted_job_is_found_later_by_anybody(
    client: Client, worker: FakeWorker, settings: ClientSettings
) -> None:
    job_id = await client.submit(MODEL, {"x": X})

    async with Client(settings, reply="redis") as other:
        answer = await other.result(job_id, timeout_s=20)

    np.testing.assert_array_equal(answer.outputs["x2"], X * 2)


async def test_infer_works_through_redis_alone(redis_client: Client, worker: FakeWorker) -> None:
    answers = await asyncio.gather(*(redis_client.infer(MODEL, {"x": np.full((1, 1), n, np.int32)}) for n in range(20)))

    assert [int(answer.outputs["x2"][0, 0]) for answer in answers] == [2 * n for n in range(20)]
    assert all(message.reply_to is None for message in worker.properties)


async def test_an_answer_that_was_there_before_is_found_at_once(redis_client: Client, worker: FakeWorker) -> None:
    first = await redis_client.infer(MODEL, {"x": X}, id="twice")
    again = await redis_client.result("twice", timeout_s=0)

    np.testing.assert_array_equal(first.outputs["x2"], again.outputs["x2"])


async def test_result_of_an_unknown_job_says_that_it_may_come(client: Client) -> None:
    with pytest.raises(AnswerTimeout, match="inferq result"):
        await client.result("never-sent", timeout_s=0.2)


async def test_an_unknown_model_is_noticed_at_publish(client: Client) -> None:
    with pytest.raises(UnknownModel, match=r"'nosuch' in lane 'interactive'.*inferq topology add-model nosuch"):
        await client.infer("nosuch", {"x": X})


async def test_a_stream_of_an_unknown_model_ends_with_the_reason(client: Client) -> None:
    with pytest.raises(UnknownModel):
        _ = [answer async for answer in client.infer_many("nosuch", ({"x": X} for _ in range(500)))]


async def test_an_interactive_job_without_deadline_is_refused_before_it_is_sent(
    client: Client, worker: FakeWorker
) -> None:
    with pytest.raises(InvalidJob, match="need a deadline"):
        await client.infer(MODEL, {"x": X}, deadline_s=None)

    assert worker.messages == 0


async def test_a_job_that_nobody_answers_times_out_and_says_how_to_look(client: Client) -> None:
    with pytest.raises(AnswerTimeout, match=r"inferq result lonely"):
        await client.infer(MODEL, {"x": X}, id="lonely", deadline_s=0.3)


async def test_many_jobs_of_mixed_sizes_are_all_answered_with_their_index(client: Client, worker: FakeWorker) -> None:
    sizes = [1 + (n * 7) % 5 for n in range(700)]
    items = ({"x": np.full((rows, 4), n, np.float32)} for n, rows in enumerate(sizes))

    answers = {answer.index: answer async for answer in client.infer_many(MODEL, items, bundle_jobs=32)}

    assert sorted(answers, key=lambda index: index or 0) == list(range(700))
    for n, rows in enumerate(sizes):
        np.testing.assert_array_equal(answers[n].outputs["x2"], np.full((rows, 4), 2 * n, np.float32))
    assert worker.messages < 100


async def test_a_bad_item_fails_alone(client: Client, worker: FakeWorker) -> None:
    worker.fails = {"third": "inference_failed"}
    items: list[Any] = [{"x": X}, {"x": np.array([1j])}, Item({"x": X}, id="third"), {"x": X}]

    answers = {answer.index: answer async for answer in client.infer_many(MODEL, items)}

    assert [answers[n].ok for n in range(4)] == [True, False, False, True]
    assert isinstance(answers[1].error, InvalidJob)
    assert isinstance(answers[2].error, JobFailed)
    assert answers[2].error.code == "inference_failed"


async def test_the_window_bounds_what_is_under_way(client: Client, worker: FakeWorker) -> None:
    worker.go.clear()
    taken = 0

    def source() -> Iterator[dict[str, Any]]:
        nonlocal taken
        for _ in range(100):
            taken += 1
            yield {"x": X}

    async def run() -> int:
        return len([answer async for answer in client.infer_many(MODEL, source(), bundle_jobs=4, window_jobs=10)])

    running = asyncio.create_task(run())
    await until(lambda: len(worker.seen) == 10)
    # The eleventh was read and waits for a place.
    assert taken == 11
    worker.go.set()
    assert await running == 100


async def test_a_slow_source_does_not_hold_jobs_back(client: Client, worker: FakeWorker) -> None:
    more = asyncio.Event()

    async def source() -> AsyncIterator[dict[str, Any]]:
        yield {"x": X}
        await more.wait()
        yield {"x": X}

    async with contextlib.aclosing(client.infer_many(MODEL, source())) as answers:
        first = await anext(answers)
        more.set()
        second = await anext(answers)

    assert [first.index, second.index] == [0, 1]


async def test_what_the_source_raises_comes_after_the_answers(client: Client, worker: FakeWorker) -> None:
    def source() -> Iterator[dict[str, Any]]:
        yield {"x": X}
        raise OSError("the disk is gone")

    async with contextlib.aclosing(client.infer_many(MODEL, source())) as answers:
        first = await anext(answers)
        with pytest.raises(OSError, match="the disk is gone"):
            await anext(answers)

    assert first.ok


async def test_leaving_a_stream_early_leaves_nothing_behind(client: Client, worker: FakeWorker) -> None:
    # The first call opens channels that stay.
    await client.infer(MODEL, {"x": X})
    before = asyncio.all_tasks()
    async with contextlib.aclosing(client.infer_many(MODEL, ({"x": X} for _ in range(1000)), bundle_jobs=8)) as answers:
        await anext(answers)

    assert len(client._courier.waiters) == 0
    await until(lambda: asyncio.all_tasks() <= before)


async def test_streams_work_through_redis_alone(
    settings: ClientSettings, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without hints this would take longer than a test may. Set before the client opens: its first beat starts then.
    monkeypatch.setattr("inferq.watch._RECHECK_S", 600)
    items = ({"x": np.full((1, 1), n, np.int32)} for n in range(200))

    async with Client(settings, reply="redis") as client:
        answers = [answer async for answer in client.infer_many(MODEL, items)]

    assert sorted(int(answer.outputs["x2"][0, 0]) for answer in answers) == [2 * n for n in range(200)]


async def test_a_full_queue_is_waited_for_and_then_named(client: Client, topology: Broker) -> None:
    await _fill(client, topology)
    started_s = time.monotonic()

    with pytest.raises(QueueFull, match="stayed full"):
        await client.submit(MODEL, {"x": X}, lane="bulk", deadline_s=1.0)

    assert 0.3 <= time.monotonic() - started_s <= 5


async def test_a_stream_reports_a_full_queue_job_by_job(client: Client, topology: Broker) -> None:
    await _fill(client, topology)

    items = ({"x": X} for _ in range(3))
    answers = [answer async for answer in client.infer_many(MODEL, items, patience_s=0.5)]

    assert [type(answer.error) for answer in answers] == [QueueFull] * 3
    assert {answer.result.error.code for answer in answers if answer.result.error} == {"overloaded"}


async def test_a_queue_that_gets_room_takes_the_job_that_waited(
    client: Client, topology: Broker, settings: ClientSettings
) -> None:
    await _fill(client, topology)
    waiting = asyncio.create_task(client.infer(MODEL, {"x": X}, lane="bulk", deadline_s=20))

    async with fake_worker(settings.broker.url.get_secret_value(), MODEL):
        answer = await waiting

    np.testing.assert_array_equal(answer.outputs["x2"], X * 2)


@pytest.mark.parametrize("with_redis", [True, False])
async def test_an_answer_still_comes_after_the_reply_queue_was_lost(
    settings: ClientSettings, topology: Broker, stack: Stack, *, with_redis: bool
) -> None:
    url = settings.broker.url.get_secret_value()
    redis_url = stack.redis_url if with_redis else None
    async with (
        fake_worker(url, MODEL, redis_url=redis_url, prefix=settings.redis.prefix) as worker,
        Client(settings, reply="both" if with_redis else "queue") as client,
    ):
        worker.go.clear()
        single = asyncio.create_task(client.infer(MODEL, {"x": X}, id="single"))
        many = asyncio.create_task(_collect(client, 20))
        await until(lambda: len(worker.seen) >= 21)
        old = {message.reply_to for message in worker.properties}
        await _close_connections(topology, "replies")
        await until(lambda: {message.reply_to for message in worker.properties} > old)
        worker.go.set()

        np.testing.assert_array_equal((await single).outputs["x2"], X * 2)
        assert [answer.ok for answer in await many] == [True] * 20


async def test_an_answer_stored_while_the_client_was_away_is_found_without_running_again(
    client: Client, worker: FakeWorker, topology: Broker, settings: ClientSettings
) -> None:
    worker.go.clear()
    waiting = asyncio.create_task(client.infer(MODEL, {"x": X}))
    await until(lambda: worker.seen)
    job = worker.seen[0]
    record = Outcome(job.digest(), Result(job.id, "ok", outputs={"x2": Tensor.from_numpy(X * 2)})).encode()
    assert worker.redis is not None
    await worker.redis.set(result_key(settings.redis.prefix, job.id), record, ex=60)

    await _close_connections(topology, "replies")

    np.testing.assert_array_equal((await waiting).outputs["x2"], X * 2)
    assert len(worker.seen) == 1


async def test_publishing_goes_on_after_its_connection_was_lost(
    client: Client, worker: FakeWorker, topology: Broker
) -> None:
    await client.infer(MODEL, {"x": X})
    await _close_connections(topology, "publish")

    answer = await client.infer(MODEL, {"x": X})

    np.testing.assert_array_equal(answer.outputs["x2"], X * 2)


async def test_cancel_stores_an_outcome_that_the_worker_respects(client: Client, worker: FakeWorker) -> None:
    worker.go.clear()
    job_id = await client.submit(MODEL, {"x": X})
    await until(lambda: worker.seen)

    assert await client.cancel(job_id)
    worker.go.set()

    with pytest.raises(JobFailed) as raised:
        await client.result(job_id, timeout_s=20)
    assert raised.value.code == "cancelled"
    assert await client.cancel(job_id)


async def test_a_job_that_was_answered_cannot_be_cancelled(client: Client, worker: FakeWorker) -> None:
    await client.infer(MODEL, {"x": X}, id="done")

    assert not await client.cancel("done")


async def test_large_tensors_travel_through_redis_both_ways_and_leave_no_input(
    client: Client, worker: FakeWorker, settings: ClientSettings
) -> None:
    large = np.random.default_rng(1).random((1, 300_000), np.float32)

    answer = await client.infer(MODEL, {"x": large})

    ref = worker.seen[0].inputs["x"].ref
    assert ref is not None
    assert is_at(ref, input_key(settings.redis.prefix, answer.id, "x"))
    assert answer.result.outputs["x2"].ref is not None
    np.testing.assert_array_equal(answer.outputs["x2"], large * 2)
    assert worker.redis is not None
    assert not await worker.redis.exists(ref)


async def test_large_inputs_of_one_id_stand_apart_by_their_contents(settings: ClientSettings) -> None:
    store = ResultStore(settings.redis)
    try:
        jobs = [Job(id="a", model=MODEL, inputs={"x": Tensor.from_numpy(np.full((1, 300_000), n))}) for n in (1, 2, 1)]
        first, other, again = [await store.leave_inputs(job, now_ms=0) for job in jobs]
        assert first.digest() == again.digest() != other.digest()
        assert await store.hold_inputs(first, now_ms=0)
        assert await store.hold_inputs(other, now_ms=0)
        await store.drop_inputs(other)
        assert await store.hold_inputs(first, now_ms=0)
        assert not await store.hold_inputs(other, now_ms=0)
    finally:
        await store.close()


async def test_a_client_without_redis_sends_large_tensors_inline(settings: ClientSettings) -> None:
    large = np.ones((1, 300_000), np.float32)
    async with (
        fake_worker(settings.broker.url.get_secret_value(), MODEL) as worker,
        Client(settings, reply="queue") as client,
    ):
        answer = await client.infer(MODEL, {"x": large})
        with pytest.raises(StoreUnavailable, match="works without it"):
            await client.result(answer.id, timeout_s=0)

    assert worker.seen[0].inputs["x"].ref is None
    np.testing.assert_array_equal(answer.outputs["x2"], large * 2)


async def test_a_body_above_the_limit_is_refused_before_it_is_sent(settings: ClientSettings) -> None:
    async with Client(settings, reply="queue") as client:
        with pytest.raises(JobTooLarge, match="configure Redis"):
            await client.infer(MODEL, {"x": np.zeros((1, 3_000_000), np.float32)})


async def test_a_client_works_on_when_redis_is_not_there(settings: ClientSettings) -> None:
    # Port 1 of the loopback refuses at once.
    url = settings.broker.url.get_secret_value()
    async with fake_worker(url, MODEL), Client(settings, redis_url="redis://127.0.0.1:1/0") as client:
        answer = await client.infer(MODEL, {"x": X})

    assert answer.ok


async def test_a_client_that_needs_redis_says_so_when_it_is_not_there(settings: ClientSettings) -> None:
    with pytest.raises(StoreUnavailable, match=r"redis\.url"):
        async with Client(settings, redis_url="redis://127.0.0.1:1/0", reply="redis"):
            pass


async def test_cancelling_infer_forgets_its_waiter(client: Client, worker: FakeWorker) -> None:
    worker.go.clear()
    waiting = asyncio.create_task(client.infer(MODEL, {"x": X}))
    await until(lambda: worker.seen)

    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting

    assert len(client._courier.waiters) == 0


async def test_closing_twice_is_fine_and_tells_those_who_wait(settings: ClientSettings, worker: FakeWorker) -> None:
    before = asyncio.all_tasks()
    worker.go.clear()
    client = Client(settings)
    await client.open()
    waiting = asyncio.create_task(client.infer(MODEL, {"x": X}))
    await until(lambda: worker.seen)

    await client.close()
    await client.close()

    with pytest.raises(ClientClosed):
        await waiting
    with pytest.raises(ClientClosed):
        await client.infer(MODEL, {"x": X})
    worker.go.set()
    await until(lambda: asyncio.all_tasks() <= before)


async def test_the_same_id_cannot_be_under_way_twice_in_one_client(client: Client, worker: FakeWorker) -> None:
    worker.go.clear()
    first = asyncio.create_task(client.infer(MODEL, {"x": X}, id="same"))
    await until(lambda: worker.seen)

    with pytest.raises(InvalidJob, match="under way already"):
        await client.infer(MODEL, {"x": X + 1}, id="same")

    worker.go.set()
    await first


async def _collect(client: Client, count: int) -> list[Any]:
    return [answer async for answer in client.infer_many(MODEL, ({"x": X} for _ in range(count)), bundle_jobs=8)]


async def _fill(client: Client, broker: Broker) -> None:
    """Let the bulk queue take one job, and send until it takes no more; the limit is not exact, and not at once."""
    definition = {"max-length": 1, "overflow": "reject-publish"}
    body = {"pattern": rf"^inferq\.{MODEL}\.bulk$", "definition": definition, "priority": 99, "apply-to": "queues"}
    broker.management.call("PUT", f"/api/policies/{quote(broker.vhost, safe='')}/test-limit", body)
    with contextlib.suppress(TimeoutError):
        while True:
            async with asyncio.timeout(1.5):
                await client.submit(MODEL, {"x": X}, lane="bulk", deadline_s=None)


async def _close_connections(broker: Broker, purpose: str) -> None:
    """Close this vhost's client connections of that purpose, once the management API has heard of them."""
    found: list[str] = []

    def named() -> bool:
        found[:] = [
            connection["name"]
            for connection in broker.management.call("GET", "/api/connections")
            if connection.get("vhost") == broker.vhost
            and connection.get("client_properties", {}).get("connection_name", "").endswith(purpose)
        ]
        return bool(found)

    await until(named)
    for name in found:
        broker.management.call("DELETE", f"/api/connections/{quote(name, safe='')}")
