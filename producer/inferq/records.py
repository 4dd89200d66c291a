"""Reads jobs from JSON lines for `inferq submit`, one at a time; arrays are `npz`'s matter.

What is wrong with a line is said with the file's name, the line, and the mend, and costs only that line.
"""

from __future__ import annotations

import base64
import contextlib
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
from pydantic import ValidationError

from inferq.lines import MAX_LINE_BYTES
from inferq_schemas import DTYPES, Tensor, as_contract_error

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from inferq_schemas import Scalar

    Value: TypeAlias = "np.ndarray[Any, Any] | Tensor"

__all__ = [
    "BadRecord",
    "InputError",
    "JsonLines",
    "Reading",
    "Record",
    "Seen",
    "look_ahead",
    "parse_record",
    "to_dtype",
]

_LOOK_AHEAD_LINES: Final = 256
_LOOK_AHEAD_BYTES: Final = 2**20
_LONG_FORM_KEYS: Final = frozenset({"inputs", "id", "params", "deadline_s"})
_RAW_KEYS: Final = frozenset({"dtype", "shape", "data_base64"})


class InputError(Exception):
    """A file does not hold what it should. The message names the file, the place and the mend."""


@dataclass(frozen=True, slots=True)
class Record:
    """One job as a file describes it.

    Attributes:
        inputs: name to array or tensor, batch axis first.
        id: as the file says; None = to be made.
        params: as the file says; None = those of the command line.
        deadline_s: seconds; None = that of the command line.
        place: where it stands in its file, for messages.
    """

    inputs: Mapping[str, Value]
    id: str | None = None
    params: Mapping[str, Scalar] | None = None
    deadline_s: float | None = None
    place: str = ""


@dataclass(frozen=True, slots=True)
class BadRecord:
    """A line that is no job.

    Attributes:
        problem: what is wrong and the mend, without the place.
        place: where it stands in its file.
    """

    problem: str
    place: str


@dataclass(slots=True)
class Seen:
    """What is known of the inputs of a run so far; the one thing here that changes while records are read.

    Attributes:
        names: inputs that a record had.
        fractions: inputs that had a number with a fraction (or an exponent) in JSON.
    """

    names: set[str] = field(default_factory=set)
    fractions: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Reading:
    """How values become arrays.

    Attributes:
        dtypes: input name to contract dtype, where the file cannot say it.
        add_batch_axis: every record is one row without batch axis.
        seen: shared by all files of a run, whose inputs are of one model and so of one dtype.
    """

    dtypes: Mapping[str, str]
    add_batch_axis: bool = False
    seen: Seen = field(default_factory=Seen)


class JsonLines:
    """Makes jobs of the lines of one file, in order.

    Args:
        reading: how values become arrays.
    """

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._number = 0

    def record(self, line: bytes) -> Record | BadRecord | None:
        """The job of the next line; None for an empty one."""
        self._number += 1
        place = f"line {self._number}"
        if len(line.rstrip(b"\r\n")) > MAX_LINE_BYTES:
            return BadRecord(f"longer than {MAX_LINE_BYTES >> 20} MiB; write one job a line", place)
        if not line.strip():
            return None
        try:
            return parse_record(line, self._reading, place)
        except InputError as error:
            return BadRecord(str(error), place)


def look_ahead(lines: Iterable[bytes], reading: Reading) -> None:
    """Note which inputs have fractions among the first lines of a file, before any of them is sent.

    Many writers of JSON write 1.0 as 1, and the model that takes floats refuses integers.
    """
    left_bytes = _LOOK_AHEAD_BYTES
    for _, line in zip(range(_LOOK_AHEAD_LINES), lines, strict=False):
        with contextlib.suppress(InputError):
            parse_record(line, reading)
        left_bytes -= len(line)
        if left_bytes < 0:
            return


