"""The frame of the command line: finds the command, loads only that one, and turns errors into one message.

Commands come from the entry-point group `inferq.commands`. What they do stands in their own modules; the worker's are
imported only when called, so that a client needs no worker extra. This module imports next to nothing by itself, so
that an early Ctrl-C meets `main` and not an import.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from inferq.commands import Subparsers

GROUP = "inferq.commands"
OWN_COMMANDS: Mapping[str, str] = {
    "worker": "inferq_worker.command:register",
    "submit": "inferq.commands.submit:register",
    "result": "inferq.commands.result:register",
    "dead": "inferq.commands.dead:register",
    "pause": "inferq.commands.pause:register_pause",
    "resume": "inferq.commands.pause:register_resume",
    "topology": "inferq.commands.topology:register",
    "whatif": "inferq_worker.whatif.command:register",
    "model": "inferq_worker.inspection.command:register",
    "profile": "inferq_worker.profiling.command:register",
}
"""The entry points of this distribution, for a checkout that nobody installed; a test holds them to pyproject.toml."""
_SUMMARIES: Mapping[str, str] = {
    "worker": "serve models: take jobs from the queues, batch them, answer",
    "submit": "send jobs and wait for their answers",
    "result": "fetch the answer to a job that was sent before",
    "dead": "list, show, send back or drop jobs that failed and were parked",
    "pause": "stop workers from taking jobs of a model or a lane; list what is paused",
    "resume": "let workers take them again",
    "topology": "create, check, export and change the queues on the broker",
    "model": "look at .onnx files before they are served",
    "profile": "find out where the time of a model's runs goes",
    "whatif": "simulate the scheduler: what a configuration would do under a load",
}
"""One line for each of our commands: listing them must not import them."""
_LAZY_ERRORS: Mapping[str, Sequence[str]] = {
    "inferq.commands": ("CommandError",),
    "inferq.configuration": ("ConfigurationError",),
    "inferq.amqp": ("BrokerUnreachable", "PublishFailed"),
    "inferq.errors": ("InferqError",),
    "inferq.management": ("ManagementError",),
}
_EXTRA_MODULES = frozenset({"onnxruntime", "prometheus_client", "structlog", "uvloop"})

EXIT_ERROR = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141

_DESCRIPTION = "Run ONNX models behind RabbitMQ: send jobs, serve them in batches, look after the queues."
_EPILOG = """\
configuration, the weakest first:
  defaults; inferq.toml (--config, else INFERQ_CONFIG, else ./inferq.toml); environment (INFERQ_BROKER__URL=...);
  files in INFERQ_SECRETS_DIR (inferq_broker__url); --set on the command line

examples:
  inferq model inspect resnet50.onnx
  inferq topology apply --model resnet50
  inferq worker --model resnet50=resnet50.onnx
  inferq --set broker.url=amqp://user:password@broker.example/ topology check
  inferq COMMAND --help

Every command also takes --config FILE and --set section.key=value."""


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line; a screen of usage would hide it. Subparsers are of the same class."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_ERROR, f"{self.prog}: {message}; see `{self.prog} --help`\n")


@dataclass(frozen=True, slots=True)
class _Command:
    name: str
    target: str

    @property
    def summary(self) -> str:
        return _SUMMARIES.get(self.name, f"from {self.target.partition(':')[0]}")

    def load(self) -> Callable[[Subparsers], None]:
        """Import the command's module and return its `register`."""
        module, _, attribute = self.target.partition(":")
        register: Callable[[Subparsers], None] = getattr(importlib.import_module(module), attribute)
        return register


def find_commands() -> dict[str, str]:
    """All commands: name to `module:function`, from installed metadata or, in a bare checkout, from our own table."""
    from importlib.metadata import entry_points  # noqa: PLC0415 - see the module's first lines

    return dict(OWN_COMMANDS) | {entry.name: entry.value for entry in entry_points(group=GROUP)}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: arguments without the program's name; None means those of the process.

    Returns:
        The exit status: the command's own; 2 for a wrong command line, a wrong configuration or a broker that cannot
        be used; 130 after Ctrl-C.
    """
    try:
        status = _run(list(sys.argv[1:] if argv is None else argv))
        # Here, and not when Python exits: a closed pipe would be complained about there.
        sys.stdout.flush()
    except SystemExit as leaving:
        # argparse leaves this way after --help and after a wrong command line; it has printed its message.
        return leaving.code if isinstance(leaving.code, int) else EXIT_ERROR
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # `inferq topology export | head`: the reader has what it wanted. What is still buffered goes nowhere, or Python
        # would complain when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return EXIT_BROKEN_PIPE
    except Exception as error:
        if not isinstance(error, _errors_for_people()):
            raise
        print(f"inferq: {error}", file=sys.stderr)
        return EXIT_ERROR
    return status


def _run(argv: list[str]) -> int:
    shared, rest = _take_configuration(argv)
    called = next((word for word in rest if not word.startswith("-")), None)
    commands = {name: _Command(name, target) for name, target in find_commands().items()}
    args = _parser(commands, called).parse_args(rest, namespace=shared)
    func: Callable[[argparse.Namespace], int] = args.func
    try:
        return func(args)
    except ModuleNotFoundError as error:
        _raise_if_extra_is_missing(args.command, error)
        raise


def _configuration_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("options of every command")
    group.add_argument("--config", metavar="FILE", type=Path, help="read this inferq.toml")
    group.add_argument(
        "--set",
        metavar="SECTION.KEY=VALUE",
        action="append",
        default=[],
        help="set one knob, above all other sources; may be given again (a password is better kept in a secret file: "
        "command lines are visible to other users)",
    )


def _take_configuration(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Take --config and --set from anywhere in the line, so that they may stand before or after the command."""
    end = argv.index("--") if "--" in argv else len(argv)
    parser = _Parser(prog="inferq", add_help=False, allow_abbrev=False)
    _configuration_options(parser)
    shared, rest = parser.parse_known_args(argv[:end])
    return shared, rest + argv[end:]


def _parser(commands: Mapping[str, _Command], called: str | None) -> argparse.ArgumentParser:
    from inferq.version import installed_version  # noqa: PLC0415 - see the module's first lines

    parser: argparse.ArgumentParser = _Parser(
        prog="inferq",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"inferq {installed_version()}")
    _configuration_options(parser)
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, title="commands")
    for command in commands.values():
        if command.name == called:
            _register(command, subparsers)
        else:
            subparsers.add_parser(command.name, help=command.summary)
    return parser


def _register(command: _Command, subparsers: Subparsers) -> None:
    try:
        register = command.load()
    except ModuleNotFoundError as error:
        _raise_if_extra_is_missing(command.name, error)
        raise
    register(subparsers)


def _raise_if_extra_is_missing(command: str, error: ModuleNotFoundError) -> None:
    """Say what to install. Any other missing module is a fault of ours and deserves its traceback."""
    missing = (error.name or "").partition(".")[0]
    if missing in _EXTRA_MODULES:
        from inferq.commands import CommandError  # noqa: PLC0415 - see the module's first lines

        raise CommandError(
            f"`inferq {command}` needs the worker extra ({missing} is not installed): "
            "pip install 'inferq[worker]' (GPU) or 'inferq[worker-cpu]'"
        ) from error


def _errors_for_people() -> tuple[type[BaseException], ...]:
    """Errors whose message says it all. A module that was never imported has raised nothing, and is not imported."""
    lazy = [(module, name) for module, names in _LAZY_ERRORS.items() for name in names]
    loaded = [getattr(sys.modules[module], name) for module, name in lazy if module in sys.modules]
    return tuple(loaded)
