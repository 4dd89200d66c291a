"""What the system says of a process's memory, its container's limit, and the slope of it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from inferq_worker.observe.memory import Growth, Resident, container_limit_bytes, resident

if TYPE_CHECKING:
    from pathlib import Path

STATUS = "Name:\tpython\nVmRSS:\t    300 kB\nRssAnon:\t    200 kB\nRssFile:\t     90 kB\nRssShmem:\t     10 kB\n"


def system(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_pages_of_files_are_in_the_one_figure_and_not_in_the_other(tmp_path: Path) -> None:
    system(tmp_path, {"self/status": STATUS, "7/status": STATUS.replace("300", "400")})
    assert resident(proc=tmp_path) == Resident(300 * 1024, 210 * 1024)
    assert resident(7, proc=tmp_path) == Resident(400 * 1024, 210 * 1024)


def test_a_system_that_does_not_divide_them_gives_one_figure_twice(tmp_path: Path) -> None:
    system(tmp_path, {"self/status": "VmRSS:\t300 kB\n"})
    assert resident(proc=tmp_path) == Resident(300 * 1024, 300 * 1024)


@pytest.mark.parametrize("status", [None, "", "VmRSS:\tmany kB\n", "VmRSS:\n", "Name:\tx\n"])
def test_a_system_that_does_not_say_is_no_error(tmp_path: Path, status: str | None) -> None:
    if status is not None:
        system(tmp_path, {"self/status": status})
    assert resident(proc=tmp_path) is None
    assert container_limit_bytes(proc=tmp_path, cgroups=tmp_path) is None


def test_what_this_process_takes_shows() -> None:
    before = resident()
    if before is None:
        pytest.skip("no /proc here")
    block = bytearray(os.urandom(1)) * (64 * 2**20)
    after = resident()
    assert after is not None
    assert 60 * 2**20 < after.anonymous_bytes - before.anonymous_bytes < 80 * 2**20
    assert len(block) == 64 * 2**20


@pytest.mark.parametrize(
    ("membership", "limits", "expected"),
    [
        pytest.param("0::/\n", {"memory.max": "500\n"}, 500, id="version 2 in a container of its own"),
        pytest.param("0::/a/b\n", {"a/b/memory.max": "max\n", "a/memory.max": "700\n"}, 700, id="a group around it"),
        pytest.param("0::/a/b\n", {"a/b/memory.max": "600\n", "a/memory.max": "700\n"}, 600, id="the lower of both"),
        pytest.param("0::/host/only\n", {"memory.max": "500\n"}, 500, id="the host's path inside a container"),
        pytest.param("0::/\n", {"memory.max": "max\n"}, None, id="no limit"),
        pytest.param("0::/\n", {}, None, id="no file in the root group"),
        pytest.param("0::/\n", {"memory.max": "rubbish"}, None, id="rubbish"),
        pytest.param("5:cpu:/x\n4:memory:/x\n0::/\n", {"memory/x/memory.limit_in_bytes": "400\n"}, 400, id="version 1"),
        pytest.param(
            "4:memory:/x\n", {"memory/x/memory.limit_in_bytes": "9223372036854771712\n"}, None, id="version 1, none"
        ),
        pytest.param("4:cpu,memory:/host\n", {"memory/memory.limit_in_bytes": "300\n"}, 300, id="version 1, inside"),
    ],
)
def test_the_limit_of_a_container(
    tmp_path: Path, membership: str, limits: dict[str, str], expected: int | None
) -> None:
    system(tmp_path, {"proc/self/cgroup": membership} | {f"cgroup/{name}": text for name, text in limits.items()})
    assert container_limit_bytes(proc=tmp_path / "proc", cgroups=tmp_path / "cgroup") == expected


def test_growth_is_told_after_two_thousand_batches_and_through_noise() -> None:
    growth = Growth()
    for batch in range(0, 1900, 10):
        growth.saw(batch, 5_000_000 + 3 * batch)
    assert growth.bytes_per_thousand is None
    for batch in range(1900, 10_000, 10):
        growth.saw(batch, 5_000_000 + 3 * batch + (batch // 100 % 2) * 1000)
    assert growth.bytes_per_thousand == pytest.approx(3000, rel=0.05)


def test_growth_forgets_the_start() -> None:
    growth = Growth()
    for batch in range(0, 5_000, 100):
        growth.saw(batch, 1000 * batch)
    for batch in range(5_000, 40_000, 100):
        growth.saw(batch, 5_000_000)
    assert growth.bytes_per_thousand == pytest.approx(0)
