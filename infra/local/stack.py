#!/usr/bin/env python3
"""Brings RabbitMQ and Redis up for this project and takes them down: `python3 infra/local/stack.py --help`.

The entry point only: it makes the project folder importable and hands over to `infra.local.command`. Everything under
`infra/local` uses the standard library alone, because it runs before the virtual environment exists.
"""

import sys
from pathlib import Path

if sys.version_info < (3, 11):  # noqa: UP036 - the very message an older interpreter has to be able to print
    sys.exit(
        f"inferq needs Python 3.11 to 3.13; {sys.executable} is {sys.version.split()[0]}.\n"
        "Name another one: make PYTHON=python3.12"
    )

# Replaces the script's own folder: its `redis.py` and `docker.py` must never stand in for the libraries of that name.
sys.path[0] = str(Path(__file__).resolve().parents[2])

from infra.local.command import main  # noqa: E402 - importable only after the line above

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
