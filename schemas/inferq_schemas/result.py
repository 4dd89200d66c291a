"""One answer as it travels. On the hot path of the worker: plain slotted dataclasses, maps built by hand.

What is made anew for every job is not frozen: that would make it three times as dear.

Reading is lenient where writing is strict: unknown keys are ignored and unknown codes read as `internal`, so that a
client need not be upgraded before its workers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Self, cast

from pydantic import ValidationError

from inferq_schemas.errors import ERROR_CODES, ContractError, ErrorCode, as_contract_error, shorten
from inferq_schemas.limits import DEFAULT_LIMITS
from inferq_schemas.tensor import Tensor

Status = Literal["ok", "error"]
BATCH_REASONS: Final = ("full", "wait", "deadline", "idle", "shape", "drain", "solo")
MAX_ERROR_CHARS: Final = 2_000


@dataclass(frozen=True, slots=True)
class ErrorInfo:
    """Why a job has no outputs.

    Args:
        code: one of `ERROR_CODES`.
        message: for people, at most 2,000 characters.
    """

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class ServedBy:
    """Who computed the answer; `role` is "gpu" or "cpu", `provider` the ONNX Runtime provider that really ran."""

    model: str
    version: str
    role: str
    provider: str
    worker: str


@dataclass(slots=True)
class Timing:
    """Where the time went, each in milliseconds >= 0; on the wire `timing_ms`.

    Args:
        broker: from the sender's clock to the worker's hands.
        queue: in the worker, until its batch was closed.
        batch: collating the batch and waiting for the device.
        run: in the model.
        total: from the sender's clock to the answer.
    """

    broker: float = 0
    queue: float = 0
    batch: float = 0
    run: float = 0
    total: float = 0


@dataclass(frozen=True, slots=True)
class BatchInfo:
    """The batch that the job ran in: its rows, and why it was closed (one of `BATCH_REASONS`)."""

    rows: int
    reason: str


@dataclass(slots=True)
class Result:
    """The terminal answer to one job.

    Args:
        id: the job's id; "" where the body was so broken that none could be read (then only `correlation_id` tells).
        status: "ok" has outputs, "error" has an error.
        outputs: by name.
        error: why there are no outputs.
        late: the deadline had passed when the answer was ready.
        fallback: the CPU answered instead of the GPU.
        served_by: None where no worker ran the job.
        timing_ms: milliseconds.
        batch: None where the job was in no batch.
        v: contract version.
    """

    id: str
    status: Status
    outputs: Mapping[str, Tensor] = field(default_factory=dict)
    error: ErrorInfo | None = None
    late: bool = False
    fallback: bool = False
    served_by: ServedBy | None = None
    timing_ms: Timing | None = None
    batch: BatchInfo | None = None
    v: int = 1

    @property
    def ok(self) -> bool:
        """Whether the job was computed."""
        return self.status == "ok"

    @classmethod
    def failed(
        cls,
        id: str,  # noqa: A002 - the wire's own name of the field
        code: ErrorCode,
        message: str,
        *,
        served_by: ServedBy | None = None,
        late: bool = False,
        fallback: bool = False,
    ) -> Self:
        """An answer without outputs; the message is cut to 2,000 characters."""
        error = ErrorInfo(code, shorten(message, MAX_ERROR_CHARS))
        return cls(id, "error", error=error, late=late, fallback=fallback, served_by=served_by)


def tensor_to_wire(tensor: Tensor) -> dict[str, Any]:
    """The map of one tensor, sharing its data."""
    if tensor.data is None:
        return {"dtype": tensor.dtype, "shape": tensor.shape, "ref": tensor.ref}
    return {"dtype": tensor.dtype, "shape": tensor.shape, "data": tensor.data}


def result_to_wire(result: Result) -> dict[str, Any]:
    """The map of one result, without keys that hold their default, in the contract's order."""
    wire: dict[str, Any] = {"id": result.id, "status": result.status}
    if result.outputs:
        wire["outputs"] = {name: tensor_to_wire(tensor) for name, tensor in result.outputs.items()}
    if (error := result.error) is not None:
        wire["error"] = {"code": error.code, "message": error.message}
    if result.late:
        wire["late"] = True
    if result.fallback:
        wire["fallback"] = True
    if (by := result.served_by) is not None:
        wire["served_by"] = {
            "model": by.model,
            "version": by.version,
            "role": by.role,
            "provider": by.provider,
            "worker": by.worker,
        }
    if (ms := result.timing_ms) is not None:
        wire["timing_ms"] = {
            "broker": ms.broker,
            "queue": ms.queue,
            "batch": ms.batch,
            "run": ms.run,
            "total": ms.total,
        }
    if (batch := result.batch) is not None:
        wire["batch"] = {"rows": batch.rows, "reason": batch.reason}
    return wire


