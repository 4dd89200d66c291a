"""A vhost and a Redis key prefix of the demo's own, on whatever broker and Redis it was given; both are removed again.

The broker may be a lasting one, with other people's jobs in it. A user who may not make vhosts works in the given one.
"""

import contextlib
import secrets
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from urllib.parse import SplitResult, quote, unquote, urlsplit

from infra.demo.report import say
from infra.local.errors import StackError
from infra.local.management import Management
from pydantic import SecretStr

from inferq.management import DEFAULT_PORT, DEFAULT_TLS_PORT
from inferq.redis_pools import REDIS_ERRORS, open_redis, redis_problem
from inferq.settings import BrokerSettings, ClientSettings, RedisSettings
from inferq.tls import tls_context, uses_tls

_KEYS_AT_A_TIME = 500


@dataclass(frozen=True, slots=True)
class Place:
    """Where the demo's jobs live.

    Attributes:
        settings: of the demo's own client.
        variables: environment variables that lead other programs to the same place.
    """

    settings: ClientSettings
    variables: Mapping[str, str]

    @property
    def broker_url(self) -> str:
        """AMQP address of the vhost, credentials included."""
        return self.settings.broker.url.get_secret_value()


@contextlib.asynccontextmanager
async def own_place(settings: ClientSettings) -> AsyncIterator[Place]:
    """Have a place for the length of a `with`; whatever was stored there goes with it."""
    suffix = f"demo-{secrets.token_hex(4)}"
    redis = settings.redis.model_copy(update={"prefix": f"{settings.redis.prefix[:40]}-{suffix}"})
    with _own_vhost(settings.broker, f"inferq-{suffix}") as broker:
        try:
            yield _place(settings, broker, redis)
        finally:
            await _delete_keys(redis)


def _place(settings: ClientSettings, broker: BrokerSettings, redis: RedisSettings) -> Place:
    variables = {
        "INFERQ_BROKER__URL": broker.url.get_secret_value(),
        "INFERQ_REDIS__URL": redis.url.get_secret_value(),
        "INFERQ_REDIS__PREFIX": redis.prefix,
        # Empty counts as not set. Its files would win over the variables above.
        "INFERQ_SECRETS_DIR": "",
    }
    if broker.management_url is not None:
        variables["INFERQ_BROKER__MANAGEMENT_URL"] = broker.management_url.get_secret_value()
    return Place(settings.model_copy(update={"broker": broker, "redis": redis}), variables)


@contextlib.contextmanager
def _own_vhost(broker: BrokerSettings, name: str) -> Iterator[BrokerSettings]:
    amqp = urlsplit(broker.url.get_secret_value())
    url = _management_url(broker, amqp)
    management = Management(url, tls=tls_context(broker) if url.startswith("https:") else None)
    try:
        _make(management, name, unquote(amqp.username or "guest"))
    except (StackError, OSError) as reason:
        say(f"in the vhost that was given, since the demo cannot have one of its own: {reason}")
        yield broker
        return
    try:
        yield broker.model_copy(update={"url": SecretStr(amqp._replace(path=f"/{name}").geturl())})
    finally:
        with contextlib.suppress(StackError, OSError):  # the broker may be why the demo ends
            management.call("DELETE", f"/api/vhosts/{name}")


def _make(management: Management, name: str, user: str) -> None:
    management.call("PUT", f"/api/vhosts/{name}", {"description": "of `make demo`; safe to delete"})
    everything = {"configure": ".*", "write": ".*", "read": ".*"}
    try:
        management.call("PUT", f"/api/permissions/{name}/{quote(user, safe='')}", everything)
    except (StackError, OSError):
        management.call("DELETE", f"/api/vhosts/{name}")
        raise


def _management_url(broker: BrokerSettings, amqp: SplitResult) -> str:
    """Where the management API is, credentials included: by the same rules as for `inferq topology`."""
    login = amqp.netloc.rpartition("@")[0]
    if broker.management_url is None:
        host = amqp.netloc.rpartition("@")[2].removesuffix(f":{amqp.port}")
        secure, port = ("s", DEFAULT_TLS_PORT) if uses_tls(broker) else ("", DEFAULT_PORT)
        return f"http{secure}://{login}@{host}:{port}"
    url = urlsplit(broker.management_url.get_secret_value())
    return url.geturl() if url.username else url._replace(netloc=f"{login}@{url.netloc}").geturl()


async def _delete_keys(settings: RedisSettings) -> None:
    redis = open_redis(settings, retries=1)
    try:
        keys = [key async for key in redis.scan_iter(match=f"{settings.prefix}:*", count=_KEYS_AT_A_TIME)]
        for start in range(0, len(keys), _KEYS_AT_A_TIME):
            await redis.unlink(*keys[start : start + _KEYS_AT_A_TIME])
    except REDIS_ERRORS as error:
        say(f"what is stored under {settings.prefix}: stays until it expires: {redis_problem(error, settings)}")
    finally:
        await redis.aclose()
