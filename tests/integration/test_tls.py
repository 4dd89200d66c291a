"""TLS to real servers: verified both ways, and a clear word for whatever is wrong."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr
from tests.authority import Authority, Certificate
from tests.hardened import tls_files
from tests.stack import Stack

from inferq.amqp import BrokerUnreachable, Link
from inferq.redis_pools import REDIS_ERRORS, open_redis, redis_problem
from inferq.settings import BrokerSettings, RedisSettings

LIMIT_S = 5.0


@pytest.fixture(scope="session")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """An authority that the servers do not trust."""
    made = Authority(tmp_path_factory.mktemp("stranger"))
    made.issue("client")
    return made


class Place:
    """Where to connect, with the files that make it work; tests spoil one of them."""

    def __init__(self, stack: Stack, folder: Path) -> None:
        self.amqps, self.rediss = stack.broker_url, stack.redis_url
        self.files = tls_files(folder)

    async def broker(self, url: str | None = None, **changes: Any) -> str:
        """What is wrong with the broker's connection; "" if nothing is."""
        return await broker_problem(url or self.amqps, **{**self.files, **changes})

    async def store(self, url: str | None = None, **changes: Any) -> str:
        """What is wrong with Redis's connection; "" if nothing is."""
        return await redis_problem_of(url or self.rediss, **{**self.files, **changes})

    async def both(self, **changes: Any) -> tuple[str, str]:
        return await self.broker(**changes), await self.store(**changes)


async def broker_problem(url: str, **files: Any) -> str:
    link = Link(BrokerSettings(url=SecretStr(url), **files), name="test")
    life = asyncio.create_task(link.run())
    try:
        await link.wait_up(LIMIT_S)
    except BrokerUnreachable as error:
        return str(error)
    else:
        return ""
    finally:
        life.cancel()
        await asyncio.gather(life, return_exceptions=True)


async def redis_problem_of(url: str, **files: Any) -> str:
    settings = RedisSettings(url=SecretStr(url), connect_timeout_s=1, **files)
    client = open_redis(settings, retries=0)
    try:
        assert await client.ping()
    except REDIS_ERRORS as error:
        return redis_problem(error, settings, first=True)
    else:
        return ""
    finally:
        await client.aclose()


@pytest.fixture
def place(secure_stack: Stack, authority: Authority) -> Place:
    return Place(secure_stack, authority.folder)


async def test_both_servers_are_reached_when_both_sides_are_who_they_say(place: Place) -> None:
    assert await place.both() == ("", "")


async def test_an_encrypted_key_is_opened_with_its_password_file(
    place: Place, authority: Authority, tmp_path: Path
) -> None:
    locked = authority.issue("locked", password="let me in")  # noqa: S106 - of a key made for this test
    (tmp_path / "password").write_text("let me in\n")
    files = {"cert_file": locked.cert, "key_file": locked.key, "key_password_file": tmp_path / "password"}
    assert await place.both(**files) == ("", "")
    (tmp_path / "password").write_text("wrong\n")
    for problem in await place.both(**files):
        assert "another password than in" in problem
    for problem in await place.both(**files | {"key_password_file": None}):
        assert "needs key_password_file" in problem


async def test_a_server_of_an_unknown_authority_is_not_spoken_to(place: Place, stranger: Authority) -> None:
    for problem in [*await place.both(ca_file=stranger.ca), *await place.both(ca_file=None)]:
        assert "signed by an authority that is not trusted: name the authority's file in" in problem


async def test_a_server_with_another_name_is_not_spoken_to(place: Place) -> None:
    for problem in await place.both(server_name=None):
        assert "is for another host" in problem
        assert ".server_name" in problem


async def test_a_missing_client_certificate_is_said(place: Place) -> None:
    for problem in await place.both(cert_file=None, key_file=None):
        assert "asks for a client certificate" in problem
        assert ".cert_file" in problem


