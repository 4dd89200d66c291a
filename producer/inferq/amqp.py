"""AMQP for both sides: a connection that comes back, and publishing that is confirmed or says why not.

aio-pika connects and keeps the connection; the hot paths use its channels one layer down (aiormq), which costs about
half the CPU a message. Foreign exceptions are translated here and nowhere else. Declares no job queue, ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import re
import struct
import time
import uuid
from typing import TYPE_CHECKING, TypeAlias, cast
from urllib.parse import unquote, urlsplit

import aio_pika
from aiormq.abc import DeliveredMessage
from aiormq.exceptions import (
    AMQPError,
    AuthenticationError,
    ChannelClosed,
    ChannelInvalidStateError,
    DeliveryError,
    InvalidFrameError,
    ProbableAuthenticationError,
    PublishError,
)
from pamqp.commands import Basic

from inferq import eof, lenient
from inferq.credentials import address
from inferq.tls import tls_context, tls_hint, tls_problem, uses_tls
from inferq_schemas import CONTENT_TYPE

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Mapping

    import aiormq
    from aiormq.channel import Channel
    from pamqp.common import FieldTable

    from inferq.settings import BrokerSettings

Properties: TypeAlias = Basic.Properties
OnUp: TypeAlias = "Callable[[Link], Awaitable[None]]"

_log = logging.getLogger(__name__)
_STABLE_AFTER_S = 5.0
"""A connection that lived this long resets the backoff; one that dies at once does not."""
_BLOCKED_POLL_S = 1.0
MAX_EXPIRATION_MS = 2**31 - 1
"""Almost 25 days. RabbitMQ takes up to 2**32 - 1 and closes the channel over more; half of it suits any broker."""
_VHOST_REFUSED = re.compile(r"Connection\.OpenOk.*got <Connection\.Close")
"""How aiormq tells that the broker closed the connection instead of opening the vhost; the broker's words are lost."""
CONNECTION_ERRORS = (AMQPError, ChannelInvalidStateError, OSError, TimeoutError, asyncio.IncompleteReadError)

_ENCODING_ERRORS = (TypeError, ValueError, OverflowError, struct.error)
"""What pamqp raises for values that it cannot write, some of which it has read itself."""


class _WithoutBodies(logging.Filter):
    """aiormq logs a late-returned message whole; bodies are the callers' data and do not belong in logs."""

    def filter(self, record: logging.LogRecord) -> bool:
        if isinstance(record.args, tuple):
            record.args = tuple("<message>" if isinstance(arg, DeliveredMessage) else arg for arg in record.args)
        return True


logging.getLogger("aiormq.channel").addFilter(_WithoutBodies())
# Here, because nothing reads from a broker without this module: one odd message would drop the connection for all,
# and one connection's end would end whoever holds it.
lenient.install()
eof.install()


class BrokerUnreachable(Exception):  # noqa: N818 - reads as what it says
    """No connection to the broker; the message carries the last reason and no credentials."""


class BrokerRefuses(BrokerUnreachable):
    """The broker is there and does not let us in: user, password, vhost, TLS. Trying again unchanged does not help."""


class PublishFailed(Exception):  # noqa: N818 - reads as what it says
    """A message was not confirmed. The subclass says what is known."""


class Unroutable(PublishFailed):
    """Definitely not delivered: no queue is bound for it, or its reply queue is gone."""


class Refused(PublishFailed):
    """Definitely not delivered: the queue is full and told us so (`reject-publish`)."""


class PublishUnknown(PublishFailed):
    """Time-out or lost connection: the message may have arrived. Publishing again is safe, identity is the job id."""


class Unencodable(PublishFailed):
    """Never sent: a property or header has a value that AMQP cannot carry. Trying again as it is fails again."""


class PublishForbidden(PublishFailed):
    """The broker closed the channel: missing exchange (404), no permission (403), or bad arguments (406).

    Other messages in flight on the same channel get this error too; for them it means "unknown".
    """


