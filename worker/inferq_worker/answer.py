"""Builds the Result of a job from what came of it. Pure."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from inferq_schemas import BatchInfo, ContractError, ErrorInfo, Result, ServedBy, Tensor, Timing
from inferq_worker.runtime import RowError
from inferq_worker.work import Answer

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from inferq_worker.errors import WorkError
    from inferq_worker.runtime import SessionInfo
    from inferq_worker.work import Feeds, WorkItem


@dataclass(frozen=True, slots=True)
class RunTimes:
    """Monotonic seconds around one batch: closed by the scheduler, and its run over."""

    closed_s: float
    ended_s: float


class Answerer:
    """Signs answers with who gave them.

    Args:
        worker: id of this process.
        role: "gpu" or "cpu"; the CPU role marks its answers `fallback`.
    """

    def __init__(self, *, worker: str, role: str) -> None:
        self._worker = worker
        self._role = role

    @property
    def is_fallback(self) -> bool:
        """Whether answers of this worker are the CPU's in place of the GPU's."""
        return self._role == "cpu"

    def served_by(self, model: str, version: str, provider: str) -> ServedBy:
        """Who answered."""
        return ServedBy(model, version, self._role, provider, self._worker)

    def results(
        self,
        done: Iterable[tuple[WorkItem, Feeds | RowError]],
        ran_in: BatchInfo,
        times: RunTimes,
        served_by: ServedBy,
        info: SessionInfo,
    ) -> list[Answer]:
        """One answer for each job that is done, in order.

        Args:
            done: jobs and what came of them, from the last step of a large one: all its rows.
            ran_in: the batch that they ran in.
            times: of that batch.
            served_by: who ran it.
            info: the model's signature.
        """
        dtypes = {spec.name: spec.dtype for spec in info.outputs}
        now_ms, ended_s, fallback = time.time() * 1000, times.ended_s, self.is_fallback
        answers: list[Answer] = []
        for item, outputs in done:
            job, deadline_s = item.job, item.deadline_s
            tensors, error = _came_of(outputs, dtypes)
            result = Result(
                job.id,
                "ok" if error is None else "error",
                tensors,
                error,
                deadline_s is not None and ended_s > deadline_s,
                fallback,
                served_by,
                _timing(item, times, now_ms),
                ran_in,
            )
            answers.append(Answer(tuple(item.requests), result, item.digest, job=job))
        return answers

    def failure(self, item: WorkItem, error: WorkError, served_by: ServedBy | None = None) -> Answer:
        """The answer to an admitted job that will not run."""
        result = Result.failed(item.job.id, error.code, error.message, served_by=served_by, fallback=self.is_fallback)
        return Answer(tuple(item.requests), result, item.digest, keep=error.keep, job=item.job)


def _came_of(outputs: Feeds | RowError, dtypes: Mapping[str, str]) -> tuple[dict[str, Tensor], ErrorInfo | None]:
    """Outputs or an error. What the contract cannot carry (nine axes, say) costs its own job, not the worker."""
    if isinstance(outputs, RowError):
        return {}, ErrorInfo(outputs.code, outputs.message)
    try:
        tensors = {name: Tensor.from_numpy(array, dtype=dtypes.get(name)) for name, array in outputs.items()}
    except ContractError as error:
        return {}, ErrorInfo("inference_failed", f"the model gave an output that cannot be sent: {error.message}")
    return tensors, None


def _timing(item: WorkItem, times: RunTimes, now_ms: float) -> Timing:
    sent_ms, run_s = item.job.sent_unix_ms, item.steps.run_s
    total_ms, broker_ms = (times.ended_s - item.arrived_s) * 1000, 0.0
    if sent_ms is not None:
        total_ms = max(total_ms, now_ms - sent_ms)
        broker_ms = max(broker_ms, item.requests[0].delivery.received_unix_ms - sent_ms)
    queue_ms, rest_ms = (times.closed_s - item.arrived_s) * 1000, (times.ended_s - times.closed_s - run_s) * 1000
    return Timing(broker_ms, queue_ms, rest_ms if rest_ms > 0 else 0.0, run_s * 1000, total_ms)
