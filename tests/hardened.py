"""A hardened site, on a pair that speaks TLS only: the roles' users in RabbitMQ and in Redis, and where they meet."""

import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import redis
from pydantic import SecretStr
from tests.e2e.worker_process import Site
from tests.stack import Broker, Stack, redis_options

from inferq.management import Management
from inferq.passwords import passwords_of, rabbitmq_hash, redis_hash
from inferq.provision import ensure_model
from inferq.redis_access import REDIS_USERS, acl_lines
from inferq.settings import BrokerSettings, RedisSettings
from inferq_schemas import REPLIES_EXCHANGE, ModelTopology, Topology, hardened_definitions, roles

USERS = tuple(role.user for role in roles())
TOPOLOGY = "inferq-topology"
_WORKERS = {"inferq-gpu", "inferq-cpu"}


def tls_files(folder: Path) -> dict[str, Any]:
    """Knobs of a client of a pair that speaks TLS, whose certificates lie in this folder."""
    return {
        "ca_file": folder / "ca.pem",
        "cert_file": folder / "client.pem",
        "key_file": folder / "client.key",
        "server_name": "stack.test",
    }


@dataclass(frozen=True, slots=True)
class HardenedSite(Site):
    """A site where everybody has a user and that user's rights, with the password in a file, and TLS both ways.

    Attributes:
        passwords: folder with one file a user.
    """

    passwords: Path

    @property
    def tls(self) -> Path:
        assert self.broker.tls is not None
        return self.broker.tls

    def password(self, user: str) -> str:
        return (self.passwords / user).read_text().strip()

    def admin_redis(self) -> "redis.Redis":
        """For the test itself; the caller closes it."""
        return redis.Redis.from_url(self.redis_url, **redis_options(self.tls))

    def broker_settings(self, user: str) -> BrokerSettings:
        parts = urlsplit(self.broker.url)
        management = urlsplit(self.broker.management_url)
        place = f"https://{management.hostname}:{management.port}"
        return BrokerSettings(
            url=SecretStr(f"amqps://{user}@{parts.hostname}:{parts.port}{parts.path}"),
            password_file=self.passwords / user,
            reply_exchange=REPLIES_EXCHANGE,
            reconnect_max_s=1,
            # Of the others nobody may ask there for more than its own lists.
            **({"management_url": SecretStr(place)} if user == TOPOLOGY else {}),
            **tls_files(self.tls),
        )

    def redis_settings(self, user: str) -> RedisSettings:
        parts = urlsplit(self.redis_url)
        return RedisSettings(
            url=SecretStr(f"rediss://{user}@{parts.hostname}:{parts.port}/0"),
            password_file=self.passwords / user,
            prefix=self.prefix,
            **tls_files(self.tls),
        )

    def amqp_url(self, user: str) -> str:
        parts = urlsplit(self.broker.url)
        return f"amqps://{user}:{self.password(user)}@{parts.hostname}:{parts.port}{parts.path}"

    def make_queues(self, model: str) -> None:
        """As the operator does in a hardened site, where a worker may not."""
        ensure_model(Management.of(self.broker_settings(TOPOLOGY)), ModelTopology(model))

    def knobs(self, user: str) -> dict[str, str]:
        found = Site.knobs(self, user)
        return found | {"MODELS__CREATE_QUEUES": "never"} if user in _WORKERS else found

    def redis_users(self) -> list[str]:
        """The lines of the shipped ACL file, with these passwords; the first turns the default user off."""
        words = passwords_of(self.passwords, REDIS_USERS)
        return acl_lines(self.prefix, password_hashes={user: redis_hash(word) for user, word in words.items()})

    def refusals(self) -> list[Any]:
        """What Redis refused to users for want of a right since the site was opened."""
        with self.admin_redis() as admin:
            return [entry for entry in admin.acl_log() if entry["reason"] != "auth"]


@contextmanager
def hardened_site(stack: Stack, folder: Path, models: Sequence[ModelTopology] = ()) -> Iterator[HardenedSite]:
    """Import users and permissions as an administrator does, and take them back afterwards. One at a time.

    Args:
        stack: one that speaks TLS.
        folder: the test's own.
        models: the only ones that clients and workers may use; none = any.
    """
    name = f"hard-{secrets.token_hex(4)}"
    vhost = Broker(f"{stack.broker_url}{name}", stack.management_url, name, stack.tls)
    site = HardenedSite(vhost, stack.redis_url, name, folder, folder / "passwords")
    hashes = {user: rabbitmq_hash(word) for user, word in passwords_of(site.passwords, USERS).items()}
    management = stack.management
    management.load(hardened_definitions(Topology(models), name, password_hashes=hashes))
    administrator = urlsplit(stack.broker_url).username
    everything = {"configure": ".*", "write": ".*", "read": ".*"}
    management.call("PUT", f"/api/permissions/{name}/{administrator}", everything)
    with site.admin_redis() as admin:
        for line in site.redis_users()[1:]:
            _, user, *rules = line.split(" ")
            admin.execute_command("ACL", "SETUSER", user, "reset", *_whole_selectors(rules))
        admin.acl_log_reset()
        try:
            yield site
        finally:
            admin.execute_command("ACL", "DELUSER", *REDIS_USERS)
            for key in admin.scan_iter(f"{name}:*"):
                admin.delete(key)
            management.call("DELETE", f"/api/vhosts/{name}")
            for user in USERS:
                management.call("DELETE", f"/api/users/{user}")


def _whole_selectors(words: Sequence[str]) -> list[str]:
    """`ACL SETUSER` takes a selector as one argument; an ACL file has it as words."""
    rules: list[str] = []
    for word in words:
        if rules and rules[-1].startswith("(") and not rules[-1].endswith(")"):
            rules[-1] += f" {word}"
        else:
            rules.append(word)
    return rules
