"""The interpreter as a worker runs it: thread switches, garbage collection, event loop. Benchmarks run it likewise."""

from __future__ import annotations

import gc
import sys
from typing import Any

_SWITCH_S = 0.0005
"""Longest wait of a thread whose run has ended for its turn in Python, whose own 5 ms would leave the device idle."""


def tune() -> None:
    """Hand the interpreter over to waiting threads soon."""
    sys.setswitchinterval(_SWITCH_S)


def started() -> None:
    """What is loaded now stays: leave it out of every later garbage collection.

    How often one comes stays as it is: a message of megabytes is no more than fifty objects to the collector, and one
    that an error's traceback holds must not wait for thousands of others.
    """
    gc.collect()
    gc.freeze()


def loop_factory() -> Any:
    """Makes event loops: uvloop's where there is one, else None for asyncio's own."""
    try:
        import uvloop  # noqa: PLC0415 - not on every platform
    except ImportError:
        return None
    return uvloop.new_event_loop
