"""The command line of the local stack: `up`, `down`, `status`, `env`, `prepare`, `run`, `hold`."""

import argparse
import json
import os
import re
import secrets
import select
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

from infra.local import given, lifecycle, processes
from infra.local.errors import StackError
from infra.local.lifecycle import Stack

_COMMAND_GRACE_S = 90.0  # a worker drains for up to 60 s
_COLLECT_INTERVAL_S = 10.0


def main(arguments: Sequence[str]) -> int:
    """Run one command; returns the exit status (2: the stack could not be brought up or down)."""
    options = _parser().parse_args(arguments)
    call: Callable[[argparse.Namespace], int] = options.call
    try:
        return call(options)
    except StackError as reason:
        print(f"stack: {reason}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="stack.py", description="RabbitMQ and Redis for this project, apart from any others."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, call, about in (
        ("up", _up, "bring the stack up and print its environment"),
        ("down", _down, "take it down; removes its data"),
        ("status", _status, "say whether it is up (exit status 0) or not (1)"),
        ("env", _env, "print the environment of the stack that is up, for `eval`"),
        ("prepare", _prepare, "install what is missing, where that is allowed; start nothing"),
        ("run", _run, "bring a stack up, run a command with its environment, take it down"),
        ("hold", _hold, "bring a stack up, print its environment as JSON, take it down when standard input ends"),
    ):
        command = commands.add_parser(name, help=about, description=about)
        command.add_argument("--name", type=_name, help="which stack (default: dev; run and hold: one of their own)")
        if call in {_up, _run, _hold}:
            command.add_argument(
                "--tls",
                type=Path,
                metavar="FOLDER",
                help="private pair that speaks TLS only, with ca.pem, server.pem and server.key of this folder",
            )
        command.set_defaults(call=call)
        if call is _run:
            command.add_argument("words", nargs=argparse.REMAINDER, metavar="-- COMMAND")
    return parser


def _name(text: str) -> str:
    if not re.fullmatch(r"[a-z0-9][a-z0-9-]{0,40}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no name: use small letters, digits and hyphens")
    return text


def _up(options: argparse.Namespace) -> int:
    stack = lifecycle.up(options.name or "dev", owned=False, tls=options.tls)
    _announce(stack)
    _print_environment(stack)
    return 0


def _prepare(_: argparse.Namespace) -> int:
    _announce(lifecycle.prepare())
    return 0


def _announce(stack: Stack | None) -> None:
    """Say on standard error what is used, and what of the environment is not."""
    if stack is not None:
        print(f"stack: {stack}", file=sys.stderr)
    aside = given.set_aside(os.environ)
    if aside and (stack is None or stack.kind != "environment"):
        print(
            f"stack: {', '.join(aside)} of the environment not used here; INFERQ_STACK=environment would use them",
            file=sys.stderr,
        )


def _down(options: argparse.Namespace) -> int:
    name = options.name or "dev"
    if not lifecycle.down(name):
        print(f"no stack named {name} is up", file=sys.stderr)
    return 0


def _status(options: argparse.Namespace) -> int:
    if lifecycle.wanted_kind(os.environ) == "environment":
        return _status_of_environment()
    name = options.name or "dev"
    stack = lifecycle.find(name)
    pids = processes.of_folder(lifecycle.RUN_FOLDER / name)
    alive = stack is not None and (stack.kind == "docker" or bool(pids))
    print(
        f"{name}: {stack.kind}, processes {', '.join(map(str, pids)) or 'in containers'}"
        if stack and alive
        else f"{name}: down"
    )
    return 0 if alive else 1


def _status_of_environment() -> int:
    try:
        given.addresses(os.environ)
    except StackError as reason:
        print(reason)
        return 1
    print("environment: RabbitMQ and Redis answer")
    return 0


def _env(options: argparse.Namespace) -> int:
    name = options.name or "dev"
    stack = lifecycle.find(name)
    if stack is None:
        raise StackError(f"no stack named {name} is up; start it: make up")
    _print_environment(stack)
    return 0


def _print_environment(stack: Stack) -> None:
    for key, value in stack.environment.items():
        print(f"export {key}={shlex.quote(value)}")


def _run(options: argparse.Namespace) -> int:
    words = options.words[1:] if options.words[:1] == ["--"] else options.words
    if not words:
        raise StackError("run needs a command: stack.py run -- COMMAND")
    owned = _Owned(options.name, options.tls)
    with owned as stack:
        _announce(stack)
        return _supervise(words, lifecycle.command_environment(owned.name, stack, os.environ))


def _hold(options: argparse.Namespace) -> int:
    with _Owned(options.name, options.tls) as stack:
        print(json.dumps({"kind": stack.kind, "environment": dict(stack.environment)}), flush=True)
        while not select.select([sys.stdin], [], [], _COLLECT_INTERVAL_S)[0]:
            processes.collect_ended()
        sys.stdin.read()
    return 0


class _Owned:
    """A stack for the length of a `with`; a signal while it comes up, or later, still takes it down.

    Signals become `SystemExit`: they end whatever is being waited for, and the stack is taken down on the way out.
    """

    def __init__(self, name: str | None, tls: Path | None = None) -> None:
        self._tls = tls
        self.name = name or f"own-{secrets.token_hex(4)}"

    def __enter__(self) -> Stack:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, _leave)
        processes.adopt_orphans()
        return lifecycle.up(self.name, owned=True, tls=self._tls)

    def __exit__(self, *_: object) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # taking it down is short and must not be cut off half-way
        lifecycle.down(self.name)
        processes.collect_children(limit_s=3.0)


def _leave(number: int, _: FrameType | None) -> None:
    sys.exit(128 + number)


def _supervise(words: Sequence[str], environment: dict[str, str]) -> int:
    """Run a command to its end; a signal is handed on to it once, and it is given time to end."""
    try:
        command = subprocess.Popen(words, env=environment)
    except OSError as reason:
        raise StackError(f"cannot run {words[0]}: {reason}") from None
    try:
        code = _wait(command)
    except SystemExit as leaving:
        if leaving.code != 128 + signal.SIGINT:  # the terminal has sent that one to the command as well
            command.terminate()
        _wait_or_kill(command)
        raise
    return code if code >= 0 else 128 - code


def _wait(command: subprocess.Popen[bytes]) -> int:
    while True:
        try:
            return command.wait(_COLLECT_INTERVAL_S)
        except subprocess.TimeoutExpired:
            processes.collect_ended(spare=command.pid)


def _wait_or_kill(command: subprocess.Popen[bytes]) -> None:
    try:
        command.wait(_COMMAND_GRACE_S)
    except (subprocess.TimeoutExpired, SystemExit):  # too long, or a second signal
        command.kill()
        command.wait()
