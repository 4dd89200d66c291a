"""The broker and Redis that the environment names.

Exported addresses may be those of a production, or of a stack that was taken down an hour ago. So they are used only
where INFERQ_STACK=environment says so, and only if both answer; every other stack keeps them from what runs on it.
"""

import contextlib
import socket
from collections.abc import Mapping
from urllib.parse import urlsplit

from infra.local import rabbitmq, redis
from infra.local.errors import StackError

BROKER, REDIS = "INFERQ_BROKER__URL", "INFERQ_REDIS__URL"
_ALSO = ("INFERQ_BROKER__MANAGEMENT_URL", "INFERQ_STACK_PROMETHEUS_URL")
# Whatever leads a program to a broker or a Redis. The last two are files, and may win over the environment.
_LEADING = ("INFERQ_BROKER__", "INFERQ_REDIS__", "INFERQ_SECRETS_DIR", "INFERQ_CONFIG")
_LIMIT_S = 5.0


def addresses(environment: Mapping[str, str]) -> dict[str, str]:
    """Read the addresses and see that a broker and a Redis answer there.

    Raises:
        StackError: an address is missing, or nothing answers; names the variable and never the password.
    """
    for name in (BROKER, REDIS):
        if not environment.get(name):
            raise StackError(f"INFERQ_STACK=environment, but {name} is not set. {_mend()}")
    for name, what in ((BROKER, "RabbitMQ"), (REDIS, "Redis")):
        if not _answers(environment[name]):
            raise StackError(
                f"INFERQ_STACK=environment, but no {what} answers at {_shown(environment[name])}, which {name} names; "
                f"a stack that was taken down does not come back on its old ports. {_mend()}"
            )
    return {name: environment[name] for name in (BROKER, REDIS, *_ALSO) if environment.get(name)}


def set_aside(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Name the variables that lead to another broker or Redis and that a stack of our own keeps from its programs."""
    return tuple(sorted(name for name, value in environment.items() if value and name.startswith(_LEADING)))


def _mend() -> str:
    return f"Name a running pair, or have one brought up: unset INFERQ_STACK {BROKER} {REDIS} {_ALSO[0]}"


def _answers(url: str) -> bool:
    """Tell whether the right kind of server is there; over TLS only whether something listens."""
    with contextlib.suppress(OSError, ValueError):
        parts = urlsplit(url)
        host = parts.hostname or ""
        match parts.scheme:
            case "amqp":
                return rabbitmq.speaks_amqp(parts.port or 5672, host)
            case "redis":
                return redis.answers(parts.port or 6379, host)
            case "amqps" | "rediss":
                default_port = 5671 if parts.scheme == "amqps" else 6379
                socket.create_connection((host, parts.port or default_port), _LIMIT_S).close()
                return True
            case "unix":
                with socket.socket(socket.AF_UNIX) as connection:
                    connection.connect(parts.path)
                return True
    return False


def _shown(url: str) -> str:
    """The address without user and password."""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}"