def properties(
    *,
    correlation_id: str | None = None,
    reply_to: str | None = None,
    expiration_ms: int | None = None,
    headers: Mapping[str, object] | None = None,
    content_type: str = CONTENT_TYPE,
    persistent: bool = True,
) -> Properties:
    """Message properties of the wire contract, with a `message_id` that is fresh for every publish attempt.

    aiormq matches returned messages by `message_id`, so the job id must never stand there. `expiration_ms` is cut to
    `MAX_EXPIRATION_MS`: whoever reads the dead-letter queue finds time left and sends the job on.
    """
    return Basic.Properties(
        content_type=content_type,
        correlation_id=correlation_id,
        reply_to=reply_to,
        expiration=None if expiration_ms is None else str(min(max(0, expiration_ms), MAX_EXPIRATION_MS)),
        headers=cast("FieldTable", dict(headers or {})),
        delivery_mode=2 if persistent else 1,
        message_id=uuid.uuid4().hex,
    )


class Link:
    """One connection to the broker that comes back with backoff and jitter.

    `run` is its life; everything else asks for the state. After every (re)connect `on_up` is awaited with the link, so
    that consumers start again on fresh channels; nothing is restored behind anybody's back.

    Args:
        settings: address, time-outs and backoff bounds.
        name: shown in the broker's connection list.
        on_up: called after each connect, before `up` is set. If it raises, the connection is closed and tried again.
        log_level: of the line that says that the connection is down, and why; repeated only when the reason changes.

    Attributes:
        up: set while connected.
        last_error: why it is down; None while it is up, and only then.
        refusal: the same, where the broker does not let us in (user, password, vhost, TLS); else None.
        connects: how often it connected.
    """

    def __init__(
        self, settings: BrokerSettings, *, name: str, on_up: OnUp | None = None, log_level: int = logging.WARNING
    ) -> None:
        self._settings = settings
        self._name = name
        self._on_up = on_up
        self._connection: aio_pika.abc.AbstractConnection | None = None
        self._address = settings.url.get_secret_value()
        self._log_level = log_level
        self._logged: str | None = None
        self._waiting = 0
        # Up, or refused: nobody needs to wait any longer.
        self._settled = asyncio.Event()
        self.up = asyncio.Event()
        self.is_blocked = False
        self.last_error: str | None = "not connected yet"
        self.refusal: str | None = None
        self.connects = 0

    async def run(self) -> None:
        """Connect, stay connected, connect again; ends only by cancellation, which closes the connection."""
        delay_s = self._settings.reconnect_min_s
        while True:
            started_s = time.monotonic()
            try:
                with loss_is_an_error():
                    await self._live()
            except CONNECTION_ERRORS as error:
                self.refusal = self._refusal(error)
                hint = "" if self.connects else tls_hint(error, self._settings, "broker")
                self.last_error = self.refusal or describe(error) + hint
            finally:
                self._down()
                await self._close()
            end_if_cancelled()
            if time.monotonic() - started_s > _STABLE_AFTER_S:
                delay_s = self._settings.reconnect_min_s
            self._tell(delay_s)
            await asyncio.sleep(delay_s * random.uniform(0.5, 1.5))  # noqa: S311 - jitter, not a secret
            delay_s = min(delay_s * 2, self._settings.reconnect_max_s)

    def _down(self) -> None:
        self.up.clear()
        self.is_blocked = False
        self.last_error = self.last_error or "closed by us"
        if self.refusal is None:
            self._settled.clear()
        else:
            self._settled.set()

    def _tell(self, delay_s: float) -> None:
        # A refusal is raised to whoever waits, and so not logged as well.
        raised = self.refusal is not None and self._waiting > 0
        level = logging.DEBUG if raised or self.last_error == self._logged else self._log_level
        text = "broker connection %s is down (%s), next try in about %.1f s"
        _log.log(level, text, self._name, self.last_error, delay_s)
        if not raised:
            self._logged = self.last_error

    def _refusal(self, error: BaseException) -> str | None:
        return tls_problem(error, self._settings, "broker") or refusal(error, self._address)

    async def _live(self) -> None:
        # Every time anew: passwords and certificates may have been changed since.
        self._address = address(self._settings)
        connection = await aio_pika.connect(
            self._address,
            ssl_context=tls_context(self._settings) if uses_tls(self._settings) else None,
            timeout=self._settings.connect_timeout_s,
            heartbeat=self._settings.heartbeat_s,
            client_properties={"connection_name": self._name},
        )
        self._connection = connection
        self.connects += 1
        self.refusal, self.last_error = None, "connected, its channels are not ready yet"
        lost = self._raw.closing
        if self._on_up is not None:
            await self._on_up(self)
        self.last_error = self._logged = None
        self.up.set()
        self._settled.set()
        _log.info("broker connection %s is up", self._name)
        # Not awaited directly: a cancelled `closing` would look like our own cancellation and end us silently.
        while not lost.done():
            await asyncio.wait([lost], timeout=_BLOCKED_POLL_S)
            self.is_blocked = await self.blocked()
        error = None if lost.cancelled() else lost.exception()
        raise ConnectionError("closed by the broker") from error

    @property
    def _raw(self) -> aiormq.abc.AbstractConnection:
        transport = self._connection.transport if self._connection is not None else None
        if transport is None:
            raise ConnectionError("not connected to the broker")
        return transport.connection

    async def _close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(*CONNECTION_ERRORS):
                async with asyncio.timeout(self._settings.connect_timeout_s):
                    await connection.close()

    async def wait_up(self, timeout_s: float) -> None:
        """Wait until connected.

        Raises:
            BrokerRefuses: at once, if the broker does not let us in.
            BrokerUnreachable: not within `timeout_s`; the message names the reason and what to check.
        """
        self._waiting += 1
        try:
            async with asyncio.timeout(timeout_s):
                await self._settled.wait()
            if self.refusal is not None:
                raise BrokerRefuses(self.refusal)
        except TimeoutError:
            raise BrokerUnreachable(
                f"no broker connection within {timeout_s:g} s: {self.last_error}; "
                "check broker.url, and that RabbitMQ runs",
            ) from None
        finally:
            self._waiting -= 1

    async def channel(self, *, confirms: bool = True) -> Channel:
        """A fresh channel; raises a connection error when the link is down."""
        try:
            with loss_is_an_error():
                return cast("Channel", await self._raw.channel(publisher_confirms=confirms, on_return_raises=True))
        except RuntimeError as error:
            # aiormq's way to say so between the loss of a connection and the moment when we hear of it.
            raise ConnectionError("the broker connection is closed") from error

    async def blocked(self) -> bool:
        """Whether the broker has told this connection to stop publishing (memory or disk alarm)."""
        try:
            async with asyncio.timeout(0.01):
                await self._raw.ready()
        except TimeoutError:
            return True
        except ConnectionError:
            return False
        return False