async def test_a_client_certificate_of_another_authority_is_said(place: Place, stranger: Authority) -> None:
    files = {"cert_file": stranger.folder / "client.pem", "key_file": stranger.folder / "client.key"}
    for problem in await place.both(**files):
        assert "the server does not accept our certificate" in problem
        assert "and who signed it" in problem


async def test_files_that_cannot_be_used_are_named(place: Place, authority: Authority, tmp_path: Path) -> None:
    for problem in await place.both(ca_file=tmp_path / "none.pem"):
        assert "none.pem cannot be read: No such file" in problem
    for problem in await place.both(ca_file=authority.folder / "client.key"):
        assert "client.key does not hold a PEM certificate" in problem
    for problem in await place.both(key_file=authority.folder / "server.key"):
        assert "server.key is not the key of cert_file" in problem


async def test_tls_to_a_plain_port_and_the_reverse_are_told_apart(place: Place, stack: Stack) -> None:
    plain_amqp = stack.broker_url.replace("amqp://", "amqps://")
    plain_redis = stack.redis_url.replace("redis://", "rediss://")
    assert "broker.url does not speak TLS" in await place.broker(plain_amqp)
    assert "redis.url does not speak TLS" in await place.store(plain_redis)
    nothing = dict.fromkeys(place.files)
    assert "write amqps://" in await place.broker(place.amqps.replace("amqps", "amqp"), **nothing)
    assert "write rediss://" in await place.store(place.rediss.replace("rediss", "redis"), **nothing)


@contextlib.asynccontextmanager
async def terminated(certificate: Certificate, target: str) -> AsyncIterator[int]:
    """A port that ends TLS with this certificate, asks for none, and passes everything on to a plain server."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate.cert, certificate.key)
    port = int(target.rpartition(":")[2].partition("/")[0])

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65_536):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(pass_on(reader, inner_writer), pass_on(inner_reader, writer))

    async with await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context) as server:
        yield server.sockets[0].getsockname()[1]


async def test_an_expired_certificate_is_called_expired(stack: Stack, authority: Authority) -> None:
    expired = authority.issue("expired", "IP:127.0.0.1", days=-1)
    async with terminated(expired, stack.broker_url) as amqps, terminated(expired, stack.redis_url) as rediss:
        problems = [
            await broker_problem(f"amqps://127.0.0.1:{amqps}/", ca_file=authority.ca),
            await redis_problem_of(f"rediss://127.0.0.1:{rediss}/0", ca_file=authority.ca),
        ]
    for problem in problems:
        assert "has expired: renew it on the server" in problem


async def test_a_plain_tls_url_is_enough_where_the_system_trusts_the_authority(
    stack: Stack, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.ca))  # OpenSSL's own way to name the system's authorities
    usual = authority.issue("usual", "DNS:localhost")
    login = stack.broker_url.removeprefix("amqp://").rpartition("@")[0]
    async with terminated(usual, stack.broker_url) as amqps, terminated(usual, stack.redis_url) as rediss:
        assert await broker_problem(f"amqps://{login}@localhost:{amqps}/") == ""
        assert await redis_problem_of(f"rediss://localhost:{rediss}/0") == ""


async def test_a_renewed_certificate_is_used_from_the_next_connection_on(
    place: Place, authority: Authority, stranger: Authority, tmp_path: Path
) -> None:
    cert, key = tmp_path / "tls.crt", tmp_path / "tls.key"
    for name, source in ((cert, "client.pem"), (key, "client.key")):
        name.write_bytes((stranger.folder / source).read_bytes())
    settings = RedisSettings(url=SecretStr(place.rediss), **{**place.files, "cert_file": cert, "key_file": key})
    client = open_redis(settings, retries=0)
    with pytest.raises(REDIS_ERRORS):
        await client.ping()
    for name, source in ((cert, "client.pem"), (key, "client.key")):
        name.write_bytes((authority.folder / source).read_bytes())
    assert await client.ping()
    await client.aclose()
