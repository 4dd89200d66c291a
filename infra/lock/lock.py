"""Writes the lock files: every package of the project, its development tools and its build, pinned with hashes.

One file each for all supported interpreters and systems: uv resolves for all of them at once and marks the lines that
are for some only. (pip-compile would need one run for each, and downloads gigabytes to hash them wherever the registry
offers no more than the standard interface.) The machine's own settings of mirrors and constraints are left out, so that
the same file comes out everywhere. Needs the network; `make lock` runs it.
"""

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

PROJECT_FOLDER = Path(__file__).resolve().parents[2]
# The extras of each file. The first one decides on versions; the images get the same ones.
LOCK_FILES = {
    "requirements.lock": ("dev",),
    "infra/docker/requirements.lock": ("worker",),
    "infra/docker/requirements-cuda.lock": ("worker", "cuda"),
}
_CACHE = PROJECT_FOLDER / ".cache" / "lock"
_OLDEST = "3.11"
_HEADER = (
    "# inferq with {extras}, and its build, for Python 3.11 to 3.13. Written by `make lock`.\n"
    "# pip install --require-hashes --no-deps -r {name}\n"
)


def main() -> int:
    """Resolve and write the files; returns the exit status."""
    settings = tomllib.loads((PROJECT_FOLDER / "pyproject.toml").read_text())
    uv = _install_uv()
    decided = ""
    for name, extras in LOCK_FILES.items():
        wanted = [*direct_requirements(settings["project"], *extras), *settings["build-system"]["requires"]]
        text = _resolve(uv, wanted, decided)
        (PROJECT_FOLDER / name).write_text(_HEADER.format(name=name, extras=" and ".join(extras)) + text)
        decided = decided or without_hashes(text)
    return 0


def direct_requirements(project: Mapping[str, Any], *extras: str) -> list[str]:
    """List the project's requirements with these extras, following the extras of its own that they name."""
    requirements: list[str] = list(project["dependencies"])
    waiting = list(extras)
    while waiting:
        for line in project["optional-dependencies"][waiting.pop()]:
            own = re.fullmatch(rf"{project['name']}\[([^\]]+)\]", line)
            if own:
                waiting += [name.strip() for name in own[1].split(",")]
            else:
                requirements.append(line)
    return requirements


def without_hashes(text: str) -> str:
    """Reduce a lock to its pins, for use as constraints."""
    lines = (line.rstrip(" \\") for line in text.splitlines())
    return "\n".join(line for line in lines if "==" in line and not line.startswith(("#", " "))) + "\n"


def _install_uv() -> Path:
    uv = _CACHE / "bin" / "uv"
    if not uv.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(_CACHE)], check=True)
        subprocess.run([str(_CACHE / "bin" / "pip"), "install", "--quiet", "uv"], check=True)
    return uv


def _resolve(uv: Path, wanted: Iterable[str], decided: str) -> str:
    source, constraints = _CACHE / "requirements.in", _CACHE / "decided.txt"
    source.write_text("\n".join(wanted) + "\n")
    constraints.write_text(decided)
    environment = {key: value for key, value in os.environ.items() if not key.startswith("UV_")}
    if certificates := os.environ.get("PIP_CERT"):  # how to reach the registry is the machine's business
        environment.setdefault("SSL_CERT_FILE", certificates)
    options = ["--universal", "--python-version", _OLDEST, "--generate-hashes", "--strip-extras", "--upgrade"]
    options += ["--no-header", "--no-annotate", "--no-config", "--quiet", "--cache-dir", str(_CACHE / "uv")]
    command = [str(uv), "pip", "compile", *options, "--constraints", str(constraints), str(source)]
    return subprocess.run(command, check=True, env=environment, cwd=_CACHE, stdout=subprocess.PIPE, text=True).stdout


if __name__ == "__main__":
    sys.exit(main())
