"""Bodies to jobs and results, and back. The border of the contract: nothing but `ContractError` leaves it.

One bad job of a bundle is one `RejectedJob`; only a body that cannot be read as a whole raises.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Final

import msgpack

from inferq_schemas.errors import ContractError
from inferq_schemas.job import ID_PATTERN, Job
from inferq_schemas.limits import DEFAULT_LIMITS, Limits
from inferq_schemas.result import Result, result_from_wire, result_to_wire, tensor_to_wire
from inferq_schemas.unpack import unpack

CONTENT_TYPE: Final = "application/msgpack"
ACCEPT_BUNDLE_HEADER: Final = "inferq-accept"
ATTEMPT_HEADER: Final = "inferq-attempt"

_POLICY: Final = frozenset({"id", "deadline_unix_ms", "sent_unix_ms", "fallback", "late", "force"})
_ID = re.compile(ID_PATTERN)


@dataclass(frozen=True, slots=True)
class RejectedJob:
    """One bad job of a readable body.

    Args:
        id: the job's id; "" where it is missing or unfit.
        error: what to answer.
        digest: fingerprint of the job's own content, 16 bytes, so that the same bad job gets the same stored answer by
            itself, in a bundle, and when it is sent again; None without an id, under which nothing can be stored.
    """

    id: str
    error: ContractError
    digest: bytes | None


def decode_jobs(body: bytes, *, limits: Limits = DEFAULT_LIMITS, bundle: bool = True) -> tuple[Job | RejectedJob, ...]:
    """Read a body of one job or of a bundle.

    Args:
        body: of one AMQP message.
        limits: this deployment's ceilings.
        bundle: whether the lane takes bundles.

    Returns:
        One entry per job, in the order of the body. Entries of a bundle may repeat an id.

    Raises:
        ContractError: the body as a whole is unreadable or not allowed here. No id is known then.
    """
    content = unpack(body, limits)
    if isinstance(content, dict):
        return (_job(content, limits),)
    if not isinstance(content, tuple):
        raise ContractError(
            "malformed", f"body: must be a map (a job) or an array (a bundle), is {type(content).__name__}"
        )
    if not bundle:
        raise ContractError("malformed", "body: this lane takes one job in a message; send bundles to a bulk lane")
    _check_bundle(content, limits)
    return tuple(_job(item, limits) for item in content)


def _check_bundle(items: tuple[Any, ...], limits: Limits) -> None:
    _check_count(len(items), limits)
    models = {item["model"] for item in items if isinstance(item, dict) and isinstance(item.get("model"), str)}
    if len(models) > 1:
        raise ContractError(
            "malformed", f"body: a bundle is for one model, this one names {len(models)}; send one each"
        )


def _check_count(count: int, limits: Limits) -> None:
    if count == 0:
        raise ContractError("malformed", "body: an empty bundle")
    if count > limits.bundle_jobs:
        raise ContractError("too_large", f"body: a bundle of {count}, at most {limits.bundle_jobs}; split it")


def _job(fields: object, limits: Limits) -> Job | RejectedJob:
    try:
        job = Job.from_wire(fields)
    except ContractError as error:
        identity = _readable_id(fields)
        return RejectedJob(identity, error, _digest(fields) if identity else None)
    if limits is not DEFAULT_LIMITS:
        try:
            _check_tightened(job, limits)
        except ContractError as error:
            return RejectedJob(job.id, error, job.digest())
    return job


def _digest(fields: object) -> bytes:
    """Of a map that is no job: everything but what may differ from one sending to the next, and what no answer needs.

    The keys left out are those that `Job.digest` leaves out, so that a retry with a later deadline is the same job.
    """
    assert isinstance(fields, dict)  # noqa: S101 - only a map has a readable id
    content = sorted((str(key), value) for key, value in fields.items() if key not in _POLICY)
    return blake2b(msgpack.packb(content), digest_size=16, person=b"inferq.rejected").digest()


def _readable_id(fields: object) -> str:
    identity = fields.get("id") if isinstance(fields, dict) else None
    return identity if isinstance(identity, str) and _ID.fullmatch(identity) else ""


def _check_tightened(job: Job, limits: Limits) -> None:
    rank = max(len(tensor.shape) for tensor in job.inputs.values())
    texts = (len(value.encode()) for value in job.params.values() if isinstance(value, str))
    for what, found, limit in (
        ("inputs", len(job.inputs), limits.inputs),
        ("inputs: axes of one tensor", rank, limits.rank),
        ("params", len(job.params), limits.params),
        ("params: bytes of one text", max(texts, default=0), limits.text_bytes),
    ):
        if found > limit:
            raise ContractError("too_large", f"{what}: {found}, at most {limit} here")


def encode_job(job: Job, *, limits: Limits = DEFAULT_LIMITS) -> bytes:
    """Write one job.

    Raises:
        ContractError: `too_large`, the receiver would refuse it; send tensors above `limits.claim_check_bytes` as refs.
    """
    return _pack(job_to_wire(job), _job_bytes(job), limits)


def encode_bundle(jobs: Sequence[Job], *, limits: Limits = DEFAULT_LIMITS) -> bytes:
    """Write a bundle of 1..`limits.bundle_jobs` jobs of one model.

    Raises:
        ContractError: `too_large`, or `malformed` for no jobs or several models.
    """
    _check_count(len(jobs), limits)
    if len({job.model for job in jobs}) > 1:
        raise ContractError("malformed", "body: a bundle is for one model")
    return _pack([job_to_wire(job) for job in jobs], sum(map(_job_bytes, jobs)), limits)


def encode_result(result: Result, *, limits: Limits = DEFAULT_LIMITS) -> bytes:
    """Write one result.

    Raises:
        ContractError: `too_large`; store large outputs and send refs.
    """
    return _pack(result_to_wire(result), _output_bytes(result), limits)


def encode_results(results: Sequence[Result], *, limits: Limits = DEFAULT_LIMITS) -> bytes:
    """Write an array of 1..`limits.bundle_jobs` results.

    Raises:
        ContractError: `too_large`, also for too many; `malformed` for none.
    """
    _check_count(len(results), limits)
    return _pack([result_to_wire(result) for result in results], sum(map(_output_bytes, results)), limits)


def decode_results(body: bytes, *, limits: Limits = DEFAULT_LIMITS) -> tuple[Result, ...]:
    """Read a body of one result or of several, in the order of the body.

    Raises:
        ContractError: the body, or any result in it, is unreadable.
    """
    content = unpack(body, limits)
    if isinstance(content, dict):
        return (result_from_wire(content),)
    if not isinstance(content, tuple):
        raise ContractError("malformed", f"body: must be a map or an array of maps, is {type(content).__name__}")
    _check_count(len(content), limits)
    return tuple(result_from_wire(item) for item in content)


def job_to_wire(job: Job) -> dict[str, Any]:
    """The map of one job, without keys that hold their default, in the contract's order; shares the tensors' data."""
    wire: dict[str, Any] = {"id": job.id, "model": job.model}
    if job.version is not None:
        wire["version"] = job.version
    wire["inputs"] = {name: tensor_to_wire(tensor) for name, tensor in job.inputs.items()}
    if job.deadline_unix_ms is not None:
        wire["deadline_unix_ms"] = job.deadline_unix_ms
    if job.sent_unix_ms is not None:
        wire["sent_unix_ms"] = job.sent_unix_ms
    if job.fallback != "allow":
        wire["fallback"] = job.fallback
    if job.late != "drop":
        wire["late"] = job.late
    if job.force:
        wire["force"] = True
    if job.params:
        wire["params"] = job.params
    return wire


def _pack(wire: object, payload_bytes: int, limits: Limits) -> bytes:
    # Checked before packing as well: a gigabyte is refused without being copied.
    packed: bytes = msgpack.packb(wire) if payload_bytes <= limits.body_bytes else b""
    size = len(packed) or payload_bytes
    if size > limits.body_bytes:
        raise ContractError(
            "too_large", f"body: {size} bytes, at most {limits.body_bytes}; send large tensors as a ref"
        )
    return packed


def _job_bytes(job: Job) -> int:
    return _tensor_bytes(job.inputs.values())


def _output_bytes(result: Result) -> int:
    return _tensor_bytes(result.outputs.values())


def _tensor_bytes(tensors: Iterable[Any]) -> int:
    # Texts count by characters here: at most their bytes, and enough to stop what is hopeless.
    return sum(len(tensor.data) for tensor in tensors if tensor.data is not None)
