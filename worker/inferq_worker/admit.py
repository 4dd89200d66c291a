"""One job to one work item: does the model take it, and is there time? Raises `WorkError` for what cannot run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from inferq_worker.errors import WorkError
from inferq_worker.work import Request, WorkItem

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

    from inferq_schemas import Job, Tensor
    from inferq_worker.runtime import SessionInfo, TensorSpec
    from inferq_worker.runtime.interface import Array
    from inferq_worker.work import Feeds


def admit(
    job: Job,
    request: Request,
    payloads: Mapping[str, Tensor],
    info: SessionInfo,
    *,
    max_rows: int,
    deadline_s: float | None,
    lane_rank: int,
) -> WorkItem:
    """Admit a job to its model.

    Args:
        job: as decoded.
        request: where its answer goes.
        payloads: its inputs with claim checks resolved.
        info: what the model takes.
        max_rows: most rows of one job.
        deadline_s: monotonic seconds, None = none.
        lane_rank: rank of the lane that brought it.

    Raises:
        WorkError: `too_large` above `max_rows`; `invalid_input` naming the input and what the model takes;
            `deadline_exceeded` when the deadline has passed and the caller does not want a late answer.
    """
    if job.rows > max_rows:
        raise WorkError("too_large", f"{job.rows} rows, at most {max_rows} (limits.rows) in one job; split it")
    inputs = _inputs(payloads, info)
    left_s = None if deadline_s is None else deadline_s - request.delivery.received_s
    if left_s is not None and job.late == "drop" and left_s <= 0:
        raise WorkError(
            "deadline_exceeded", f"deadline passed {-left_s * 1000:.0f} ms before a worker received the job"
        )
    return WorkItem(
        job=job,
        requests=[request],
        inputs=inputs,
        step_rows=info.max_rows if info.batchable else job.rows,
        payload_bytes=sum(tensor.payload_bytes for tensor in payloads.values()),
        bucket=(job.model, _shape(inputs, info)),
        digest=job.digest(),
        lane_rank=lane_rank,
        arrived_s=request.delivery.received_s,
        deadline_s=deadline_s,
    )


def _inputs(payloads: Mapping[str, Tensor], info: SessionInfo) -> Feeds:
    wanted = {spec.name: spec for spec in info.inputs}
    unknown = sorted(set(payloads) - set(wanted))
    missing = sorted(set(wanted) - set(payloads))
    if unknown or missing:
        wrong = [f"unknown {', '.join(unknown)}"] if unknown else []
        wrong += [f"missing {', '.join(missing)}"] if missing else []
        raise WorkError("invalid_input", f"inputs: {'; '.join(wrong)[:300]}; the model takes {', '.join(wanted)[:300]}")
    for name, tensor in payloads.items():
        _check(tensor, wanted[name], shared=name in info.shared)
    return {name: payloads[name].to_numpy() for name in wanted}


def _check(tensor: Tensor, spec: TensorSpec, *, shared: bool) -> None:
    if tensor.dtype != spec.dtype:
        raise WorkError("invalid_input", f"inputs.{spec.name}.dtype is {tensor.dtype}, the model takes {spec.dtype}")
    if shared:
        if tensor.shape != ():
            raise WorkError("invalid_input", f"inputs.{spec.name} is shared by the batch: its shape must be []")
        return
    inner, wanted = tensor.shape[1:], spec.shape[1:]
    fits = len(inner) == len(wanted) and all(want in (None, have) for have, want in zip(inner, wanted, strict=True))
    if not tensor.shape or not fits:
        takes = ", ".join(["n", *("any" if size is None else str(size) for size in wanted)])
        raise WorkError("invalid_input", f"inputs.{spec.name}.shape is {list(tensor.shape)}, the model takes [{takes}]")


def _shape(inputs: Feeds, info: SessionInfo) -> Hashable:
    """Jobs may share a batch when their inner shapes agree, and the values of shared scalars too."""
    return tuple(_value(array) if name in info.shared else array.shape[1:] for name, array in inputs.items())


def _value(scalar: Array) -> Hashable:
    """Bytes, so that NaN equals NaN; of a text itself, because an object array's bytes are addresses."""
    return str(scalar[()]) if scalar.dtype.hasobject else scalar.tobytes()
