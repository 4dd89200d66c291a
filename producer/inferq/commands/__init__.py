"""The commands of `inferq`, one module each; here is what they share.

A command's `register(subparsers)` adds its parser and sets `func`, a callable that takes the parsed arguments and
returns the exit status. `args.config` and `args.set` come from the options of `inferq` itself.
"""

from __future__ import annotations

import argparse
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


CONFIGURATION_HINT = "Every command also takes --config FILE and --set section.key=value; see `inferq --help`."


def settings_of(args: argparse.Namespace, cls: type[SettingsT]) -> SettingsT:
    """The settings for a command, from all sources and the command line.

    Raises:
        ConfigurationError: as `load_settings` says.
    """
    return load_settings(cls, config_file=args.config, overrides=args.set)
