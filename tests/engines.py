"""Engines in place of ONNX Runtime, for tests of what a session makes of their failures."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from inferq_worker.runtime.caps import RowCaps
from inferq_worker.runtime.collate import Collator
from inferq_worker.runtime.interface import Feeds, RunFailed, SessionInfo, TensorSpec
from inferq_worker.runtime.runs import Runs
from inferq_worker.runtime.turns import Turns

if TYPE_CHECKING:
    from collections.abc import Callable


class Doubling:
    """y = 2 x for float32 [n, 2], with memory for so many rows at a time.

    Attributes:
        limit_rows: larger runs fail.
        greedy: a run that holds this value in its first column finds no memory, whatever its size.
        offset: added to every answer.
        tried: rows of every run, failed ones included.
        check: called with the feeds before each run.
    """

    inputs = (TensorSpec("x", "float32", (None, 2)),)
    outputs = (TensorSpec("y", "float32", (None, 2)),)

    def __init__(self, limit_rows: int = 1 << 30) -> None:
        self.limit_rows = limit_rows
        self.greedy: float | None = None
        self.offset: np.ndarray = np.zeros(2, np.float32)
        self.tried: list[int] = []
        self.check: Callable[[Feeds], None] = lambda _feeds: None

    def prepare(self, feeds: Feeds) -> DoublingRun:
        return DoublingRun(self, feeds)


class DoublingRun:
    """One run of it."""

    def __init__(self, engine: Doubling, feeds: Feeds) -> None:
        self._engine, self.feeds = engine, feeds

    def run(self) -> Feeds:
        engine, x = self._engine, self.feeds["x"]
        engine.check(self.feeds)
        engine.tried.append(len(x))
        if len(x) > engine.limit_rows or (engine.greedy is not None and (x[:, 0] == engine.greedy).any()):
            raise RunFailed("out_of_memory", f"no memory for {len(x)} rows")
        return {"y": x * 2 + engine.offset}

    def stop(self) -> None:
        """It ends by itself."""


def info_of(
    max_rows: int = 32, buckets: tuple[int, ...] = (), *, fixed_rows: int | None = None, batchable: bool = True
) -> SessionInfo:
    return SessionInfo(
        inputs=Doubling.inputs,
        outputs=Doubling.outputs,
        fixed_rows=fixed_rows,
        shared=frozenset(),
        provider="CPUExecutionProvider",
        requested_provider="CPUExecutionProvider",
        nodes_by_provider={},
        sha256="",
        max_rows=max_rows,
        buckets=buckets,
        batchable=batchable,
    )


class Calls:
    """Calls of one session, one after the other, on the caller's thread; the buffers and caps outlive each."""

    def __init__(self, engine: Doubling, info: SessionInfo) -> None:
        self.engine, self.info = engine, info
        self.caps = RowCaps(info.max_rows, info.buckets)
        self.collator = Collator(info)
        self.turns = Turns(1)

    def new(self) -> Runs:
        return Runs(self.engine, self.collator, self.info, self.turns, self.caps)


def items_of(*counts: int, first: int = 0) -> list[Feeds]:
    """Items of so many rows each; every row has a number of its own in its first column."""
    items: list[Feeds] = []
    for count in counts:
        numbers = np.arange(first, first + count, dtype=np.float32)
        items.append({"x": np.stack([numbers, -numbers], axis=1)})
        first += count
    return items
