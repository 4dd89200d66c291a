"""Opens Redis connection pools with every time-out and the retry policy said out loud.

redis-py's own defaults differ between its constructors (ten retries or none). `SET ... NX` must not be retried behind
one's back: a retry whose first attempt did arrive reports the key as taken. Commands like it go through a pool with
`retries=0`.
"""

from __future__ import annotations

import builtins
from typing import TYPE_CHECKING, Any, Final

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.client import PubSub
from redis.asyncio.connection import SSLConnection, parse_url
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialWithJitterBackoff
from redis.credentials import CredentialProvider
from redis.exceptions import (
    AuthenticationError,
    ConnectionError,  # noqa: A004 - Redis' own, which is no built-in one
    NoPermissionError,
    RedisError,
    TimeoutError,  # noqa: A004 - the same
)

from inferq.credentials import SecretFileError, login_of
from inferq.tls import TlsContexts, tls_hint, tls_problem, uses_tls

if TYPE_CHECKING:
    from ssl import SSLContext

    from redis.asyncio.connection import Connection

    from inferq.settings import RedisSettings

__all__ = ["REDIS_ERRORS", "Subscriber", "open_redis", "redis_problem"]

REDIS_ERRORS: Final = (RedisError, OSError, TimeoutError, RuntimeError)
"""What a lost Redis shows as. The last is uvloop's way to say that a connection was closed before something was sent on
it; asyncio's own loop drops such bytes silently, and redis-py expects that."""
_HEALTH_CHECK_S: Final = 15
_BACKOFF_BASE_S: Final = 0.02
_BACKOFF_CAP_S: Final = 0.5


class Subscriber(PubSub):
    """A pub/sub connection that is not restored when it is lost: whoever owns it makes a new one.

    redis-py restores it from whichever call finds the loss, also from two at the same time, and then both read.
    """

    @property
    def connected(self) -> bool:
        """Whether there is a connection that nobody has found lost yet."""
        connection: Connection | None = self.connection  # redis-py leaves it untyped
        return connection is not None and connection.is_connected

    async def _reconnect(self, _conn: object, error: BaseException | None = None, *_: object) -> None:
        # Not disconnected either: somebody may be about to send, and closing it is for the owner.
        raise error or ConnectionError("lost")


def open_redis(
    settings: RedisSettings, *, retries: int, max_connections: int | None = None, patient: bool = False
) -> Redis:
    """A client over a pool of its own; connects on first use. `aclose()` closes the pool.

    Args:
        settings: address, TLS files, time-outs.
        retries: how often a command is tried again after a lost connection or a time-out; 0 for anything that is not
            idempotent.
        max_connections: overrides the settings; callers beyond it wait for at most the socket time-out.
        patient: callers beyond it wait as long as it takes. Who holds a connection gives it back within the time-outs;
            a pool that is busy then never looks like a server that is away.
    """
    options: dict[str, Any] = dict(parse_url(settings.url.get_secret_value()))
    if uses_tls(settings):
        options |= {"connection_class": _TlsConnection, "contexts": TlsContexts(settings)}
    if settings.user_file is not None or settings.password_file is not None:
        options = {name: value for name, value in options.items() if name not in {"username", "password"}}
        options["credential_provider"] = _Login(settings)
    # After those of the url, so that nothing in it outranks a knob.
    options |= {
        "max_connections": max_connections or settings.max_connections,
        "timeout": None if patient else settings.socket_timeout_s,
        "socket_timeout": settings.socket_timeout_s,
        "socket_connect_timeout": settings.connect_timeout_s,
        "health_check_interval": _HEALTH_CHECK_S,
        # Else every connection asks for CLIENT SETINFO, which a hardened Redis refuses and records.
        "driver_info": None,
        "retry": Retry(ExponentialWithJitterBackoff(base=_BACKOFF_BASE_S, cap=_BACKOFF_CAP_S), retries),
    }
    return Redis.from_pool(BlockingConnectionPool(**options))


class _TlsConnection(SSLConnection):
    """Takes its context from us when it connects, so that renewed certificates and another server name are used."""

    def __init__(self, *, contexts: TlsContexts, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._contexts = contexts

    def _connection_arguments(self) -> dict[str, Any]:
        arguments = dict(super()._connection_arguments())
        context: SSLContext = self._contexts.get()
        return {**arguments, "ssl": context}


class NoLogin(ConnectionError):  # noqa: N818 - reads as what it says
    """A file with the user or the password cannot be used."""


class _Login(CredentialProvider):
    """Reads user and password from their files whenever a connection logs in."""

    def __init__(self, settings: RedisSettings) -> None:
        self._settings = settings

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        try:
            login = login_of(self._settings)
        except SecretFileError as error:
            # The one kind of error upon which the library closes a connection that is half set up.
            raise NoLogin(str(error)) from None
        password = login.password or ""
        return (password,) if login.user is None else (login.user, password)

    async def get_credentials_async(self) -> tuple[str] | tuple[str, str]:
        """The same: the base class would print a warning of its own first."""
        return self.get_credentials()


def redis_problem(error: BaseException, settings: RedisSettings, *, first: bool = False) -> str:
    """One line about a Redis error, for people, without credentials; `first` if Redis has never answered so far."""
    if problem := tls_problem(error, settings, "redis"):
        return problem
    line = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    if isinstance(error, NoLogin):
        return f"redis.{error}"
    if isinstance(error, AuthenticationError):
        return f"{line}; mend user and password in redis.url, or in redis.user_file and redis.password_file"
    if isinstance(error, NoPermissionError):
        return f"{line}; this user has no right to it: log in as the one whose task it is"
    if not isinstance(error, ConnectionError | TimeoutError | builtins.ConnectionError | builtins.TimeoutError):
        return line
    return f"{line}; check redis.url and that Redis runs" + (tls_hint(error, settings, "redis") if first else "")
