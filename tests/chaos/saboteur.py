"""Injects faults from a schedule that follows from the seed alone.

The plan says what, on what, when and for how long. Two faults overlap unless they need the same part; a fault that has
to wait for its part comes later than planned, and the ledger has the real times.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from infra.local.errors import StackError
from tests.chaos.faults import FAULTS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tests.chaos.harm import Arena

_FIRST_S = 3.0
_GAP_S = (1.0, 6.0)
_QUIET_END_S = 5.0


@dataclass(frozen=True, slots=True)
class Planned:
    """One fault of a plan.

    Attributes:
        at_s: from the start of the load.
        target: name of a worker or a link; "" where there is only one.
        hold_s: how long it holds once it is there.
        seed: of what is random within it.
    """

    at_s: float
    kind: str
    target: str
    hold_s: float
    seed: int


def plan(
    *, seed: int, seconds: float, kinds: Sequence[str], workers: Sequence[str], links: Sequence[str]
) -> list[Planned]:
    """Draw the faults of a run: every kind once, in random order, as far as time goes; then by weight."""
    chance = random.Random(seed)  # noqa: S311 - faults, not secrets
    drawn = [kind for kind in sorted(kinds) if FAULTS[kind].weight]
    targets = {"worker": sorted(workers)}
    for service in ("broker", "redis"):
        targets[f"link.{service}"] = sorted(name for name in links if name.endswith(f".{service}"))
    first = chance.sample(drawn, len(drawn))
    planned: list[Planned] = []
    at_s = _FIRST_S
    while drawn and at_s < seconds - _QUIET_END_S:
        weights = [FAULTS[kind].weight for kind in drawn]
        kind = first.pop() if first else chance.choices(drawn, weights)[0]
        fault = FAULTS[kind]
        target = chance.choice(targets.get(fault.on, [""]))
        hold_s = min(chance.uniform(*fault.hold_s), max(fault.hold_s[0], seconds - _QUIET_END_S - at_s))
        planned.append(Planned(round(at_s, 3), kind, target, round(hold_s, 3), chance.getrandbits(32)))
        at_s += chance.uniform(*_GAP_S)
    return planned


def chosen(text: str) -> list[str]:
    """Read a choice of kinds: `all`, `none`, or names with commas between them.

    Raises:
        ValueError: there is no such kind.
    """
    kinds: set[str] = set()
    for name in filter(None, (part.strip() for part in text.split(","))):
        if name == "all":
            kinds |= FAULTS.keys()
        elif name in FAULTS:
            kinds.add(name)
        elif name != "none":
            raise ValueError(f"there is no fault {name!r}; --list shows those that are there")
    return sorted(kinds)


class Saboteur:
    """Carries a plan out.

    Attributes:
        injected: how many faults of each kind took hold.
        failed: what could not be done or undone, and why; a run with such entries proves nothing.

    Args:
        give_up: set when the load ends: what holds is undone, and what waits for its part is left out.
    """

    def __init__(self, arena: Arena, give_up: asyncio.Event) -> None:
        self._arena = arena
        self._give_up = give_up
        self._parts: Mapping[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self.injected: Counter[str] = Counter()
        self.failed: list[str] = []

    async def run(self, planned: Sequence[Planned]) -> None:
        """Inject everything; returns when the last fault is undone."""
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        async with asyncio.TaskGroup() as group:
            for one in planned:
                await self._pause(max(0.0, started_s + one.at_s - loop.time()))
                group.create_task(self._inject(one))

    async def _inject(self, one: Planned) -> None:
        fault = FAULTS[one.kind]
        chance = random.Random(one.seed)  # noqa: S311 - faults, not secrets
        async with self._parts[one.target or fault.on]:
            if self._give_up.is_set():
                return
            self._note(one, "begin")
            try:
                async with fault.harm(self._arena, one.target, chance):
                    self.injected[one.kind] += 1
                    await self._pause(one.hold_s)
            except (StackError, OSError) as error:
                self.failed.append(f"{one.kind}: {error}"[:500])
            finally:
                self._note(one, "end")

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._give_up.wait()

    def _note(self, one: Planned, phase: str) -> None:
        self._arena.ledger.write("fault", kind=one.kind, target=one.target, phase=phase)
