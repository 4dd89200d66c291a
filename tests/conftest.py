"""Fixtures for every test that needs a real broker or Redis. One stack serves the whole run; each test gets its own
vhost and key prefix on it.
"""

import contextlib
import os
from collections.abc import Iterator
from typing import TypeVar

import pytest
from hypothesis import settings
from tests.authority import Authority
from tests.stack import Broker, Stack, StackMissingError, own_prefix, own_vhost, running_stack, tls_stack

T = TypeVar("T")

if not os.environ.get("CI"):
    # In CI hypothesis itself takes the same examples every time and no time limit; at home it looks for new ones.
    settings.register_profile("home", deadline=None)
    settings.load_profile("home")


@pytest.fixture(scope="session")
def stack() -> Iterator[Stack]:
    """RabbitMQ and Redis. Without them a test is skipped at home and fails in CI, where "not tested" must be seen."""
    with _or_skipped(running_stack()) as running:
        yield running


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """Who signs the certificates of this run: `server` for the host stack.test, `client` for whoever connects."""
    made = Authority(tmp_path_factory.mktemp("authority"))
    made.issue("server", "DNS:stack.test")
    made.issue("client")
    return made


@pytest.fixture(scope="session")
def secure_stack(authority: Authority) -> Iterator[Stack]:
    """RabbitMQ and Redis that speak mutual TLS only, apart from the plain pair of the other tests."""
    with _or_skipped(tls_stack(authority.folder)) as running:
        yield running


@contextlib.contextmanager
def _or_skipped(servers: contextlib.AbstractContextManager[T]) -> Iterator[T]:
    try:
        with servers as running:
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
    with own_prefix(stack) as prefix:
        yield prefix
