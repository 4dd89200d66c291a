"""The answer a caller gets: arrays, and where they came from. Turns wire results into it, and failures into errors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from inferq.errors import AnswerLost, InferqError, JobFailed, StoreUnavailable
from inferq_schemas import ContractError, Result

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import TypeAlias

    import numpy as np

    from inferq.results import ResultStore
    from inferq_schemas import ErrorCode, Tensor

    Arrays: TypeAlias = "Mapping[str, np.ndarray[Any, Any]]"

__all__ = ["Answer", "failed_answer", "result_error", "to_answer"]


@dataclass(frozen=True, slots=True)
class Answer:
    """One job's answer.

    Attributes:
        id: job id.
        outputs: name to array, batch axis first, row i belongs to the job's row i. Read-only views; copy to change
            them. bfloat16 comes as uint16. Empty if the job failed.
        result: the answer as it travelled: status, who served it, timings, `late`, `fallback`.
        index: place of the job in what was given to `infer_many`, from 0; None elsewhere.
        error: why there are no outputs; None if the job was answered. `infer` and `result` raise it instead.
    """

    id: str
    outputs: Arrays
    result: Result
    index: int | None = None
    error: InferqError | None = None

    @property
    def ok(self) -> bool:
        """Whether there are outputs."""
        return self.error is None


def result_error(result: Result) -> JobFailed | None:
    """The error that a failed result stands for; None for a good one."""
    if result.ok:
        return None
    info = result.error
    code, message = (info.code, info.message) if info is not None else ("internal", "no reason given")
    return JobFailed(code, message, result)


def failed_answer(job_id: str, error: InferqError, index: int | None = None) -> Answer:
    """The answer of a job that failed, whether a worker or this client says so."""
    if isinstance(error, JobFailed):
        return Answer(job_id, {}, error.result, index, error)
    # Every class but JobFailed carries a code of the closed list.
    result = Result.failed(job_id, cast("ErrorCode", error.code), str(error))
    return Answer(job_id, {}, result, index, error)


async def to_answer(result: Result, store: ResultStore | None, *, job_id: str, index: int | None = None) -> Answer:
    """Make arrays of a result; outputs kept apart are fetched from Redis. Does not raise for a failed job.

    Args:
        result: as it came.
        store: where outputs kept apart are; None = this client works without Redis.
        job_id: the job's own id; a result that answers an unreadable message has none.
        index: goes into the answer.
    """
    error: InferqError | None = result_error(result)
    if error is not None:
        return failed_answer(job_id, error, index)
    try:
        outputs = {name: await _array(job_id, name, tensor, store) for name, tensor in result.outputs.items()}
    except (AnswerLost, StoreUnavailable) as problem:
        return failed_answer(job_id, problem, index)
    return Answer(job_id, outputs, result, index)


async def _array(job_id: str, name: str, tensor: Tensor, store: ResultStore | None) -> np.ndarray[Any, Any]:
    if tensor.ref is not None:
        if store is None:
            raise AnswerLost(f"output {name!r} of job {job_id} was kept apart in Redis; configure redis.url to read it")
        tensor = await store.fetch_output(job_id, name, tensor)
    try:
        return tensor.to_numpy()
    except ContractError as error:
        raise AnswerLost(f"output {name!r} of job {job_id} cannot be read: {error.message}") from error
