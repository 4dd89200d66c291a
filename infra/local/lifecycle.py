"""Bringing a named stack up and down: which kind it is, where its state lies, what of it is stale.

A stack's run folder is `.run/<name>/`; whatever it starts lives in there and carries its name. A stack with an owner (a
`run` or `hold`) must not outlive it: the next call that finds such a folder without its owner clears it away.
"""

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from infra.local import docker, given, install, processes, rabbitmq, redis
from infra.local import tls as local_tls
from infra.local.errors import StackError
from infra.local.management import Management, read_definitions
from infra.local.processes import FOLDER_VARIABLE, Identity

RUN_FOLDER = Path(__file__).resolve().parents[2] / ".run"
DEFINITIONS = rabbitmq.CONFIG_FOLDER / "definitions.json"
_OWNER = "owner.json"
_PROJECT = "docker-project"
_SERVERS = 3  # Redis, epmd, the broker
_ATTEMPTS = 3  # another process may take a port between our choosing it and the server's binding it
# The data is thrown away, so there is nothing to save by waiting longer; a full, clean stop of RabbitMQ takes 8 s.
_STOP_GRACE_S = 1.0


@dataclass(frozen=True, slots=True)
class Stack:
    """A running stack.

    Attributes:
        kind: `environment` (which names it; not ours to end), `docker` or `binaries`.
        environment: the variables by which programs find it.
    """

    kind: str
    environment: Mapping[str, str]

    def __str__(self) -> str:
        return {
            "environment": f"using the broker and Redis of {given.BROKER} and {given.REDIS} (INFERQ_STACK=environment)",
            "docker": "RabbitMQ and Redis in Docker containers of their own",
            "binaries": "RabbitMQ and Redis as a private pair of processes, from the installed packages",
        }[self.kind]


def up(name: str, *, owned: bool, tls: Path | None = None) -> Stack:
    """Bring a stack up, or return the one of that name that is up already.

    Args:
        name: which one.
        owned: whether it must not outlive this process, by whatever the process ends.
        tls: folder with `ca.pem`, `server.pem` and `server.key`: a private pair that speaks nothing but TLS, to clients
            that have a certificate of that authority.

    Raises:
        StackError: with what was missing or went wrong; nothing of the attempt is left.
    """
    kind = wanted_kind(os.environ) if tls is None else "binaries"
    if kind == "environment":
        return Stack(kind, given.addresses(os.environ))
    folder = RUN_FOLDER / name
    with _locked():
        _clear_stale()
        if running := _running(folder):
            return running
        _remove(folder)
        folder.mkdir()
        # Until the stack is up it belongs to this process in any case: nobody else may take the folder for a stale one.
        _this_process().write(folder / _OWNER)
    try:
        stack = _start(folder, kind, tls)
    except BaseException:
        _remove(folder)
        raise
    if not owned:
        (folder / _OWNER).unlink()
    return stack


def prepare() -> Stack | None:
    """Make sure that `up` will find what it needs, installing it where that is allowed; starts nothing.

    Returns:
        The stack that the environment names, if it is the one to use.

    Raises:
        StackError: something is missing; the message says what to do.
    """
    kind = wanted_kind(os.environ)
    if kind == "environment":
        return Stack(kind, given.addresses(os.environ))
    if kind == "binaries" or not (docker.answers() and docker.fetch()):
        install.ensure()
    return None


def wanted_kind(environment: Mapping[str, str]) -> str:
    """Read which kind of stack is asked for, "" for whatever is there.

    Raises:
        StackError: there is no such kind.
    """
    kind = environment.get("INFERQ_STACK", "")
    if kind not in {"", "docker", "binaries", "environment"}:
        raise StackError(
            f"INFERQ_STACK={kind!r} is not a kind of stack; use docker, binaries or environment, or leave it unset"
        )
    return kind


def command_environment(name: str, stack: Stack, environment: Mapping[str, str]) -> dict[str, str]:
    """Build the environment of a command that runs on a stack.

    On one of ours nothing leads the command elsewhere, and whatever it leaves behind ends with the stack.
    """
    if stack.kind == "environment":
        return {**environment, **stack.environment}
    aside = given.set_aside(environment)
    kept = {key: value for key, value in environment.items() if key not in aside}
    return {**kept, **stack.environment, FOLDER_VARIABLE: str(RUN_FOLDER / name)}


def down(name: str) -> bool:
    """Take a stack down and remove its folder; returns whether there was one."""
    if not (RUN_FOLDER / name).exists():
        return False
    with _locked():
        _remove(RUN_FOLDER / name)
    with contextlib.suppress(OSError):  # other stacks live there
        RUN_FOLDER.rmdir()
    return True


