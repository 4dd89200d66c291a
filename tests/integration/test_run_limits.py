"""Runs on the real ONNX Runtime that last too long: stopped midway, or given up for lost; and what waits behind."""

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Collection
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pytest
from tests import models

from inferq_worker.models.repository import ModelFile
from inferq_worker.runtime import DeviceLost, RowError, RuntimeSettings, Turns, open_session
from inferq_worker.runtime.engine import OrtEngine, OrtRun
from inferq_worker.runtime.interface import Feeds
from inferq_worker.runtime.session import OrtSession

Packed: TypeAlias = "queue.SimpleQueue[int]"

WIDTH = 512
LIMIT_S = 0.3
HOLD_S = 20.0


class Watcher:
    """Notes when a run gets the device; leaves out what it is told to, and keeps the device until it may go on."""

    def __init__(self, *unwanted: int) -> None:
        self._unwanted = unwanted
        self.asked = threading.Event()
        self.begun = asyncio.Event()
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def unwanted(self) -> Collection[int]:
        self.asked.set()
        assert self.may_go_on.wait(HOLD_S)
        return self._unwanted

    def started(self) -> None:
        self.begun.set()


async def opened(path: Path, turns: Turns | None = None, *, grace_s: float = 20.0) -> OrtSession:
    config = RuntimeSettings(provider="cpu", run_limit_s=LIMIT_S, stop_grace_s=grace_s)
    return await open_session(ModelFile(path.stem, "1", path), config, turns=turns)


def ones(count: int, width: int = WIDTH) -> list[dict[str, np.ndarray]]:
    return [{"x": np.full((1, width), 0.1, np.float32)} for _ in range(count)]


async def busy_for(seconds: float, session: OrtSession) -> np.ndarray:
    """The input that keeps `one_long_node` busy for so long on this machine, whose time grows with its square."""
    x = np.array([[6_000.0]], np.float32)
    took_s = min([(await session.run([{"x": x}])).run_s for _ in range(3)])
    assert took_s < LIMIT_S
    return x * np.float32((seconds / took_s) ** 0.5)


@pytest.fixture(name="turns")
def _turns() -> Turns:
    return Turns(1)


@pytest.fixture(name="chain")
async def _chain(tmp_path: Path, turns: Turns) -> AsyncIterator[OrtSession]:
    """Very many short nodes: a run of 1,024 rows takes seconds, one of a single row much less than the limit."""
    session = await opened(models.slow(tmp_path, layers=200, width=WIDTH), turns)
    yield session
    await session.close()


@pytest.fixture(name="packed")
def _packed(monkeypatch: pytest.MonkeyPatch) -> Packed:
    """Rows of each run that lies ready, in order."""
    packed: Packed = queue.SimpleQueue()
    prepare = OrtEngine.prepare

    def watched(engine: OrtEngine, feeds: Feeds) -> OrtRun:
        run = prepare(engine, feeds)
        packed.put(len(feeds["x"]))
        return run

    monkeypatch.setattr(OrtEngine, "prepare", watched)
    return packed


async def test_a_run_at_its_limit_is_stopped_and_the_session_answers_rightly_afterwards(chain: OrtSession) -> None:
    first = await chain.run(ones(1))
    long = await chain.run(ones(1024))
    assert long.timed_out
    assert not long.wedged
    last = long.answers[-1]
    assert isinstance(last, RowError)
    assert last.code == "inference_timeout"
    again = await chain.run(ones(1))
    assert not again.timed_out
    assert not isinstance(first.answers[0], RowError)
    assert not isinstance(again.answers[0], RowError)
    np.testing.assert_array_equal(first.answers[0]["y"], again.answers[0]["y"])


async def test_the_limit_counts_from_the_start_of_the_run_and_not_from_the_wait_for_the_device(
    chain: OrtSession,
) -> None:
    first = Watcher()
    long = asyncio.create_task(chain.run(ones(1024), first))
    await first.begun.wait()
    waited = await chain.run(ones(1))
    assert (await long).timed_out
    assert not waited.timed_out


async def test_one_long_node_cannot_be_stopped_and_is_given_up_for_lost_with_its_turn(tmp_path: Path) -> None:
    turns = Turns(1)
    session = await opened(models.one_long_node(tmp_path), turns, grace_s=0.2)
    first, behind = Watcher(), Watcher()
    hung = asyncio.create_task(session.run([{"x": await busy_for(3.0, session)}], first))
    await first.begun.wait()
    waiting = asyncio.create_task(session.run([{"x": np.array([[1.0]], np.float32)}], behind))
    report = await hung
    assert report.timed_out
    assert report.wedged
    assert isinstance(report.answers[0], RowError)
    assert "nor when it was told to" in report.answers[0].message
    with pytest.raises(DeviceLost):
        await waiting
    assert not behind.asked.is_set(), "it has not been run"


async def test_two_runs_of_one_device_do_not_overlap_and_the_second_is_packed_meanwhile(
    chain: OrtSession, packed: Packed
) -> None:
    first, second = Watcher(), Watcher()
    first.may_go_on.clear()
    both = [asyncio.create_task(chain.run(ones(1), first))]
    assert await asyncio.to_thread(packed.get, timeout=HOLD_S) == 1
    assert await asyncio.to_thread(first.asked.wait, HOLD_S)
    both.append(asyncio.create_task(chain.run(ones(2), second)))
    assert await asyncio.to_thread(packed.get, timeout=HOLD_S) == 2
    assert not await asyncio.to_thread(second.asked.wait, 0.1)
    first.may_go_on.set()
    await asyncio.gather(*both)
    assert second.asked.is_set()


async def test_items_that_nobody_waits_for_any_more_are_left_out_of_the_run(chain: OrtSession) -> None:
    report = await chain.run(ones(3), Watcher(1))
    assert report.rows == 2
    assert isinstance(report.answers[1], RowError)
    assert not isinstance(report.answers[0], RowError)
    assert not isinstance(report.answers[2], RowError)


async def test_a_batch_that_nobody_waits_for_takes_no_run(chain: OrtSession) -> None:
    report = await chain.run(ones(2), Watcher(0, 1))
    assert (report.rows, report.run_s) == (0, 0.0)


async def test_two_models_share_the_turns_of_their_device(
    tmp_path: Path, turns: Turns, chain: OrtSession, packed: Packed
) -> None:
    other = await opened(models.scale(tmp_path), turns)
    first, second = Watcher(), Watcher()
    first.may_go_on.clear()
    both = [asyncio.create_task(chain.run(ones(1), first))]
    assert await asyncio.to_thread(first.asked.wait, HOLD_S)
    both.append(asyncio.create_task(other.run([{"x": np.ones((2, 3), np.float32)}], second)))
    assert [await asyncio.to_thread(packed.get, timeout=HOLD_S) for _ in both] == [1, 2]
    assert not await asyncio.to_thread(second.asked.wait, 0.1)
    first.may_go_on.set()
    await asyncio.gather(*both)
    await other.close()
