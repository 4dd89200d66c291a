"""Everything that can go wrong for a client, on one page.

A class says what is known about the job: never sent, perhaps sent, or answered with a failure. `code` is the wire
code that comes nearest, so that failures found here and failures found by a worker can be counted together. Errors of
the AMQP and Redis libraries do not leave the client; they stand as the cause.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from inferq_schemas import Result

__all__ = [
    "AnswerLost",
    "AnswerTimeout",
    "BrokerBlocked",
    "BrokerForbids",
    "BrokerUnavailable",
    "ClientClosed",
    "InferqError",
    "InvalidJob",
    "JobFailed",
    "JobTooLarge",
    "NotSent",
    "QueueFull",
    "SendUnknown",
    "StoreUnavailable",
    "UnknownModel",
]


class InferqError(Exception):
    """Base of all errors of the client."""

    code: str = "internal"


class NotSent(InferqError):  # noqa: N818 - reads as what it says
    """The job is in no queue; nothing will be answered. The subclass says why."""


class InvalidJob(NotSent):
    """The job breaks the contract; sending it again unchanged fails again."""

    code: str = "invalid_input"


class JobTooLarge(InvalidJob):
    """The message would be above the body limit; split the rows, or configure Redis for claim checks."""

    code: str = "too_large"


class UnknownModel(NotSent):
    """The broker has no queue for that model and lane."""

    code: str = "unknown_model"


class QueueFull(NotSent):
    """The queue of that model and lane stayed full for as long as the job could wait."""

    code: str = "overloaded"


class BrokerForbids(NotSent):
    """The broker closed the channel: the exchange is missing, or this user may not publish there."""


class BrokerUnavailable(NotSent):
    """No connection to the broker."""


class SendUnknown(InferqError):  # noqa: N818 - reads as what it says
    """No confirm in time: the job may be queued or not. Sending it again with the same id is safe."""


class BrokerBlocked(SendUnknown):
    """The broker takes no messages (memory or disk alarm) and did not recover in time."""

    code: str = "overloaded"


class AnswerTimeout(InferqError):  # noqa: N818 - reads as what it says
    """No answer in time. The job may still be answered: `inferq result ID` looks."""

    code: str = "deadline_exceeded"


class AnswerLost(InferqError):  # noqa: N818 - reads as what it says
    """The job was answered, but outputs that were kept apart in Redis are gone or out of reach."""


class StoreUnavailable(InferqError):  # noqa: N818 - reads as what it says
    """Redis is needed for this and cannot be reached, or this client works without it."""


class ClientClosed(InferqError):  # noqa: N818 - reads as what it says
    """The client was closed, or not opened yet."""


class JobFailed(InferqError):  # noqa: N818 - reads as what it says
    """The job has its terminal answer, and that is a failure.

    Args:
        code: one of the contract's error codes.
        message: the worker's own words.
        result: the whole answer, with timings and who answered.
    """

    def __init__(self, code: str, message: str, result: Result) -> None:
        super().__init__(f"job {result.id} failed ({code}): {message}")
        self.code = code
        self.message = message
        self.result = result
