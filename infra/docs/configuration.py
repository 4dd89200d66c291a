"""Writes the configuration table of the README from the settings; `--check` only compares."""

from __future__ import annotations

import sys
from pathlib import Path

from inferq.settings import settings_table
from inferq_worker.settings import WorkerSettings

README = Path(__file__).parents[2] / "README.md"
START, END = "<!-- configuration: made by `make docs` -->", "<!-- end of configuration -->"


def rendered(text: str) -> str:
    """The README's text with the current table."""
    before, _, rest = text.partition(START)
    _, _, after = rest.partition(END)
    return f"{before}{START}\n{settings_table(WorkerSettings).strip()}\n{END}{after}"


def main() -> int:
    """Write, or compare."""
    text = README.read_text()
    if "--check" in sys.argv:
        return int(rendered(text) != text)
    README.write_text(rendered(text))
    return 0


if __name__ == "__main__":
    sys.exit(main())
