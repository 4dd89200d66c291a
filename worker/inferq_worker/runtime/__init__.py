"""Running models: the only part of the worker that knows ONNX Runtime, and it is imported when a model is opened."""

from inferq_worker.runtime.interface import (
    Array,
    Feeds,
    ModelRefused,
    RowError,
    RunReport,
    RuntimeUnavailable,
    Session,
    SessionBroken,
    SessionInfo,
    TensorSpec,
)
from inferq_worker.runtime.session import open_session
from inferq_worker.runtime.settings import RuntimeSettings

__all__ = [
    "Array",
    "Feeds",
    "ModelRefused",
    "RowError",
    "RunReport",
    "RuntimeSettings",
    "RuntimeUnavailable",
    "Session",
    "SessionBroken",
    "SessionInfo",
    "TensorSpec",
    "open_session",
]