def find(name: str) -> Stack | None:
    """Return what is recorded of a stack that has come up; its processes may have died since."""
    try:
        record = json.loads((RUN_FOLDER / name / "stack.json").read_text())
        return Stack(record["kind"], record["environment"])
    except (OSError, ValueError, KeyError):
        return None


def project_of(folder: Path) -> str | None:
    """Name the compose project of a run folder's containers; None if it has none."""
    with contextlib.suppress(FileNotFoundError):
        return (folder / _PROJECT).read_text()
    return None


def _running(folder: Path) -> Stack | None:
    """Return the stack of this folder if it is up.

    Raises:
        StackError: another process is bringing it up at this moment.
    """
    owner = Identity.read(folder / _OWNER)  # first: a stack that has come up gets its record before it loses its owner
    stack = find(folder.name)
    if stack is None and owner is not None:
        raise StackError(f"process {owner.pid} is bringing {folder.name} up; wait for it, or choose another --name")
    whole = stack is not None and (stack.kind == "docker" or processes.servers_of_folder(folder) >= _SERVERS)
    return stack if whole else None


def _this_process() -> Identity:
    identity = Identity.of(os.getpid())
    if identity is None:
        raise StackError("cannot read /proc; the local stack needs Linux")
    return identity


def _start(folder: Path, kind: str, tls: Path | None) -> Stack:
    stack = _start_binaries(folder, tls) if tls is not None else _choose(kind)(folder)
    context = local_tls.context(tls) if tls else None
    Management(stack.environment["INFERQ_BROKER__MANAGEMENT_URL"], tls=context).load(read_definitions(DEFINITIONS))
    (folder / "stack.json").write_text(
        json.dumps({"kind": stack.kind, "environment": dict(stack.environment)}, indent=2)
    )
    return stack


def _choose(forced: str) -> Callable[[Path], Stack]:
    if forced == "docker" and not docker.answers():
        raise StackError("INFERQ_STACK=docker, but no Docker engine with the compose plugin answers")
    if forced == "docker":
        return _start_containers
    if forced == "" and docker.answers():
        return _start_containers_or_binaries
    return _start_binaries


def _start_containers(folder: Path) -> Stack:
    project = f"inferq-{folder.name}".lower()
    (folder / _PROJECT).write_text(project)
    return Stack("docker", docker.start(project))


def _start_containers_or_binaries(folder: Path) -> Stack:
    """Containers, or the binaries where the engine cannot get the images (no network, a pull limit)."""
    try:
        return _start_containers(folder)
    except StackError as reason:
        print(
            f"{reason}\ncontinuing with the installed binaries (INFERQ_STACK=docker insists on Docker)", file=sys.stderr
        )
        _stop_containers(folder)
        return _start_binaries(folder)


def _start_binaries(folder: Path, tls: Path | None = None) -> Stack:
    install.ensure()
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            suffix = f"{folder.name}-{secrets.token_hex(4)}"
            environment = redis.start(folder, tls=tls) | rabbitmq.start(folder, suffix=suffix, tls=tls)
            return Stack("binaries", environment)
        except StackError:
            processes.end(folder, grace_s=0.0)
            if attempt == _ATTEMPTS:
                raise
            for left in ("rabbitmq", "redis"):
                shutil.rmtree(folder / left, ignore_errors=True)
    raise AssertionError("unreachable: the last attempt returns or raises")


def _stop_containers(folder: Path) -> None:
    if project := project_of(folder):
        docker.stop(project)
        (folder / _PROJECT).unlink()


def _remove(folder: Path) -> None:
    if folder.exists():
        processes.end(folder, grace_s=_STOP_GRACE_S)
        _stop_containers(folder)
        shutil.rmtree(folder)


def _clear_stale() -> None:
    """Clear away stacks whose owner was killed before it could do so."""
    for record in RUN_FOLDER.glob(f"*/{_OWNER}"):
        owner = Identity.read(record)
        disowned = owner is None and not record.exists()  # by a `make up` that has just finished
        if not disowned and (owner is None or not owner.alive()):
            _remove(record.parent)


@contextlib.contextmanager
def _locked() -> Iterator[None]:
    """Hold the run folder, so that two calls do not start or clear the same stack at once; leaves no file behind."""
    RUN_FOLDER.mkdir(exist_ok=True)
    handle = os.open(RUN_FOLDER, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
