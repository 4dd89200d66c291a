"""Reads configuration from its five places and says plainly what is wrong with it.

Defaults < inferq.toml < environment < secrets directory < command line. All reading happens in `load_settings`; the
settings objects themselves do no I/O. Secrets stand in no message and in nothing that `effective` returns.
"""

from __future__ import annotations

import difflib
import json
import os
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import ValidationError

from inferq.knobs import KeyPath, Shape, dotted, env_name, knob_paths, shape_at

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pydantic_core import ErrorDetails
    from pydantic_settings import BaseSettings

CLIENT_SECTIONS = frozenset({"broker", "redis", "client", "topology"})
WORKER_SECTIONS = frozenset(
    {
        "role",
        "models",
        "batching",
        "lanes",
        "runtime",
        "breaker",
        "admin",
        "log",
        "drain",
        "limits",
        "replies",
        "memory",
    }
)
"""One inferq.toml serves client and worker: each ignores what only the other reads."""

ENV_PREFIX = "INFERQ_"
_FOREIGN_PREFIXES = ("INFERQ_TEST_", "INFERQ_STACK_")
_FOREIGN_NAMES = frozenset(
    {
        "INFERQ_CONFIG",
        "INFERQ_SECRETS_DIR",
        "INFERQ_STACK",
        "INFERQ_BASE_IMAGE",
        "INFERQ_RABBITMQ_IMAGE",
        "INFERQ_REDIS_IMAGE",
        "INFERQ_MODELS_DIR",
    }
)
"""Environment names of the tests, the stack and the images: they share the prefix and are no knobs."""

SettingsT = TypeVar("SettingsT", bound="BaseSettings")


class ConfigurationError(Exception):
    """The configuration cannot be used. The message is for people: each problem, its knob, and the mend."""


