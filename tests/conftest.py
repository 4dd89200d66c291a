"""Fixtures for every test that needs a real broker or Redis. One stack serves the whole run; each test gets its own
vhost and key prefix on it.
"""

import os
import secrets
from collections.abc import Iterator

import pytest
import redis
from hypothesis import settings
from tests.stack import Broker, Stack, StackMissingError, own_vhost, running_stack

if not os.environ.get("CI"):
    # In CI hypothesis itself takes the same examples every time and no time limit; at home it looks for new ones.
    settings.register_profile("home", deadline=None)
    settings.load_profile("home")


@pytest.fixture(scope="session")
def stack() -> Iterator[Stack]:
    """RabbitMQ and Redis. Without them a test is skipped at home and fails in CI, where "not tested" must be seen."""
    try:
        with running_stack() as running:
            yield running
    except StackMissingError as reason:
        if os.environ.get("CI", "").lower() in {"", "0", "false"}:
            pytest.skip(str(reason))
        pytest.fail(str(reason), pytrace=False)


@pytest.fixture
def broker(stack: Stack) -> Iterator[Broker]:
    """An empty vhost of the test's own."""
    with own_vhost(stack) as vhost:
        yield vhost


@pytest.fixture
def redis_prefix(stack: Stack) -> Iterator[str]:
    """A key prefix of the test's own; its keys are deleted afterwards."""
    prefix = f"test-{secrets.token_hex(6)}"
    yield prefix
    with redis.Redis.from_url(stack.redis_url) as client:
        for key in client.scan_iter(f"{prefix}:*"):
            client.delete(key)
