"""Samples the memory of a live worker, and says when it is over its limit. What follows is the program's affair."""

from __future__ import annotations

import asyncio
import ctypes
import gc
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import structlog

from inferq_worker.observe.memory import Growth, resident

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from inferq_worker.observe.device_memory import DeviceMemory
    from inferq_worker.observe.memory import Resident
    from inferq_worker.observe.metrics import Metrics

_log = structlog.get_logger(__name__)
_OVER_SAMPLES = 3
"""So many samples in a row over the limit: what a single large batch takes and gives back is no reason to leave."""


class MemoryWatch:
    """Keeps the memory figures of this process current until it is over its limit.

    Args:
        limit_bytes: of anonymous memory; None = only watch.
        metrics: takes the figures, and counts the batches that growth is told by.
        interval_s: between samples, > 0.
        read: this process's memory; None where the system does not say.
        give_back: called when the limit is first passed: returns to the system what the process holds for no use.
    """

    def __init__(
        self,
        limit_bytes: int | None,
        metrics: Metrics,
        *,
        interval_s: float,
        read: Callable[[], Resident | None] = resident,
        give_back: Callable[[], None] | None = None,
    ) -> None:
        self._limit_bytes = limit_bytes
        self._metrics = metrics
        self._interval_s = interval_s
        self._read = read
        self.read_device: Callable[[], DeviceMemory | None] | None = None
        """The GPU's memory, where there is one that is used."""
        self._give_back = give_back or give_free_memory_back
        self._growth = Growth()
        self._over = 0
        self._memory: Resident | None = None
        self._device: DeviceMemory | None = None

    async def exceeded(self) -> str:
        """Sample until the limit is passed and stays so; returns that in words. Never, without a limit."""
        while True:
            self.sample()
            if self._memory is not None and self._over >= _OVER_SAMPLES:
                return self._in_words(self._memory)
            await asyncio.sleep(self._interval_s)

    def _in_words(self, memory: Resident) -> str:
        growth = self._growth.bytes_per_thousand
        slope = "" if growth is None else f", growing by {growth:.0f} bytes in a thousand batches"
        return f"{memory.anonymous_bytes} bytes of memory are over the limit of {self._limit_bytes}{slope}"

    def sample(self) -> None:
        """Take one sample."""
        self._memory = memory = self._read()
        self._device = None if self.read_device is None else self.read_device()
        if self._device is not None:
            self._metrics.device_memory(self._device.device, self._device.used_bytes, self._device.total_bytes)
        if memory is None:
            return
        self._growth.saw(self._metrics.batches, memory.anonymous_bytes)
        self._metrics.memory(memory.bytes, memory.anonymous_bytes, self._growth.bytes_per_thousand or 0.0)
        over = self._limit_bytes is not None and memory.anonymous_bytes > self._limit_bytes
        self._over = self._over + 1 if over else 0
        if self._over == 1:
            self._give_back()

    def status(self) -> Mapping[str, Any]:
        """The last sample, for `/status`."""
        return {
            "resident_bytes": self._memory and self._memory.bytes,
            "anonymous_bytes": self._memory and self._memory.anonymous_bytes,
            "limit_bytes": self._limit_bytes,
            "growth_bytes_per_thousand_batches": self._growth.bytes_per_thousand,
            "device": self._device and asdict(self._device),
        }


def give_free_memory_back() -> None:
    """Collect garbage, and have the C library return its free pages, which it otherwise keeps below what is in use."""
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError):
        _log.debug("memory.no_trim", reason="this C library has no malloc_trim")
