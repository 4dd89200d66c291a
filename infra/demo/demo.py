#!/usr/bin/env python3
"""A few hundred files go through a real model, and two jobs go where jobs in trouble go: `make demo`.

The entry point only: it makes the project folder importable and hands over to `infra.demo.story`. Needs a broker and
Redis in its environment, as `infra/local/stack.py run` gives them. Exit status 0: every file was answered and every
known answer was right; 1: not so; 2: it could not be shown.
"""

import sys
from pathlib import Path

# Replaces the script's own folder, see infra/local/stack.py.
sys.path[0] = str(Path(__file__).resolve().parents[2])

from infra.demo.story import main  # noqa: E402 - importable only after the line above

if __name__ == "__main__":
    sys.exit(main())
