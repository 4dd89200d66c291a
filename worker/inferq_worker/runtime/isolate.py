"""Finds the items that spoil a run, so that their companions are still answered. Pure: the run is a parameter."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from inferq_worker.runtime.interface import RowError, RunFailed

Item = TypeVar("Item")
Answer = TypeVar("Answer")


def isolate(items: Sequence[Item], run: Callable[[Sequence[Item]], list[Answer]]) -> list[Answer | RowError]:
    """Run the items together; when that fails, halve them until the culprits are alone.

    One culprit among n costs about 2 log2(n) further runs; n culprits cost 2n - 1 runs in all. Running out of memory
    halves as well, so a batch that is too large for the device is answered in smaller ones.

    Args:
        items: at least one.
        run: answers all items, answer i for item i, or raises `RunFailed` for all of them.
    """
    try:
        return list(run(items))
    except RunFailed as error:
        failure = RowError(error.code, str(error))
    if len(items) == 1:
        return [failure]
    middle = len(items) // 2
    return isolate(items[:middle], run) + isolate(items[middle:], run)
