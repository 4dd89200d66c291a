"""A session that broke is rebuilt once; what comes meanwhile waits; what cannot be rebuilt stays broken."""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.engines import Doubling, DoublingRun, info_of, items_of

from inferq_worker.models.repository import ModelFile
from inferq_worker.runtime import session as module
from inferq_worker.runtime.interface import Feeds, ModelRefused, RowError, RunReport, RuntimeUnavailable, SessionBroken
from inferq_worker.runtime.session import OrtSession


class Fragile(Doubling):
    """Breaks for good when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.is_broken = False
        self.began, self.gate = threading.Event(), threading.Event()
        self.gate.set()
        self.check = self._break

    def prepare(self, feeds: Feeds) -> DoublingRun:
        return DoublingRun(self, feeds)

    def _break(self, _feeds: Feeds) -> None:
        self.began.set()
        assert self.gate.wait(20)
        if self.is_broken:
            raise SessionBroken("the device failed: device-side assert")


class Opening:
    """Opens engines one after the other; the gate holds the next one back."""

    def __init__(self) -> None:
        self.engines = [Fragile()]
        self.problem: Exception | None = None
        self.began, self.gate = threading.Event(), threading.Event()
        self.gate.set()

    def __call__(self) -> Fragile:
        self.began.set()
        assert self.gate.wait(20)
        if self.problem is not None:
            raise self.problem
        self.engines.append(Fragile())
        return self.engines[-1]


@pytest.fixture(name="opening")
def _opening() -> Opening:
    return Opening()


@pytest.fixture(name="session")
async def _session(opening: Opening) -> Any:
    session = made(opening.engines[0], reopen=opening)
    await session.warm_up([1, 4])
    yield session
    await session.close()


def made(engine: Doubling, *, reopen: Callable[[], Any] | None = None, **described: Any) -> OrtSession:
    return OrtSession(ModelFile("m", "1", Path("m.onnx"), **described), engine, info_of(8), reopen=reopen)


def assert_doubled(report: RunReport, items: list[Feeds]) -> None:
    for answer, item in zip(report.answers, items, strict=True):
        assert not isinstance(answer, RowError), answer
        np.testing.assert_array_equal(answer["y"], item["x"] * 2)


async def broken(session: OrtSession, opening: Opening) -> None:
    opening.engines[-1].is_broken = True
    with pytest.raises(SessionBroken, match="device-side assert"):
        await session.run(items_of(1))


async def test_a_rebuilt_session_answers_again_and_was_warmed_up_as_before(
    session: OrtSession, opening: Opening
) -> None:
    await broken(session, opening)
    await session.rebuild()
    warmed = set(opening.engines[1].tried)
    assert {1, 4} <= warmed
    assert_doubled(await session.run(items_of(2, 1)), items_of(2, 1))
    assert len(opening.engines) == 2


async def test_what_comes_while_it_is_rebuilt_waits_and_is_answered_by_the_new_engine(
    session: OrtSession, opening: Opening
) -> None:
    await broken(session, opening)
    opening.gate.clear()
    rebuilding = asyncio.create_task(session.rebuild())
    await asyncio.to_thread(opening.began.wait, 20)
    waiting = asyncio.create_task(session.run(items_of(3)))
    await asyncio.sleep(0)
    opening.gate.set()
    await rebuilding
    assert_doubled(await waiting, items_of(3))
    assert 3 in opening.engines[1].tried


async def test_the_new_engine_is_not_loaded_beside_runs_of_the_old_one(session: OrtSession, opening: Opening) -> None:
    old = opening.engines[0]
    old.began.clear()
    old.gate.clear()
    running = asyncio.create_task(session.run(items_of(1)))
    await asyncio.to_thread(old.began.wait, 20)
    rebuilding = asyncio.create_task(session.rebuild())
    assert not await asyncio.to_thread(opening.began.wait, 0.1)
    old.gate.set()
    assert_doubled(await running, items_of(1))
    await rebuilding
    assert opening.began.is_set()


async def test_two_who_ask_at_the_same_time_share_one_attempt(session: OrtSession, opening: Opening) -> None:
    await broken(session, opening)
    await asyncio.gather(session.rebuild(), session.rebuild())
    assert len(opening.engines) == 2


async def test_cancelling_who_asked_does_not_end_the_attempt(session: OrtSession, opening: Opening) -> None:
    await broken(session, opening)
    opening.gate.clear()
    asking = asyncio.create_task(session.rebuild())
    await asyncio.to_thread(opening.began.wait, 20)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    opening.gate.set()
    assert_doubled(await session.run(items_of(2)), items_of(2))


@pytest.mark.parametrize("problem", [ModelRefused("gone"), RuntimeUnavailable("gone"), SessionBroken("gone")])
async def test_one_that_cannot_be_loaded_again_stays_broken(
    session: OrtSession, opening: Opening, problem: Exception
) -> None:
    await broken(session, opening)
    opening.problem = problem
    with pytest.raises(SessionBroken, match="gone"):
        await session.rebuild()
    with pytest.raises(SessionBroken, match="broken for good"):
        await session.run(items_of(1))


async def test_one_that_breaks_again_within_a_minute_is_not_rebuilt_again(
    session: OrtSession, opening: Opening
) -> None:
    await broken(session, opening)
    await session.rebuild()
    await broken(session, opening)
    with pytest.raises(SessionBroken, match="broke again 0 s after it was rebuilt"):
        await session.rebuild()


async def test_one_that_breaks_again_much_later_is_rebuilt_again(
    session: OrtSession, opening: Opening, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_REST_S", 0.0)
    for _ in range(3):
        await broken(session, opening)
        await session.rebuild()
    assert_doubled(await session.run(items_of(2)), items_of(2))


async def test_one_that_was_closed_or_handed_a_ready_made_engine_cannot_be_rebuilt(
    session: OrtSession,
) -> None:
    await session.close()
    ready_made = made(Doubling())
    for each in (session, ready_made):
        with pytest.raises(SessionBroken, match="cannot be rebuilt"):
            await each.rebuild()
    await ready_made.close()


async def test_closing_waits_for_a_rebuild_under_way_and_keeps_nothing_of_it(
    session: OrtSession, opening: Opening
) -> None:
    opening.gate.clear()
    rebuilding = asyncio.create_task(session.rebuild())
    await asyncio.to_thread(opening.began.wait, 20)
    closing = asyncio.create_task(session.close())
    await asyncio.sleep(0)
    assert not closing.done()
    opening.gate.set()
    await closing
    with pytest.raises(SessionBroken):
        await rebuilding
    with pytest.raises(SessionBroken, match="closed"):
        await session.run(items_of(1))


async def test_a_model_that_fails_on_nan_refuses_the_job_and_one_that_passes_it_does_not() -> None:
    items = items_of(1, 2)
    items[1]["x"][1, 0] = np.nan
    failing, passing = made(Doubling(), nan="fail"), made(Doubling())
    refused, passed = await failing.run(items), await passing.run(items)
    await failing.close()
    await passing.close()
    assert isinstance(refused.answers[1], RowError)
    assert refused.answers[1].code == "inference_failed"
    assert not any(isinstance(answer, RowError) for answer in (refused.answers[0], *passed.answers))


async def test_warm_up_and_probes_do_not_judge_what_made_up_numbers_lead_to() -> None:
    engine = Doubling()
    engine.offset = np.array([0, np.inf], np.float32)
    session = made(engine, nan="fail")
    assert set(await session.warm_up([1, 4])) == {1, 4}
    probed, refused = await session.probe(), await session.run(items_of(1))
    await session.close()
    assert not any(isinstance(answer, RowError) for answer in probed.answers)
    assert isinstance(refused.answers[0], RowError)


async def test_the_scheduler_is_told_what_was_learned_of_a_shape() -> None:
    session = made(Doubling(limit_rows=2))
    assert session.max_rows([(2,)]) == 8
    await session.run(items_of(8))
    assert session.max_rows([(2,)]) == 2
    assert session.row_caps == {((2,),): 2}
    await session.close()
