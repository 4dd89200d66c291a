"""What the scheduler is told of the sessions that run its batches."""

from __future__ import annotations

import pytest
from tests.fakes import VirtualTime, job_of
from tests.worker_on_fakes import fake_worker, virtual_time

from inferq_worker.runtime.fake import FakeSession


@pytest.fixture
async def time(monkeypatch: pytest.MonkeyPatch) -> VirtualTime:
    return virtual_time(monkeypatch)


@pytest.mark.parametrize("policy_name", ["size_or_timeout", "earliest_deadline"])
async def test_batches_follow_what_their_session_learned_of_the_device(time: VirtualTime, policy_name: str) -> None:
    session = FakeSession(run_s=1.0, passes=True)
    async with fake_worker(time, session=session, policy_name=policy_name) as worker:
        worker.latency.observe(1, 0.5)
        for cap in (6, 2, 6):
            session.row_caps = {((4,),): cap}
            session.calls.clear()
            await worker.take(job_of(f"first-{time.time()}", 1))
            await worker.take([job_of(f"{number}-{time.time()}", number) for number in range(12)], lane="bulk")
            await time.advance(20)
            assert max(len(call) for call in session.calls) == cap
        assert set(worker.codes().values()) == {"ok"}
