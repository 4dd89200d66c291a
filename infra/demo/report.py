"""What the demo shows: headings, a progress bar, the table of answers, the histogram, the checks.

On a terminal with colours and a moving bar; elsewhere plain lines, so that a log stays readable.
"""

import os
import shutil
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from infra.demo.inputs import Verdict
from infra.demo.samples import Sample

from inferq_schemas import Result

_GREEN, _RED, _BOLD, _DIM = "32", "31", "1", "2"
_BAR_COLUMNS = 30
_NAME_COLUMNS = 46


@dataclass(frozen=True, slots=True)
class Row:
    """One answered file: what it was, what the model says, and how it was answered."""

    sample: Sample
    verdict: Verdict
    result: Result

    @property
    def batch_rows(self) -> int:
        """Rows of the batch it was part of."""
        return self.result.batch.rows if self.result.batch else 0

    @property
    def total_ms(self) -> float:
        """Milliseconds from sending to the answer leaving the worker."""
        return self.result.timing_ms.total if self.result.timing_ms else 0.0

    @property
    def right(self) -> bool:
        """Whether the type is the expected one, or nobody knows better."""
        return self.sample.expected in (None, self.verdict.label)


@dataclass(slots=True)
class Checks:
    """What had to hold, and did or did not."""

    passed: int = 0
    failed: int = 0

    def check(self, what: str, *, holds: bool, found: object = "") -> None:
        """Note one check and print it."""
        if holds:
            self.passed += 1
            print(_style(_GREEN, "  ok    ") + what)
        else:
            self.failed += 1
            print(_style(_RED, "  WRONG ") + what + (f": {found}" if found != "" else ""))


class Progress:
    """A bar that moves on a terminal, and a line at every quarter elsewhere."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._done = 0
        self._moves = sys.stdout.isatty()

    def advance(self) -> None:
        """Count one more; after the last one the bar's line is ended."""
        self._done += 1
        if self._moves:
            filled = _BAR_COLUMNS * self._done // self._total
            bar = "█" * filled + "░" * (_BAR_COLUMNS - filled)
            end = "\n" if self._done == self._total else ""
            print(f"\r  {bar} {self._done}/{self._total}", end=end, flush=True)
        elif self._done * 4 // self._total != (self._done - 1) * 4 // self._total:
            print(f"  {self._done}/{self._total} files answered", flush=True)


def heading(text: str) -> None:
    """Begin a part of the story."""
    print("\n" + _style(_BOLD, text), flush=True)


def say(text: str) -> None:
    """One line of the story."""
    print(f"  {text}", flush=True)


def table_lines(rows: Sequence[Row]) -> list[str]:
    """Lay out the table, one line a file; a type that the model is not sure of carries a question mark."""
    head = f"  {'file':{_NAME_COLUMNS}}  {'type':<14} {'score':>6} {'batch rows':>11} {'ms':>8}"
    return [head, *(_table_line(row) for row in rows)]


def _table_line(row: Row) -> str:
    name = row.sample.name if len(row.sample.name) <= _NAME_COLUMNS else "…" + row.sample.name[-_NAME_COLUMNS + 1 :]
    label = row.verdict.label + ("" if row.verdict.sure else " ?")
    wrong = "" if row.right else f"  <- should be {row.sample.expected}"
    score, rows, total_ms = row.verdict.score, row.batch_rows, row.total_ms
    return f"  {name:{_NAME_COLUMNS}}  {label:<14} {score:>6.3f} {rows:>11} {total_ms:>8.0f}{wrong}"


def excerpt(rows: Sequence[Row], *, each: int = 2) -> list[Row]:
    """Choose what a person wants to see: all wrong ones, a few of each known type, one of each other type seen."""
    seen: Counter[tuple[str, bool]] = Counter()
    chosen = []
    for row in rows:
        known = row.sample.expected is not None
        kind = (row.verdict.label, known)
        seen[kind] += 1
        if not row.right or seen[kind] <= (each if known else 1):
            chosen.append(row)
    return chosen


def print_histogram(rows: Sequence[Row]) -> None:
    """Draw how many batches of each size there were.

    Every job here is one row, so a batch of n rows is seen n times: each sighting counts for 1/n of a batch.
    """
    sightings = Counter(row.batch_rows for row in rows if row.batch_rows)
    batches = {size: round(count / size) for size, count in sorted(sightings.items())}
    columns = min(40, max(10, shutil.get_terminal_size().columns - 30))
    most = max(batches.values(), default=1)
    for size, count in batches.items():
        print(f"  {size:>3} rows  {'▇' * max(1, round(columns * count / most))} {count}")
    reasons: Counter[str] = Counter()
    for row in rows:
        if row.result.batch:
            reasons[row.result.batch.reason] += 1
    print("  jobs by why their batch left: " + ", ".join(f"{why} {count}" for why, count in reasons.most_common()))


def mean_batch_rows(rows: Sequence[Row]) -> float:
    """Mean rows of a batch (not of the batch that a job sees, which is larger)."""
    batches = sum(1 / row.batch_rows for row in rows if row.batch_rows)
    return len(rows) / batches if batches else 0.0


def by_expected(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Sort the rows whose type is known beforehand by that type."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        if row.sample.expected is not None:
            found.setdefault(row.sample.expected, []).append(row)
    return dict(sorted(found.items()))


def percentiles(milliseconds: Sequence[float]) -> str:
    """Median and 95th percentile, in words."""
    if len(milliseconds) < 2:
        return "too few to say"
    cuts = statistics.quantiles(milliseconds, n=20, method="inclusive")
    return f"p50 {cuts[9]:.0f} ms, p95 {cuts[18]:.0f} ms"


def _style(code: str, text: str) -> str:
    plain = not sys.stdout.isatty() or "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb"
    return text if plain else f"\x1b[{code}m{text}\x1b[0m"
