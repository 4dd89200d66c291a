"""The worker's memory, from its start to its end: what fits, how much there is, and when to leave because of it.

A worker over its limit drains and ends, to be started again. It does not reopen its sessions instead: that gives back
the arena of ONNX Runtime only, takes the lanes out of service for as long as a start does (load and warm-up), and
leaves whatever else has grown where it is. The end of the process gives back everything.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import structlog

from inferq_worker.budget import Use, Windows, fit, limit_of
from inferq_worker.observe.device_memory import open_device_memory
from inferq_worker.observe.heap import HeapSnapshots
from inferq_worker.observe.memory import container_limit_bytes, resident
from inferq_worker.observe.memory_watch import MemoryWatch, give_free_memory_back

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from inferq_worker.models import ModelFile
    from inferq_worker.observe.metrics import Metrics
    from inferq_worker.settings import WorkerSettings

_log = structlog.get_logger(__name__)


class Memory:
    """Memory of one worker process.

    Args:
        worker: id of this process.
    """

    def __init__(self, settings: WorkerSettings, worker: str, metrics: Metrics) -> None:
        knobs = settings.memory
        self._settings = settings
        self._limit_bytes = limit_of(knobs, container_limit_bytes())
        self._snapshots = (
            None
            if knobs.snapshot_dir is None
            else HeapSnapshots(knobs.snapshot_dir, worker, kept=knobs.snapshots_kept, frames=knobs.snapshot_frames)
        )
        self._watch = MemoryWatch(self._limit_bytes, metrics, interval_s=knobs.sample_every_s)
        metrics.memory_limit(self._limit_bytes or 0)

    def windows(self, models: Sequence[ModelFile]) -> Windows:
        """What may be in hand, now that all models are loaded and warm.

        Raises:
            ConfigurationError: it does not fit into memory.
        """
        give_free_memory_back()
        now = resident()
        if self._limit_bytes is None or now is None:
            if self._limit_bytes is not None:
                _log.warning("memory.unwatched", reason="this system does not tell a process's memory (/proc)")
            return Windows(self._settings.lanes)
        gpu = self._settings.role == "gpu"
        # In the CPU role the fallback queue is the urgent lane. The dead-letter queue is one more in both.
        patient = sum(len(model.lanes) - 1 + model.fallback for model in models) if gpu else 0
        use = Use(self._limit_bytes, now.anonymous_bytes, max(1, len(models)), patient + 1)
        windows = fit(self._settings, use)
        if windows.lowered:
            _log.warning(
                "memory.windows_lowered",
                knobs={knob: f"{was} -> {now}" for knob, was, now in windows.lowered},
                limit_bytes=use.limit_bytes,
                loaded_bytes=use.idle_bytes,
                mend=f"lower limits.body_bytes (now {self._settings.limits.body_bytes}) to the largest message in use, "
                "or give the worker more memory",
            )
        return windows

    def watch_device(self, device_id: int) -> None:
        """Models run on this GPU: show its memory as well, where the driver tells it."""
        self._watch.read_device = open_device_memory(device_id)

    async def exceeded(self) -> None:
        """Watch until the limit is passed; by then a heap snapshot is written, if that is on."""
        why = await self._watch.exceeded()
        path = None
        if self._snapshots is not None:
            try:
                path = await asyncio.to_thread(self._snapshots.take, why)
            except (OSError, MemoryError) as error:
                _log.warning("memory.no_snapshot", reason=str(error))
        _log.error("worker.memory_exceeded", reason=why, snapshot=path and str(path))

    def status(self) -> Mapping[str, Any]:
        """For `/status`."""
        return self._watch.status()
