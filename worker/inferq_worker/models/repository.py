"""Finds models on disk: `models/<name>/<version>/model.onnx` with an optional `model.toml`, or single files.

Reads names and `model.toml`; never opens an .onnx file. Everything wrong is one `RepositoryError` with the mend.
"""

import difflib
import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal, Self, TypeAlias

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError, model_validator

from inferq_schemas.job import MODEL_PATTERN
from inferq_schemas.topology import DEFAULT_LANES, LANE_PATTERN

MODEL_FILE = "model.onnx"
_VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_FILE_VERSION = "1"
_NAME_CHARS = 64

BucketSizes: TypeAlias = Annotated[
    Annotated[Literal["auto", "off"], Tag("word")]
    | Annotated[list[Annotated[int, Field(ge=1, le=65_536)]], Field(min_length=1), Tag("sizes")],
    Discriminator(lambda value: "sizes" if isinstance(value, list | tuple) else "word"),
]
"""What runs are padded to: `auto` (powers of two on a GPU, nothing on the CPU), `off`, or sizes in rows."""


class RepositoryError(Exception):
    """A model that cannot be found or described. The message names the file and the mend."""


@dataclass(frozen=True, slots=True)
class ModelFile:
    """One version of one model, not opened yet.

    Attributes:
        name: as in jobs and routing keys.
        version: name of the version's folder; "1" for a single file.
        path: the .onnx file.
        max_rows: most rows of one native run; None leaves it to the settings.
        shared_inputs: scalar inputs that all rows of a run have in common.
        fallback: whether a CPU worker may answer for the model.
        lanes: the queues of the model.
        batch: how far its batch axis is trusted: `probe` proves it at load, `trust` takes the model's word, `single`
            runs every job alone and whole.
        sha256: what the file, and its external data, must be; None = anything.
        buckets: sizes that its runs are padded to, as `runtime.buckets`, which None leaves it to.
        nan: `fail` refuses a job whose float outputs hold NaN or infinity; `pass` hands them on.
    """

    name: str
    version: str
    path: Path
    max_rows: int | None = None
    shared_inputs: frozenset[str] = frozenset()
    fallback: bool = True
    lanes: tuple[str, ...] = DEFAULT_LANES
    batch: Literal["probe", "trust", "single"] = "probe"
    sha256: str | None = None
    buckets: Literal["auto", "off"] | tuple[int, ...] | None = None
    nan: Literal["pass", "fail"] = "pass"

    @property
    def toml(self) -> Path:
        """Where its settings are read from: `model.toml` beside `model.onnx`, or `NAME.toml` beside `NAME.onnx`."""
        return self.path.with_suffix(".toml")


