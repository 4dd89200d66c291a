"""A progress bar for a person at a terminal, and single lines that do not tear it. Draws nothing where nobody looks."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, TextIO

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Progress", "bar_line", "duration", "jobs"]

_REDRAW_S: Final = 0.1
_BAR_CELLS: Final = 24


@dataclass
class Progress:
    """Counts jobs and draws one line that is drawn over.

    Attributes:
        stream: where to draw; None = count only.
        share: how much of the input has been read, 0..1; None = its size is not known.
        clock: monotonic seconds.
        notes: where `note` writes; None = nowhere.
        read: records read so far, those that a checkpoint has among them.
        skipped: records that were answered before this run.
    """

    stream: TextIO | None
    share: Callable[[], float | None] = lambda: None
    clock: Callable[[], float] = time.monotonic
    notes: TextIO | None = None
    ok: int = 0
    failed: int = 0
    read: int = 0
    skipped: int = 0
    _started_s: float = field(init=False)
    _drawn_s: float = field(init=False, default=float("-inf"))

    def __post_init__(self) -> None:
        self._started_s = self.clock()

    @property
    def answered(self) -> int:
        """Jobs that this run brought to an end, well or not."""
        return self.ok + self.failed

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return self.clock() - self._started_s

    @property
    def jobs_per_s(self) -> float:
        """Answered jobs a second, over the whole run."""
        return self.answered / max(self.elapsed_s, 1e-9)

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
        share, done = self.share(), self.answered + self.skipped
        # What was read is only under way; what was answered is done.
        part = None if share is None else share * done / max(self.read, done, 1)
        line = bar_line(part, answered=done, read=self.read, failed=self.failed, per_s=self.jobs_per_s)
        # Back to the first column, and clear what a longer line left.
        self.stream.write(f"\r{line}  {duration(self.elapsed_s)}\x1b[K")
        self.stream.flush()

    def note(self, text: str) -> None:
        """Write a line of its own, above the bar where there is one."""
        if self.notes is None:
            return
        clear = "" if self.stream is None else "\r\x1b[K"
        self.notes.write(f"{clear}{text}\n")
        self.notes.flush()
        self.draw()

    def close(self) -> None:
        """Draw the last state and leave the line."""
        if self.stream is not None:
            self.draw()
            self.stream.write("\n")
            self.stream.flush()


def bar_line(part: float | None, *, answered: int, read: int, failed: int, per_s: float) -> str:
    """The line: how far, how many, how fast, how long still.

    Args:
        part: of all records that is answered, 0..1; None = the total is not known, and then neither a percentage nor
            the remaining time are shown.
        answered: jobs brought to an end.
        read: records read so far, >= answered.
        failed: of those answered.
        per_s: answered jobs a second.
    """
    parts = [f"{answered:,}/{jobs(max(read, answered))}", f"{per_s:,.0f}/s"]
    if failed:
        parts.append(f"{failed:,} failed")
    if part is None:
        return "  ".join(parts)
    part = min(max(part, 0.0), 1.0)
    full = int(part * _BAR_CELLS)
    bar = "#" * full + "." * (_BAR_CELLS - full)
    left_s = answered * (1 - part) / part / per_s if 0 < part < 1 and per_s > 0 else None
    left = [] if left_s is None else [f"{duration(left_s)} left"]
    return "  ".join([f"{int(part * 100):3}% [{bar}]", *parts, *left])


def jobs(count: int) -> str:
    """`1 job`, `1,000 jobs`."""
    return f"{count:,} job{'' if count == 1 else 's'}"


def duration(seconds: float) -> str:
    """Hours, minutes and seconds as `1:02:03` or `2:03`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
