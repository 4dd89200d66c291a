"""Builds jobs: arrays to tensors, options to fields, time left to `expiration`. Pure; time is an argument.

What breaks the contract is refused here, before anything is sent, with the input's name and the mend.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import numpy as np

from inferq.errors import InvalidJob, JobTooLarge
from inferq.names import lane_problem, model_problem
from inferq_schemas import DEFAULT_LIMITS, ContractError, Job, Tensor

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy.typing as npt

    from inferq_schemas import Scalar

__all__ = [
    "GRACE_S",
    "INTERACTIVE_LANE",
    "Deadline",
    "Inputs",
    "Item",
    "JobOptions",
    "answer_limit_s",
    "build_job",
    "expiration_ms",
    "job_bytes",
    "to_tensor",
]

INTERACTIVE_LANE: Final = "interactive"
_JOB_OVERHEAD_BYTES: Final = 512
"""More than the keys and scalars of a job take on the wire; the estimate must not be too low."""
_REFERENCE_BYTES: Final = 1024
GRACE_S: Final = 2.0
"""How long after its deadline a job's refusal may still arrive: it may have crossed three queues by then."""

Inputs: TypeAlias = "Mapping[str, npt.ArrayLike | Tensor]"
Deadline: TypeAlias = float | Literal["default"] | None
"""Seconds from sending; None = no deadline; "default" = what the client's settings say."""


@dataclass(frozen=True, slots=True)
class JobOptions:
    """What a caller may say about a job besides its inputs.

    Attributes:
        lane: which of the model's queues.
        deadline_s: seconds from now until the answer is of no use, > 0; None = never.
        version: pinned model version; None = what the roll-out decides.
        fallback: whether a CPU worker may answer.
        late: what to do when the deadline cannot be met anywhere.
        force: run again although an outcome is stored.
        params: scalars for the model's hooks.
    """

    lane: str = INTERACTIVE_LANE
    deadline_s: float | None = 30.0
    version: str | None = None
    fallback: Literal["allow", "never"] = "allow"
    late: Literal["drop", "serve"] = "drop"
    force: bool = False
    params: Mapping[str, Scalar] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if problem := lane_problem(self.lane):
            raise InvalidJob(problem)
        if self.deadline_s is None and self.lane == INTERACTIVE_LANE:
            raise InvalidJob(
                f"jobs of the {INTERACTIVE_LANE!r} lane need a deadline: give deadline_s, or use another lane"
            )
        if self.deadline_s is not None and not _is_duration(self.deadline_s):
            raise InvalidJob(
                f"deadline_s is {self.deadline_s!r}; it must be a number of seconds above 0, or None for no deadline"
            )


def _is_duration(seconds: Any) -> bool:
    is_number = isinstance(seconds, int | float | np.integer | np.floating) and not isinstance(seconds, bool)
    return is_number and 0 < float(seconds) < math.inf


@dataclass(frozen=True, slots=True)
class Item:
    """One job of `Client.infer_many` that needs more than its inputs.

    Attributes:
        inputs: name to array, batch axis first.
        id: job id; None = a new UUID.
        params: scalars for hooks; None = those of the whole call.
        deadline_s: seconds from sending; "default" = that of the whole call.
    """

    inputs: Inputs
    id: str | None = None
    params: Mapping[str, Scalar] | None = None
    deadline_s: Deadline = "default"

    def options(self, common: JobOptions) -> JobOptions:
        """The options of this job, where `common` is what the call said for all."""
        params = common.params if self.params is None else self.params
        deadline_s = common.deadline_s if self.deadline_s == "default" else self.deadline_s
        return replace(common, params=params, deadline_s=deadline_s)


def to_tensor(name: str, value: npt.ArrayLike | Tensor) -> Tensor:
    """Turn an input into a wire tensor.

    An array keeps its dtype. Plain Python numbers have none: floats become float32 and ints int64, which is what
    models nearly always want; pass an array for anything else.

    Raises:
        InvalidJob: not convertible; names the input and the mend.
    """
    if isinstance(value, Tensor):
        return value
    try:
        return Tensor.from_numpy(_as_array(value))
    except (ValueError, TypeError, OverflowError) as error:
        problem = error.message if isinstance(error, ContractError) else str(error)
        raise InvalidJob(f"input {name!r}: {problem}") from error


