"""What the pipeline knows of a model at work: its signature, its answers, and the three ways it can fail.

Everything here is plain data and one protocol. ONNX Runtime stays behind `ort.py`, so that a fake session can stand in.
"""

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

import numpy as np

from inferq_schemas.errors import ErrorCode

Array: TypeAlias = np.ndarray
"""Any dtype: `object` arrays of `str` for strings, `uint16` for bfloat16."""

Feeds: TypeAlias = Mapping[str, Array]
"""Tensors by name, batch axis first: each is `(rows, ...)`, shared scalars `()`."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One input or output as the model declares it.

    Attributes:
        name: the name in the graph.
        dtype: the contract's dtype name, such as `float32`, `bfloat16` or `string`.
        shape: the whole shape, axis 0 included; None is a dynamic axis. Empty for a scalar and for an unknown rank.
    """

    name: str
    dtype: str
    shape: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """What was loaded, and what really runs it.

    Attributes:
        inputs: in graph order.
        outputs: in graph order.
        fixed_rows: the batch a model with a fixed axis 0 insists on (runs are padded to it); None when dynamic.
        shared: inputs of rank 0 that all rows of a run have in common.
        provider: what ONNX Runtime says runs the graph, such as `CPUExecutionProvider`.
        requested_provider: what the settings asked for, in the same spelling.
        nodes_by_provider: graph nodes per provider, as they were given to it: before it fuses some of them, unless the
            graph comes out of the cache already fused.
        sha256: of the model file followed by its external data files, hexadecimal.
        max_rows: most rows of one native run.
        batchable: False when every item runs alone and whole (`batch = "single"`).
        buckets: sizes in rows that runs are padded to, ascending, the last of them `max_rows`; empty = not padded.
        warning: for people, when the wish was not granted; empty otherwise. The caller logs it.
        cache: what part the cache on disk took in the load: `off`, `reused`, `built` or `failed`.
        load_s: seconds that ONNX Runtime took to load the model.
        notes: for people, what was wrong with the cache. The caller logs them.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    fixed_rows: int | None
    shared: frozenset[str]
    provider: str
    requested_provider: str
    nodes_by_provider: Mapping[str, int]
    sha256: str
    max_rows: int = 32
    batchable: bool = True
    warning: str = ""
    cache: Literal["off", "reused", "built", "failed"] = "off"
    load_s: float = 0.0
    notes: tuple[str, ...] = ()
    buckets: tuple[int, ...] = ()

    @property
    def degraded(self) -> bool:
        """Whether something else than the requested provider runs the model."""
        return self.provider != self.requested_provider

    def padded(self, rows: int) -> int:
        """Rows that the device computes for so many: what does not fill a run is padded to the next bucket."""
        sizes = self.buckets if self.fixed_rows is None else (self.fixed_rows,)
        if not sizes:
            return rows
        full, rest = divmod(rows, sizes[-1])
        return full * sizes[-1] + (next(size for size in sizes if size >= rest) if rest else 0)


@dataclass(frozen=True, slots=True)
class RowError:
    """Why one item has no answer; its companions are not touched by it."""

    code: ErrorCode
    message: str


@dataclass(frozen=True, slots=True)
class RunReport:
    """What came of one call of `Session.run`.

    Attributes:
        answers: answer i belongs to item i. Arrays are views into the outputs of the run, never of a reused buffer.
        run_s: seconds inside the native calls, all of them together; collation and splitting are not in it.
        rows: rows of the items that were run, failed ones included; items refused before the run are not counted.
        padded_rows: rows computed on top of those to fill a fixed batch or a bucket, over all native calls.
        timed_out: it ran into its limit; items that have no answer yet carry `inference_timeout`.
        wedged: it did not even end when told to: its thread and its slot of the device are lost.
    """

    answers: tuple[Feeds | RowError, ...]
    run_s: float
    rows: int
    padded_rows: int
    timed_out: bool = False
    wedged: bool = False


class ModelRefused(Exception):  # noqa: N818 - says what happened; the caller reads it as a sentence
    """The model cannot be served. The message names the model, the reason and the mend."""


class SessionBroken(Exception):  # noqa: N818 - as above
    """The session can answer nothing any more; open a new one, or end the process."""


class DeviceLost(SessionBroken):
    """Runs that never ended hold every slot of the device. What waited for it has not been run."""


class RuntimeUnavailable(Exception):  # noqa: N818 - as above
    """ONNX Runtime, or the provider that the settings require, is not there. The message names the mend."""


class RunFailed(Exception):  # noqa: N818 - as above
    """One native run failed and the session is still good. Stays inside the runtime: callers see a `RowError`."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code: ErrorCode = code


