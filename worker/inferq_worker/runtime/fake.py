"""A session without ONNX Runtime, for tests of everything that stands on one. It keeps the promises of `Session`."""

import asyncio
from collections.abc import Callable, Hashable, Mapping, Sequence

from inferq_worker.runtime.interface import (
    Feeds,
    RowError,
    RunReport,
    RunWatcher,
    SessionBroken,
    SessionInfo,
    TensorSpec,
)

FAKE_INFO = SessionInfo(
    inputs=(TensorSpec("x", "float32", (None, 4)),),
    outputs=(TensorSpec("y", "float32", (None, 4)),),
    fixed_rows=None,
    shared=frozenset(),
    provider="CPUExecutionProvider",
    requested_provider="CPUExecutionProvider",
    nodes_by_provider={"CPUExecutionProvider": 1},
    sha256="0" * 64,
)


def double(item: Feeds) -> Feeds:
    """Answer with `y` = 2 `x`."""
    return {"y": item["x"] * 2}


class FakeSession:
    """Answers each item with a function, when the gate is open.

    Args:
        answer: from one item to its answer, or to the error that only this item gets.
        info: what the session claims to be; its first input counts the rows.
        slots: runs at a time; others wait their turn.
        run_s: what each run reports, in seconds.
        passes: whether that time passes, on the clock of the event loop.

    Attributes:
        calls: the items of every run that began, in order.
        gate: a run waits here; set (open) at first. Clear it to hold runs in flight.
        running: runs that wait at the gate now; `began` is set whenever one arrives.
        broken: when set, every run raises it.
        probes: what the next probes report; then all goes well.
        probed: how many began; they wait at the gate as well.
        rebuilds: how often it was rebuilt.
        beyond_repair: when set, rebuilding raises it.
        row_caps: inner shapes -> most rows that it claims to find memory for.
    """

    def __init__(
        self,
        answer: Callable[[Feeds], Feeds | RowError] = double,
        *,
        info: SessionInfo = FAKE_INFO,
        slots: int = 1,
        run_s: float = 0.001,
        passes: bool = False,
    ) -> None:
        self.info = info
        self.calls: list[tuple[Feeds, ...]] = []
        self.warmed: list[int] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.began = asyncio.Event()
        self.running = 0
        self.closed = False
        self.broken: SessionBroken | None = None
        self.probes: list[RunReport] = []
        self.probed = 0
        self.rebuilds = 0
        self.beyond_repair: SessionBroken | None = None
        self.row_caps: dict[Hashable, int] = {}
        self._answer = answer
        self._turns = asyncio.Semaphore(slots)
        self.run_s = run_s
        self._passes = passes

    async def warm_up(self, rows: Sequence[int]) -> Mapping[int, float]:
        """Note the sizes, and call each of them `run_s` long."""
        self.warmed.extend(rows)
        return dict.fromkeys(rows, self.run_s)

    async def run(self, feeds: Sequence[Feeds], watcher: RunWatcher | None = None) -> RunReport:
        """Wait for a turn and at the gate, then answer item by item."""
        if self.closed:
            raise SessionBroken("the session is closed")
        async with self._turns:
            unwanted = watcher.unwanted() if watcher is not None else ()
            if watcher is not None:
                watcher.started()
            wanted = [item for number, item in enumerate(feeds) if number not in unwanted]
            run_s = self.run_s if wanted else 0.0
            if wanted:
                await self._begin(tuple(wanted))
                await asyncio.sleep(run_s if self._passes else 0)
        if self.broken is not None:
            raise self.broken
        first = self.info.inputs[0].name
        rows = sum(int(item[first].shape[0]) for item in wanted)
        return RunReport(tuple(self._answer(item) for item in feeds), run_s, rows, 0)

    def max_rows(self, shapes: Sequence[Hashable]) -> int:
        """As many as ever, or what `row_caps` says of the shapes."""
        return self.row_caps.get(tuple(shapes), self.info.max_rows)

    async def _begin(self, feeds: tuple[Feeds, ...]) -> None:
        self.calls.append(feeds)
        self.running += 1
        self.began.set()
        try:
            await self.gate.wait()
        finally:
            self.running -= 1

    async def probe(self, watcher: RunWatcher | None = None) -> RunReport:
        """Wait for a turn and at the gate, then report what the test has put there."""
        async with self._turns:
            self.probed += 1
            if watcher is not None:
                watcher.unwanted()
                watcher.started()
            await self.gate.wait()
        if self.broken is not None:
            raise self.broken
        return self.probes.pop(0) if self.probes else RunReport(({},), self.run_s, 1, 0)

    async def rebuild(self) -> None:
        """Be whole again."""
        self.rebuilds += 1
        if self.beyond_repair is not None:
            raise self.beyond_repair
        self.broken = None

    async def close(self) -> None:
        """Refuse further runs."""
        self.closed = True
