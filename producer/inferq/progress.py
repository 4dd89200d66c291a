"""A progress bar for a person at a terminal. Draws nothing where nobody looks."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, TextIO

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Progress", "bar_line", "duration"]

_REDRAW_S: Final = 0.1
_BAR_CELLS: Final = 24


@dataclass
class Progress:
    """Counts jobs and draws one line that is drawn over.

    Attributes:
        stream: where to draw; None = count only.
        share: how much of the input has been read, 0..1; None = not known.
        clock: monotonic seconds.
    """

    stream: TextIO | None
    share: Callable[[], float | None] = lambda: None
    clock: Callable[[], float] = time.monotonic
    ok: int = 0
    failed: int = 0
    _started_s: float = field(init=False)
    _drawn_s: float = field(init=False, default=float("-inf"))

    def __post_init__(self) -> None:
        self._started_s = self.clock()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return self.clock() - self._started_s

    @property
    def jobs_per_s(self) -> float:
        """Answered jobs a second, over the whole run."""
        return (self.ok + self.failed) / max(self.elapsed_s, 1e-9)

    def add(self, *, ok: bool) -> None:
        """Count one answer, and draw if the last drawing is old enough."""
        if ok:
            self.ok += 1
        else:
            self.failed += 1
        if self.stream is not None and self.clock() - self._drawn_s >= _REDRAW_S:
            self.draw()

    def draw(self) -> None:
        """Draw now."""
        if self.stream is None:
            return
        self._drawn_s = self.clock()
        line = bar_line(self.share(), ok=self.ok, failed=self.failed, elapsed_s=self.elapsed_s)
        # Back to the first column, and clear what a longer line left.
        self.stream.write(f"\r{line}\x1b[K")
        self.stream.flush()

    def close(self) -> None:
        """Draw the last state and leave the line."""
        if self.stream is not None:
            self.draw()
            self.stream.write("\n")
            self.stream.flush()


def bar_line(share: float | None, *, ok: int, failed: int, elapsed_s: float) -> str:
    """The line: how far, how many, how fast, how long still.

    Args:
        share: of the input, 0..1; None = not known, and then neither bar nor remaining time are shown.
        ok: answered jobs.
        failed: failed jobs.
        elapsed_s: seconds since the start, >= 0.
    """
    done = ok + failed
    parts = [f"{done:,} jobs", f"{done / max(elapsed_s, 1e-9):,.0f}/s"]
    if failed:
        parts.append(f"{failed:,} failed")
    if share is None:
        return "  ".join([*parts, duration(elapsed_s)])
    share = min(max(share, 0.0), 1.0)
    full = int(share * _BAR_CELLS)
    bar = "#" * full + "." * (_BAR_CELLS - full)
    left = f"{duration(elapsed_s * (1 - share) / share)} left" if 0 < share < 1 else duration(elapsed_s)
    return "  ".join([f"{share:4.0%} [{bar}]", *parts, left])


def duration(seconds: float) -> str:
    """Hours, minutes and seconds as `1:02:03` or `2:03`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
