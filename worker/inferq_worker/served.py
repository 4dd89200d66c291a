"""A model at work, as the steps see it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from inferq_worker.models import ModelFile
    from inferq_worker.runtime import Session
    from inferq_worker.scheduling import LatencyTable
    from inferq_worker.windows import Window


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model at work: its session, what is known of its run time, and how much of its urgent lane to hold."""

    file: ModelFile
    session: Session
    latency: LatencyTable
    window: Window
