"""What end-to-end tests start from: a site of their own, and workers that are ended with the test."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.worker_process import Site, Workers
from tests.stack import Broker, Stack


@pytest.fixture
def site(stack: Stack, broker: Broker, redis_prefix: str, tmp_path: Path) -> Site:
    return Site(broker, stack.redis_url, redis_prefix, tmp_path)


@pytest.fixture
def workers(site: Site) -> Iterator[Workers]:
    started = Workers(site)
    yield started
    started.close()
