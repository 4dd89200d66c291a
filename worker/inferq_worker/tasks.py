"""Owner of everything that goes on in the background. A task that dies stops the program, with a true exit status."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Coroutine


class Tasks:
    """Short-lived tasks inside a task group, so that a drain can wait for them.

    Args:
        group: owns the tasks; an exception in one of them cancels the rest and surfaces where the group is awaited.
    """

    def __init__(self, group: asyncio.TaskGroup) -> None:
        self._group = group
        self._open: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        """How many go on."""
        return len(self._open)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Start `work`."""
        task = self._group.create_task(work)
        self._open.add(task)
        task.add_done_callback(self._open.discard)

    def cancel(self) -> None:
        """Stop all that goes on; nothing is lost by it that the broker would not deliver again."""
        for task in self._open:
            task.cancel()

    async def idle(self) -> None:
        """Wait until nothing goes on, including what is started meanwhile."""
        while self._open:
            await asyncio.wait(self._open)
