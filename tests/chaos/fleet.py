"""Workers under a supervisor that starts them again whenever they end, as systemd or Kubernetes would.

Each has proxies of its own to the broker and to Redis, so that one can be cut off while the others go on. What a worker
counted is kept beyond its end: from its log, which survives SIGKILL.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.e2e import poisoned_worker
from tests.e2e.worker_process import WorkerProcess

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from tests.chaos.proxy import Proxy
    from tests.e2e.worker_process import Site

PROGRAM = (str(Path(poisoned_worker.__file__)),)
UNSTORED = "answered without a stored outcome"
_RESTART_S = 0.5
_LOOK_S = 0.1


@dataclass(slots=True)
class Member:
    """One place in the fleet: a worker, and after its end the next one.

    Attributes:
        name: of the place; also of its logs.
        to_broker, to_redis: its own.
        signalled: signals that the saboteur sent to the process that runs now.
        ends: how processes here ended, by `<exit status> <why>`.
    """

    site: Site
    name: str
    arguments: Sequence[str]
    knobs: Mapping[str, str]
    to_broker: Proxy
    to_redis: Proxy
    program: Sequence[str] = PROGRAM
    process: WorkerProcess | None = None
    retired: bool = False
    signalled: set[int] = field(default_factory=set)
    ends: Counter[str] = field(default_factory=Counter)
    logs: list[Path] = field(default_factory=list)

    @property
    def clock_jumps(self) -> bool:
        """Whether its wall clock obeys signals: that of another revision's program does not."""
        return self.program == PROGRAM

    async def run(self) -> None:
        """Keep a worker running until it is retired, or until cancelled, which kills it."""
        try:
            while not self.retired:
                worker = self._start()
                while worker.returncode is None:
                    await asyncio.sleep(_LOOK_S)
                self.ends[_why(worker.returncode, self.signalled)] += 1
                await asyncio.sleep(_RESTART_S)
        finally:
            self._kill()

    def send(self, number: signal.Signals) -> None:
        """Signal the process that runs now, if any."""
        if self.process is not None and self.process.returncode is None:
            self.signalled.add(number)
            self.process.send(number)

    async def ready(self, limit_s: float) -> bool:
        """Wait until the worker is ready; returns whether it is."""
        give_up_s = time.monotonic() + limit_s
        while time.monotonic() < give_up_s:
            with contextlib.suppress(AssertionError):
                if self.process is not None and await self.process.is_ready():
                    return True
            await asyncio.sleep(0.3)
        return False

    async def in_hand(self) -> int:
        """Deliveries that it has not settled; -1 when it does not say."""
        with contextlib.suppress(AssertionError):
            if self.process is not None:
                return await self.process.in_hand()
        return -1

    def retire(self) -> None:
        """End the worker in peace, and start no other."""
        self.retired = True
        self.send(signal.SIGCONT)
        self.send(signal.SIGTERM)

    def _start(self) -> WorkerProcess:
        name = f"{self.name}.{len(self.logs) + 1}"
        self.signalled = set()
        self.process = WorkerProcess(self.site, *self.arguments, name=name, program=self.program, knobs=self.knobs)
        self.logs.append(self.process.log_path)
        return self.process

    def _kill(self) -> None:
        if self.process is not None:
            if self.process.returncode is None:
                self.process.process.kill()
            self.process.process.wait()


def _why(status: int, signalled: set[int]) -> str:
    """An exit status and whether the saboteur asked for it."""
    if status < 0 and -status in signalled:
        return f"{status} signalled"
    if signal.SIGTERM in signalled:
        return f"{status} drained" if status == 0 else f"{status} drain cut short"
    return f"{status} by itself"


def program_of(folder: Path) -> tuple[str, ...]:
    """The worker of another checkout, in which no row kills: how that is done depends on the revision."""
    paths = [str(folder / name) for name in ("schemas", "producer", "worker")]
    return ("-c", f"import sys; sys.path[:0] = {paths!r}; from inferq.cli import main; sys.exit(main())")


def crashes(members: Iterable[Member], *, kills: bool) -> Counter[str]:
    """Ends that nobody asked for.

    Args:
        kills: rows that end the process were sent, which does it by SIGKILL.
    """
    expected = f"{-signal.SIGKILL} by itself" if kills else ""
    ends = sum((member.ends for member in members), start=Counter())
    return Counter({how: count for how, count in ends.items() if how.endswith("by itself") and how != expected})


def unstored_jobs(logs: Sequence[Path]) -> set[str]:
    """Ids of the jobs that workers say they answered without a stored outcome."""
    return {job_id for event in _events(logs, UNSTORED) for job_id in event["jobs"]}


def _events(logs: Sequence[Path], message: str) -> Iterator[dict[str, Any]]:
    for path in logs:
        with path.open(errors="replace") as lines:
            for line in lines:
                if message in line and line.startswith("{") and line.endswith("}\n"):
                    event: dict[str, Any] = json.loads(line)
                    if event.get("message") == message:
                        yield event
