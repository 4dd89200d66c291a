"""Claim checks: whose keys are read, and what is refused."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest
from tests.fakes import FakeStore, VirtualTime, delivery_of, job_of, request_of, tensor

from inferq_schemas import Job, Tensor
from inferq_worker.errors import WorkError
from inferq_worker.held import Held
from inferq_worker.payloads import Payloads

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ROWS = np.ones((2, 4), np.float32)


@pytest.fixture
async def time(monkeypatch: pytest.MonkeyPatch) -> VirtualTime:
    return VirtualTime(monkeypatch)


@pytest.fixture
async def store() -> FakeStore:
    return FakeStore()


@pytest.fixture
async def held() -> Held:
    return Held(100, lambda _pressed: None)


@pytest.fixture
async def payloads(store: FakeStore, held: Held) -> Payloads:
    return Payloads(cast("Any", store), held, max_bytes=64)


def referring(job_id: str = "a", ref: str | None = None, shape: tuple[int, ...] = (2, 4)) -> Job:
    ref = ref or f"inferq:{{{job_id}}}:in:x"
    inputs = {"x": Tensor(dtype="float32", shape=shape, ref=ref), "y": tensor(1.0, 2.0)}
    return Job.build(id=job_id, model="m", inputs=inputs)


async def resolved(payloads: Payloads, job: Job) -> Mapping[str, Tensor]:
    return await payloads.resolve(job, request_of())


async def refusal(payloads: Payloads, job: Job) -> WorkError:
    with pytest.raises(WorkError) as caught:
        await resolved(payloads, job)
    return caught.value


async def test_a_job_without_references_asks_nobody(payloads: Payloads, store: FakeStore) -> None:
    job = job_of()
    assert not payloads.needed(job)
    assert await resolved(payloads, job) == job.inputs
    assert store.asked == []


async def test_a_reference_is_replaced_by_its_bytes(payloads: Payloads, store: FakeStore) -> None:
    store.inputs["a", "x"] = ROWS.tobytes()
    job = referring()
    assert payloads.needed(job)
    inputs = await resolved(payloads, job)
    assert np.array_equal(inputs["x"].to_numpy(), ROWS)
    assert inputs["y"] == job.inputs["y"]


@pytest.mark.parametrize("ref", ["inferq:{b}:in:x", "inferq:{a}:in:y", "inferq:{a}:result", "http://elsewhere/x"])
async def test_only_the_key_of_this_very_input_is_read(payloads: Payloads, store: FakeStore, ref: str) -> None:
    error = await refusal(payloads, referring(ref=ref))
    assert error.code == "invalid_input"
    assert "'inferq:{a}:in:x'" in error.message
    assert store.asked == []


async def test_a_payload_that_is_gone_is_told(payloads: Payloads) -> None:
    error = await refusal(payloads, referring())
    assert error.code == "invalid_input"
    assert "inputs.x.ref" in error.message
    assert "send the job again" in error.message


async def test_a_payload_of_another_size_is_refused(payloads: Payloads, store: FakeStore) -> None:
    store.inputs["a", "x"] = ROWS.tobytes()[:-1]
    error = await refusal(payloads, referring())
    assert error.code == "invalid_input"
    assert "31 bytes" in error.message
    assert "float32 [2, 4]" in error.message


async def test_payloads_above_the_limit_are_too_large(payloads: Payloads, store: FakeStore) -> None:
    error = await refusal(payloads, referring(shape=(2, 9)))
    assert error.code == "too_large"
    assert "72 bytes together, at most 64 (limits.payload_bytes)" in error.message
    assert store.asked == [], "what is too large is not fetched to find out"


async def test_texts_are_not_fetched(payloads: Payloads, store: FakeStore) -> None:
    inputs = {"x": Tensor(dtype="string", shape=(1, 4), ref="inferq:{a}:in:x")}
    assert (await refusal(payloads, Job.build(id="a", model="m", inputs=inputs))).code == "invalid_input"
    assert store.asked == []


async def test_of_many_jobs_a_few_at_a_time_are_fetched(store: FakeStore, time: VirtualTime) -> None:
    under_way, most = 0, 0

    async def slowly(refs: Sequence[str]) -> list[bytes | None]:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await time.advance(0.1)
        under_way -= 1
        return [ROWS.tobytes()]

    payloads = Payloads(
        cast("Any", SimpleNamespace(payloads=slowly, input_ref=store.input_ref)), Held(2**20, print), max_bytes=64
    )
    await asyncio.gather(*(resolved(payloads, referring(str(number))) for number in range(20)))
    assert most == 4


async def test_what_would_exceed_the_bytes_in_hand_waits_until_others_have_their_answer(
    payloads: Payloads, held: Held, store: FakeStore, time: VirtualTime
) -> None:
    requests = [request_of() for _ in range(4)]
    for number in range(4):
        store.inputs[str(number), "x"] = ROWS.tobytes()
    waiting = [asyncio.create_task(payloads.resolve(referring(str(n)), one)) for n, one in enumerate(requests)]
    await time.settle()
    assert [one.done() for one in waiting] == [True, True, True, False]
    assert held.bytes == 96
    held.release(requests[1])
    await waiting[3]
    assert held.bytes == 96
    for request in requests:
        held.release(request)
    assert held.bytes == 0


async def test_while_redis_is_away_the_job_waits(payloads: Payloads, store: FakeStore, time: VirtualTime) -> None:
    store.inputs["a", "x"] = ROWS.tobytes()
    store.go_away()
    waiting = asyncio.create_task(resolved(payloads, referring()))
    await time.advance(60)
    assert not waiting.done()
    store.come_back()
    assert "x" in await waiting


async def test_a_job_that_the_broker_took_back_waits_no_longer(
    payloads: Payloads, store: FakeStore, time: VirtualTime
) -> None:
    store.go_away()
    delivery = delivery_of()
    waiting = asyncio.create_task(payloads.resolve(referring(), request_of(delivery)))
    await time.advance(1)
    cast("Any", delivery.settler)._channel.is_closed = True
    with pytest.raises(WorkError) as caught:
        await waiting
    assert not caught.value.keep
