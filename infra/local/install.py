"""Finds the servers' binaries and, where it may, installs Debian's packages without starting their services.

A package's own daemon is never waited for: its ports may be taken by another broker, and then its start fails while the
binaries are in place, which is all that is needed here.
"""

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from infra.local.errors import StackError

# An unprivileged user's PATH has no sbin, where some of the servers are.
SEARCH_PATH = os.pathsep.join(
    dict.fromkeys(
        [*os.environ.get("PATH", "").split(os.pathsep), "/usr/local/sbin", "/usr/sbin", "/sbin", "/usr/bin", "/bin"]
    )
)
_PACKAGES = {"rabbitmq-server": "rabbitmq-server", "epmd": "erlang-base", "redis-server": "redis-server"}
_POLICY = Path("/usr/sbin/policy-rc.d")
_POLICY_TEXT = "#!/bin/sh\n# Written by inferq while it installs packages; safe to delete.\nexit 101\n"


def find(binary: str) -> str:
    """Return the path of a server's binary.

    Raises:
        StackError: it is not installed.
    """
    path = shutil.which(binary, path=SEARCH_PATH)
    if path is None:
        raise StackError(f"{binary} is not installed")
    return path


def missing() -> tuple[str, ...]:
    """Name the Debian packages whose binaries are not there, RabbitMQ first."""
    absent = [package for binary, package in _PACKAGES.items() if shutil.which(binary, path=SEARCH_PATH) is None]
    if "rabbitmq-server" in absent:  # brings Erlang, and with it epmd
        absent = [package for package in absent if package != "erlang-base"]
    return tuple(absent)


def ensure() -> None:
    """Make sure that the binaries are there, installing them as root on Debian and its kin.

    Raises:
        StackError: they are missing and may not, or could not, be installed; the message says what to type.
    """
    absent = missing()
    if not absent:
        return
    if not may_install():
        raise StackError(advice(absent))
    code = packages(*absent)
    if missing():
        raise StackError(f"apt-get ended with {code} and {', '.join(missing())} is still missing.\n{advice(missing())}")
    print(
        f"{' and '.join(absent)} installed. Their own services are not running, but start with the next boot; "
        "to keep them off: systemctl disable rabbitmq-server redis-server",
        file=sys.stderr,
    )


def may_install() -> bool:
    """Tell whether packages may be installed: as root, with apt-get, unless INFERQ_STACK_INSTALL=no forbids it."""
    allowed = os.environ.get("INFERQ_STACK_INSTALL", "") != "no"
    return allowed and os.geteuid() == 0 and shutil.which("apt-get", path=SEARCH_PATH) is not None


def packages(*names: str) -> int:
    """Install Debian packages without starting their services; returns the status of apt-get."""
    print(f"installing {' and '.join(names)}; no service is started", file=sys.stderr)
    with _services_held_back():
        return _apt_get("install", "-y", "--no-install-recommends", *names)


def advice(absent: tuple[str, ...]) -> str:
    """Say what to type where nothing may be installed for the reader."""
    return (
        "RabbitMQ and Redis are needed, and neither a Docker engine nor these packages are here. One of:\n"
        f"  sudo apt-get install --no-install-recommends {' '.join(absent)}\n"
        "  start a Docker engine\n"
        "  name running servers: INFERQ_STACK=environment INFERQ_BROKER__URL=amqp://... INFERQ_REDIS__URL=redis://..."
    )


def _apt_get(*arguments: str) -> int:
    """Run `apt-get update` and then the command, its output on standard error; returns the command's status."""
    wait_for_lock = ["-q", "-o", "DPkg::Lock::Timeout=300"]
    environment = {**_plain_environment(), "DEBIAN_FRONTEND": "noninteractive"}
    code = 0
    for words in (["update"], arguments):
        done = subprocess.run(  # nosec B607  # found on PATH, as a person would call it
            ["apt-get", *wait_for_lock, *words],
            env=environment,
            stdout=sys.stderr,
            stdin=subprocess.DEVNULL,
            check=False,
        )
        code = done.returncode
    return code


def _plain_environment() -> Mapping[str, str]:
    return {**os.environ, "PATH": SEARCH_PATH}


@contextlib.contextmanager
def _services_held_back() -> Iterator[None]:
    """Keep packages from starting their services, unless the administrator has a policy of their own."""
    foreign = _POLICY.exists() and _POLICY.read_text(errors="replace") != _POLICY_TEXT
    if not foreign:
        _POLICY.write_text(_POLICY_TEXT)
        _POLICY.chmod(0o755)
    try:
        yield
    finally:
        if not foreign:
            _POLICY.unlink(missing_ok=True)
