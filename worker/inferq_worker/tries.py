"""How often a message is tried on its way out, and when trying it as it is makes no more sense."""

from __future__ import annotations

import asyncio

from inferq.amqp import PublishFailed, PublishForbidden, Unencodable

_RETRY_MIN_S, _RETRY_MAX_S = 0.1, 5.0
_BARE_AFTER = 3
_HOPELESS_AFTER = 10
"""With the pauses between them about twenty seconds: time for an exchange to come back."""


class Tries:
    """Counts the failures of one message.

    A broker that closes the channel over a message may do so for ever, and for all that is published beside it.
    """

    def __init__(self) -> None:
        self._forbidden = 0
        self._delay_s = _RETRY_MIN_S

    @property
    def bare(self) -> bool:
        """Whether to go on without what the sender has chosen: headers and time limit."""
        return self._forbidden >= _BARE_AFTER

    @property
    def hopeless(self) -> bool:
        """Whether to give up, and the message back to the broker."""
        return self._forbidden >= _HOPELESS_AFTER

    def failed(self, error: PublishFailed) -> None:
        """Take note of a failure. What cannot even be written is hopeless at once: it was tried bare already."""
        if isinstance(error, Unencodable):
            self._forbidden = _HOPELESS_AFTER
        self._forbidden += isinstance(error, PublishForbidden)

    async def pause(self) -> None:
        """Wait before the next try, longer each time."""
        await asyncio.sleep(self._delay_s)
        self._delay_s = min(self._delay_s * 2, _RETRY_MAX_S)
