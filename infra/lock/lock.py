"""Writes `requirements.lock`: every package of the project, its development tools and its build, pinned with hashes.

One file for all supported interpreters: it is resolved once with each of them that is found on PATH, and where the
answers differ the line gets a marker. The machine's own pip settings (mirrors, find-links, constraints) are left out,
so that the same file comes out everywhere. Needs the network; `make lock` runs it.
"""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROJECT_FOLDER = Path(__file__).resolve().parents[2]
LOCK_FILE = PROJECT_FOLDER / "requirements.lock"
INTERPRETERS = ("3.11", "3.12", "3.13")
_CACHE = PROJECT_FOLDER / ".cache" / "lock"
_HEADER = (
    "# Everything that `make test` and `make demo` install, for Python 3.11 to 3.13. Written by `make lock`.\n"
    "# pip install --require-hashes --no-deps -r requirements.lock\n"
)
# How to reach the registry is the machine's business; which packages it gets there is not.
_KEPT_SETTINGS = ("PIP_CERT", "PIP_PROXY", "PIP_DEFAULT_TIMEOUT", "PIP_RETRIES")


@dataclass(frozen=True, slots=True)
class Pin:
    """One resolved package: `name==version`, the marker it came with ("" for none), and its hashes."""

    requirement: str
    marker: str
    hashes: tuple[str, ...]


def main() -> int:
    """Resolve with every interpreter and write the file."""
    found = {version: path for version in INTERPRETERS if (path := shutil.which(f"python{version}"))}
    if set(found) != set(INTERPRETERS):
        print(
            f"needs python{', python'.join(INTERPRETERS)} on PATH; found {', '.join(found) or 'none'}", file=sys.stderr
        )
        return 2
    settings = tomllib.loads((PROJECT_FOLDER / "pyproject.toml").read_text())
    wanted = [*direct_requirements(settings["project"], "dev"), *settings["build-system"]["requires"]]
    resolved = {version: resolve(path, version, wanted) for version, path in found.items()}
    LOCK_FILE.write_text(_HEADER + render(resolved))
    return 0


def direct_requirements(project: Mapping[str, Any], extra: str) -> list[str]:
    """List the project's requirements with one extra, following extras of its own that the extra names."""
    requirements: list[str] = list(project["dependencies"])
    waiting = [extra]
    while waiting:
        for line in project["optional-dependencies"][waiting.pop()]:
            own = re.fullmatch(rf"{project['name']}\[([^\]]+)\]", line)
            if own:
                waiting += [name.strip() for name in own[1].split(",")]
            else:
                requirements.append(line)
    return requirements


def resolve(python: str, version: str, wanted: Iterable[str]) -> dict[str, Pin]:
    """Resolve the requirements with one interpreter; returns the pins by package name."""
    folder = _CACHE / version
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith("PIP_") or key in _KEPT_SETTINGS
    }
    environment["PIP_CONFIG_FILE"] = os.devnull
    if not (folder / "bin" / "pip-compile").exists():
        subprocess.run([python, "-m", "venv", "--clear", str(folder)], check=True)
        subprocess.run([str(folder / "bin" / "pip"), "install", "-q", "pip-tools"], check=True, env=environment)
    source, target = folder / "requirements.in", folder / "requirements.txt"
    source.write_text("\n".join(wanted) + "\n")
    target.unlink(missing_ok=True)
    options = ["--generate-hashes", "--allow-unsafe", "--strip-extras", "--no-header", "--no-annotate", "--quiet"]
    options += ["--no-emit-index-url", "--no-emit-find-links", "--no-emit-trusted-host", "--no-emit-options"]
    command = [str(folder / "bin" / "pip-compile"), *options, f"--output-file={target}", str(source)]
    subprocess.run(command, check=True, env=environment, cwd=folder)
    return dict(read_pins(target.read_text()))


def read_pins(text: str) -> Iterator[tuple[str, Pin]]:
    """Read pip-compile's output: package name and pin, in the order of the file."""
    for line in text.replace("\\\n", " ").splitlines():
        if line.strip() and not line.startswith(("#", "-")):
            requirement, *hashes = line.split("--hash=")
            pin, _, marker = requirement.partition(";")
            name = pin.split("==")[0].strip()
            yield name, Pin(pin.strip(), marker.strip(), tuple(sorted(part.strip() for part in hashes)))


def render(resolved: Mapping[str, Mapping[str, Pin]]) -> str:
    """Write one line for each pin, marked with the interpreters it is for unless it is for all of them."""
    users: dict[str, dict[Pin, list[str]]] = defaultdict(lambda: defaultdict(list))
    for version, pins in resolved.items():
        for name, pin in pins.items():
            users[name][pin].append(version)
    return "".join(
        _entry(pin, versions, len(resolved)) for name in sorted(users) for pin, versions in users[name].items()
    )


def _entry(pin: Pin, versions: list[str], every: int) -> str:
    markers = [f"({pin.marker})"] if pin.marker else []
    if len(versions) < every:
        markers.append("(" + " or ".join(f'python_version == "{version}"' for version in versions) + ")")
    condition = f" ; {' and '.join(markers)}" if markers else ""
    return f"{pin.requirement}{condition} \\\n" + " \\\n".join(f"    --hash={text}" for text in pin.hashes) + "\n"


if __name__ == "__main__":
    sys.exit(main())
