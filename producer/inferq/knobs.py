"""The knobs of a settings class: their paths and names, the printable configuration, the table for the README.

Looks at classes and finished objects only; reads no file and no environment.
"""

from __future__ import annotations

import enum
import re
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, SecretBytes, SecretStr

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

KeyPath = tuple[str, ...]
MASK = "**********"
_ANY_KEY = "<name>"
# Only what surely is a URL is shown in part: a password with an unescaped "@" or "/" would be cut at the wrong place.
_URL = re.compile(
    r"^(?P<scheme>[a-z][a-z+]*://)(?:(?P<user>[^:@/?#]*)(?P<password>:[^@]*)?@)?"
    r"(?P<place>(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])?(?::\d{1,5})?(?:/[^@?#]*)?)(?P<query>\?[^@]*)?$"
)


class Shape(enum.Enum):
    """What a text from the environment has to become before pydantic sees it."""

    SCALAR = "scalar"
    OPTIONAL = "optional"
    SEQUENCE = "sequence"
    TABLE = "table"


def dotted(path: KeyPath) -> str:
    """The name of a knob in inferq.toml and for `--set`: `section.key`."""
    return ".".join(path)


def env_name(path: KeyPath) -> str:
    """The environment variable of a knob: `INFERQ_SECTION__KEY`."""
    return "INFERQ_" + "__".join(path).upper()


def _members(annotation: Any) -> tuple[Any, ...]:
    """The alternatives of a union without None, or the annotation itself; `Annotated` is unwrapped."""
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) in {Union, types.UnionType}:
        return tuple(m for part in get_args(annotation) if part is not type(None) for m in _members(part))
    return (annotation,)


def _is_optional(annotation: Any) -> bool:
    return get_origin(annotation) in {Union, types.UnionType} and type(None) in get_args(annotation)


def _table_value(annotation: Any) -> Any | None:
    """`V` of a `dict[str, V]`, or None for anything else."""
    for member in _members(annotation):
        origin = get_origin(member)
        if isinstance(origin, type) and issubclass(origin, Mapping):
            return get_args(member)[1]
    return None


def _model(annotation: Any) -> type[BaseModel] | None:
    for member in _members(annotation):
        if isinstance(member, type) and issubclass(member, BaseModel):
            return member
    return None


def _shape(annotation: Any) -> Shape:
    if _model(annotation) is not None or _table_value(annotation) is not None:
        return Shape.TABLE
    for member in _members(annotation):
        kind = get_origin(member) or member
        if isinstance(kind, type) and issubclass(kind, (list, tuple, set, frozenset)):
            return Shape.SEQUENCE
    return Shape.OPTIONAL if _is_optional(annotation) else Shape.SCALAR


def _annotation_at(cls: type[BaseModel], path: KeyPath) -> Any | None:
    annotation: Any = cls
    for key in path:
        model = _model(annotation)
        if model is not None:
            info = model.model_fields.get(key)
            annotation = None if info is None else info.annotation
        else:
            annotation = _table_value(annotation)
        if annotation is None:
            return None
    return annotation


def shape_at(cls: type[BaseModel], path: KeyPath) -> Shape | None:
    """What stands at a path, or None if there is no such knob. Keys of free tables (`dict[str, V]`) all exist."""
    annotation = _annotation_at(cls, path)
    return None if annotation is None else _shape(annotation)


def _knobs(cls: type[BaseModel], above: KeyPath = ()) -> Iterator[tuple[KeyPath, FieldInfo]]:
    for name, info in cls.model_fields.items():
        path = (*above, name)
        inner = _model(info.annotation)
        value = _table_value(info.annotation)
        if inner is None and value is not None and (inner := _model(value)) is not None:
            path = (*path, _ANY_KEY)
        if inner is None:
            yield path, info
        else:
            yield from _knobs(inner, path)


def knob_paths(cls: type[BaseModel]) -> Iterator[KeyPath]:
    """All knobs in the order of their declaration; a free key stands as `<name>`."""
    return (path for path, _ in _knobs(cls))


def mask_url(text: str) -> str:
    """A URL with its password and query hidden and its host visible; the mask alone if it is no clear URL."""
    match = _URL.match(text)
    if match is None:
        return MASK
    user = match["user"]
    login = "" if user is None else f"{user}{':' + MASK if match['password'] else ''}@"
    return f"{match['scheme']}{login}{match['place']}{'?' + MASK if match['query'] else ''}"


def _printable(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return {name: _printable(getattr(value, name)) for name in type(value).model_fields}
    if isinstance(value, Mapping):
        return {str(key): _printable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_printable(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(_printable(item) for item in value)
    return _printable_scalar(value)


def _printable_scalar(value: Any) -> Any:
    if isinstance(value, SecretStr):
        return mask_url(value.get_secret_value())
    if isinstance(value, SecretBytes):
        return MASK
    if isinstance(value, str) and "://" in value and "@" in value:
        return mask_url(value)
    if isinstance(value, enum.Enum):
        return value.value
    return str(value) if isinstance(value, Path) else value


def effective(settings: BaseModel) -> dict[str, Any]:
    """The configuration as it may be printed: JSON-able, secrets as `**********`, of a URL only the secret parts."""
    printable = _printable(settings)
    assert isinstance(printable, dict)  # noqa: S101 - tells mypy what the first branch returned
    return printable


def _default_text(info: FieldInfo) -> str:
    if info.is_required():
        return "required"
    default = _printable(info.get_default(call_default_factory=True))
    if default is None or default in ([], {}, ""):
        return "-"
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    if isinstance(default, list):
        return f"`{', '.join(map(str, default))}`"
    return f"`{default}`"


def _choices(annotation: Any) -> str:
    values = [
        str(value) for member in _members(annotation) if get_origin(member) is Literal for value in get_args(member)
    ]
    return f" One of {', '.join(f'`{value}`' for value in values)}." if values else ""


def settings_table(cls: type[BaseModel]) -> str:
    """A markdown table of all knobs: knob, environment name, default, meaning."""
    lines = ["| knob | environment | default | meaning |", "|---|---|---|---|"]
    for path, info in _knobs(cls):
        meaning = (info.description or "").replace("|", "\\|") + _choices(info.annotation)
        env = env_name(path).replace("<NAME>", "<name>")
        lines.append(f"| `{dotted(path)}` | `{env}` | {_default_text(info)} | {meaning} |")
    return "\n".join(lines) + "\n"