def _as_array(value: Any) -> np.ndarray[Any, Any]:
    if isinstance(value, np.ndarray | np.generic):
        return np.asarray(value)
    array = np.asarray(value)
    # Objects with a dtype of their own (other array libraries) know what they hold.
    if array.dtype == np.float64 and not hasattr(value, "dtype"):
        return array.astype(np.float32)
    return array


def build_job(model: str, inputs: Inputs, options: JobOptions, *, now_ms: int, job_id: str | None = None) -> Job:
    """Build one valid job.

    Args:
        model: model name.
        inputs: name to array of shape (n, ...), the same n >= 1 in all.
        options: everything else.
        now_ms: Unix milliseconds; sending time and base of the deadline.
        job_id: None = a new UUID.

    Raises:
        InvalidJob: the job breaks the contract; the message says where and how to mend it.
    """
    if problem := model_problem(model):
        raise InvalidJob(problem)
    if not isinstance(inputs, Mapping):
        raise InvalidJob(
            f"inputs is a map of input name to array, such as {{'x': array}}, and not {type(inputs).__name__}"
        )
    tensors = {name: to_tensor(name, value) for name, value in inputs.items()}
    deadline_ms = None if options.deadline_s is None else now_ms + max(1, round(options.deadline_s * 1000))
    try:
        return Job.build(
            id=str(uuid.uuid4()) if job_id is None else job_id,
            model=model,
            version=options.version,
            inputs=tensors,
            deadline_unix_ms=deadline_ms,
            sent_unix_ms=now_ms,
            fallback=options.fallback,
            late=options.late,
            force=options.force,
            params=dict(options.params),
        )
    except ContractError as error:
        kind = JobTooLarge if error.code == "too_large" else InvalidJob
        raise kind(error.message) from error


def answer_limit_s(job: Job, *, now_ms: int, late_s: float) -> float | None:
    """How long waiting for the answer makes sense, in seconds; None = without limit, for jobs without a deadline.

    A little beyond the deadline, because the refusal of a job that could not be met comes after it; `late_s` beyond it
    where the job is to be served late.
    """
    if job.deadline_unix_ms is None:
        return None
    grace_s = late_s if job.late == "serve" else GRACE_S
    return max(0, job.deadline_unix_ms - now_ms) / 1000 + grace_s


def job_bytes(job: Job, *, claims: bool = False) -> int:
    """Upper estimate of what the job takes in a message body, in bytes.

    Args:
        job: any job.
        claims: whether tensors above the claim-check limit will travel apart.
    """
    names = sum(len(name) for name in job.inputs)
    params = sum(len(name) + len(str(value)) for name, value in job.params.items())
    # Four bytes a character at worst, and as much again for the framing of each input.
    return (
        _JOB_OVERHEAD_BYTES + 4 * (names + params) + sum(_tensor_bytes(t, claims=claims) for t in job.inputs.values())
    )


def _tensor_bytes(tensor: Tensor, *, claims: bool) -> int:
    framing = 128 + 4 * len(tensor.ref or "")
    if claims and isinstance(tensor.data, bytes) and len(tensor.data) > DEFAULT_LIMITS.claim_check_bytes:
        return framing + _REFERENCE_BYTES
    # Every string carries a length of its own, up to five bytes.
    strings = 5 * len(tensor.data) if isinstance(tensor.data, tuple) else 0
    return framing + strings + tensor.payload_bytes


def expiration_ms(jobs: Iterable[Job], *, now_ms: int, cpu_reserve_ratio: float) -> int | None:
    """When the broker may take a message out of its lane, in milliseconds from now; None = never.

    That is each job's time left less what is reserved for the CPU fallback (nothing where the job forbids it). A
    bundle lives as long as its most patient job, and for ever if one has no deadline.
    """
    latest: int | None = 0
    for job in jobs:
        if job.deadline_unix_ms is None:
            return None
        left = max(0, job.deadline_unix_ms - now_ms)
        reserve = cpu_reserve_ratio if job.fallback == "allow" else 0.0
        latest = max(latest or 0, int(left * (1 - reserve)))
    return latest
