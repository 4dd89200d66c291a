"""What end-to-end tests start from: a site of their own, and workers that are ended with the test.

INFERQ_TEST_SECURITY=hardened puts all of them on a hardened site: TLS only, and a user with the least rights for
everybody.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from tests.e2e.worker_process import OpenSite, Site, Workers
from tests.hardened import HardenedSite, hardened_site
from tests.stack import Stack, own_prefix, own_vhost

SECURITY = os.environ.get("INFERQ_TEST_SECURITY", "")
if SECURITY not in {"", "hardened"}:
    raise pytest.UsageError(f"INFERQ_TEST_SECURITY={SECURITY!r} is not known; use hardened, or leave it unset")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items if SECURITY else []:
        if (mark := item.get_closest_marker("plain_only")) is not None:
            item.add_marker(pytest.mark.skip(reason=mark.args[0]))


@pytest.fixture(scope="session")
def open_site(request: pytest.FixtureRequest) -> OpenSite:
    """A plain site, or a hardened one."""
    if SECURITY:
        return partial(_nobody_is_refused, request.getfixturevalue("secure_stack"))
    return partial(_plain_site, request.getfixturevalue("stack"))


@contextmanager
def _plain_site(stack: Stack, folder: Path) -> Iterator[Site]:
    with own_vhost(stack) as broker, own_prefix(stack) as prefix:
        yield Site(broker, stack.redis_url, prefix, folder)


@contextmanager
def _nobody_is_refused(stack: Stack, folder: Path) -> Iterator[HardenedSite]:
    """Whatever a test does, nobody asks Redis for more than the shipped ACL allows."""
    with hardened_site(stack, folder) as site:
        yield site
        assert site.refusals() == []


@pytest.fixture
def site(open_site: OpenSite, tmp_path: Path) -> Iterator[Site]:
    with open_site(tmp_path) as opened:
        yield opened


@pytest.fixture
def workers(site: Site) -> Iterator[Workers]:
    started = Workers(site)
    yield started
    started.close()
