"""`inferq dead` against a real broker and Redis: nothing is lost, nothing changes its place, whatever happens."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path

import aio_pika
import numpy as np
import pytest
from aio_pika.abc import AbstractChannel, HeadersType
from redis.asyncio import Redis
from tests.e2e.worker_process import until
from tests.stack import Broker, Stack

from inferq.keys import input_key, result_key
from inferq_schemas import (
    PARKING_EXCHANGE,
    PARKING_QUEUE,
    Job,
    ModelTopology,
    Tensor,
    Topology,
    decode_jobs,
    encode_job,
)

MODEL = "m"
LANE = "inferq.m.bulk"
LOOKS = 25
"""More than a quorum queue of RabbitMQ 4.x lets a message be delivered by default."""


def job(number: int, deadline_unix_ms: int | None = None) -> Job:
    tensor = Tensor.from_numpy(np.full((1, 2), number, np.float32))
    return Job.model_validate(
        {"id": f"job-{number}", "model": MODEL, "inputs": {"x": tensor}, "deadline_unix_ms": deadline_unix_ms}
    )


class Yard:
    """The parking queue of a test, and the command that looks after it."""

    def __init__(self, channel: AbstractChannel, redis: Redis, prefix: str, environment: dict[str, str]) -> None:
        self.channel = channel
        self.redis = redis
        self.prefix = prefix
        self._environment = environment

    async def park(
        self, body: bytes, *, routing_key: str = "m.bulk", age_s: float = 0.0, headers: Mapping[str, str] | None = None
    ) -> None:
        exchange = await self.channel.get_exchange(PARKING_EXCHANGE)
        parked: HeadersType = {
            "inferq-reason": "overloaded",
            "inferq-parked-unix-ms": int((time.time() - age_s) * 1000),
        }
        message = aio_pika.Message(
            body,
            message_id=os.urandom(8).hex(),
            headers={**parked, **(headers or {})},
            correlation_id="c",
            reply_to="reply.me",
            delivery_mode=2,
        )
        await exchange.publish(message, routing_key=routing_key)

    async def start(self, *arguments: str) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "inferq",
            "dead",
            *arguments,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    async def run(self, *arguments: str) -> tuple[int | None, str, str]:
        process = await self.start(*arguments)
        output, errors = await process.communicate()
        return process.returncode, output.decode(), errors.decode()

    async def listed(self, *arguments: str) -> list[dict[str, object]]:
        code, output, errors = await self.run("list", "--json", *arguments)
        assert code == 0, errors
        return [json.loads(line) for line in output.splitlines()]

    async def depth(self, queue: str) -> int:
        declared = await self.channel.declare_queue(queue, passive=True)
        return declared.declaration_result.message_count or 0

    async def holds(self, queue: str, count: int, limit_s: float = 20.0) -> None:
        """Wait until a queue has so many messages: those that are returned come back a moment later."""
        give_up_s = time.monotonic() + limit_s
        while (found := await self.depth(queue)) != count:
            assert time.monotonic() < give_up_s, f"{queue} holds {found}, not {count}"
            await asyncio.sleep(0.05)

    async def taken(self, queue: str) -> list[Job]:
        """All jobs of a queue, which is empty then."""
        found = []
        source = await self.channel.get_queue(queue)
        while (message := await source.get(fail=False, no_ack=True)) is not None:
            found += [one for one in decode_jobs(message.body) if isinstance(one, Job)]
        return found


@pytest.fixture
async def yard(tmp_path: Path, broker: Broker, stack: Stack, redis_prefix: str) -> AsyncIterator[Yard]:
    broker.load(Topology([ModelTopology(MODEL)]).definitions(broker.vhost))
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("INFERQ_")},
        "INFERQ_BROKER__URL": broker.url,
        "INFERQ_REDIS__URL": stack.redis_url,
        "INFERQ_REDIS__PREFIX": redis_prefix,
    }
    redis = Redis.from_url(stack.redis_url)
    connection = await aio_pika.connect(broker.url)
    async with connection:
        yield Yard(await connection.channel(), redis, redis_prefix, environment)
    await redis.aclose()


def ids(entries: list[dict[str, object]]) -> list[object]:
    return [entry["jobs"] for entry in entries]


@pytest.mark.timeout(180)
async def test_looking_at_parked_messages_for_ever_takes_none_out_and_moves_none(yard: Yard) -> None:
    from inferq.configuration import load_settings  # noqa: PLC0415 - here only, with the addresses of the test
    from inferq.parking_queue import ParkingQueue  # noqa: PLC0415 - same
    from inferq.settings import ClientSettings  # noqa: PLC0415 - same

    for number in range(100):
        await yard.park(encode_job(job(number)))
    settings = load_settings(ClientSettings, overrides=[f"broker.url={yard._environment['INFERQ_BROKER__URL']}"])
    for _ in range(LOOKS):
        await yard.holds(PARKING_QUEUE, 100)
        async with ParkingQueue(settings.broker) as queue:
            found = await queue.scan()
        assert [one.job_ids for one in found] == [(f"job-{number}",) for number in range(100)]

    await yard.holds(PARKING_QUEUE, 100)
    assert ids(await yard.listed("--limit", "2")) == [["job-0"], ["job-1"]]


async def test_filters_say_what_is_meant_and_the_rest_keeps_its_place(yard: Yard) -> None:
    await yard.park(encode_job(job(0)), age_s=7200)
    await yard.park(encode_job(job(1)), headers={"inferq-reason": "internal"})
    await yard.park(encode_job(job(2)), age_s=7200)
    await yard.park(b"\xff\x00 no job \x1b[31m")

    assert ids(await yard.listed("--older", "1h")) == [["job-0"], ["job-2"]]
    await yard.holds(PARKING_QUEUE, 4)
    code, output, errors = await yard.run("requeue", "job-2", "--dry-run")
    assert (code, output.rpartition(" job-2: ")[2]) == (0, "would be requeued\n")
    assert "4 parked, 1 meant: 1 would be requeued" in errors
    await yard.holds(PARKING_QUEUE, 4)
    code, output, errors = await yard.run("requeue", "--reason", "internal", "job-1")
    assert code == 0, errors

    await yard.holds(PARKING_QUEUE, 3)
    assert ids(await yard.listed()) == [["job-0"], ["job-2"], []]
    assert [one.id for one in await yard.taken(LANE)] == ["job-1"]


async def test_a_job_goes_back_as_new_under_its_own_id_and_without_its_outcome(yard: Yard) -> None:
    await yard.redis.set(result_key(yard.prefix, "job-7"), b"outcome", ex=60)
    await yard.redis.set(result_key(yard.prefix, "job-8"), b"outcome", ex=60)
    await yard.park(encode_job(job(7, deadline_unix_ms=1)), headers={"inferq-attempt": "3", "tenant": "t"})

    code, output, _ = await yard.run("requeue", "--all")
    assert (code, "it would only expire again" in output) == (1, True)
    await yard.holds(PARKING_QUEUE, 1)
    assert await yard.redis.exists(result_key(yard.prefix, "job-7"))
    code, _, errors = await yard.run("requeue", "job-7", "--deadline-s", "60")

    assert code == 0, errors
    message = await (await yard.channel.get_queue(LANE)).get(no_ack=True)
    assert message is not None
    (again,) = decode_jobs(message.body)
    assert isinstance(again, Job)
    assert again.deadline_unix_ms is not None
    assert 50_000 < again.deadline_unix_ms - time.time() * 1000 < 61_000
    assert (message.reply_to, message.correlation_id) == ("reply.me", "c")
    # 3.10 tells the first delivery's count, too.
    assert {**message.headers, "x-delivery-count": 0} == {"tenant": "t", "inferq-requeues": 1, "x-delivery-count": 0}
    assert not await yard.redis.exists(result_key(yard.prefix, "job-7"))
    assert await yard.redis.exists(result_key(yard.prefix, "job-8"))


async def test_a_job_of_a_model_that_is_gone_stays_with_its_outcome(yard: Yard) -> None:
    await yard.redis.set(result_key(yard.prefix, "job-1"), b"outcome", ex=60)
    other = job(1).model_copy(update={"model": "gone"})
    await yard.park(encode_job(other), routing_key="gone.bulk")

    code, output, _ = await yard.run("requeue", "--all")

    assert (code, "no queue takes" in output) == (1, True)
    await yard.holds(PARKING_QUEUE, 1)
    assert await yard.redis.get(result_key(yard.prefix, "job-1")) == b"outcome"


async def test_large_inputs_are_kept_for_the_next_run_and_keys_of_others_are_left_alone(yard: Yard) -> None:
    own, foreign = input_key(yard.prefix, "job-1", "x"), input_key(yard.prefix, "job-9", "x")
    for key in (own, foreign):
        await yard.redis.set(key, b"12345678", ex=60)
    for number, ref in ((1, own), (2, foreign)):
        inputs = {"x": Tensor(dtype="float32", shape=(1, 2), ref=ref)}
        await yard.park(encode_job(job(number).model_copy(update={"inputs": inputs})))

    code, output, _ = await yard.run("requeue", "--all")

    assert (code, "have expired" in output) == (1, True)
    assert [one.id for one in await yard.taken(LANE)] == ["job-1"]
    assert await yard.redis.ttl(own) > 600
    assert 0 < await yard.redis.ttl(foreign) <= 60


async def test_what_cannot_be_read_is_shown_and_dropped(yard: Yard) -> None:
    await yard.park(b"\xff\x00 no job", routing_key="nonsense")
    await yard.park(encode_job(job(1)))
    code, output, _ = await yard.run("show", "--unreadable")
    assert (code, "begins with ff 00 20 6e 6f" in output) == (0, True)

    await yard.holds(PARKING_QUEUE, 2)
    code, _, errors = await yard.run("drop", "--unreadable")
    assert (code, "say --yes" in errors) == (2, True)
    code, _, errors = await yard.run("drop", "--yes")
    assert (code, "say --all" in errors) == (2, True)
    code, _, errors = await yard.run("drop", "--unreadable", "--yes")

    assert (code, "2 parked, 1 meant: 1 dropped" in errors) == (0, True)
    await yard.holds(PARKING_QUEUE, 1)
    assert ids(await yard.listed()) == [["job-1"]]


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
async def test_a_requeue_that_is_ended_in_the_middle_loses_nothing(yard: Yard, end: signal.Signals) -> None:
    jobs = 40
    for number in range(jobs):
        await yard.park(encode_job(job(number)))

    process = await yard.start("requeue", "--all", "--rate", "10")
    await reached(lambda: yard.depth(LANE), 5)
    process.send_signal(end)
    _, errors = await process.communicate()

    assert process.returncode == (-9 if end is signal.SIGKILL else 143), errors
    sent = [one.id for one in await yard.taken(LANE)]
    assert 5 <= len(sent) < jobs
    # A kill may leave the last one in both places, never in none.
    await reached(lambda: yard.depth(PARKING_QUEUE), jobs - len(sent))
    left = [str(entry["jobs"][0]) for entry in await yard.listed()]  # type: ignore[index]  # a list in JSON
    assert set(sent) | set(left) == {f"job-{number}" for number in range(jobs)}
    assert left == sorted(left, key=lambda name: int(name[4:])), "what stayed kept its place"
    assert len(sent) + len(left) <= jobs + 1


async def test_a_job_that_fails_again_at_once_is_not_sent_round_and_round(yard: Yard) -> None:
    await yard.park(encode_job(job(0)))
    await yard.park(encode_job(job(1)))
    process = await yard.start("requeue", "--all", "--rate", "2")
    await reached(lambda: yard.depth(LANE), 1)
    await yard.park(encode_job(job(0)))

    await process.communicate()

    assert process.returncode == 0
    assert [one.id for one in await yard.taken(LANE)] == ["job-0", "job-1"]
    await yard.holds(PARKING_QUEUE, 1)


async def test_two_commands_do_not_get_half_of_the_messages_each(yard: Yard) -> None:
    for number in range(2):
        await yard.park(encode_job(job(number)))
    process = await yard.start("requeue", "--all", "--rate", "0.5")
    await reached(lambda: yard.depth(LANE), 1)

    code, _, errors = await yard.run("list")

    assert (code, "somebody else reads inferq.parking" in errors) == (2, True)
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.wait()


async def reached(count: Callable[[], Awaitable[int]], least: int, limit_s: float = 30.0) -> None:
    async def enough() -> bool:
        return await count() >= least

    await until(enough, f"{least} are there", limit_s)
