"""What can go wrong with one job, and what follows for its message. Steps raise these; the pipeline acts on them."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from inferq_schemas import ErrorCode

_log = logging.getLogger(__name__)

CALLERS_FAULT: frozenset[ErrorCode] = frozenset(
    {"malformed", "unsupported_version", "unknown_model", "invalid_input", "too_large", "conflict", "cancelled"},
)
"""Codes that the caller can mend: the job is answered and acknowledged. Every other code is parked as well."""


class WorkError(Exception):
    """One job fails with a code of the contract; its neighbours go on.

    Args:
        code: what the caller is told; it also decides whether the job is parked for operators.
        message: what was wrong, where, and the mend. Never contains payloads.
        keep: store the failure as the job's outcome. False where that would overwrite the truth (`conflict`).
    """

    def __init__(self, code: ErrorCode, message: str, *, keep: bool = True) -> None:
        super().__init__(message)
        self.code: ErrorCode = code
        self.message = message
        self.keep = keep


class StoreUnavailable(Exception):  # noqa: N818 - reads as what it says
    """Redis did not answer, or refused to write (out of memory). Nothing is known to be stored; try again."""


def as_work_error(error: Exception) -> WorkError:
    """The error as one job's failure: whatever a body does, its sender is answered. The unexpected is logged."""
    if isinstance(error, WorkError):
        return error
    _log.error("a job could not be taken in", exc_info=error)
    return WorkError("internal", f"the worker could not take the job in: {type(error).__name__}", keep=False)
