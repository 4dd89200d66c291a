"""`inferq worker` with one value that ends the process in the middle of a run, as a bug in native code would.

And with a wall clock that jumps: SIGUSR1 sets it ahead, SIGUSR2 back. Runs in place of `python -m inferq`; everything
else is the real program.
"""

import os
import signal
import sys
import time

from inferq.cli import main
from inferq_worker.runtime import Feeds
from inferq_worker.runtime.ort import OrtRun

POISON = 666.0
JUMP_S = 45.0
_run = OrtRun.run


def _run_or_die(self: OrtRun) -> Feeds:
    if any((array == POISON).any() for array in self.feeds.values()):
        os.kill(os.getpid(), signal.SIGKILL)
    return _run(self)


def _make_clock_jump() -> None:
    """Under the very names that the program calls."""
    ahead_s = 0.0
    unix_s, unix_ns = time.time, time.time_ns

    def jump(number: int, _frame: object) -> None:
        nonlocal ahead_s
        ahead_s += JUMP_S if number == signal.SIGUSR1 else -JUMP_S

    signal.signal(signal.SIGUSR1, jump)
    signal.signal(signal.SIGUSR2, jump)
    time.time = lambda: unix_s() + ahead_s
    time.time_ns = lambda: unix_ns() + int(ahead_s * 1e9)


if __name__ == "__main__":
    _make_clock_jump()
    OrtRun.run = _run_or_die  # type: ignore[method-assign]  # the point of this program
    sys.exit(main())
