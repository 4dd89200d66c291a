"""The `inferq` command in a process of its own, for tests that only need its answer."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Mapping


async def run_inferq(knobs: Mapping[str, str], *words: str, limit_s: float = 60.0) -> subprocess.CompletedProcess[str]:
    """Run it to its end.

    Args:
        knobs: environment, names without `INFERQ_`; empty ones are left out.
        words: of the command line.
        limit_s: longest that it may take.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith("INFERQ_")}
    return await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "inferq", *words],
        env=kept | {f"INFERQ_{name}": value for name, value in knobs.items() if value},
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )
