"""What is done with a fuzzed body: every decoder of the contract, and what must hold of whatever it returns."""

from typing import Final

from inferq.outcome import decode_outcome
from inferq_schemas import (
    DEFAULT_LIMITS,
    ContractError,
    Job,
    Limits,
    RejectedJob,
    decode_jobs,
    decode_results,
    encode_job,
    encode_results,
    result_to_wire,
)
from inferq_schemas.errors import ERROR_CODES, MAX_MESSAGE_CHARS

_TIGHT: Final = Limits(body_bytes=4096, bundle_jobs=4, inputs=2, rank=2, params=2, text_bytes=64)


class Broken(Exception):  # noqa: N818 - reads as what it says
    """A decoder answered something that the contract does not allow."""


def try_body(body: bytes) -> int:
    """Hand one body to all decoders.

    Returns:
        How many of them took it.

    Raises:
        Broken: an answer out of contract.
        Exception: anything but `ContractError` that a decoder let out; that is a defect.
    """
    return sum((_jobs(body, DEFAULT_LIMITS), _jobs(body, _TIGHT), _results(body), _outcome(body)))


def _jobs(body: bytes, limits: Limits) -> bool:
    try:
        entries = decode_jobs(body, limits=limits)
    except ContractError as error:
        _check(error)
        return False
    if not 1 <= len(entries) <= limits.bundle_jobs:
        raise Broken(f"{len(entries)} entries")
    for entry in entries[:4]:
        _check_entry(entry)
    return True


def _check_entry(entry: Job | RejectedJob) -> None:
    if isinstance(entry, RejectedJob):
        _check(entry.error)
        if (entry.digest is None) == bool(entry.id):
            raise Broken(f"a rejected job {entry.id!r} with digest {entry.digest!r}")
        return
    if len(entry.digest()) != 16 or entry.rows < 1:
        raise Broken(f"digest {entry.digest()!r}, {entry.rows} rows")
    (again,) = decode_jobs(encode_job(entry))
    if not isinstance(again, Job) or again.digest() != entry.digest():
        raise Broken("a job that is not the same after it was written and read")
    for tensor in entry.inputs.values():
        if tensor.data is not None and tensor.to_numpy().shape != tensor.shape:
            raise Broken(f"an array of shape {tensor.to_numpy().shape}, not {tensor.shape}")


def _results(body: bytes) -> bool:
    try:
        results = decode_results(body)
    except ContractError as error:
        _check(error)
        return False
    again = decode_results(encode_results(results))
    # As text, because NaN is not equal to itself.
    if [repr(result_to_wire(one)) for one in again] != [repr(result_to_wire(one)) for one in results]:
        raise Broken("results that are not the same after they were written and read")
    return True


def _outcome(body: bytes) -> bool:
    try:
        decode_outcome(body)
    except ContractError as error:
        _check(error)
        return False
    return True


def _check(error: ContractError) -> None:
    if error.code not in ERROR_CODES or not 0 < len(error.message) <= MAX_MESSAGE_CHARS:
        raise Broken(f"an error {error.code!r} of {len(error.message)} characters")
