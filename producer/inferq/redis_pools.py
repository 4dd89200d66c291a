"""Opens Redis connection pools with every time-out and the retry policy said out loud.

redis-py's own defaults differ between its constructors (ten retries or none). `SET ... NX` must not be retried behind
one's back: a retry whose first attempt did arrive reports the key as taken. Commands like it go through a pool with
`retries=0`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qs, urlsplit

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialWithJitterBackoff
from redis.exceptions import RedisError

from inferq.configuration import ConfigurationError

if TYPE_CHECKING:
    from inferq.settings import RedisSettings

__all__ = ["REDIS_ERRORS", "open_redis", "redis_problem"]

REDIS_ERRORS: Final = (RedisError, OSError, TimeoutError)
_HEALTH_CHECK_S: Final = 15
_BACKOFF_BASE_S: Final = 0.02
_BACKOFF_CAP_S: Final = 0.5


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

    Raises:
        ConfigurationError: the URL has options that no connection takes. They are named, their values are not.
    """
    kwargs: dict[str, Any] = {
        "max_connections": max_connections or settings.max_connections,
        "timeout": None if patient else settings.socket_timeout_s,
        "socket_timeout": settings.socket_timeout_s,
        "socket_connect_timeout": settings.connect_timeout_s,
        "health_check_interval": _HEALTH_CHECK_S,
        "retry": Retry(ExponentialWithJitterBackoff(base=_BACKOFF_BASE_S, cap=_BACKOFF_CAP_S), retries),
    }
    files = {"ssl_ca_certs": settings.ca_file, "ssl_certfile": settings.cert_file, "ssl_keyfile": settings.key_file}
    kwargs.update({name: str(path) for name, path in files.items() if path is not None})
    try:
        pool = BlockingConnectionPool.from_url(settings.url.get_secret_value(), **kwargs)
        # The pool hands what it does not know to its connections: only making one tells. It does not connect.
        pool.make_connection()  # type: ignore[no-untyped-call]  # redis-py does not type it
    except (TypeError, ValueError):
        # `from None`: the cause may repeat a value, and the query may hold a password.
        raise _unknown_options(settings) from None
    return Redis.from_pool(pool)


def _unknown_options(settings: RedisSettings) -> ConfigurationError:
    options = sorted(parse_qs(urlsplit(settings.url.get_secret_value()).query, keep_blank_values=True))
    return ConfigurationError(
        f"redis.url: its options cannot be used as they are ({', '.join(options)[:200]}); take out what is no option "
        "of redis-py, and use the other knobs of section redis for time-outs, TLS files and the size of the pool"
    )


def redis_problem(error: BaseException) -> str:
    """One line about a Redis error, for people, without credentials."""
    return f"{type(error).__name__}: {error}"[:300]
