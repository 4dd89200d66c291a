"""Heap snapshots: what is in the file, and how many stay."""

from __future__ import annotations

import tracemalloc
from typing import TYPE_CHECKING

import pytest

from inferq_worker.observe.heap import HeapSnapshots

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(autouse=True)
def _tracing_ends() -> Iterator[None]:
    yield
    tracemalloc.stop()


def test_a_snapshot_names_the_line_that_holds_the_memory(tmp_path: Path) -> None:
    heap = HeapSnapshots(tmp_path / "made" / "here", "w-1", kept=2, frames=4)
    leak = [bytes(100_000) for _ in range(100)]
    path = heap.take("too much memory")
    text = path.read_text()
    assert text.startswith("too much memory\n")
    assert "test_heap.py" in text
    assert "leak = [bytes(100_000) for _ in range(100)]" in text
    assert len(leak) == 100
    assert path.parent == tmp_path / "made" / "here"


def test_only_the_last_files_stay_whoever_wrote_them(tmp_path: Path) -> None:
    for year in range(2020, 2024):
        (tmp_path / f"heap-{year}0101T000000Z-other.txt").write_text("old")
    (tmp_path / "notes.txt").write_text("not ours")
    path = HeapSnapshots(tmp_path, "w-1", kept=2, frames=1).take("why")
    assert sorted(one.name for one in tmp_path.iterdir()) == [
        "heap-20230101T000000Z-other.txt",
        path.name,
        "notes.txt",
    ]


def test_a_folder_that_cannot_be_written_is_an_os_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        HeapSnapshots(tmp_path / "file", "w-1", kept=1, frames=1).take("why")
