"""What Ctrl-C and SIGTERM do to a command that has something to bring to safety first: stop; the second time, leave."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator

__all__ = ["Stop"]


class Stop:
    """Turns the first signal into a cancellation and the second into an end.

    Args:
        leave: called before the process ends at the second signal; brings to the disk what it can, without waiting.
    """

    def __init__(self, leave: Callable[[], object]) -> None:
        self._leave = leave
        self._signal: int | None = None

    @property
    def status(self) -> int | None:
        """The exit status that the signal asks for (130, 143); None if none came."""
        return None if self._signal is None else 128 + self._signal

    def run(self, work: Coroutine[object, object, None]) -> None:
        """Run to the end or to the first signal; `status` tells which."""
        with contextlib.suppress(asyncio.CancelledError):
            asyncio.run(self._watched(work))
            return
        if self._signal is None:
            raise asyncio.CancelledError

    async def _watched(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - asyncio.run made it
        with self._signals(task):
            await work

    @contextlib.contextmanager
    def _signals(self, task: asyncio.Task[None]) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._received, number, task)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    def _received(self, number: int, task: asyncio.Task[None]) -> None:
        if self._signal is None:
            self._signal = number
            task.cancel()
            return
        with contextlib.suppress(Exception):
            self._leave()
        # Not an exception: the first signal's is still on its way up, through whatever holds it.
        os._exit(128 + self._signal)