class RunStopped(Exception):  # noqa: N818 - as above
    """A native run ended early because it was told to. Stays inside the runtime, like `RunFailed`."""


class RunWatcher(Protocol):
    """Whoever follows one call of `Session.run`."""

    def unwanted(self) -> Collection[int]:
        """The device is this run's now: which items nobody waits for any more. Asked on the thread of the run."""
        ...

    def started(self) -> None:
        """Told on the event loop, soon after the run began."""
        ...


class Session(Protocol):
    """A loaded model that answers items."""

    @property
    def info(self) -> SessionInfo:
        """What was loaded and what runs it."""
        ...

    async def warm_up(self, rows: Sequence[int]) -> Mapping[int, float]:
        """Prove that rows do not depend on each other, then run each size twice, largest first.

        Returns:
            Seconds of the second run for each of `rows`. Empty if no made-up input suits the model and its
            `model.toml` says that it need not be probed.

        Raises:
            ModelRefused: the model mixes rows, refuses a batch, or cannot be probed at all.
            SessionBroken: the device failed.
        """
        ...

    async def run(self, feeds: Sequence[Feeds], watcher: RunWatcher | None = None) -> RunReport:
        """Answer each item; a bad item costs only its own answer.

        Items are packed at once and run as soon as the device is free: hand the next batch in while one runs, and
        nothing but a thread switch lies between the two. A run that reaches its limit is stopped and reported.

        Cancelling the call stops the waiting, not the run: buffers stay taken until the native call has ended.

        Args:
            feeds: one for each item.
            watcher: asked when the run begins; items that it names are not run, and their answers mean nothing.

        Raises:
            DeviceLost: it was never its turn, and never will be.
            SessionBroken: the session itself is unusable, or closed.
        """
        ...

    async def probe(self, watcher: RunWatcher | None = None) -> RunReport:
        """Run the made-up items of the warm-up once more, in one batch of the largest size, as `run` does.

        Returns:
            What came of them; no answers if no made-up input suits the model, which then proves nothing.

        Raises:
            DeviceLost, SessionBroken: as `run`.
        """
        ...

    def max_rows(self, shapes: Sequence[Hashable]) -> int:
        """Most rows of one run now: fewer than `info.max_rows` while more of that shape do not find memory.

        Args:
            shapes: the inner shape of each input, in the order of the inputs; whatever stands for a shared one.
        """
        ...

    @property
    def row_caps(self) -> Mapping[Hashable, int]:
        """Inner shapes of the batched inputs -> most rows that find memory, where those are fewer than usual."""
        ...

    async def rebuild(self) -> None:
        """Load the same model again and warm it up as before, after a `SessionBroken`. Runs asked for meanwhile wait.

        Once: a session that breaks within a minute of it stays broken. Let go of the `SessionBroken` first: through its
        traceback it holds the broken engine, and with it memory of the device. Calls at the same time share one
        attempt; cancelling one stops the waiting, not the attempt.

        Raises:
            SessionBroken: it cannot be rebuilt, or broke again so soon. End the process: a fresh one has a fresh
                device.
        """
        ...

    async def close(self) -> None:
        """Refuse new runs, wait for those in flight, then free the model."""
        ...


class NativeRun(Protocol):
    """One run of the graph, ready to go: its inputs lie where the device reads them."""

    def run(self) -> Feeds:
        """Run once on the calling thread. The arrays returned are fresh, never those that went in.

        Raises:
            RunFailed: this input does not work; the next may.
            RunStopped: `stop` was called, and took effect.
            SessionBroken: nothing will work any more.
        """
        ...

    def stop(self) -> None:
        """Ask the run to end, from any thread. It ends between two nodes of the graph; inside a node nothing helps."""
        ...


class Engine(Protocol):
    """The synchronous heart of a session: one loaded graph. ONNX Runtime in `ort.py`, a function in tests."""

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """Declared inputs, in graph order."""
        ...

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """Declared outputs, in graph order."""
        ...

    def prepare(self, feeds: Feeds) -> NativeRun:
        """Make a run ready; may be done while another one is under way.

        Raises:
            RunFailed: this input does not work.
            SessionBroken: nothing will work any more.
        """
        ...
