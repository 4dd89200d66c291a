"""Writes `definitions.json` beside it: what every broker of ours has before any model is added to it.

Generated from the one module that holds the topology. Models come later, with `inferq topology add-model`.
"""

import json
from pathlib import Path

from inferq_schemas import Topology

DEFINITIONS = Path(__file__).with_name("definitions.json")


def definitions_text() -> str:
    """Render the definitions of a broker without models."""
    return json.dumps(Topology(()).definitions(), indent=2) + "\n"


if __name__ == "__main__":
    DEFINITIONS.write_text(definitions_text())
