"""No password leaves a process: its output, pages and arguments are searched, in success and failure."""

import asyncio
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from tests import models
from tests.e2e.worker_process import Site, Workers, until
from tests.hardened import HardenedSite
from tests.integration.shell import run_inferq

pytestmark = pytest.mark.timeout(180)
CANARY = "c4n4ry-p4ssw0rd"


def with_password(url: str, user: str) -> str:
    """The same place, with a login that it does not know."""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{user}:{CANARY}@{rest.rpartition('@')[2]}"


def closed(scheme: str) -> str:
    return f"{scheme}://me:{CANARY}@127.0.0.1:1/"


@pytest.fixture
def login(site: Site) -> Iterator[Mapping[str, str]]:
    """Of a user who is let in, with the canary as password: the worker's own user, where it has one."""
    management = site.broker.management
    if isinstance(site, HardenedSite):
        management.call("PUT", "/api/users/inferq-gpu", {"password": CANARY, "tags": ""})
        yield {"BROKER__URL": with_password(site.broker.url, "inferq-gpu"), "BROKER__PASSWORD_FILE": ""}
        return
    name = f"canary-{site.broker.vhost}"
    management.call("PUT", f"/api/users/{name}", {"password": CANARY, "tags": "management,policymaker"})
    everything = {"configure": ".*", "write": ".*", "read": ".*"}
    management.call("PUT", f"/api/permissions/{site.broker.vhost}/{name}", everything)
    yield {
        "BROKER__URL": with_password(site.broker.url, name),
        "BROKER__MANAGEMENT_URL": with_password(site.broker.management_url, name),
    }
    management.call("DELETE", f"/api/users/{name}")


async def test_a_worker_tells_nobody_its_passwords_while_all_is_well(
    workers: Workers, login: Mapping[str, str], tmp_path: Path
) -> None:
    worker = await workers.ready("--model", models.scale(tmp_path), **login, LOG__LEVEL="debug")
    pages = [(await worker.page(page))[1] for page in ("/status", "/metrics", "/readyz", "/livez")]
    arguments = await asyncio.to_thread(Path(f"/proc/{worker.process.pid}/cmdline").read_text)
    assert await worker.stop() == 0
    assert "worker.starting" in worker.log()
    for text in (worker.log(), arguments, *map(str, pages)):
        assert CANARY not in text


@pytest.mark.parametrize("scheme", ["", "s"], ids=["plain", "tls"])
@pytest.mark.parametrize("where", ["nobody listens", "a stranger is refused"])
async def test_a_worker_tells_nobody_its_passwords_when_it_cannot_connect(
    site: Site, workers: Workers, tmp_path: Path, scheme: str, where: str
) -> None:
    urls = {"BROKER__URL": closed(f"amqp{scheme}"), "REDIS__URL": closed(f"redis{scheme}")}
    if where == "a stranger is refused":
        if isinstance(site, HardenedSite) and not scheme:
            pytest.skip("these servers speak TLS only")
        amqp = with_password(site.broker.url, "nobody").replace("amqp:", f"amqp{scheme}:")
        redis = with_password(site.redis_url, "nobody").replace("redis:", f"redis{scheme}:")
        # A file would win over the url.
        urls = {"BROKER__URL": amqp, "BROKER__PASSWORD_FILE": "", "REDIS__URL": redis, "REDIS__PASSWORD_FILE": ""}
    urls |= {"BROKER__MANAGEMENT_URL": with_password(site.broker.management_url, "nobody"), "LOG__LEVEL": "debug"}
    worker = workers.start("--model", models.scale(tmp_path), **urls)
    await until(lambda: "is down" in worker.log() and "redis.away" in worker.log(), "both are said to be away")
    pages = [(await worker.page(page))[1] for page in ("/status", "/metrics", "/readyz")]
    await worker.stop()
    for text in (worker.log(), *map(str, pages)):
        assert CANARY not in text


COMMANDS = (("result", "some-id"), ("submit", "--model", "m", "in.jsonl"), ("topology", "check"))


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[0])
@pytest.mark.parametrize(
    "broken",
    [
        {"BROKER__URL": closed("amqp"), "REDIS__URL": closed("redis")},
        {"BROKER__URL": closed("amqps"), "REDIS__URL": closed("rediss")},
        {"BROKER__URL": f"amqp://me:{CANARY}@[bad", "REDIS__URL": f"redis://me:{CANARY}@h:port/"},
        {"BROKER__URL": f"amqp://me:{CANARY}@h/?x={CANARY}", "REDIS__URL": f"redis://h/?password={CANARY}"},
        {"BROKER__URL": f"{CANARY}", "REDIS__URL": f"https://me:{CANARY}@h/"},
        {"BROKER__URL": f"amqp://me:{CANARY}@127.0.0.1:1/", "BROKER__PASSWORD_FILE": "/nowhere"},
    ],
    ids=["closed", "closed, TLS", "no urls", "options", "other schemes", "no file"],
)
async def test_a_command_that_fails_prints_no_password(
    tmp_path: Path, words: tuple[str, ...], broken: Mapping[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.jsonl").write_text('{"x": [[1.0]]}\n')
    times = {"BROKER__CONNECT_TIMEOUT_S": "0.5", "REDIS__CONNECT_TIMEOUT_S": "0.5"}
    done = await run_inferq({**broken, **times, "BROKER__MANAGEMENT_URL": closed("http")}, *words)
    assert done.returncode != 0
    assert done.stderr.strip()
    assert CANARY not in done.stdout + done.stderr
