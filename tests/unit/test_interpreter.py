"""The interpreter's settings of a worker."""

import gc
import sys
import weakref
from collections.abc import Iterator

import pytest

from inferq_worker import interpreter


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    switch_s = sys.getswitchinterval()
    yield
    sys.setswitchinterval(switch_s)
    gc.unfreeze()


def test_a_thread_whose_run_has_ended_gets_its_turn_within_a_millisecond() -> None:
    interpreter.tune()
    assert sys.getswitchinterval() < 0.001


def test_what_a_worker_has_loaded_is_not_gone_through_for_garbage_again() -> None:
    interpreter.started()
    assert gc.get_freeze_count() > 10_000


def test_cycles_made_later_are_still_found() -> None:
    class Node:
        """Refers to itself."""

        def __init__(self) -> None:
            self.me = self

    interpreter.started()
    node = weakref.ref(Node())
    gc.collect()
    assert node() is None
