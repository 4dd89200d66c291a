"""Writes what every broker and Redis of ours has before any model is added to it, plain and hardened.

Generated from the modules that hold topology and access. Models come later, with `inferq topology add-model`. The
hardened files hold no passwords: nobody can log in until the users have been given theirs.
"""

import json
from collections.abc import Callable
from pathlib import Path

from inferq.redis_access import acl_lines
from inferq_schemas import Topology, hardened_definitions

DEFINITIONS = Path(__file__).with_name("definitions.json")
HARDENED_DEFINITIONS = Path(__file__).with_name("definitions-hardened.json")
REDIS_USERS = Path(__file__).parents[1] / "redis" / "users.acl"


def definitions_text() -> str:
    """Render the definitions of a broker without models."""
    return json.dumps(Topology(()).definitions(), indent=2) + "\n"


def hardened_text() -> str:
    """Render the same with a user for each role."""
    return json.dumps(hardened_definitions(Topology(())), indent=2) + "\n"


def acl_text() -> str:
    """Render the users of Redis, for the default key prefix."""
    return "\n".join(acl_lines("inferq")) + "\n"


FILES: dict[Path, Callable[[], str]] = {
    DEFINITIONS: definitions_text,
    HARDENED_DEFINITIONS: hardened_text,
    REDIS_USERS: acl_text,
}

if __name__ == "__main__":
    for path, text in FILES.items():
        path.write_text(text())
