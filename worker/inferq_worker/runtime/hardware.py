"""Names the hardware that optimised code is made for, so that it is never loaded on another.

Read by the cache only. Nothing here opens a session or imports ONNX Runtime.
"""

import ctypes
import platform
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

_CPU_INFO = Path("/proc/cpuinfo")
_GPU_DRIVER = Path("/proc/driver/nvidia/version")
# CUdevice_attribute of cuda.h.
_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76
_NAME_BYTES = 256

Library = Callable[[str], Any]
"""Loads a shared library by name; raises OSError."""


def driver_present(load: Library = ctypes.CDLL) -> bool:
    """Whether the NVIDIA driver's own library loads on this machine."""
    try:
        load("libcuda.so.1")
    except OSError:
        return False
    return True


def cpu(info: Path = _CPU_INFO) -> str:
    """Architecture and instruction sets of this machine's processor, as the kernel lists them."""
    wanted = {"flags", "features", "model name"}
    found: dict[str, str] = {}
    try:
        for line in info.read_text("utf-8", "replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip().lower() in wanted:
                found.setdefault(name.strip().lower(), " ".join(value.split()))
    except OSError:
        found["processor"] = platform.processor()
    return "; ".join([platform.machine(), *(f"{name}: {value}" for name, value in sorted(found.items()))])


def gpu(device_id: int, load: Library = ctypes.CDLL, driver: Path = _GPU_DRIVER) -> str:
    """Name, compute capability and driver of a GPU, as the driver tells them.

    Raises:
        OSError: there is no driver, or no such device: what was made for it cannot be named.
    """
    library = load("libcuda.so.1")
    device = ctypes.c_int()
    name = ctypes.create_string_buffer(_NAME_BYTES)
    major, minor, version = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    for status in (
        library.cuInit(0),
        library.cuDeviceGet(ctypes.byref(device), device_id),
        library.cuDeviceGetName(name, _NAME_BYTES, device),
        library.cuDeviceGetAttribute(ctypes.byref(major), _CAPABILITY_MAJOR, device),
        library.cuDeviceGetAttribute(ctypes.byref(minor), _CAPABILITY_MINOR, device),
        library.cuDriverGetVersion(ctypes.byref(version)),
    ):
        if status:
            raise OSError(f"the NVIDIA driver answers {status} for GPU {device_id}")
    first = driver.read_text("utf-8", "replace").partition("\n")[0] if driver.exists() else ""
    return f"{name.value.decode('utf-8', 'replace')} sm_{major.value}{minor.value} cuda {version.value} {first}".strip()


def tensorrt_version(load: Library = ctypes.CDLL) -> str:
    """What TensorRT library a session would use; empty where it cannot be told.

    Engines of one version do not load in another.
    """
    try:
        return str(load("libnvinfer.so.10").getInferLibVersion())
    except (OSError, AttributeError):
        names = ("tensorrt-cu13-libs", "tensorrt-cu13", "tensorrt")
        return next((version for name in names if (version := _version(name))), "")


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""
