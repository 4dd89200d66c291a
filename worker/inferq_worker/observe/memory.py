"""What memory the process has and may have: its own pages, its container's limit, and whether it grows with work.

Reads /proc and the control groups of Linux; elsewhere it knows nothing, and says so with None. Decides nothing.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from pathlib import Path
from statistics import linear_regression
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")
_UNLIMITED_BYTES = 2**60
"""Version 1 writes "no limit" as the largest number of pages that fits in 64 bits."""
_POINT_EVERY_BATCHES, _POINTS, _FEWEST_POINTS = 100, 200, 20


@dataclass(frozen=True, slots=True)
class Resident:
    """Memory of one process.

    Attributes:
        bytes: pages in memory, of whatever kind (RSS).
        anonymous_bytes: those that no file backs, which only the process itself can give back: what a container's
            limit is about. A worker with CUDA has gigabytes of libraries on top, which the kernel drops under pressure.
    """

    bytes: int
    anonymous_bytes: int


def resident(pid: int | None = None, *, proc: Path = _PROC) -> Resident | None:
    """Memory of a process, by default this one; None where the system does not say."""
    try:
        lines = (proc / ("self" if pid is None else str(pid)) / "status").read_text().splitlines()
        sizes = {name: int(size.split()[0]) * 1024 for name, _, size in (line.partition(":") for line in lines)
                 if name in {"VmRSS", "RssAnon", "RssShmem"}}  # fmt: skip
    except (OSError, ValueError, IndexError):
        return None
    if "VmRSS" not in sizes:
        return None
    anonymous = sizes["RssAnon"] + sizes.get("RssShmem", 0) if "RssAnon" in sizes else sizes["VmRSS"]
    return Resident(sizes["VmRSS"], anonymous)


def container_limit_bytes(*, proc: Path = _PROC, cgroups: Path = _CGROUPS) -> int | None:
    """The least memory limit of the control groups that this process is in, of either version; None without one."""
    return min(_limits(proc, cgroups), default=None)


def _limits(proc: Path, cgroups: Path) -> Iterator[int]:
    try:
        memberships = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in memberships:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            yield from _limits_upwards(cgroups, path, "memory.max")
        elif "memory" in controllers.split(","):
            yield from _limits_upwards(cgroups / "memory", path, "memory.limit_in_bytes")


def _limits_upwards(root: Path, path: str, name: str) -> Iterator[int]:
    """Limits of a group and of those around it, which bind it too.

    Inside a container the path may be the host's, of which only the root is to be seen, as the container's own group.
    """
    inside = Path(path.lstrip("/"))
    for group in (inside, *inside.parents):
        try:
            limit = int((root / group / name).read_text())
        except (OSError, ValueError):
            continue
        if limit < _UNLIMITED_BYTES:
            yield limit


class Growth:
    """By how many bytes memory grows in a thousand batches, over the last twenty thousand or so.

    A straight line through points a hundred batches apart: memory also rises and falls with what is in hand.
    """

    def __init__(self) -> None:
        self._points: deque[tuple[int, int]] = deque(maxlen=_POINTS)
        self.bytes_per_thousand: float | None = None
        """None until there have been two thousand batches."""

    def saw(self, batches: int, held_bytes: int) -> None:
        """So much memory after so many batches of the process's life."""
        if self._points and batches < self._points[-1][0] + _POINT_EVERY_BATCHES:
            return
        self._points.append((batches, held_bytes))
        if len(self._points) >= _FEWEST_POINTS:
            self.bytes_per_thousand = 1000 * linear_regression(*zip(*self._points, strict=True)).slope
