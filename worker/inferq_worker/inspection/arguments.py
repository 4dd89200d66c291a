"""What the commands that try one model file share: its arguments, its settings, its errors, and a limit in time."""

from __future__ import annotations

import argparse
import math
import threading
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from inferq.commands import CommandError, settings_of
from inferq.settings import Settings
from inferq_worker.models.repository import RepositoryError, find_models
from inferq_worker.runtime.interface import ModelRefused, RunFailed, RuntimeUnavailable, SessionBroken
from inferq_worker.runtime.settings import RuntimeSettings
from inferq_worker.settings import BatchingSettings

if TYPE_CHECKING:
    from collections.abc import Callable

    from inferq_worker.models.repository import ModelFile

T = TypeVar("T")


class TrialSettings(Settings):
    """What of the worker's configuration these commands read."""

    runtime: RuntimeSettings = RuntimeSettings()
    batching: BatchingSettings = BatchingSettings()


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the file, the provider, the limit and the form of the answer."""
    parser.add_argument("file", metavar="FILE", help="the .onnx file")
    parser.add_argument(
        "--provider", choices=("cuda", "tensorrt", "cpu"), help="execution provider (default: runtime.provider)"
    )
    parser.add_argument(
        "--limit", type=seconds, default=300.0, metavar="S", help="give up after so many seconds (default %(default)g)"
    )
    parser.add_argument(
        "--dim",
        type=_axis,
        action="append",
        default=[],
        metavar="AXIS=N",
        help="size of a dynamic inner axis, by its name or as INPUT:AXIS; may be repeated",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def trial_settings(args: argparse.Namespace) -> TrialSettings:
    """The settings of the configuration, with the provider of the command line.

    Raises:
        ConfigurationError: as `load_settings` says.
    """
    if args.provider:
        args.set = [f"runtime.provider={args.provider}", *args.set]
    return settings_of(args, TrialSettings)


def model_at(file: str) -> ModelFile:
    """The model in a file, with the settings beside it.

    Raises:
        CommandError: there is no such file, or its `.toml` is wrong.
    """
    try:
        # Named here, because not every file name makes a model's name.
        return find_models(None, [f"model={Path(file)}"])[0]
    except RepositoryError as error:
        raise CommandError(str(error)) from error


def within(limit_s: float, task: Callable[[], T], file: str) -> T:
    """Try a model on a thread that nobody waits for longer than `limit_s` seconds.

    A native run cannot be interrupted, and Python handles Ctrl-C only between two of them; here it waits for the
    thread instead, and leaves it behind.

    Raises:
        CommandError: the time was up, or the file is no model that can be loaded here.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            results.append(task())
        except BaseException as error:  # noqa: BLE001 - raised again below, on the thread that can report it
            errors.append(error)

    thread = threading.Thread(target=work, name="trial", daemon=True)
    thread.start()
    thread.join(limit_s)
    if errors:
        raise _for_people(errors[0], file)
    if not results:
        raise CommandError(f"{file} was not done after {limit_s:g} s; give it more time with --limit")
    return results[0]


def _for_people(error: BaseException, file: str) -> BaseException:
    if isinstance(error, ModelRefused | RuntimeUnavailable):
        return CommandError(str(error))
    if isinstance(error, RunFailed | SessionBroken):
        return CommandError(f"{file}: {error}")
    return error


def _axis(text: str) -> tuple[str, int]:
    name, separator, size = text.rpartition("=")
    if not (separator and name and size.isdecimal() and int(size) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not AXIS=N, such as sequence=128")
    return name, int(size)


def count(text: str) -> int:
    """A whole number of at least 1 and at most 65,536, which is the most rows of a run."""
    number = int(text)
    if not 1 <= number <= 65_536:
        raise argparse.ArgumentTypeError(f"{text} is not in 1..65536")
    return number


def seconds(text: str) -> float:
    """A finite number of seconds above 0."""
    number = float(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return number
