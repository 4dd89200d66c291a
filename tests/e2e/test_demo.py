"""The demo as a person runs it, on a vhost and a key prefix of the test's own."""

import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
import redis
from infra.demo import model
from infra.demo.errors import DemoError
from tests.stack import PROJECT_FOLDER, Broker, Stack

MARK = "INFERQ_TEST_MARK"


@pytest.mark.stack
@pytest.mark.plain_only("the demo makes vhosts and queues and plays all roles, as administrator of a pair of its own")
@pytest.mark.timeout(150)
def test_the_demo_gets_every_answer_right_and_leaves_nothing_behind(
    stack: Stack, broker: Broker, redis_prefix: str
) -> None:
    try:
        model.fetch()
    except DemoError as reason:
        pytest.skip(str(reason))
    mark = uuid.uuid4().hex
    environment = {
        **os.environ,
        "INFERQ_BROKER__URL": broker.url,
        "INFERQ_BROKER__MANAGEMENT_URL": broker.management_url,
        "INFERQ_REDIS__URL": stack.redis_url,
        "INFERQ_REDIS__PREFIX": redis_prefix,
        MARK: mark,
    }

    done = subprocess.run(
        [sys.executable, str(PROJECT_FOLDER / "infra" / "demo" / "demo.py")],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert "fallback: true" in done.stdout
    assert "answered: deadline_exceeded" in done.stdout
    assert "every file was answered" in done.stdout
    assert " 0 failed" in done.stdout
    assert not [pid for pid in pids() if f"{MARK}={mark}".encode() in environment_of(pid)]
    vhosts = [vhost["name"] for vhost in broker.management.call("GET", "/api/vhosts")]
    assert not [name for name in vhosts if name.startswith("inferq-demo-")]
    with redis.Redis.from_url(stack.redis_url) as client:
        assert list(client.scan_iter(f"{redis_prefix}*")) == []
    queues = broker.management.call("GET", f"/api/queues/{broker.vhost}")
    assert not [queue["name"] for queue in queues if "magika" in queue["name"]]


def pids() -> list[Path]:
    return list(Path("/proc").glob("[0-9]*"))


def environment_of(process: Path) -> bytes:
    try:
        return process.joinpath("environ").read_bytes()
    except OSError:  # another user's, or gone by now
        return b""
