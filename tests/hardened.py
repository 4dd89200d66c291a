"""A hardened site on the private pair with TLS: the roles' users in RabbitMQ and in Redis, and where they meet."""

import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import redis
from infra.local.management import Management
from pydantic import SecretStr
from tests.authority import Authority
from tests.stack import TlsStack

from inferq.passwords import passwords_of, rabbitmq_hash, redis_hash
from inferq.redis_access import REDIS_USERS, acl_lines
from inferq.settings import BrokerSettings, ClientOptions, ClientSettings, RedisSettings
from inferq_schemas import ModelTopology, Topology, hardened_definitions, roles

USERS = tuple(role.user for role in roles())


@dataclass(frozen=True, slots=True)
class HardenedSite:
    """Where hardened workers and clients meet.

    Attributes:
        stack: the servers.
        authority: who signed everybody's certificate.
        vhost: their vhost.
        prefix: of their keys.
        passwords: folder with one file a user.
    """

    stack: TlsStack
    authority: Authority
    vhost: str
    prefix: str
    passwords: Path

    def password(self, user: str) -> str:
        return (self.passwords / user).read_text().strip()

    @property
    def management(self) -> Management:
        """As administrator."""
        return Management(self.stack.stack.management_url)

    @property
    def admin_redis(self) -> "redis.Redis":
        """As Redis's default user, which this site's ACL would turn off."""
        return redis.Redis.from_url(self.stack.stack.redis_url)

    def _files(self) -> dict[str, Any]:
        folder = self.authority.folder
        return {
            "ca_file": self.authority.ca,
            "cert_file": folder / "client.pem",
            "key_file": folder / "client.key",
            "server_name": "stack.test",
        }

    def broker(self, user: str) -> BrokerSettings:
        """How a user reaches RabbitMQ: TLS both ways, the password from its file."""
        url = f"amqps://{user}@127.0.0.1:{self.stack.amqps_port}/{quote(self.vhost, safe='')}"
        return BrokerSettings(
            url=SecretStr(url),
            password_file=self.passwords / user,
            reply_exchange="inferq.replies",
            reconnect_min_s=0.05,
            reconnect_max_s=0.5,
            **self._files(),
        )

    def redis(self, user: str) -> RedisSettings:
        """How a user reaches Redis."""
        url = f"rediss://{user}@127.0.0.1:{self.stack.rediss_port}/0"
        return RedisSettings(
            url=SecretStr(url), password_file=self.passwords / user, prefix=self.prefix, **self._files()
        )

    def client(self, user: str = "inferq-client") -> ClientSettings:
        return ClientSettings(
            broker=self.broker(user), redis=self.redis(user), client=ClientOptions(deadline_s=60, cpu_reserve_ratio=0.3)
        )

    def environment(self, user: str) -> dict[str, str]:
        """The same for a command, names without `INFERQ_`; the default addresses of other tests are taken out."""
        knobs = {"BROKER__MANAGEMENT_URL": ""}
        for section, settings in (("BROKER", self.broker(user)), ("REDIS", self.redis(user))):
            for name in settings.model_fields_set:
                value = getattr(settings, name)
                knobs[f"{section}__{name.upper()}"] = str(
                    value.get_secret_value() if isinstance(value, SecretStr) else value
                )
        return knobs


@contextmanager
def hardened_site(
    stack: TlsStack, authority: Authority, folder: Path, models: Sequence[ModelTopology]
) -> Iterator[HardenedSite]:
    """Import users and permissions as an administrator does, and take them back afterwards."""
    name = f"hard-{secrets.token_hex(4)}"
    site = HardenedSite(stack, authority, name, name, folder / "passwords")
    hashes = {user: rabbitmq_hash(word) for user, word in passwords_of(site.passwords, USERS).items()}
    site.management.load(hardened_definitions(Topology(models), site.vhost, password_hashes=hashes))
    words = passwords_of(site.passwords, REDIS_USERS)
    lines = acl_lines(site.prefix, password_hashes={user: redis_hash(word) for user, word in words.items()})
    with site.admin_redis as admin:
        for line in lines:
            _, user, *rules = line.split(" ")
            # The default user is the one that sets the others, here.
            if user != "default":
                admin.execute_command("ACL", "SETUSER", user, "reset", *_whole_selectors(rules))
        try:
            yield site
        finally:
            admin.execute_command("ACL", "DELUSER", *REDIS_USERS)
            site.management.call("DELETE", f"/api/vhosts/{site.vhost}")
            for user in USERS:
                site.management.call("DELETE", f"/api/users/{user}")


def _whole_selectors(words: Sequence[str]) -> list[str]:
    """`ACL SETUSER` takes a selector as one argument; an ACL file has it as words."""
    rules: list[str] = []
    for word in words:
        if rules and rules[-1].startswith("(") and not rules[-1].endswith(")"):
            rules[-1] += f" {word}"
        else:
            rules.append(word)
    return rules
