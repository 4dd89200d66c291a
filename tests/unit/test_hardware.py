"""The names of the hardware that cached code is made for."""

import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from inferq_worker.runtime import hardware


class Driver:
    """The part of libcuda that is asked, with one GPU."""

    def __init__(self, *, capability: tuple[int, int] = (9, 0)) -> None:
        self._capability = {75: capability[0], 76: capability[1]}

    def cuInit(self, _flags: int) -> int:  # noqa: N802 - the library's name
        return 0

    def cuDeviceGet(self, _device: Any, number: int) -> int:  # noqa: N802 - as above
        return 0 if number == 0 else 101

    def cuDeviceGetName(self, name: Any, _size: int, _device: Any) -> int:  # noqa: N802 - as above
        name.value = b"NVIDIA Test"
        return 0

    def cuDeviceGetAttribute(self, value: Any, attribute: int, _device: Any) -> int:  # noqa: N802 - as above
        value._obj.value = self._capability[attribute]
        return 0

    def cuDriverGetVersion(self, value: Any) -> int:  # noqa: N802 - as above
        value._obj.value = 13000
        return 0


def absent(name: str) -> Any:
    raise OSError(f"{name}: cannot open shared object file")


def test_a_gpu_is_named_with_capability_and_driver(tmp_path: Path) -> None:
    (tmp_path / "version").write_text("NVRM version: 580.1\nGCC version: 1\n")
    named = hardware.gpu(0, lambda _: Driver(), tmp_path / "version")
    assert named == "NVIDIA Test sm_90 cuda 13000 NVRM version: 580.1"
    assert hardware.gpu(0, lambda _: Driver(capability=(8, 6)), tmp_path / "none") == "NVIDIA Test sm_86 cuda 13000"


def test_a_gpu_that_is_not_there_has_no_name(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="answers 101 for GPU 3"):
        hardware.gpu(3, lambda _: Driver(), tmp_path)
    with pytest.raises(OSError, match=r"libcuda\.so\.1"):
        hardware.gpu(0, absent)


def test_the_driver_is_there_when_its_library_loads() -> None:
    assert hardware.driver_present(lambda _: Driver())
    assert not hardware.driver_present(absent)


@pytest.mark.parametrize("line", ["flags\t\t: fpu avx2", "Features\t: fp asimd"])
def test_a_cpu_is_named_by_its_instruction_sets(tmp_path: Path, line: str) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text(f"processor\t: 0\nmodel name\t: Fast\n{line}\ncpu MHz\t: 2000.1\n\nprocessor\t: 1\n{line} other\n")
    named = hardware.cpu(info)
    assert named.startswith(platform.machine())
    assert line.partition(":")[2].strip() in named
    assert "Fast" in named
    assert "2000" not in named  # changes by the minute
    assert "other" not in named


def test_a_cpu_without_a_list_has_a_name_all_the_same(tmp_path: Path) -> None:
    assert hardware.cpu(tmp_path / "none").startswith(platform.machine())


def test_this_machines_cpu_is_always_named_alike() -> None:
    assert hardware.cpu() == hardware.cpu()


def test_the_version_of_tensorrt_comes_from_its_library_or_else_from_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    class Library:
        def getInferLibVersion(self) -> int:  # noqa: N802 - the library's name
            return 101303

    assert hardware.tensorrt_version(lambda _: Library()) == "101303"
    monkeypatch.setattr(metadata, "version", {"tensorrt-cu13": "10.13.3"}.__getitem__)
    monkeypatch.setattr(metadata, "PackageNotFoundError", KeyError)
    assert hardware.tensorrt_version(absent) == "10.13.3"
    monkeypatch.setattr(metadata, "version", {}.__getitem__)
    assert hardware.tensorrt_version(absent) == ""
