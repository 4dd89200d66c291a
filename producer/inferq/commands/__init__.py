"""The commands of `inferq`, one module each; here is what they share.

A command's `register(subparsers)` adds its parser and sets `func`, a callable that takes the parsed arguments and
returns the exit status. `args.config` and `args.set` come from the options of `inferq` itself.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import textwrap
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from inferq.configuration import load_settings

if TYPE_CHECKING:
    from pydantic_settings import BaseSettings

SettingsT = TypeVar("SettingsT", bound="BaseSettings")
Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"  # noqa: SLF001 - argparse has no public name for it


class CommandError(Exception):
    """A command cannot do what was asked. The message is for people; `inferq` prints it and exits with 2."""


def add_command(
    subparsers: Subparsers, name: str, *, summary: str, description: str, examples: str
) -> argparse.ArgumentParser:
    """Add a command's parser in the common form.

    Args:
        subparsers: where it goes.
        name: the word to type.
        summary: one line for the list of commands.
        description: what it does, and to what; may have several paragraphs.
        examples: whole command lines, one a line.
    """
    epilog = "examples:\n" + textwrap.indent(textwrap.dedent(examples).strip(), "  ") + "\n\n" + CONFIGURATION_HINT
    return subparsers.add_parser(
        name,
        help=summary,
        description=textwrap.dedent(description).strip(),
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


class _Lines(logging.Formatter):
    """`inferq: message`, and never a traceback: a person at a shell can do nothing with it."""

    def format(self, record: logging.LogRecord) -> str:
        # A progress bar may stand in the line: it is drawn again below.
        clear = "\r\x1b[K" if sys.stderr.isatty() else ""
        return f"{clear}inferq: {' '.join(record.getMessage().split())}"


class _StandardError(logging.Handler):
    """Writes to what `sys.stderr` is at the time."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr)


def speak_in_lines() -> None:
    """Let our own log speak in single lines on standard error, and libraries not at all.

    They narrate every lost connection with tracebacks, and what they know is in our own line. Not for the worker,
    which configures its log itself. `PYTHONASYNCIODEBUG=1` and `python -X dev` let them speak.
    """
    own = logging.getLogger("inferq")
    if not own.handlers:
        handler = _StandardError()
        handler.setFormatter(_Lines())
        own.addHandler(handler)
    if not (sys.flags.dev_mode or os.environ.get("PYTHONASYNCIODEBUG")):
        for name in ("aiormq", "aio_pika", "asyncio"):
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)


CONFIGURATION_HINT = "Every command also takes --config FILE and --set section.key=value; see `inferq --help`."


def settings_of(args: argparse.Namespace, cls: type[SettingsT]) -> SettingsT:
    """The settings for a command, from all sources and the command line.

    Raises:
        ConfigurationError: as `load_settings` says.
    """
    return load_settings(cls, config_file=args.config, overrides=args.set)