class Publisher:
    """Publishes with confirms through one channel of a link, and opens that channel anew when it was lost.

    Safe for any number of concurrent callers; confirms are pipelined, so gather publishes instead of awaiting one by
    one (a serial confirmed publish waits for a disk sync each time).
    """

    def __init__(self, link: Link, *, timeout_s: float) -> None:
        self._link = link
        self._timeout_s = timeout_s
        self._channel: Channel | None = None
        self._opening = asyncio.Lock()

    async def publish(
        self,
        body: bytes,
        *,
        exchange: str,
        routing_key: str,
        properties: Properties,
        mandatory: bool = True,
        timeout_s: float | None = None,
        patient: bool = False,
    ) -> None:
        """Publish and wait for the broker's confirm.

        Args:
            body: message body.
            exchange: exchange name; "" is the default exchange.
            routing_key: routing key.
            properties: from `properties()`; its `message_id` must be fresh.
            mandatory: True = a message that reaches no queue raises `Unroutable`.
            timeout_s: overrides the publisher's own; covers waiting for the connection too.
            patient: let the time stand still while the broker has an alarm: it takes then what was sent meanwhile, and
                a second sending with it.

        Raises:
            Unroutable: returned by the broker.
            Refused: negatively acknowledged, the queue is full.
            PublishForbidden: the broker closed the channel over this or a neighbouring publish.
            PublishUnknown: no confirm in time, or the connection went away.
            Unencodable: a property or header cannot be written; nothing was sent.
        """
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        try:
            async with asyncio.timeout(limit_s) as limit:
                with self._extended(limit, limit_s) if patient else contextlib.nullcontext(), loss_is_an_error():
                    channel = await self._open()
                    await channel.basic_publish(
                        body,
                        exchange=exchange,
                        routing_key=routing_key,
                        properties=properties,
                        mandatory=mandatory,
                        wait=False,
                    )
        except PublishError as error:
            raise Unroutable(f"no queue takes {routing_key!r} from exchange {exchange or '(default)'!r}") from error
        except DeliveryError as error:
            raise Refused(f"the queue behind {routing_key!r} is full") from error
        except ChannelClosed as error:
            raise PublishForbidden(describe(error)) from error
        except TimeoutError as error:
            raise PublishUnknown(f"no confirm from the broker within {limit_s:g} s") from error
        except CONNECTION_ERRORS as error:
            raise PublishUnknown(describe(error)) from error
        except _ENCODING_ERRORS as error:
            raise Unencodable(describe(error)) from error

    @contextlib.contextmanager
    def _extended(self, limit: asyncio.Timeout, limit_s: float) -> Iterator[None]:
        """Put a time limit off, again and again, as long as the broker takes no messages."""
        loop = asyncio.get_running_loop()
        timer: asyncio.TimerHandle

        def check() -> None:
            nonlocal timer
            if self._link.is_blocked:
                limit.reschedule(loop.time() + limit_s)
                timer = loop.call_later(0.9 * limit_s, check)

        timer = loop.call_later(0.9 * limit_s, check)
        try:
            yield
        finally:
            timer.cancel()

    async def blocked(self) -> bool:
        """Whether the broker has told our connection to stop publishing; what is sent meanwhile waits there."""
        return await self._link.blocked()

    async def _open(self) -> Channel:
        async with self._opening:
            if self._channel is None or self._channel.is_closed:
                await self._link.up.wait()
                self._channel = await self._link.channel()
            return self._channel


