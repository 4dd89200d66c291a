"""The project under faults: `make chaos SEED=1 MINUTES=5 FAULTS=all`.

A load with known answers, a ledger of what was promised to whom, a saboteur with a seeded schedule, and a checker. Runs
on a private pair of its own (`stack.py run`), which also ends whatever is left if this process dies. The last line is
JSON; exit status 1 if a promise was broken, and then the ledger and all logs are kept.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
import time
from typing import TYPE_CHECKING

from infra.local.errors import StackError
from tests.chaos.faults import FAULTS
from tests.chaos.report import report
from tests.chaos.run import ChaosRun, Options
from tests.chaos.saboteur import chosen
from tests.stack import PROJECT_FOLDER

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tests.chaos.run import Outcome

_KEPT = PROJECT_FOLDER / ".cache" / "chaos"


def main(arguments: Sequence[str]) -> int:
    """Run once; returns the exit status (2: it could not be run)."""
    given = _parser().parse_args(arguments)
    if given.list:
        _list()
        return 0
    try:
        kinds = chosen(given.faults)
        folder = _folder(given.seed)
        options = Options(given.seed, given.minutes * 60, kinds, given.rate, folder, given.old or None)
        logging.basicConfig(
            filename=folder / "driver.log", level=logging.INFO, format="%(asctime)s %(name)s %(message)s"
        )
        told = f"seed {given.seed}, {given.minutes:g} min, faults {', '.join(kinds) or 'none'}"
        print(f"chaos: {told}; ledger and logs in {folder}", flush=True)
        outcome = asyncio.run(_cancellable(options))
    except (StackError, ValueError) as reason:
        print(f"chaos: {reason}", file=sys.stderr)
        return 2
    except (KeyboardInterrupt, asyncio.CancelledError):
        print(f"chaos: ended before it was over; ledger and logs: {folder}", file=sys.stderr)
        return 130
    again = f"make chaos SEED={given.seed} MINUTES={given.minutes:g} FAULTS={given.faults} RATE={given.rate:g}"
    report(outcome, options, again=again + (f" OLD={given.old}" if given.old else ""), keep=given.keep)
    return 1 if outcome.failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=1, help="of the schedule and the load")
    parser.add_argument("--minutes", type=float, default=5.0, help="of load")
    parser.add_argument("--faults", default="all", help="all, none, or kinds with commas between them")
    parser.add_argument("--rate", type=float, default=1.0, help="1 = about 150 jobs a second")
    parser.add_argument("--old", default="", metavar="REVISION", help="git revision that the second worker runs")
    parser.add_argument("--keep", action="store_true", help="keep ledger and logs of a good run too")
    parser.add_argument("--list", action="store_true", help="list the kinds of fault")
    return parser


def _list() -> None:
    for kind, fault in FAULTS.items():
        print(f"{kind:18} {fault.about}")


def _folder(seed: int) -> Path:
    folder = _KEPT / f"seed-{seed}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    folder.mkdir(parents=True)
    return folder


async def _cancellable(options: Options) -> Outcome:
    """SIGTERM is taken like Ctrl-C: everything is ended and undone on the way out."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await ChaosRun(options).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