@dataclass(slots=True)
class _Gathered:
    """What the sources said so far: the tree that pydantic will validate, who set what, and the problems."""

    cls: type[BaseSettings]
    tree: dict[str, Any] = field(default_factory=dict)
    origins: dict[KeyPath, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def ignored(self) -> frozenset[str]:
        return (CLIENT_SECTIONS | WORKER_SECTIONS) - self.cls.model_fields.keys()


def load_settings(cls: type[SettingsT], *, config_file: Path | None = None, overrides: Sequence[str] = ()) -> SettingsT:
    """Read all sources and build a frozen settings object.

    Args:
        cls: the settings class; its top-level fields are the sections that this program reads.
        config_file: TOML file; None means `INFERQ_CONFIG`, and else `inferq.toml` in the working directory if there.
        overrides: `section.key=value` texts of the command line, applied last.

    Raises:
        ConfigurationError: an unknown key, an unreadable file, a value out of bounds, a contradiction. It lists all
            that was found, not only the first problem.
    """
    gathered = _Gathered(cls)
    _read_file(gathered, config_file)
    _read_environment(gathered)
    _read_secrets(gathered)
    for text in overrides:
        _read_override(gathered, text)
    problems = list(gathered.problems)
    try:
        settings = cls(**gathered.tree)
    except ValidationError as error:
        problems += [
            line
            for detail in error.errors(include_url=False, include_input=False, include_context=False)
            # What a source could not say is not missing.
            if not (gathered.problems and detail["type"] == "missing")
            for line in _describe(gathered, detail)
        ]
    else:
        if not problems:
            return settings
    # Raised outside the handler: the chained ValidationError would print a traceback and is of no use to anybody.
    raise _configuration_error(problems)


def _configuration_error(problems: Sequence[str]) -> ConfigurationError:
    return ConfigurationError("the configuration cannot be used:\n" + "\n".join(f"  - {line}" for line in problems))


def _read_file(gathered: _Gathered, config_file: Path | None) -> None:
    named = config_file or (Path(value) if (value := os.environ.get("INFERQ_CONFIG")) else None)
    path = named or Path("inferq.toml")
    if named is None and not path.is_file():
        return
    how = "" if named is None else " (named by --config)" if config_file else " (named by INFERQ_CONFIG)"
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        gathered.problems.append(f"{path}{how} cannot be read: {error.strerror or error}")
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        reason = str(error) if isinstance(error, tomllib.TOMLDecodeError) else "it is not UTF-8"
        gathered.problems.append(f"{path} is not valid TOML: {reason}")
    else:
        for key_path, value in _leaves(content):
            if key_path[0] not in gathered.ignored:
                _put(gathered, key_path, value, origin=str(path))


def _leaves(table: Mapping[str, Any], above: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Every value that is not a table, with its path; an empty table counts as a value."""
    for key, value in table.items():
        path = (*above, key)
        if isinstance(value, dict) and value:
            yield from _leaves(value, path)
        else:
            yield path, value


def _read_environment(gathered: _Gathered) -> None:
    for name, raw in sorted(os.environ.items()):
        if not name.startswith(ENV_PREFIX) or name in _FOREIGN_NAMES or name.startswith(_FOREIGN_PREFIXES):
            continue
        path = _path_of_name(name)
        # Compose files pass variables that nobody set as empty texts: empty means "not set".
        if raw and path[0] not in gathered.ignored:
            _put_text(gathered, path, raw, origin=f"environment variable {name}")


def _read_secrets(gathered: _Gathered) -> None:
    directory = os.environ.get("INFERQ_SECRETS_DIR")
    if not directory:
        return
    try:
        # Kubernetes mounts secrets beside `..data` links; only our own names are looked at.
        files = sorted(
            entry
            for entry in Path(directory).iterdir()
            if entry.name.upper().startswith(ENV_PREFIX) and entry.is_file()
        )
        for file in files:
            path = _path_of_name(file.name)
            by_name = (*path[:-1], f"{path[-1]}_file")
            if path[0] in gathered.ignored:
                continue
            if shape_at(gathered.cls, path) is None and shape_at(gathered.cls, by_name) is not None:
                # A password is not copied: it is read from there at every connect, and may change.
                _put(gathered, by_name, str(file), origin=f"secret file {file}")
            else:
                _put_text(gathered, path, file.read_text(encoding="utf-8").strip(), origin=f"secret file {file}")
    except OSError as error:
        where = error.filename or directory
        gathered.problems.append(f"secrets directory (INFERQ_SECRETS_DIR): {where}: {error.strerror or error}")
    except UnicodeDecodeError:
        gathered.problems.append(f"secrets directory {directory}: a secret file is not UTF-8 text")


def _read_override(gathered: _Gathered, text: str) -> None:
    key, equals, raw = text.partition("=")
    path = tuple(key.strip().split("."))
    # The text itself is not repeated: it may hold a password.
    if not equals or not all(path):
        gathered.problems.append(f"--set {key.strip()}: write it as section.key=value")
    elif path[0] in gathered.ignored:
        reader = "the worker" if path[0] in WORKER_SECTIONS else "clients"
        gathered.problems.append(f"--set {dotted(path)}: only {reader} read the section {path[0]!r}; leave it out here")
    else:
        _put_text(gathered, path, raw, origin=f"--set {dotted(path)}")


def _path_of_name(name: str) -> KeyPath:
    return tuple(name[len(ENV_PREFIX) :].lower().split("__"))


def _put_text(gathered: _Gathered, path: KeyPath, raw: str, *, origin: str) -> None:
    shape = shape_at(gathered.cls, path)
    if shape is Shape.SEQUENCE and not raw.lstrip().startswith("["):
        _put(gathered, path, [item.strip() for item in raw.split(",") if item.strip()], origin=origin)
    elif shape in {Shape.SEQUENCE, Shape.TABLE}:
        try:
            value = json.loads(raw)
        except ValueError:
            kind = "a JSON array or texts with commas between" if shape is Shape.SEQUENCE else "a JSON object"
            gathered.problems.append(f"{dotted(path)} ({env_name(path)}): {origin} must be {kind}")
            return
        # A table from a text is taken apart, so that its keys are checked and merged like all others.
        for key_path, leaf in _leaves(value, path) if isinstance(value, dict) and value else [(path, value)]:
            _put(gathered, key_path, leaf, origin=origin)
    elif shape is Shape.OPTIONAL and not raw:
        _put(gathered, path, None, origin=origin)
    else:
        _put(gathered, path, raw, origin=origin)


def _put(gathered: _Gathered, path: KeyPath, value: Any, *, origin: str) -> None:
    if shape_at(gathered.cls, path) is None:
        gathered.problems.append(_unknown(gathered, path, origin))
        return
    table = gathered.tree
    for key in path[:-1]:
        below = table.setdefault(key, {})
        if not isinstance(below, dict):
            # A value where a section belongs, from a weaker source: pydantic names it if nothing replaces it.
            below = table[key] = {}
        table = below
    if value == {} and isinstance(table.get(path[-1]), dict):
        return  # an empty table adds nothing to what weaker sources said
    table[path[-1]] = value
    gathered.origins[path] = origin


def _unknown(gathered: _Gathered, path: KeyPath, origin: str) -> str:
    in_env = origin.startswith("environment")
    show = env_name if in_env else dotted
    knobs = list(knob_paths(gathered.cls))
    sections = sorted(gathered.cls.model_fields)
    close = difflib.get_close_matches(show(path), map(show, knobs), n=1)
    close_section = difflib.get_close_matches(path[0], {*sections, *gathered.ignored}, n=1)
    if close:
        mend = f"did you mean {close[0]}?"
    elif path[0] in sections:
        keys = sorted({dotted(knob[1:]) for knob in knobs if knob[0] == path[0]})
        mend = f"known in {path[0]}: {', '.join(keys)}"
    elif close_section:
        mend = f"did you mean the section {close_section[0]}?"
    else:
        mend = f"known sections: {', '.join(sections)}"
    return f"{origin} is no knob; {mend}" if in_env else f"{origin}: there is no knob {dotted(path)}; {mend}"


def _describe(gathered: _Gathered, detail: ErrorDetails) -> list[str]:
    path = tuple(str(part) for part in detail["loc"])
    # Positions inside a list, and the tags of unions, are no knobs.
    while path and shape_at(gathered.cls, path) is None:
        path = path[:-1]
    origin = next((found for length in range(len(path), 0, -1) if (found := gathered.origins.get(path[:length]))), None)
    message = detail["msg"].removeprefix("Value error, ")
    if detail["type"] == "missing":
        message = "is required and has no value"
    where = f"{dotted(path)} ({env_name(path)}): " if path else ""
    source = f" [set by {origin}]" if origin else ""
    # A validator may report several contradictions at once, one a line.
    return [f"{where}{line}{source}" for line in message.splitlines() or [message]]
