#!/usr/bin/env python3
"""Makes the project's virtual environment, or leaves it alone if it is current: `python3 infra/local/environment.py`.

Current means: made by this version of Python from this lock and this `pyproject.toml`. Standard library alone, since
it runs before anything is installed. Writes into the project's folder and nowhere else.
"""

import fcntl
import hashlib
import importlib.util
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
_STAMP = VENV / "inferq-made-from"
_MADE_FROM = ("requirements.lock", "pyproject.toml")
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


def fingerprint() -> str:
    """Digest of what an environment is made from."""
    digest = hashlib.sha256(f"{sys.version_info[:2]} {PROJECT_FOLDER}".encode())
    for name in _MADE_FROM:
        digest.update((PROJECT_FOLDER / name).read_bytes())
    return digest.hexdigest()


def _make_if_outdated() -> None:
    if not _OLDEST <= sys.version_info[:2] <= _NEWEST:
        raise StackError(
            f"inferq needs Python 3.11 to 3.13; {sys.executable} is {sys.version.split()[0]}. "
            "Name another one: make PYTHON=python3.12"
        )
    lock = os.open(PROJECT_FOLDER, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)  # `make demo` and `make test` at once
        if not _STAMP.exists() or _STAMP.read_text() != fingerprint():
            _make()
    finally:
        os.close(lock)


def _make() -> None:
    print("making the virtual environment; the first time takes a few minutes", file=sys.stderr)
    _ensure_venv_module()
    shutil.rmtree(VENV, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(VENV)], check=True)
    _pip("--require-hashes", "--no-deps", "--requirement", "requirements.lock")
    # Last: the build needs hatchling from the lock, and takes nothing from the network.
    _pip("--no-deps", "--no-build-isolation", "--editable", ".")
    _STAMP.write_text(fingerprint())


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
