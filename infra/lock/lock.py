"""Writes the lock files: every package of the project, its development tools and its build, pinned with hashes.

One file each for all supported interpreters: it is resolved once with each of them that is found on PATH, and where the
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
# The extras of each file. The first one decides on versions; the images get the same ones.
LOCK_FILES = {
    "requirements.lock": ("dev",),
    "infra/docker/requirements.lock": ("worker",),
    "infra/docker/requirements-cuda.lock": ("worker", "cuda"),
}
INTERPRETERS = ("3.11", "3.12", "3.13")
_CACHE = PROJECT_FOLDER / ".cache" / "lock"
_HEADER = (
    "# inferq with {extras}, and its build, for Python 3.11 to 3.13. Written by `make lock`.\n"
    "# pip install --require-hashes --no-deps -r {name}\n"
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
    decided: dict[str, list[str]] = {version: [] for version in found}
    for name, extras in LOCK_FILES.items():
        wanted = [*direct_requirements(settings["project"], *extras), *settings["build-system"]["requires"]]
        resolved = {version: resolve(path, version, wanted, decided[version]) for version, path in found.items()}
        (PROJECT_FOLDER / name).write_text(_HEADER.format(name=name, extras=" and ".join(extras)) + render(resolved))
        for version, pins in resolved.items():
            decided[version] = decided[version] or [pin.requirement for pin in pins.values()]
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


def resolve(python: str, version: str, wanted: Iterable[str], decided: Iterable[str]) -> dict[str, Pin]:
    """Resolve the requirements with one interpreter, keeping to versions already decided; returns the pins by name."""
    folder = _CACHE / version
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith("PIP_") or key in _KEPT_SETTINGS
    }
    environment["PIP_CONFIG_FILE"] = os.devnull
    if not (folder / "bin" / "pip-compile").exists():
        subprocess.run([python, "-m", "venv", "--clear", str(folder)], check=True)
        subprocess.run([str(folder / "bin" / "pip"), "install", "-q", "pip-tools"], check=True, env=environment)
    source, target, constraint = (folder / name for name in ("requirements.in", "requirements.txt", "decided.txt"))
    source.write_text("\n".join(wanted) + "\n")
    constraint.write_text("\n".join(decided) + "\n")
    target.unlink(missing_ok=True)
    options = ["--generate-hashes", "--allow-unsafe", "--strip-extras", "--no-header", "--no-annotate", "--quiet"]
    options += ["--no-emit-index-url", "--no-emit-find-links", "--no-emit-trusted-host", "--no-emit-options"]
    command = [
        str(folder / "bin" / "pip-compile"),
        *options,
        f"--constraint={constraint}",
        f"--output-file={target}",
        str(source),
    ]
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
