"""Passwords change while programs run: the next connection uses the new one, and nobody restarts anything."""

import asyncio
import secrets
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
import redis
from pydantic import SecretStr
from tests.e2e.worker_process import until
from tests.stack import Stack

from inferq.amqp import Link
from inferq.redis_pools import REDIS_ERRORS, open_redis, redis_problem
from inferq.settings import BrokerSettings, ClientSettings, RedisSettings, load_settings


class User:
    """One user of the private broker, whose password changes."""

    def __init__(self, stack: Stack, file: Path) -> None:
        self.name = f"rotating-{secrets.token_hex(4)}"
        self.api = stack.management
        self.file = file
        self.url = f"amqp://{self.name}@{stack.broker_url.rpartition('@')[2]}"
        self.set_password("first")
        everything = {"configure": ".*", "write": ".*", "read": ".*"}
        self.api.call("PUT", f"/api/permissions/%2F/{self.name}", everything)
        file.write_text("first\n")

    def set_password(self, password: str) -> None:
        self.api.call("PUT", f"/api/users/{self.name}", {"password": password, "tags": ""})

    async def cut_off(self) -> None:
        """Have the broker close this user's connections, as soon as it has heard of them itself."""

        def cut() -> bool:
            mine = [one for one in self.api.call("GET", "/api/connections") if one.get("user") == self.name]
            for one in mine:
                self.api.call("DELETE", f"/api/connections/{quote(one['name'], safe='')}")
            return bool(mine)

        await until(lambda: asyncio.to_thread(cut), "the broker knows the connection")


@pytest.fixture
def user(stack: Stack, tmp_path: Path) -> Iterator[User]:
    made = User(stack, tmp_path / "password")
    yield made
    made.api.call("DELETE", f"/api/users/{made.name}")


async def test_a_broker_connection_comes_back_with_the_password_that_is_in_the_file_then(user: User) -> None:
    settings = BrokerSettings(
        url=SecretStr(user.url), password_file=user.file, reconnect_min_s=0.05, reconnect_max_s=0.2
    )
    link = Link(settings, name="rotating")
    life = asyncio.create_task(link.run())
    await link.wait_up(10)
    user.set_password("second")
    await user.cut_off()
    await until(lambda: link.refusal, "the old password is refused")
    assert "broker.password_file" in (link.refusal or "")
    user.file.write_text("second\n")
    await link.up.wait()
    assert link.connects == 2
    life.cancel()
    await asyncio.gather(life, return_exceptions=True)


async def test_a_redis_connection_comes_back_with_the_password_that_is_in_the_file_then(
    stack: Stack, tmp_path: Path
) -> None:
    name, file = f"rotating-{secrets.token_hex(4)}", tmp_path / "password"
    place = stack.redis_url
    with redis.Redis.from_url(place) as admin:
        admin.acl_setuser(name, enabled=True, passwords=["+first"], commands=["+ping"])
        file.write_text("first")
        settings = RedisSettings(url=SecretStr(place.replace("://", f"://{name}@")), password_file=file)
        client = open_redis(settings, retries=0)
        assert await client.ping()
        admin.acl_setuser(name, enabled=True, reset_passwords=True, passwords=["+second"])
        admin.execute_command("CLIENT", "KILL", "USER", name)
        for _ in range(2):  # the killed connection, then the refused login
            with pytest.raises(REDIS_ERRORS):
                await client.ping()
        file.write_text("second")
        assert await client.ping()
        await client.aclose()
        admin.acl_deluser(name)


async def test_a_file_that_holds_no_password_leaves_no_redis_connection_half_set_up(
    stack: Stack, tmp_path: Path, recwarn: pytest.WarningsRecorder, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "password"
    file.write_text("")
    settings = RedisSettings(url=SecretStr(stack.redis_url), password_file=file)
    client = open_redis(settings, retries=0)
    for _ in range(2):
        with pytest.raises(REDIS_ERRORS) as problem:
            await client.hgetall("nothing")
        assert redis_problem(problem.value, settings) == f"redis.password_file {file} is empty"
    await client.aclose()
    assert not recwarn.list
    assert not caplog.records


def test_a_password_in_the_secrets_directory_is_read_from_there_at_every_connect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "inferq_broker__password").write_text("hunter2")
    (tmp_path / "inferq_redis__user").write_text("me")
    monkeypatch.setenv("INFERQ_SECRETS_DIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    settings = load_settings(ClientSettings)
    assert settings.broker.password_file == tmp_path / "inferq_broker__password"
    assert settings.redis.user_file == tmp_path / "inferq_redis__user"
