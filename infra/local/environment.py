#!/usr/bin/env python3
"""Makes the project's virtual environment, or leaves it alone if it is current: `python3 infra/local/environment.py`.

Current means: made by this version of Python from this lock and this `pyproject.toml`. Standard library alone, since
it runs before anything is installed. Writes into the project's folder and nowhere else.
"""

import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

# Replaces the script's own folder, see stack.py.
sys.path[0] = str(Path(__file__).resolve().parents[2])

from infra.local import install  # noqa: E402 - importable only after the line above
from infra.local.errors import StackError  # noqa: E402 - the same

PROJECT_FOLDER = Path(__file__).resolve().parents[2]
VENV = PROJECT_FOLDER / ".venv"
# Written last, so that an interrupted run is taken up again.
_STAMP = VENV / "inferq-made-from.json"
_OLDEST, _NEWEST = (3, 11), (3, 13)


def main() -> int:
    """Make the environment if it is not current; returns the exit status."""
    try:
        _make_if_outdated()
    except StackError as reason:
        print(f"environment: {reason}", file=sys.stderr)
        return 2
    except subprocess.CalledProcessError as failure:
        print(f"environment: {' '.join(map(str, failure.cmd))} ended with {failure.returncode}", file=sys.stderr)
        return 2
    return 0


def fingerprints() -> dict[str, str]:
    """What an environment is made from; a part of it is made again only when that part changes."""
    import tomllib  # noqa: PLC0415 - an older Python lacks it, and has to get as far as the message about that

    project = tomllib.loads((PROJECT_FOLDER / "pyproject.toml").read_text())
    # Not the tools' settings: a new lint rule is no reason to install anything.
    installed = json.dumps([project[key] for key in ("project", "build-system")] + [project["tool"]["hatch"]])
    return {
        "python": f"{sys.version_info[0]}.{sys.version_info[1]}",
        "lock": hashlib.sha256((PROJECT_FOLDER / "requirements.lock").read_bytes()).hexdigest(),
        "project": hashlib.sha256(f"{PROJECT_FOLDER} {installed}".encode()).hexdigest(),
    }


def _make_if_outdated() -> None:
    if not _OLDEST <= sys.version_info[:2] <= _NEWEST:
        raise StackError(
            f"inferq needs Python 3.11 to 3.13; {sys.executable} is {sys.version.split()[0]}. "
            "Name another one: make PYTHON=python3.12"
        )
    lock = os.open(PROJECT_FOLDER, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)  # `make demo` and `make test` at once
        _make(_stamped(), fingerprints())
    finally:
        os.close(lock)


def _stamped() -> dict[str, str]:
    try:
        stamped: dict[str, str] = json.loads(_STAMP.read_text())
    except (OSError, ValueError):
        return {}
    return stamped


def _make(present: dict[str, str], wanted: dict[str, str]) -> None:
    if present == wanted:
        return
    print("bringing the virtual environment up to date; the first time takes a few minutes", file=sys.stderr)
    if _version_inside() != wanted["python"]:
        _ensure_venv_module()
        shutil.rmtree(VENV, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", str(VENV)], check=True)
        present = {}
    _STAMP.unlink(missing_ok=True)
    if present.get("lock") != wanted["lock"]:
        _pip("--require-hashes", "--no-deps", "--requirement", "requirements.lock")
    # Last: the build needs hatchling from the lock, and takes nothing from the network.
    _pip("--no-deps", "--no-build-isolation", "--editable", ".")
    _STAMP.write_text(json.dumps(wanted))


def _version_inside() -> str:
    """The Python version of the environment that is there, "" for none or a broken one."""
    ask = "import sys, pip; print(f'{sys.version_info[0]}.{sys.version_info[1]}')"
    try:
        done = subprocess.run([VENV / "bin" / "python", "-c", ask], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()


def _pip(*arguments: str) -> None:
    environment = dict(os.environ)
    environment.setdefault("PIP_CACHE_DIR", str(PROJECT_FOLDER / ".cache" / "pip"))  # not in the user's home
    command = [
        str(VENV / "bin" / "python"),
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        *arguments,
    ]
    subprocess.run(command, check=True, cwd=PROJECT_FOLDER, env=environment)


def _ensure_venv_module() -> None:
    """Debian splits `venv` off its Python; install it where that is allowed."""
    if _has_venv():
        return
    package = f"python{sys.version_info[0]}.{sys.version_info[1]}-venv"
    if install.may_install():
        install.packages(package)
    importlib.invalidate_caches()
    if not _has_venv():
        raise StackError(f"this Python cannot make virtual environments; type: sudo apt-get install {package}")


def _has_venv() -> bool:
    return all(importlib.util.find_spec(module) for module in ("venv", "ensurepip"))


if __name__ == "__main__":
    sys.exit(main())
