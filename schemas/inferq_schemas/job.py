"""One job as it travels, and how much time it has left. The clock is an argument; nothing here reads one."""

from hashlib import blake2b
from typing import Annotated, Any, Final, Literal, Self

import msgpack
from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError, WithJsonSchema, model_validator

from inferq_schemas.errors import ContractError, as_contract_error, fault
from inferq_schemas.limits import DEFAULT_LIMITS
from inferq_schemas.tensor import MAX_INTEGER, Tensor, is_unicode

ID_PATTERN: Final = r"^[A-Za-z0-9_.:-]{1,128}$"
MODEL_PATTERN: Final = r"^[a-z0-9][a-z0-9_-]{0,63}$"
VERSION_PATTERN: Final = r"^[A-Za-z0-9_.-]{1,64}$"
# ONNX names hold slashes, colons and dots; control characters have no place in a key or a log line.
NAME_PATTERN: Final = r"^[^\x00-\x1f\x7f]{1,256}$"

MAX_SKEW_MS: Final = 5_000

Scalar = bool | int | float | str

_Name = Annotated[str, Field(pattern=NAME_PATTERN)]
_UnixMs = Annotated[int, Field(ge=0, le=MAX_INTEGER)]


def _scalar(value: object) -> object:
    """Check one value of `params`. pydantic's own union would turn an int too long for msgpack into a float."""
    if isinstance(value, str):
        if not is_unicode(value):
            raise fault("malformed", "", "is not valid Unicode: it holds a lone surrogate")
        if len(value.encode()) > DEFAULT_LIMITS.text_bytes:
            raise fault("too_large", "", f"a text has at most {DEFAULT_LIMITS.text_bytes} bytes")
        return value
    if isinstance(value, bool | float) or (isinstance(value, int) and -(2**63) <= value < 2**64):
        return value
    raise fault("malformed", "", "must be a bool, an int of 64 bits, a float or a str")


_Scalar = Annotated[Scalar, PlainValidator(_scalar), WithJsonSchema({"type": ["boolean", "number", "string"]})]


class Job(BaseModel):
    """A request to run one model on `rows` rows.

    Args:
        v: contract version.
        id: identity for deduplication and results.
        model: name of the model; agrees with the routing key.
        version: pins a version of the model; None leaves it to the roll-out.
        inputs: by name; the batch axis comes first and has the same length >= 1 in all of rank >= 1. Shared scalars
            that the model declares have shape ().
        deadline_unix_ms: absolute, sender's wall clock; None = no deadline.
        sent_unix_ms: sender's wall clock when the job was written.
        fallback: may the CPU answer?
        late: what to do when the deadline cannot be met anywhere.
        force: run again although an outcome is stored.
        params: for pre- and post-processing hooks.

    Raises:
        pydantic.ValidationError: from the constructor; `Job.build` raises `ContractError` instead.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", hide_input_in_errors=True)

    v: Annotated[int, Field(ge=1, le=1)] = 1
    id: Annotated[str, Field(pattern=ID_PATTERN)]
    model: Annotated[str, Field(pattern=MODEL_PATTERN)]
    version: Annotated[str, Field(pattern=VERSION_PATTERN)] | None = None
    inputs: Annotated[dict[_Name, Tensor], Field(min_length=1, max_length=DEFAULT_LIMITS.inputs)]
    deadline_unix_ms: _UnixMs | None = None
    sent_unix_ms: _UnixMs | None = None
    fallback: Literal["allow", "never"] = "allow"
    late: Literal["drop", "serve"] = "drop"
    force: bool = False
    params: Annotated[dict[_Name, _Scalar], Field(max_length=DEFAULT_LIMITS.params)] = {}

    @classmethod
    def build(cls, **fields: Any) -> Self:
        """Make a job from its fields (`inputs` as tensors or as maps).

        Raises:
            ContractError: with the code, the place and the mend, where a field breaks the contract.
        """
        return cls.from_wire(fields)

    @classmethod
    def from_wire(cls, fields: object) -> Self:
        """Validate an unpacked map. Bytes are kept, not copied.

        Raises:
            ContractError: the map breaks the contract.
        """
        try:
            return cls.model_validate(fields)
        except ValidationError as error:
            raise as_contract_error(error) from None

    @model_validator(mode="after")
    def _check_whole(self) -> Self:
        _check_rows(self.inputs)
        return self

    @property
    def rows(self) -> int:
        """Length >= 1 of the batch axis that all inputs of rank >= 1 share."""
        return next(tensor.shape[0] for tensor in self.inputs.values() if tensor.shape)

    def digest(self) -> bytes:
        """Fingerprint of what is to be computed: model, version, inputs and params, in any order of keys.

        Returns:
            16 bytes. Deadline, id and policy are not part of it. Of a ref, the ref itself counts, not what it names.
        """
        state = blake2b(digest_size=16, person=b"inferq.job.v1")
        state.update(msgpack.packb([self.model, self.version, sorted(self.params.items()), len(self.inputs)]))
        for name in sorted(self.inputs):
            tensor = self.inputs[name]
            # Each head ends where its own lengths say, and tells the length of the data behind it: no two different
            # jobs give the same stream.
            state.update(msgpack.packb([name, tensor.dtype, tensor.shape, tensor.ref]))
            if tensor.data is not None:
                state.update(tensor.data if isinstance(tensor.data, bytes) else msgpack.packb(tensor.data))
        return state.digest()


def time_left_ms(job: Job, now_unix_ms: int) -> int | None:
    """Milliseconds until the job's deadline by the receiver's wall clock; negative once it has passed.

    Where the receiver's clock is behind the sender's, the job gets no more than the budget its sender gave it.

    Returns:
        None for a job without deadline, whose clocks do not matter.

    Raises:
        ContractError: `invalid_input`, the sender's clock is more than 5 s ahead.
    """
    if job.deadline_unix_ms is None:
        return None
    left = job.deadline_unix_ms - now_unix_ms
    if job.sent_unix_ms is None or job.sent_unix_ms <= now_unix_ms:
        return left
    skew = job.sent_unix_ms - now_unix_ms
    if skew > MAX_SKEW_MS:
        raise ContractError(
            "invalid_input",
            f"sent_unix_ms: {skew} ms ahead of the receiver's clock, over {MAX_SKEW_MS} ms; synchronise the clocks",
        )
    return min(left, job.deadline_unix_ms - job.sent_unix_ms)


def _check_rows(inputs: dict[str, Tensor]) -> None:
    rows = None
    for name, tensor in inputs.items():
        if not tensor.shape:
            continue
        length = tensor.shape[0]
        if length < 1:
            raise fault("invalid_input", f"inputs.{name}.shape", "the first axis is the batch and must be at least 1")
        if rows is None:
            rows = length
        elif rows != length:
            problem = f"{length} rows, but an input before it has {rows}; all share the first axis, the batch"
            raise fault("invalid_input", f"inputs.{name}.shape", problem)
    if rows is None:
        raise fault("invalid_input", "inputs", "no input has a batch axis; send shape [1, ...] for a single row")
