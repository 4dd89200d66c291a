"""Whose turn it is on a device, and how long one may last. Threads wait here, so that a hand-over takes microseconds.

The event loop never waits here: it learns of a start by a callback, and stops a run that lasts too long.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Collection, Iterator

from inferq_worker.runtime.interface import DeviceLost, Feeds, NativeRun, RunStopped, RunWatcher


class Turns:
    """The runs that a device takes at a time; shared by all sessions on it.

    Args:
        count: >= 1.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = count
        self._left = count
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Wait for a turn, on the calling thread, and hold it inside the block.

        Raises:
            DeviceLost: every turn is held by a run that will never end.
        """
        with self._changed:
            while self._left and not self._free:
                self._changed.wait()
            if not self._left:
                raise DeviceLost("no run on this device ends any more")
            self._free -= 1
        try:
            yield
        finally:
            with self._changed:
                self._free += 1
                self._changed.notify()

    def lose(self) -> None:
        """One of the turns under way will never end."""
        with self._changed:
            self._left -= 1
            self._changed.notify_all()


class Turn:
    """One turn on the device that lasts as long as it lasts: of warm-up and probes. Belongs to one thread.

    Attributes:
        limit_s: seconds after which it is told to end.
        was_stopped: it was told to end.
    """

    limit_s = float("inf")
    was_stopped = False

    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    @contextlib.contextmanager
    def taken(self) -> Iterator[Collection[int]]:
        """Hold it inside the block; gives the items that nobody waits for any more."""
        with self._turns.taken():
            yield ()

    def run(self, native: NativeRun) -> Feeds:
        """One native run of the turn."""
        return native.run()


class WatchedTurn(Turn):
    """A turn of jobs: its start is reported to the event loop, and it is ended if it lasts too long.

    Made on the event loop; `taken` and `run` belong to the thread of the run.

    Args:
        turns: of the device.
        watcher: told of the start.
        limit_s: a turn that lasts longer is told to end.
        grace_s: if it has not ended so long after that, it is wedged.

    Attributes:
        on_wedged: called when the run has not ended although it was told to.
    """

    def __init__(self, turns: Turns, watcher: RunWatcher | None, *, limit_s: float, grace_s: float) -> None:
        super().__init__(turns)
        self._watcher = watcher
        self.limit_s = limit_s
        self._grace_s = grace_s
        self._loop = asyncio.get_running_loop()
        self.on_wedged: Callable[[], None] = lambda: None
        self._timer: asyncio.TimerHandle | None = None
        self._native: NativeRun | None = None
        self._left = False

    @contextlib.contextmanager
    def taken(self) -> Iterator[Collection[int]]:
        """See `Turn.taken`."""
        with self._turns.taken():
            unwanted = self._watcher.unwanted() if self._watcher is not None else ()
            # The loop is closed when a forced end left this thread behind.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._started)
            yield unwanted

    def run(self, native: NativeRun) -> Feeds:
        """One native run of the turn.

        Raises:
            RunStopped: the turn has reached its limit.
        """
        self._native = native
        # Only after it is known to `_stop`: whichever of the two comes second sees the other.
        if self.was_stopped:
            raise RunStopped
        try:
            return native.run()
        finally:
            self._native = None

    def leave(self) -> None:
        """It is over, or nobody waits for it any more."""
        self._left = True
        if self._timer is not None:
            self._timer.cancel()

    def _started(self) -> None:
        if self._left:
            return
        self._timer = self._loop.call_later(self.limit_s, self._stop)
        if self._watcher is not None:
            self._watcher.started()

    def _stop(self) -> None:
        self.was_stopped = True
        native = self._native
        if native is not None:
            native.stop()
        self._timer = self._loop.call_later(self._grace_s, self.on_wedged)
