"""Heap snapshots: what the Python objects of the process are and where they were allocated, in a file for a person.

Costs time and memory while it is on; so it is on only where an operator asked for it.
"""

from __future__ import annotations

import gc
import time
import tracemalloc
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_LINES, _TRACES, _TYPES = 40, 8, 20


class HeapSnapshots:
    """Writes snapshots into a folder and keeps the last few; allocations are traced from its creation on.

    Args:
        folder: made if it is not there.
        worker: this process, part of each file's name.
        kept: files that stay in the folder, whichever worker wrote them; >= 1.
        frames: callers told of each allocation; >= 1. Each costs more.
    """

    def __init__(self, folder: Path, worker: str, *, kept: int, frames: int) -> None:
        self._folder = folder
        self._worker = worker
        self._kept = kept
        if not tracemalloc.is_tracing():
            tracemalloc.start(frames)

    def take(self, why: str) -> Path:
        """Write one; blocks for a second or more, so call it from a thread.

        Args:
            why: first line of the file.

        Raises:
            OSError: the folder cannot be written.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        # The time first, so that names sort by it across workers.
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        path = self._folder / f"heap-{stamp}-{self._worker}.txt"
        path.write_text("\n".join([why, *_report(), ""]))
        for old in sorted(self._folder.glob("heap-*.txt"))[: -self._kept]:
            old.unlink(missing_ok=True)
        return path


def _report() -> Iterator[str]:
    traced_bytes, peak_bytes = tracemalloc.get_traced_memory()
    ignored = (tracemalloc.Filter(inclusive=False, filename_pattern=tracemalloc.__file__),)
    snapshot = tracemalloc.take_snapshot().filter_traces(ignored)
    yield f"Python allocations traced: {traced_bytes} bytes, at most {peak_bytes}; native ones are not among them."
    yield f"\nThe {_LINES} lines that hold the most:"
    yield from (f"  {statistic}" for statistic in snapshot.statistics("lineno")[:_LINES])
    yield f"\nThe {_TRACES} call paths that hold the most, the latest call last:"
    for statistic in snapshot.statistics("traceback")[:_TRACES]:
        yield f"  {statistic.size} bytes in {statistic.count} blocks"
        yield from (f"    {line}" for line in statistic.traceback.format())
    types = Counter(type(one).__qualname__ for one in gc.get_objects())
    yield f"\nThe {_TYPES} commonest types of containers:"
    yield from (f"  {count:9} {name}" for name, count in types.most_common(_TYPES))
