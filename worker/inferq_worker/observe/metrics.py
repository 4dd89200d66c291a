"""The worker's metrics, as methods named after what happened.

The pipeline calls them; steps and sessions only return figures. A label value outside its closed set is counted as
`other`, so that no client can create series. Cheap: a dictionary look-up and one update under a lock each.
"""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING

from prometheus_client import disable_created_metrics

from inferq_schemas import BATCH_REASONS
from inferq_worker.observe.catalogue import (
    BREAKER_STATES,
    BREAKER_TRANSITIONS,
    CODES,
    DEADLINE_STAGES,
    DIVERT_REASONS,
    LINKS,
    OK,
    OTHER,
    PAUSE_REASONS,
    REPLY_FATES,
    STORE_OPERATIONS,
    Catalogue,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from prometheus_client import CollectorRegistry

__all__ = [
    "BATCH_REASONS",
    "BREAKER_STATES",
    "BREAKER_TRANSITIONS",
    "CODES",
    "DEADLINE_STAGES",
    "DIVERT_REASONS",
    "LINKS",
    "OK",
    "OTHER",
    "PAUSE_REASONS",
    "REPLY_FATES",
    "STORE_OPERATIONS",
    "Metrics",
]

_CODES = frozenset(CODES)


def _known(value: str, options: Sequence[str]) -> str:
    return value if value in options else OTHER


class Metrics:
    """Counts what happens in a worker.

    Args:
        registry: where the metrics live; a fresh one in each test.
        role: `gpu` or `cpu`.
        deadlines_s: deadlines that are service levels, in seconds; each becomes a bucket bound, so that the share of
            jobs in time can be read exactly.
    """

    def __init__(self, registry: CollectorRegistry, *, role: str, deadlines_s: Sequence[float] = ()) -> None:
        # Process-wide in prometheus_client: without it every counter and histogram has a second series, `_created`.
        disable_created_metrics()  # type: ignore[no-untyped-call]  # untyped upstream
        self._role = role
        self._all = Catalogue(registry, deadlines_s)
        self._models = {OTHER}
        self._lanes = {OTHER}
        self._batches = 0

    @property
    def batches(self) -> int:
        """Batches run so far, of all models."""
        return self._batches

    def _at(self, model: str, lane: str) -> tuple[str, str]:
        return self._model(model), lane if lane in self._lanes else OTHER

    def _model(self, model: str) -> str:
        return model if model in self._models else OTHER

    def model_served(self, model: str, lanes: Iterable[str]) -> None:
        """A model is served from these lanes (`fallback` among them, if so); its series start at zero."""
        lanes = tuple(lanes)
        self._models.add(model)
        self._lanes.update(lanes)
        self._all.create_model(model, lanes, self._role)

    def job_received(self, model: str, lane: str, *, jobs: int = 1) -> None:
        """Jobs were taken from a lane and decoded, or found undecodable (`model` is then that of the lane)."""
        self._all.received(*self._at(model, lane)).inc(jobs)

    def job_answered(self, model: str, lane: str, code: str = OK) -> None:
        """A job has its answer: `ok` or an error code of the contract."""
        self._all.answered(*self._at(model, lane), self._role, code if code in _CODES else "internal").inc()

    def queue_times(self, model: str, lane: str, waits_s: Iterable[float]) -> None:
        """How long each of some jobs waited, from its receipt until its batch was closed."""
        observe = self._all.queue_time(*self._at(model, lane)).observe
        for wait_s in waits_s:
            observe(max(0.0, wait_s))

    def total_time(self, model: str, lane: str, seconds: float) -> None:
        """How long a job took, from its sender's clock to its answer."""
        self._all.total_time(*self._at(model, lane)).observe(max(0.0, seconds))

    def fallback_answered(self, model: str, seconds: float) -> None:
        """A CPU worker answered in place of the GPU: how long that took, from the sender's clock to the answer."""
        self._all.fallback_latency(self._model(model)).observe(max(0.0, seconds))

    def deadline_missed(self, model: str, lane: str, stage: str) -> None:
        """A deadline is missed; `stage` is one of DEADLINE_STAGES."""
        self._all.deadline_missed(*self._at(model, lane), _known(stage, DEADLINE_STAGES)).inc()

    def window_full(self, model: str, lane: str) -> None:
        """A lane's window is full: beyond it the broker is first-in-first-out."""
        self._all.window_full(*self._at(model, lane)).inc()

    def held(self, model: str, lane: str, *, jobs: int, rows: int, payload_bytes: int) -> None:
        """What is held of a lane now."""
        at = self._at(model, lane)
        self._all.held_jobs(*at).set(jobs)
        self._all.held_rows(*at).set(rows)
        self._all.held_bytes(*at).set(payload_bytes)

    def oldest_job_age(self, model: str, lane: str, age_s: float) -> None:
        """Age of the oldest job held of a lane; 0 when none is."""
        self._all.oldest_age(*self._at(model, lane)).set(max(0.0, age_s))

    def lane_paused(self, model: str, lane: str, reason: str, *, paused: bool) -> None:
        """A lane is not consumed for this reason, one of PAUSE_REASONS, or no longer for it."""
        self._all.paused(*self._at(model, lane), _known(reason, PAUSE_REASONS)).set(paused)

    def duplicate_answered(self, model: str, lane: str) -> None:
        """A job was answered from the store without a run."""
        self._all.duplicates(*self._at(model, lane)).inc()

    def requeued(self, model: str, lane: str, *, jobs: int = 1) -> None:
        """Jobs went back into their queue."""
        self._all.requeued(*self._at(model, lane)).inc(jobs)

    def parked(self, model: str, code: str) -> None:
        """A job went to the parking queue with this error code."""
        self._all.parked(self._model(model), code if code in _CODES else "internal").inc()

    def diverted(self, model: str, reason: str) -> None:
        """A job went to the CPU fallback; `reason` is one of DIVERT_REASONS."""
        self._all.diverted(self._model(model), _known(reason, DIVERT_REASONS)).inc()

    def conflict(self, model: str) -> None:
        """A job's id has the outcome of another job."""
        self._all.conflicts(self._model(model)).inc()

    def suspect(self, model: str) -> None:
        """A redelivered job stood in the record of a run that never ended."""
        self._all.suspects(self._model(model)).inc()

    def batch_done(self, model: str, *, rows: int, padded_rows: int, reason: str, run_s: float) -> None:
        """A batch was run: its real rows, the rows of padding, why it was released, the seconds of the run."""
        self._batches += 1
        model = self._model(model)
        self._all.batches(model, _known(reason, BATCH_REASONS)).inc()
        self._all.batch_rows(model).observe(rows)
        self._all.padded_rows(model).inc(padded_rows)
        self._all.run_time(model, self._role).observe(run_s)
        self._all.progress().set_to_current_time()

    def row_caps(self, model: str, *, shapes: int, lowest_rows: int) -> None:
        """How many input shapes have a cap on their batches, and the largest batch of the most limited one."""
        model = self._model(model)
        self._all.capped_shapes(model).set(shapes)
        self._all.lowest_cap(model).set(lowest_rows)

    def prediction_error(self, model: str, ratio: float) -> None:
        """A run took this much longer than predicted: 0.5 means one and a half times as long."""
        self._all.prediction_error(self._model(model)).observe(ratio)

    def run_timed_out(self, model: str) -> None:
        """A run was cut off at its time limit."""
        self._all.timed_out(self._model(model)).inc()

    def breaker_state(self, model: str, state: str) -> None:
        """A model's breaker is in this one of BREAKER_STATES."""
        for one in BREAKER_STATES:
            self._all.breaker_state(self._model(model), one).set(one == state)

    def breaker_transition(self, model: str, state: str, reason: str) -> None:
        """A model's breaker came into this state for this reason: one of BREAKER_TRANSITIONS."""
        known = (state, reason) in BREAKER_TRANSITIONS
        self._all.breaker_transitions(self._model(model), *((state, reason) if known else (OTHER, OTHER))).inc()

    def acked(self, deliveries: int = 1) -> None:
        """Deliveries were acknowledged."""
        self._all.acks().inc(deliveries)

    def stale_ack(self, deliveries: int = 1) -> None:
        """Acks were dropped, because the channel that brought the deliveries is gone."""
        self._all.stale_acks().inc(deliveries)

    def reply(self, fate: str) -> None:
        """A reply was published; `fate` is one of REPLY_FATES."""
        self._all.replies(_known(fate, REPLY_FATES)).inc()

    def outcome_stored(self, jobs: int = 1) -> None:
        """Outcomes were stored, or were found stored already."""
        self._all.stored().inc(jobs)

    def result_unstored(self, jobs: int = 1) -> None:
        """Jobs were answered though Redis lost or refused their outcome: another answer may differ."""
        self._all.unstored().inc(jobs)

    def store_error(self, operation: str) -> None:
        """A command to Redis failed; `operation` is one of STORE_OPERATIONS."""
        self._all.store_errors(_known(operation, STORE_OPERATIONS)).inc()

    def undertaker_handled(self, code: str) -> None:
        """A dead-lettered job was answered with this code (`ok`: its outcome was stored already)."""
        self._all.undertaken(code if code in _CODES else "internal").inc()

    def broker_connected(self, link: str, *, connected: bool) -> None:
        """A connection to the broker came up or went down; `link` is one of LINKS."""
        self._all.connected(_known(link, LINKS)).set(connected)

    def broker_blocked(self, link: str, *, blocked: bool) -> None:
        """The broker stopped or resumed taking publishes on a connection."""
        self._all.blocked(_known(link, LINKS)).set(blocked)

    def broker_reconnected(self, link: str) -> None:
        """A connection to the broker came back."""
        self._all.reconnects(_known(link, LINKS)).inc()

    def redis_available(self, *, available: bool) -> None:
        """Redis answers, or does not."""
        self._all.redis().set(available)

    def provider(self, model: str, *, requested: str, provider: str, nodes_by_provider: Mapping[str, int]) -> None:
        """What execution provider was asked for and which one runs, and how the graph was divided."""
        model = self._model(model)
        self._all.provider.forget(model)
        self._all.provider(model, requested, provider).set(1)
        self._all.nodes.forget(model)
        for name, count in nodes_by_provider.items():
            self._all.nodes(model, name).set(count)

    def model_info(self, model: str, *, version: str, sha256: str) -> None:
        """Which version of a model is served; a version served before disappears."""
        model = self._model(model)
        self._all.model_info.forget(model)
        self._all.model_info(model, version, sha256).set(1)

    def warmed_up(self, model: str, seconds: float) -> None:
        """A model's warm-up ended."""
        self._all.warm_up(self._model(model)).set(seconds)

    def build_info(self, *, version: str, worker: str) -> None:
        """Which program this is, and the worker's own name."""
        self._all.build(version, platform.python_version(), self._role, worker).set(1)

    def draining(self, *, draining: bool) -> None:
        """The worker finishes what it has and takes nothing new."""
        self._all.draining().set(draining)

    def clock_skew(self, ahead_s: float) -> None:
        """How far a sender's clock was ahead of ours, in seconds; 0 if it was not."""
        self._all.skew().set(ahead_s)

    def loop_lag(self, seconds: float) -> None:
        """How late the event loop's last beat was."""
        self._all.lag().set(seconds)

    def memory_limit(self, limit_bytes: int) -> None:
        """Anonymous memory at which this worker leaves."""
        self._all.memory_limit().set(limit_bytes)

    def memory(self, resident_bytes: int, anonymous_bytes: int, growth_bytes_per_thousand: float) -> None:
        """What the process has in memory now, and by how much a thousand batches make it grow."""
        self._all.resident().set(resident_bytes)
        self._all.anonymous().set(anonymous_bytes)
        self._all.memory_growth().set(growth_bytes_per_thousand)

    def device_memory(self, device: str, used_bytes: int, total_bytes: int) -> None:
        """What is taken of a GPU's memory now, by anybody, and what it has."""
        self._all.device_used(device).set(used_bytes)
        self._all.device_total(device).set(total_bytes)
