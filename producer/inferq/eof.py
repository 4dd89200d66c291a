"""A broker connection that ends between two frames is a connection error, as one that ends within a frame is.

aiormq takes such an end for the orderly end of a loop: connecting raises StopAsyncIteration, and whatever waits on a
channel gets a bare Exception. Load balancers bring it about: they accept before they know whether the broker does.
Stands below `amqp`, which installs it; what arrived before the end is read first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from aiormq.connection import FrameReceiver
from aiormq.exceptions import AMQPConnectionError

if TYPE_CHECKING:
    from aiormq.connection import ReceivedFrame

__all__ = ["install"]

_next_frame: Final = FrameReceiver.get_frame


def install() -> None:
    """Put the reader in that says so; doing it twice is harmless."""
    FrameReceiver.get_frame = _frame_or_error  # type: ignore[method-assign]  # there is no hook for it


async def _frame_or_error(self: FrameReceiver) -> ReceivedFrame:
    if self.reader.at_eof():
        raise AMQPConnectionError("the broker, or what stands before it, closed the connection")
    return await _next_frame(self)