def parse_record(line: bytes, reading: Reading, place: str = "") -> Record:
    """Read one line: `{"inputs": {...}, "id", "params", "deadline_s"}`, or just the map of inputs.

    JSON has one kind of number, so an input's integers become float32 once that input had a fraction anywhere in the
    run; `reading.dtypes` goes before.

    Raises:
        InputError: what is wrong and the mend, without the place.
    """
    try:
        value = json.loads(line)
    except ValueError as error:
        raise InputError(f"not JSON ({error}); every line is one JSON object") from error
    if not isinstance(value, dict):
        raise InputError(f'must be an object like {{"x": [[1.0, 2.0]]}}, is {_kind(value)}')
    if not isinstance(value.get("inputs"), dict):
        return Record(_inputs(value, reading), place=place)
    unknown = sorted(value.keys() - _LONG_FORM_KEYS)
    if unknown:
        raise InputError(f'unknown key {unknown[0]!r} beside "inputs"; known are {", ".join(sorted(_LONG_FORM_KEYS))}')
    return Record(
        _inputs(value["inputs"], reading),
        id=_typed(value, "id", str, "a text"),
        params=_typed(value, "params", dict, "an object"),
        deadline_s=_typed(value, "deadline_s", (int, float), "a number of seconds"),
        place=place,
    )


def _typed(value: dict[str, Any], key: str, kind: type | tuple[type, ...], wanted: str) -> Any:
    found = value.get(key)
    if found is None or (isinstance(found, kind) and not isinstance(found, bool)):
        return found
    raise InputError(f"{key!r} must be {wanted}, is {_kind(found)}")


def _inputs(values: dict[str, Any], reading: Reading) -> dict[str, Value]:
    if not values:
        raise InputError('no inputs; write them as {"name": [[...]]}')
    reading.seen.names.update(values)
    return {name: _input(name, value, reading) for name, value in values.items()}


def _input(name: str, value: Any, reading: Reading) -> Value:
    if isinstance(value, dict):
        return _raw_tensor(name, value)
    array = _array(name, value)
    if reading.add_batch_axis:
        array = array[np.newaxis]
    if array.dtype.kind == "f" and array.size:
        reading.seen.fractions.add(name)
    if name not in reading.dtypes and name in reading.seen.fractions and array.dtype.kind in "iu":
        return array.astype(np.float32)
    return to_dtype(array, reading.dtypes.get(name), default_float=np.dtype(np.float32))


def _raw_tensor(name: str, value: dict[str, Any]) -> Tensor:
    if value.keys() != _RAW_KEYS:
        raise InputError(f"input {name!r}: an object must have the keys {', '.join(sorted(_RAW_KEYS))}")
    try:
        data = base64.b64decode(value["data_base64"], validate=True)
        return Tensor.model_validate({"dtype": value["dtype"], "shape": tuple(value["shape"]), "data": data})
    except ValidationError as error:
        raise InputError(f"input {name!r}: {as_contract_error(error).message}") from error
    except (TypeError, ValueError) as error:
        raise InputError(f"input {name!r}: data_base64 or shape cannot be read: {error}") from error


def _array(name: str, value: Any) -> np.ndarray[Any, Any]:
    try:
        array = np.asarray(value)
    except (ValueError, OverflowError) as error:
        raise InputError(f"input {name!r}: rows of different length, or numbers out of range ({error})") from error
    # numpy makes one kind out of several: [1, "a"] would become two texts, [1, true] two numbers.
    if array.dtype.kind not in "biufU" or (array.dtype.kind == "U" and not _only_texts(value)):
        raise InputError(f"input {name!r}: use numbers, booleans or texts, all of one kind and within 64 bits")
    return array


def _only_texts(value: Any) -> bool:
    return all(map(_only_texts, value)) if isinstance(value, list) else isinstance(value, str)


def to_dtype(array: np.ndarray[Any, Any], dtype: str | None, *, default_float: np.dtype[Any] | None = None) -> Value:
    """Convert to a contract dtype; bfloat16, which numpy lacks, becomes a tensor.

    Args:
        array: any.
        dtype: contract dtype; None = as it is.
        default_float: what float64 becomes where `dtype` is None; None = float64.

    Raises:
        InputError: texts as numbers, or the reverse.
    """
    if dtype is None:
        return array.astype(default_float) if array.dtype == np.float64 and default_float is not None else array
    if (dtype == "string") != (array.dtype.kind == "U"):
        raise InputError(f"an array of {array.dtype.name} cannot become {dtype}; mend --dtype")
    if dtype == "bfloat16":
        # The upper half of a float32, rounded to nearest even.
        bits = array.astype(np.float32).view(np.uint32)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return Tensor.from_numpy(rounded.astype(np.uint16), dtype="bfloat16")
    return array if dtype == "string" else array.astype(DTYPES[dtype].storage)


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "an array", str: "a text", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
