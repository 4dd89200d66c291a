"""One tensor as it travels: a dtype by name, a shape, and little-endian C-order bytes, a flat array of texts, or a ref.

Validated once, viewed with numpy afterwards; bytes are never copied by validation. Resolves no refs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal, Self, get_args

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError, WithJsonSchema, model_validator

from inferq_schemas.errors import ContractError, as_contract_error, fault
from inferq_schemas.limits import DEFAULT_LIMITS

DTypeName = Literal[
    "bool",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "string",
]


@dataclass(frozen=True, slots=True)
class DType:
    """What a contract dtype is in memory.

    Args:
        name: as on the wire.
        storage: little-endian numpy dtype of the bytes; None for `string`, uint16 for `bfloat16` (numpy has none).
        item_bytes: bytes of one element; 0 for `string`.
    """

    name: DTypeName
    storage: np.dtype[Any] | None
    item_bytes: int


def _dtype(name: DTypeName) -> DType:
    if name == "string":
        return DType(name, None, 0)
    storage = np.dtype("uint16" if name == "bfloat16" else name).newbyteorder("<")
    return DType(name, storage, storage.itemsize)


DTYPES: Final[Mapping[str, DType]] = MappingProxyType({name: _dtype(name) for name in get_args(DTypeName)})
_BYTE_ORDERS: Final[tuple[Literal["<", ">"], ...]] = ("<", ">")
# Asking a numpy dtype for its name takes longer than all the rest of `from_numpy`.
_NAMES: Final[Mapping[np.dtype[Any], DTypeName]] = {
    storage.newbyteorder(order): name
    for name, storage in ((entry.name, entry.storage) for entry in DTYPES.values())
    if storage is not None and name != "bfloat16"
    for order in _BYTE_ORDERS
}

# 2**53 - 1 is the largest integer that every language's JSON and doubles keep exactly.
MAX_INTEGER: Final = 2**53 - 1
_Dim = Annotated[int, Field(ge=0, le=MAX_INTEGER)]


def _bytes_or_texts(value: object) -> object:
    """Check the type alone and hand the very same object on.

    A union of pydantic's own types would build the tuple anew, and make 200,000 errors of 200,000 wrong elements.
    """
    if value is None or type(value) is bytes:
        return value
    if type(value) is not tuple:
        raise fault("invalid_input", "", f"must be bytes or an array of str, is {type(value).__name__}")
    for index, text in enumerate(value):
        if type(text) is not str:
            raise fault("invalid_input", str(index), f"must be a str, is {type(text).__name__}")
        if not is_unicode(text):
            raise fault("invalid_input", str(index), "is not valid Unicode: it holds a lone surrogate")
    return value


def is_unicode(text: str) -> bool:
    """Whether a str can be written as UTF-8; one with a lone surrogate cannot."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


_Data = Annotated[
    bytes | tuple[str, ...] | None,
    PlainValidator(_bytes_or_texts),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "contentEncoding": "base64", "description": "msgpack bin; base64 only in JSON"},
                {"type": "array", "items": {"type": "string"}, "description": "for dtype string, C order"},
            ]
        }
    ),
]


class Tensor(BaseModel):
    """A tensor of a job or of a result; exactly one of `data` and `ref` is there.

    `data` is bytes of exactly `prod(shape) * item_bytes`, or for dtype `string` a flat tuple of `prod(shape)` texts. A
    0 in `shape` is legal. `ref` names a payload kept elsewhere; its size is checked by whoever fetches it.

    Args:
        dtype: of the elements, by name.
        shape: lengths of the axes; a job's inputs start with the batch axis.
        data: the elements, little-endian in C order.
        ref: key or URL of a payload kept elsewhere.

    Raises:
        pydantic.ValidationError: from the constructor; `as_contract_error` turns it into a `ContractError`.
    """

    model_config = ConfigDict(
        frozen=True,
        strict=True,
        extra="forbid",
        hide_input_in_errors=True,
        json_schema_extra={"oneOf": [{"required": ["data"]}, {"required": ["ref"]}]},
    )

    dtype: DTypeName
    shape: Annotated[tuple[_Dim, ...], Field(max_length=DEFAULT_LIMITS.rank)]
    data: _Data = None
    ref: Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f]{1,2048}$")] | None = None

    @model_validator(mode="after")
    def _check_contents(self) -> Self:
        data = self.data
        if (data is None) is (self.ref is None):
            raise fault("invalid_input", "data", "a tensor has exactly one of data and ref")
        if data is not None:
            _check_data(self.dtype, self.shape, data)
        return self

    @property
    def payload_bytes(self) -> int:
        """Bytes of `data` (texts: their UTF-8 length); 0 for a ref."""
        if isinstance(self.data, bytes):
            return len(self.data)
        return sum(len(text) if text.isascii() else len(text.encode()) for text in self.data or ())

    def to_numpy(self) -> np.ndarray[Any, np.dtype[Any]]:
        """View the data as an array of `shape`.

        Returns:
            A read-only, C-contiguous view of `data`, not a copy; dtype `bfloat16` as uint16. Texts become a new,
            read-only object array of str.

        Raises:
            ContractError: `invalid_input`, the tensor is a ref, which has to be fetched first.
        """
        if self.data is None:
            raise ContractError("invalid_input", "the tensor is a ref: fetch its payload before viewing it")
        if isinstance(self.data, bytes):
            # Unlike np.frombuffer this takes an empty buffer, and the shape in the same call.
            return np.ndarray(self.shape, DTYPES[self.dtype].storage, self.data)
        array = np.empty(len(self.data), dtype=object)
        array[:] = self.data
        array = array.reshape(self.shape)
        array.flags.writeable = False
        return array

    @classmethod
    def from_numpy(cls, array: npt.ArrayLike, *, dtype: str | None = None) -> Self:
        """Take an array's contents; the one copy is made here, whatever its strides and byte order.

        Args:
            array: an array, or what numpy makes one of, of any shape within the limits; bool, integers, float16 to
                float64, bfloat16 (of ml_dtypes), or texts.
            dtype: the contract dtype, where the array cannot say it: "bfloat16" reads a uint16 array as such. Never
                converts values.

        Raises:
            ContractError: `invalid_input` for a dtype outside the closed list (bytes strings, objects, complex, dates,
                long double) or one that differs from `dtype`; `too_large` above the rank limit.
        """
        array = np.asarray(array)
        said = DTYPES.get(dtype) if dtype is not None else None
        if said is not None and said.storage is not None and array.dtype == said.storage and _may_be_sent(array):
            return cls._built(said.name, array.shape, array.tobytes())  # what comes out of a model, nearly always
        name = _contract_name(array, dtype)
        storage = DTYPES[name].storage
        if storage is not None and _may_be_sent(array):
            return cls._built(name, array.shape, _little_endian_bytes(array, storage))
        data = _texts(array) if storage is None else _little_endian_bytes(array, storage)
        try:
            return cls(dtype=name, shape=array.shape, data=data)
        except ValidationError as error:
            raise as_contract_error(error) from None

    @classmethod
    def _built(cls, dtype: DTypeName, shape: tuple[int, ...], data: bytes) -> Self:
        """A tensor that is right by construction: what `model_construct` makes, at a third of its price."""
        made = cls.__new__(cls)
        _set_fields(made, {"dtype": dtype, "shape": shape, "data": data, "ref": None})
        _set_names(made, _DATA_FIELDS)
        _set_extra(made, None)
        _set_private(made, None)
        return made