@contextlib.contextmanager
def loss_is_an_error() -> Iterator[None]:
    """Around every wait for the broker: raises ConnectionError where aiormq cancels who waits on what is lost.

    Nobody asked for such a cancellation. A task that takes it for its own ends without a word, and with it a caller's
    wait for an answer, or the consumer of a lane.
    """
    try:
        yield
    except asyncio.CancelledError as error:
        end_if_cancelled()
        raise ConnectionError("what was asked of the broker was lost with its connection") from error


def end_if_cancelled() -> None:
    """Cancel again what was cancelled: a library that catches it on the way out would make a task immortal."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


def describe(error: BaseException) -> str:
    """One line about a broker error, for people, without credentials."""
    if isinstance(error, TimeoutError):
        return "no answer in time"
    text = getattr(error, "reason", None) if isinstance(error, AMQPError) and not error.args else None
    return " ".join(f"{type(error).__name__}: {text or error}".split())[:300]


def refusal(error: BaseException, url: str) -> str | None:
    """What a person must mend if the broker did not let us in; None for all other errors.

    Args:
        error: raised by connecting.
        url: the broker's; only user and vhost of it are shown.
    """
    parts = urlsplit(url)
    user, vhost = unquote(parts.username or "guest"), unquote(parts.path.removeprefix("/")) or "/"
    if isinstance(error, ProbableAuthenticationError | AuthenticationError):
        return (
            f"the broker does not let user {user!r} in: mend user and password in broker.url, or in the files that "
            f"broker.user_file and broker.password_file name ({_said(error)})"
        )
    if isinstance(error, InvalidFrameError) and _VHOST_REFUSED.search(_said(error)):
        return (
            f"the broker does not open vhost {vhost!r} to user {user!r}: mend broker.url, or make the vhost "
            "(`rabbitmqctl add_vhost`), or let the user in (`rabbitmqctl set_permissions`), or raise the vhost's limit "
            "of connections"
        )
    return None


def _said(error: BaseException) -> str:
    """The broker's own words, without the codes before them."""
    return " ".join(str(error.args[-1] if error.args else error).split())[:200]
