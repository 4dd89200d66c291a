"""The client library of inferq, and its command line.

Names are loaded on first use: the worker and `inferq --help` need modules of this package, but not the client.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from inferq.answers import Answer
    from inferq.client import Client
    from inferq.errors import (
        AnswerLost,
        AnswerTimeout,
        BrokerBlocked,
        BrokerForbids,
        BrokerUnavailable,
        ClientClosed,
        InferqError,
        InvalidJob,
        JobFailed,
        JobTooLarge,
        NotSent,
        QueueFull,
        SendUnknown,
        StoreUnavailable,
        UnknownModel,
    )
    from inferq.jobs import Item

__all__ = [
    "Answer",
    "AnswerLost",
    "AnswerTimeout",
    "BrokerBlocked",
    "BrokerForbids",
    "BrokerUnavailable",
    "Client",
    "ClientClosed",
    "InferqError",
    "InvalidJob",
    "Item",
    "JobFailed",
    "JobTooLarge",
    "NotSent",
    "QueueFull",
    "SendUnknown",
    "StoreUnavailable",
    "UnknownModel",
]

_HOMES = {"Answer": "inferq.answers", "Client": "inferq.client", "Item": "inferq.jobs"}


def __dir__() -> list[str]:
    """The public names, loaded or not, for completion in a shell."""
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    """Load a public name from its module; those not in `_HOMES` are errors."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES.get(name, "inferq.errors")), name)
