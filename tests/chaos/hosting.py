"""What a server of the stack runs as, a process of the run folder or a container, to be ended and started again.

`stack.py run` owns both and ends whatever is alive of them, also what was started here, however the driver ends.
"""

from __future__ import annotations

import asyncio
import signal
import time
from typing import TYPE_CHECKING, Protocol

from infra.local.errors import StackError
from infra.local.processes import Identity, wait_until

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable
    from pathlib import Path

    from infra.local.docker import Service

_END_LIMIT_S = 30.0
_READY_LIMIT_S = 60.0


class Host(Protocol):
    """Runs one server."""

    async def send(self, number: signal.Signals) -> None:
        """Signal it."""

    async def kill(self) -> None:
        """Kill it and wait until it is gone."""

    async def start(self) -> None:
        """Start it again, with its data and on its ports, and wait until it serves."""


class Process:
    """A process of the run folder, known by its recorded identity.

    Args:
        launch: starts it and waits until it serves; leaves its identity in `<name>.pid`.
    """

    def __init__(self, folder: Path, name: str, launch: Callable[[], subprocess.Popen[bytes]]) -> None:
        self._record = folder / f"{name}.pid"
        self._launch = launch
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def _identity(self) -> Identity:
        found = Identity.read(self._record)
        if found is None:
            raise StackError(f"there is no record {self._record}")
        return found

    async def send(self, number: signal.Signals) -> None:
        self._identity.send(number)

    async def kill(self) -> None:
        identity = self._identity
        identity.send(signal.SIGKILL)
        give_up_s = time.monotonic() + _END_LIMIT_S
        while identity.alive():
            if time.monotonic() > give_up_s:
                raise StackError(f"process {identity.pid} of {self._record} does not end")
            await asyncio.sleep(0.05)
        if self._child is not None:  # ours to see off; the one before it was another process's
            await asyncio.to_thread(self._child.wait)

    async def start(self) -> None:
        self._child = await asyncio.to_thread(self._launch)


class Container:
    """A container of the stack's compose project.

    Args:
        serves: whether the server answers on its ports.
    """

    def __init__(self, service: Service, serves: Callable[[], bool]) -> None:
        self._service = service
        self._serves = serves

    async def send(self, number: signal.Signals) -> None:
        await asyncio.to_thread(self._service.send, number)

    async def kill(self) -> None:
        await self.send(signal.SIGKILL)

    async def start(self) -> None:
        await asyncio.to_thread(self._service.start)
        await asyncio.to_thread(wait_until, self._serves, what=self._service.name, limit_s=_READY_LIMIT_S)
