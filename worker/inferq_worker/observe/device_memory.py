"""Memory of the GPU, as its driver tells it (NVML through ctypes; nothing to install). Without a driver: None.

The figures are those of the whole device: other processes on it count, which is what a run that needs memory meets.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

_BUS_ID_BYTES = 32


class _Memory(ctypes.Structure):
    """`nvmlMemory_t` (nvml.h)."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """What one GPU has and what is taken of it, by anybody; `device` is where it sits on the PCI bus."""

    device: str
    used_bytes: int
    total_bytes: int


class _RefusedError(Exception):
    """A driver call did not return 0."""


def open_device_memory(
    device_id: int, *, load: Callable[[str], Any] = ctypes.CDLL
) -> Callable[[], DeviceMemory | None] | None:
    """A reader of one GPU's memory, or None where the driver's libraries are missing or refuse.

    Args:
        device_id: as CUDA counts in this process, so after `CUDA_VISIBLE_DEVICES`.
        load: opens a shared library.
    """
    try:
        nvml = load("libnvidia-ml.so.1")
        bus_id = _bus_id(load("libcuda.so.1"), device_id)
        handle = ctypes.c_void_p()
        _ask(nvml.nvmlInit_v2)
        _ask(nvml.nvmlDeviceGetHandleByPciBusId_v2, bus_id, ctypes.byref(handle))
    except (OSError, AttributeError, _RefusedError):
        return None

    def read() -> DeviceMemory | None:
        memory = _Memory()
        try:
            _ask(nvml.nvmlDeviceGetMemoryInfo, handle, ctypes.byref(memory))
        except _RefusedError:
            return None
        return DeviceMemory(bus_id.decode(), memory.used, memory.total)

    return read


def _bus_id(cuda: Any, device_id: int) -> bytes:
    """Where the device sits: NVML counts all devices of the machine, CUDA only the visible ones, in its own order."""
    device, bus_id = ctypes.c_int(), ctypes.create_string_buffer(_BUS_ID_BYTES)
    _ask(cuda.cuInit, 0)
    _ask(cuda.cuDeviceGet, ctypes.byref(device), device_id)
    _ask(cuda.cuDeviceGetPCIBusId, bus_id, _BUS_ID_BYTES, device)
    return bus_id.value


def _ask(call: Callable[..., int], *arguments: object) -> None:
    if status := call(*arguments):
        raise _RefusedError(status)
