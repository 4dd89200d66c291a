"""The GPU's memory through the driver's C interface, on a driver of the test's own."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from inferq_worker.observe.device_memory import DeviceMemory, open_device_memory

BUS_ID = b"0000:0a:00.0"


class Driver:
    """Both libraries in one; `refuses` are calls that return an error."""

    def __init__(self, *refuses: str, missing: str = "") -> None:
        self._refuses = set(refuses)
        self._missing = missing

    def load(self, name: str) -> Any:
        if self._missing and self._missing in name:
            raise OSError(name)
        return self

    def refuse(self, name: str) -> None:
        self._refuses.add(name)

    def _status(self, name: str) -> int:
        return 999 if name in self._refuses else 0

    def nvmlInit_v2(self) -> int:  # noqa: N802 - the library's name
        return self._status("init")

    def cuInit(self, flags: int) -> int:  # noqa: N802 - same
        assert flags == 0
        return self._status("cuInit")

    def cuDeviceGet(self, device: Any, ordinal: int) -> int:  # noqa: N802 - same
        ctypes.cast(device, ctypes.POINTER(ctypes.c_int))[0] = ordinal + 100
        return self._status("device")

    def cuDeviceGetPCIBusId(self, text: Any, size: int, device: Any) -> int:  # noqa: N802 - same
        assert (device.value, size > len(BUS_ID)) == (103, True)
        text.value = BUS_ID
        return self._status("bus")

    def nvmlDeviceGetHandleByPciBusId_v2(self, bus_id: bytes, handle: Any) -> int:  # noqa: N802 - same
        assert bus_id == BUS_ID
        ctypes.cast(handle, ctypes.POINTER(ctypes.c_void_p))[0] = 42
        return self._status("handle")

    def nvmlDeviceGetMemoryInfo(self, handle: Any, memory: Any) -> int:  # noqa: N802 - same
        assert handle.value == 42
        figures = ctypes.cast(memory, ctypes.POINTER(ctypes.c_ulonglong))
        figures[0], figures[1], figures[2] = 80, 50, 30
        return self._status("memory")


def test_used_and_total_of_the_device_that_cuda_means() -> None:
    read = open_device_memory(3, load=Driver().load)
    assert read is not None
    assert read() == DeviceMemory("0000:0a:00.0", 30, 80)


@pytest.mark.parametrize("call", ["init", "cuInit", "device", "bus", "handle"])
def test_a_driver_that_refuses_is_none(call: str) -> None:
    assert open_device_memory(3, load=Driver(call).load) is None


@pytest.mark.parametrize("library", ["nvidia-ml", "cuda"])
def test_a_library_that_is_missing_is_none(library: str) -> None:
    assert open_device_memory(3, load=Driver(missing=library).load) is None


def test_a_device_that_is_lost_later_has_no_figures() -> None:
    driver = Driver()
    read = open_device_memory(3, load=driver.load)
    assert read is not None
    driver.refuse("memory")
    assert read() is None
