"""Bytes to jobs: reads one delivery against the wire contract. Before batching, one by one; touches no socket."""

from __future__ import annotations

from typing import TYPE_CHECKING

from inferq_schemas import (
    BUNDLE_LANES,
    CONTENT_TYPE,
    ContractError,
    Job,
    Limits,
    RejectedJob,
    decode_jobs,
    parse_routing_key,
    time_left_ms,
)
from inferq_worker.errors import WorkError

if TYPE_CHECKING:
    from inferq_worker.work import Delivery

_CONTENT_TYPES = (None, "", CONTENT_TYPE, "application/x-msgpack")


def decode(delivery: Delivery, limits: Limits) -> tuple[str, tuple[Job | RejectedJob, ...]]:
    """Read the jobs of a delivery.

    Returns:
        The lane that the sender chose (the routing key keeps it through the fallback), and the jobs in order; a job
        that is wrong by itself is a `RejectedJob` and leaves the others of its bundle alone.

    Raises:
        WorkError: the body as a whole is unreadable, or contradicts its routing key.
    """
    if delivery.content_type not in _CONTENT_TYPES:
        raise WorkError("malformed", f"content_type {delivery.content_type!r:.80} is not {CONTENT_TYPE}; send msgpack")
    try:
        model, lane = parse_routing_key(delivery.routing_key)
        jobs = decode_jobs(delivery.body, limits=limits, bundle=lane in BUNDLE_LANES)
    except ContractError as error:
        raise WorkError(error.code, error.message) from error
    return lane, tuple(_checked(job, model, lane) if isinstance(job, Job) else job for job in jobs)


def deadline_s(job: Job, delivery: Delivery) -> float | None:
    """The job's deadline in monotonic seconds, or None.

    Raises:
        WorkError: the sender's clock is more than the tolerated skew ahead.
    """
    try:
        left_ms = time_left_ms(job, delivery.received_unix_ms)
    except ContractError as error:
        raise WorkError(error.code, error.message) from error
    return None if left_ms is None else delivery.received_s + left_ms / 1000


def _checked(job: Job, model: str, lane: str) -> Job | RejectedJob:
    if job.model != model:
        message = f"job is for model {job.model!r}, but was published with routing key '{model}.{lane}'"
        return RejectedJob(job.id, ContractError("malformed", message), job.digest())
    if lane == "interactive" and job.deadline_unix_ms is None:
        message = "lane interactive requires deadline_unix_ms; set one, or publish to lane bulk"
        return RejectedJob(job.id, ContractError("invalid_input", message), job.digest())
    return job