_DATA_FIELDS: Final = {"dtype", "shape", "data"}  # one for all; pydantic only ever reads or copies it
# The four slots of a pydantic model, past the checks of its `__setattr__`.
_set_fields, _set_names, _set_extra, _set_private = (
    BaseModel.__dict__[slot].__set__
    for slot in ("__dict__", "__pydantic_fields_set__", "__pydantic_extra__", "__pydantic_private__")
)


def _may_be_sent(array: np.ndarray[Any, Any]) -> bool:
    return array.ndim <= DEFAULT_LIMITS.rank


def _check_data(dtype: DTypeName, shape: tuple[int, ...], data: bytes | tuple[str, ...]) -> None:
    if (dtype == "string") is isinstance(data, bytes):
        wanted = "an array of str" if dtype == "string" else "bytes (msgpack bin)"
        raise fault("invalid_input", "data", f"dtype {dtype} needs {wanted}")
    # Python integers do not overflow; eight axes of 2**53 are still a small number of digits.
    item_bytes = DTYPES[dtype].item_bytes or 1
    wanted_length = prod(shape) * item_bytes
    if wanted_length != len(data):
        unit = "texts" if dtype == "string" else "bytes"
        raise fault(
            "invalid_input",
            "shape",
            f"{list(shape)} of {dtype} needs {wanted_length} {unit}, data has {len(data)}; send little-endian, C order",
        )
    if dtype == "bool" and isinstance(data, bytes) and data.count(0) + data.count(1) != len(data):
        raise fault("invalid_input", "data", "dtype bool needs bytes that are 0 or 1")


def _contract_name(array: np.ndarray[Any, Any], wanted: str | None) -> DTypeName:
    common = _NAMES.get(array.dtype)
    if common is not None and wanted in (None, common):
        return common
    if wanted is not None and wanted not in DTYPES:
        raise ContractError("invalid_input", f"dtype {wanted!r} is not one of {', '.join(DTYPES)}")
    if wanted == "bfloat16" and array.dtype == np.uint16:
        return "bfloat16"
    name = common or _uncommon_name(array)
    if name is None:
        raise ContractError("invalid_input", f"an array of {array.dtype} cannot be sent; {_mend(array.dtype.kind)}")
    if wanted not in (None, name):
        raise ContractError("invalid_input", f"the array is {name}, not {wanted}; use .astype({wanted!r}) first")
    return name


def _uncommon_name(array: np.ndarray[Any, Any]) -> DTypeName | None:
    if array.dtype.kind in "UT" or (array.dtype.kind == "O" and all(isinstance(item, str) for item in array.flat)):
        return "string"
    # Aliases such as long long, and the bfloat16 that ml_dtypes registers.
    return DTYPES[array.dtype.name].name if array.dtype.name in DTYPES else None


def _mend(kind: str) -> str:
    match kind:
        case "S":
            return "decode the bytes to str first, or send them as uint8"
        case "O":
            return "every element must be str; convert numbers with .astype(...)"
        case _:
            return f"convert it to one of {', '.join(DTYPES)}"


def _texts(array: np.ndarray[Any, Any]) -> tuple[str, ...]:
    return tuple(map(str, array.ravel().tolist()))


def _little_endian_bytes(array: np.ndarray[Any, Any], storage: np.dtype[Any]) -> bytes:
    if array.dtype.kind == "V":  # bfloat16 of ml_dtypes, whose casts are conversions
        array = array.view(np.uint16)
    return (array if array.dtype == storage else array.astype(storage)).tobytes()