class _ModelToml(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    max_rows: int | None = Field(None, ge=1, le=65_536)
    shared_inputs: list[str] = []
    fallback: bool = True
    lanes: list[Annotated[str, Field(pattern=LANE_PATTERN)]] = Field(list(DEFAULT_LANES), min_length=1)
    batch: Literal["probe", "trust", "single"] = "probe"
    sha256: str | None = Field(None, pattern=r"^[0-9a-f]{64}$")
    buckets: BucketSizes | None = None
    nan: Literal["pass", "fail"] = "pass"

    @model_validator(mode="after")
    def _buckets_can_be_used(self) -> Self:
        if not isinstance(self.buckets, list):
            return self
        if self.batch == "single":
            raise ValueError('buckets have no meaning with batch = "single", where no run is padded; remove one')
        if self.max_rows is not None and max(self.buckets) > self.max_rows:
            raise ValueError(f"a bucket of {max(self.buckets)} rows is above max_rows = {self.max_rows}; change one")
        return self


def find_models(models_dir: Path | None, files: Sequence[str], *, every_version: bool = False) -> tuple[ModelFile, ...]:
    """Find the models of a folder and those named one by one.

    Args:
        models_dir: holds `<name>/<version>/model.onnx`; hidden entries and loose files are passed over.
        files: each `path.onnx` (named after the file, made valid) or `name=path.onnx`; settings are read from a .toml
            file of the same stem beside it.
        every_version: all versions of the folder, oldest first, instead of the newest of each model. Versions that
            are whole numbers are ordered as numbers, and come after those that are not.

    Returns:
        At least one model, sorted by name.

    Raises:
        RepositoryError: nothing found, something missing, a bad or doubled name, a bad `model.toml`.
    """
    found = [] if models_dir is None else list(_in_folder(models_dir, every_version=every_version))
    found += [_single(text) for text in files]
    if not found:
        where = f"in {models_dir}" if models_dir else "configured"
        raise RepositoryError(
            f"no model {where}; put one at <models>/<name>/<version>/{MODEL_FILE} or pass --model FILE"
        )
    seen: dict[tuple[str, str], ModelFile] = {}
    for model in found:
        key = (model.name, model.version if every_version else "")
        if key in seen:
            raise RepositoryError(
                f"the model name {model.name!r} is given twice: {seen[key].path} and {model.path}; "
                "give one another name with --model NAME=FILE"
            )
        seen[key] = model
    return tuple(sorted(found, key=lambda model: (model.name, _age(model.version))))


def _in_folder(models_dir: Path, *, every_version: bool) -> Iterator[ModelFile]:
    if not models_dir.is_dir():
        raise RepositoryError(f"the models folder {models_dir} is not there; create it or correct its path")
    for folder in _folders(models_dir):
        _check_name(folder.name, folder)
        if (folder / MODEL_FILE).exists():
            raise RepositoryError(f"{folder / MODEL_FILE} has no version; move it to {folder / '1' / MODEL_FILE}")
        versions = sorted(_folders(folder), key=lambda version: _age(version.name))
        if not versions:
            raise RepositoryError(f"{folder} has no version; put the model at {folder / '1' / MODEL_FILE}")
        for version in versions if every_version else versions[-1:]:
            if not _VERSION.fullmatch(version.name):
                raise RepositoryError(f"{version} is no version name; use letters, digits, '.', '_' and '-'")
            yield _describe(folder.name, version.name, version / MODEL_FILE)


def _folders(parent: Path) -> list[Path]:
    return sorted(child for child in parent.iterdir() if child.is_dir() and not child.name.startswith("."))


def _age(version: str) -> tuple[bool, int, str]:
    is_number = version.isascii() and version.isdigit()
    return is_number, int(version) if is_number else 0, version


def _single(text: str) -> ModelFile:
    # A path may hold "=" itself, so a file of that very name comes first.
    name, separator, rest = ("", "", text) if Path(text).is_file() else text.partition("=")
    path = Path(rest if separator else text)
    if separator:
        _check_name(name, f"--model {text}")
    else:
        name = _name_from(path)
    return _describe(name, _FILE_VERSION, path)


def _name_from(path: Path) -> str:
    name = re.sub(r"[^a-z0-9_-]+", "-", path.stem.lower()).strip("-_")[:_NAME_CHARS]
    if not name:
        raise RepositoryError(f"no model name can be made of {path.name!r}; pass --model NAME={path}")
    return name


def _check_name(name: str, where: Path | str) -> None:
    if not re.fullmatch(MODEL_PATTERN, name):
        raise RepositoryError(
            f"{where}: {name!r} is no model name; use 1 to 64 of a-z, 0-9, '_' and '-', a letter or digit first"
        )


def _describe(name: str, version: str, path: Path) -> ModelFile:
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "is not there"
        raise RepositoryError(f"the model file {path} {what}; check the path, or copy the .onnx file to it")
    model = ModelFile(name, version, path)
    settings = _read_toml(model.toml)
    return replace(
        model,
        max_rows=settings.max_rows,
        shared_inputs=frozenset(settings.shared_inputs),
        fallback=settings.fallback,
        lanes=tuple(dict.fromkeys(settings.lanes)),
        batch=settings.batch,
        sha256=settings.sha256,
        buckets=tuple(settings.buckets) if isinstance(settings.buckets, list) else settings.buckets,
        nan=settings.nan,
    )


def _read_toml(path: Path) -> _ModelToml:
    if not path.exists():
        return _ModelToml()
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise RepositoryError(f"{path} cannot be read: {error}") from error
    known = list(_ModelToml.model_fields)
    for key in values:
        if key not in known:
            nearest = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
            mend = f"did you mean {nearest[0]!r}?" if nearest else f"the keys are {', '.join(known)}"
            raise RepositoryError(f"{path}: unknown key {key!r}; {mend}")
    try:
        return _ModelToml.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        if not first["loc"]:
            raise RepositoryError(f"{path}: {first['ctx']['error']}") from error
        where = ".".join(str(part) for part in first["loc"])
        raise RepositoryError(f"{path}: {where}: {first['msg']} (found {first['input']!r})") from error
