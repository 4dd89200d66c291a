"""Running models: the only part of the worker that knows ONNX Runtime, and it is imported when a model is opened."""

from inferq_worker.runtime.interface import (
    Array,
    DeviceLost,
    Feeds,
    ModelRefused,
    RowError,
    RunReport,
    RuntimeUnavailable,
    RunWatcher,
    Session,
    SessionBroken,
    SessionInfo,
    TensorSpec,
)
from inferq_worker.runtime.session import open_session
from inferq_worker.runtime.settings import BreakerSettings, RuntimeSettings
from inferq_worker.runtime.turns import Turns

__all__ = [
    "Array",
    "BreakerSettings",
    "DeviceLost",
    "Feeds",
    "ModelRefused",
    "RowError",
    "RunReport",
    "RunWatcher",
    "RuntimeSettings",
    "RuntimeUnavailable",
    "Session",
    "SessionBroken",
    "SessionInfo",
    "TensorSpec",
    "Turns",
    "open_session",
]