def result_from_wire(wire: object) -> Result:
    """Read the map of one result.

    Raises:
        ContractError: `unsupported_version`; `malformed` where a known key has a wrong type or the status contradicts
            the rest; `invalid_input` where an output's data does not fit its shape.
    """
    fields = _Fields(wire, "result")
    if (version := fields.integer("v", 1)) != 1:
        raise ContractError("unsupported_version", f"v: this reader knows version 1, not {version}")
    error = fields.submap("error")
    result = Result(
        id=fields.text("id"),
        status=_status(fields, has_error=error is not None),
        outputs=_outputs(fields.submap("outputs")),
        error=None if error is None else _error(error),
        late=fields.flag("late"),
        fallback=fields.flag("fallback"),
        served_by=_served_by(fields.submap("served_by")),
        timing_ms=_timing(fields.submap("timing_ms")),
        batch=_batch(fields.submap("batch")),
    )
    if result.error is not None and result.outputs:
        raise ContractError("malformed", "result: has both outputs and an error")
    return result


class _Fields:
    """Typed access to a stranger's map; every problem names its place."""

    __slots__ = ("_map", "_where")

    def __init__(self, wire: object, where: str) -> None:
        if not isinstance(wire, dict):
            raise ContractError("malformed", f"{where}: must be a map, is {type(wire).__name__}")
        self._map: dict[Any, Any] = wire
        self._where = where

    def wrong(self, key: str, wanted: str) -> ContractError:
        return ContractError("malformed", f"{self._where}.{key}: must be {wanted}")

    def text(self, key: str) -> str:
        value = self._map.get(key)
        if not isinstance(value, str):
            raise self.wrong(key, "a str")
        return value

    def flag(self, key: str) -> bool:
        value = self._map.get(key, False)
        if not isinstance(value, bool):
            raise self.wrong(key, "a bool")
        return value

    def integer(self, key: str, default: int) -> int:
        value = self._map.get(key, default)
        if type(value) is not int:
            raise self.wrong(key, "an int")
        return value

    def number(self, key: str) -> float:
        value = self._map.get(key, 0.0)
        if type(value) not in (int, float):
            raise self.wrong(key, "a number")
        return float(value)

    def submap(self, key: str) -> "_Fields | None":
        value = self._map.get(key)
        return None if value is None else _Fields(value, f"{self._where}.{key}")

    def items(self) -> dict[Any, Any]:
        return self._map


def _status(fields: _Fields, *, has_error: bool) -> Status:
    status = fields.text("status")
    if status not in ("ok", "error"):
        raise fields.wrong("status", '"ok" or "error"')
    if (status == "error") is not has_error:
        raise fields.wrong("error", "there if and only if the status is error")
    return cast("Status", status)


def _outputs(fields: _Fields | None) -> dict[str, Tensor]:
    if fields is None:
        return {}
    items = fields.items()
    if len(items) > DEFAULT_LIMITS.inputs:
        raise ContractError("too_large", f"result.outputs: at most {DEFAULT_LIMITS.inputs}, has {len(items)}")
    return {_name(name): tensor_from_wire(tensor, f"outputs.{name}") for name, tensor in items.items()}


def _name(name: object) -> str:
    if not isinstance(name, str):
        raise ContractError("malformed", "result.outputs: names must be str")
    return name


def tensor_from_wire(wire: object, where: str) -> Tensor:
    """Read the map of one output tensor; unknown keys are ignored.

    Raises:
        ContractError: the tensor breaks the contract; the message starts with `where`.
    """
    if not isinstance(wire, dict):
        raise ContractError("malformed", f"{shorten(where, 80)}: must be a map")
    try:
        return Tensor.model_validate({key: wire[key] for key in ("dtype", "shape", "data", "ref") if key in wire})
    except ValidationError as error:
        problem = as_contract_error(error)
        raise ContractError(problem.code, f"{shorten(where, 80)}.{problem.message}") from None


def _error(fields: _Fields) -> ErrorInfo:
    code = fields.text("code")
    return ErrorInfo(code if code in ERROR_CODES else "internal", shorten(fields.text("message"), MAX_ERROR_CHARS))


def _served_by(fields: _Fields | None) -> ServedBy | None:
    if fields is None:
        return None
    return ServedBy(*(fields.text(key) for key in ("model", "version", "role", "provider", "worker")))


def _timing(fields: _Fields | None) -> Timing | None:
    if fields is None:
        return None
    return Timing(*(fields.number(key) for key in ("broker", "queue", "batch", "run", "total")))


def _batch(fields: _Fields | None) -> BatchInfo | None:
    return None if fields is None else BatchInfo(fields.integer("rows", 0), fields.text("reason"))
