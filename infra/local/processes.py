"""Starts servers apart from the terminal, finds them again, and ends exactly those.

A process belongs to a run folder if its process id *and* start time stand in the folder's records, or if it carries the
folder's name in its environment (the servers' own helpers, and what a command left behind: nobody recorded those).
Signals go through a pidfd that was opened before that check, so a recycled process id is never hit. Linux only.
"""

import contextlib
import ctypes
import json
import os
import random
import signal
import socket
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from infra.local.errors import StackError

FOLDER_VARIABLE = "INFERQ_STACK_FOLDER"
LOOPBACK = "127.0.0.1"
# Below Linux's ephemeral range (32768-60999), so that no outgoing connection takes a port between choice and use.
_PORTS = range(20_000, 32_000)
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class Identity:
    """One process for ever: `start_ticks` since the boot named by `boot_id` tells it from a later holder of its pid."""

    pid: int
    start_ticks: int
    boot_id: str

    @classmethod
    def of(cls, pid: int) -> "Identity | None":
        """Identify a live process; None if there is none (a zombie counts as none)."""
        try:
            # The command's name may hold spaces and parentheses, so count fields from the last one.
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return None
        return None if fields[0] in "ZX" else cls(pid, int(fields[19]), _BOOT_ID.read_text().strip())

    @classmethod
    def read(cls, path: Path) -> "Identity | None":
        """Read a record; None if it is missing or was cut short by a crash."""
        try:
            return cls(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError):
            return None

    def write(self, path: Path) -> None:
        """Record the process."""
        path.write_text(json.dumps(asdict(self)))

    def alive(self) -> bool:
        """Tell whether this very process still runs."""
        return Identity.of(self.pid) == self

    def send(self, number: signal.Signals) -> bool:
        """Signal this very process, never a later holder of its pid; returns whether it was there."""
        with contextlib.suppress(ProcessLookupError):
            handle = os.pidfd_open(self.pid)
            try:
                if self.alive():
                    signal.pidfd_send_signal(handle, number)
                    return True
            finally:
                os.close(handle)
        return False


def connected(port: int, host: str = LOOPBACK, tls: ssl.SSLContext | None = None) -> socket.socket:
    """Connect to a server of ours, for one short question.

    Raises:
        OSError: nothing listens there, or what listens does not speak TLS.
    """
    plain = socket.create_connection((host, port), timeout=2.0)
    try:
        return plain if tls is None else tls.wrap_socket(plain, server_hostname=host)
    except OSError:
        plain.close()
        raise


def start(
    command: Sequence[str], *, name: str, folder: Path, environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start a server in a session of its own, output in `<name>.log`, identity in `<name>.pid`.

    Args:
        command: program and arguments.
        name: what to call the two files.
        folder: the run folder; it is also the mark in the environment by which helpers are found.
        environment: the server's whole environment; nothing of ours leaks in.
    """
    with (folder / f"{name}.log").open("ab") as log:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={**environment, FOLDER_VARIABLE: str(folder)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    identity = Identity.of(process.pid)
    if identity is not None:  # None: it has ended already, and the wait for readiness will say so
        identity.write(folder / f"{name}.pid")
    return process


def of_folder(folder: Path) -> tuple[int, ...]:
    """Find the live processes that were started for a run folder, their helpers included."""
    return tuple(sorted({*_recorded(folder), *_marked(folder)}))


def servers_of_folder(folder: Path) -> int:
    """Count the live servers of a run folder, without their helpers and without what runs on the stack."""
    return sum(1 for _ in _recorded(folder))


def end(folder: Path, *, grace_s: float, kill_wait_s: float = 10.0) -> None:
    """End every process of a run folder and wait until they are gone.

    Servers are asked first; whatever is left after `grace_s` is killed.

    Raises:
        StackError: something survived SIGKILL for `kill_wait_s`.
    """
    for pid in _recorded(folder):
        _signal(pid, signal.SIGTERM, folder)
    if _gone(folder, grace_s):
        return
    for pid in of_folder(folder):
        _signal(pid, signal.SIGKILL, folder)
    if not _gone(folder, kill_wait_s):
        raise StackError(f"processes {of_folder(folder)} of {folder} do not end; end them by hand")


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends, so that `collect_children` can see them off."""
    set_child_subreaper = 36  # linux/prctl.h; a kernel that lacks it only leaves the zombies to pid 1
    ctypes.CDLL(None).prctl(set_child_subreaper, 1, 0, 0, 0)


def collect_ended(*, spare: int = 0) -> None:
    """See off children that have ended: a node starts a short-lived helper every minute, and those add up.

    Args:
        spare: a child whose exit status somebody else waits for.
    """
    with contextlib.suppress(ChildProcessError):  # no child is left
        while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if ended.si_pid == spare:
                return
            os.waitpid(ended.si_pid, 0)


def collect_children(limit_s: float) -> None:
    """Wait for children that are ending, so that no zombie stays where pid 1 does not care (a bare container)."""
    give_up_s = time.monotonic() + limit_s
    with contextlib.suppress(ChildProcessError):  # no child is left
        while time.monotonic() < give_up_s:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.02)


def wait_until(
    ready: Callable[[], bool], *, what: str, limit_s: float, servers: Sequence[subprocess.Popen[bytes]] = ()
) -> None:
    """Poll a condition, giving up at once when a server that it waits for has ended.

    Raises:
        StackError: a server ended, or `limit_s` passed.
    """
    give_up_s = time.monotonic() + limit_s
    while not ready():
        if any(server.poll() is not None for server in servers):
            raise StackError(f"{what} ended while starting")
        if time.monotonic() > give_up_s:
            raise StackError(f"{what} was not ready within {limit_s:.0f} s")
        time.sleep(0.05)


def free_ports(count: int) -> tuple[int, ...]:
    """Choose distinct loopback ports that nobody listens on."""
    with contextlib.ExitStack() as held:
        return tuple(_claim(held) for _ in range(count))


def _claim(held: contextlib.ExitStack) -> int:
    for port in random.sample(_PORTS, len(_PORTS)):
        attempt = socket.socket()
        with contextlib.suppress(OSError):
            attempt.bind((LOOPBACK, port))
            held.enter_context(attempt)
            return port
        attempt.close()
    raise StackError(f"no free port between {_PORTS.start} and {_PORTS.stop} on {LOOPBACK}")


def _recorded(folder: Path) -> Iterator[int]:
    for path in folder.glob("*.pid"):
        identity = Identity.read(path)
        if identity is not None and identity.alive():
            yield identity.pid


def _marked(folder: Path) -> Iterator[int]:
    mark = f"{FOLDER_VARIABLE}={folder}".encode()
    for path in Path("/proc").glob("[0-9]*/environ"):
        # Another user's process, or one that has just ended: not ours in either case.
        with contextlib.suppress(OSError):
            pid = int(path.parent.name)
            # Not the one that asks: a `down` typed in the shell of a `run` does not end itself half-way.
            if pid != os.getpid() and mark in path.read_bytes().split(b"\0") and Identity.of(pid):
                yield pid


def _signal(pid: int, number: signal.Signals, folder: Path) -> None:
    with contextlib.suppress(ProcessLookupError):
        handle = os.pidfd_open(pid)
        try:
            # The handle cannot change its process any more, so this check holds for the signal as well.
            if pid in of_folder(folder):
                signal.pidfd_send_signal(handle, number)
        finally:
            os.close(handle)


def _gone(folder: Path, limit_s: float) -> bool:
    give_up_s = time.monotonic() + limit_s
    while of_folder(folder):
        if time.monotonic() > give_up_s:
            return False
        time.sleep(0.05)
    return True
