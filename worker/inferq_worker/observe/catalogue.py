"""The catalogue of metrics: names, meanings, labels, buckets and the closed sets of label values.

About 250 series a model. Events and their rules are in `metrics`.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Generic, TypeVar

from prometheus_client import Counter, Gauge, Histogram

from inferq_schemas import BATCH_REASONS, ERROR_CODES

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from prometheus_client import CollectorRegistry

OTHER = "other"
OK = "ok"
CODES = (OK, *sorted(ERROR_CODES))
DEADLINE_STAGES = ("broker", "admit", "compose", "run")
"""Where a deadline was seen missed: dead-lettered by the broker, at admission, before the run, after the run."""
DIVERT_REASONS = ("deadline", "overrun", "timeout", "breaker")
BREAKER_STATES = ("closed", "half_open", "open")
BREAKER_TRANSITIONS = (
    *(("open", reason) for reason in ("failures", "errors", "slow", "timeouts", "broken", "probe_failed")),
    ("half_open", "waited"),
    ("closed", "probe_passed"),
)
"""To which state, and why."""
PAUSE_REASONS = ("breaker", "bytes", "cpu_worker", "drain", "operator")
REPLY_FATES = ("confirmed", "returned", "failed")
STORE_OPERATIONS = ("connect", "lookup", "store", "running", "input", "output")
LINKS = ("consume", "publish")

_WAIT_BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_RUN_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_ERROR_BOUNDS = (-0.5, -0.25, -0.1, -0.05, 0.0, 0.05, 0.1, 0.25, 0.5, 1.0, 3.0)
_ROW_BOUNDS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_MODEL_LANE = ("model", "lane")

MetricT = TypeVar("MetricT", Counter, Gauge, Histogram)


class Children(Generic[MetricT]):
    """The label children of one metric, each made once: looking a child up anew triples the cost of counting."""

    def __init__(self, metric: MetricT) -> None:
        self._metric: MetricT = metric
        self._made: dict[tuple[str, ...], MetricT] = {}

    def __call__(self, *values: str) -> MetricT:
        """The child with these label values, in the order of the labels; without labels, the metric itself."""
        child = self._made.get(values)
        if child is None:
            child = self._made[values] = self._metric.labels(*values) if values else self._metric
        return child

    def create(self, *options: Iterable[str]) -> None:
        """Make all combinations now, so that they stand at zero and `rate()` sees the first event."""
        for combination in itertools.product(*options):
            self(*combination)

    def forget(self, first: str) -> None:
        """Remove the children whose first label has this value."""
        for values in [values for values in self._made if values[0] == first]:
            del self._made[values]
            self._metric.remove(*values)


class Catalogue:
    """All metrics of a worker, made once on one registry.

    Args:
        registry: where they live.
        deadlines_s: further bounds for the waiting histograms, in seconds.
    """

    def __init__(self, registry: CollectorRegistry, deadlines_s: Sequence[float]) -> None:
        self._registry = registry
        self._make_job_metrics(tuple(sorted({*_WAIT_BOUNDS_S, *deadlines_s})))
        self._make_batch_metrics()
        self._make_edge_metrics()
        self._make_process_metrics()

    def _counter(self, name: str, text: str, *labels: str) -> Children[Counter]:
        return Children(Counter(f"inferq_{name}_total", text, labels, registry=self._registry))

    def _gauge(self, name: str, text: str, *labels: str) -> Children[Gauge]:
        return Children(Gauge(f"inferq_{name}", text, labels, registry=self._registry))

    def _histogram(self, name: str, text: str, bounds: Sequence[float], *labels: str) -> Children[Histogram]:
        return Children(Histogram(f"inferq_{name}", text, labels, registry=self._registry, buckets=bounds))

    def _make_job_metrics(self, wait_bounds_s: Sequence[float]) -> None:
        at = _MODEL_LANE
        self.received = self._counter("jobs_received", "Jobs taken from the queues.", *at)
        self.answered = self._counter("jobs_answered", "Jobs answered, by code or ok.", *at, "role", "code")
        self.queue_time = self._histogram(
            "job_queue_time_seconds", "From the receipt until the batch was closed.", wait_bounds_s, *at
        )
        self.total_time = self._histogram(
            "job_duration_seconds", "From the sender's clock to the answer.", wait_bounds_s, *at
        )
        self.fallback_latency = self._histogram(
            "fallback_latency_seconds", "From the sender's clock to the answer of a CPU worker.", wait_bounds_s, "model"
        )
        self.deadline_missed = self._counter("deadline_missed", "Deadlines missed, by where seen.", *at, "stage")
        self.window_full = self._counter("window_full", "Times a lane's window was full.", *at)
        self.held_jobs = self._gauge("held_jobs", "Jobs held and not yet settled.", *at)
        self.held_rows = self._gauge("held_rows", "Rows of the jobs held.", *at)
        self.held_bytes = self._gauge("held_bytes", "Payload of the jobs held.", *at)
        self.paused = self._gauge("lane_paused", "1 while this keeps the lane from being consumed.", *at, "reason")
        self.oldest_age = self._gauge("oldest_job_age_seconds", "Age of the oldest job held.", *at)
        self.duplicates = self._counter("duplicates_answered", "Jobs answered from a stored outcome.", *at)
        self.requeued = self._counter("jobs_requeued", "Jobs put back into their queue.", *at)
        self.parked = self._counter("jobs_parked", "Jobs moved to the parking queue.", "model", "code")
        self.diverted = self._counter("jobs_diverted", "Jobs sent to the CPU fallback.", "model", "reason")
        self.conflicts = self._counter("conflicts", "Jobs whose id had another job's outcome.", "model")
        self.suspects = self._counter("suspects", "Redelivered jobs of a run that never ended.", "model")

    def _make_batch_metrics(self) -> None:
        self.batches = self._counter("batches", "Batches released, by why.", "model", "reason")
        self.batch_rows = self._histogram("batch_rows", "Real rows in a batch.", _ROW_BOUNDS, "model")
        self.padded_rows = self._counter("padded_rows", "Rows computed only to fill a batch.", "model")
        self.capped_shapes = self._gauge(
            "capped_shapes", "Input shapes whose batches are kept small, as larger ones found no memory.", "model"
        )
        self.lowest_cap = self._gauge("lowest_cap_rows", "Largest batch of the most limited input shape.", "model")
        self.run_time = self._histogram(
            "inference_duration_seconds", "One run of the session.", _RUN_BOUNDS_S, "model", "role"
        )

        self.prediction_error = self._histogram(
            "run_prediction_error_ratio", "How much longer a run took than predicted.", _ERROR_BOUNDS, "model"
        )
        self.breaker_state = self._gauge("breaker_state", "1 for the state of the breaker.", "model", "state")
        self.breaker_transitions = self._counter(
            "breaker_transitions", "Changes of the breaker's state.", "model", "state", "reason"
        )

        self.timed_out = Children(
            Counter("onnx_inference_timeout_total", "Runs cut off at their limit.", ("model",), registry=self._registry)
        )

    def _make_edge_metrics(self) -> None:
        self.acks = self._counter("acks", "Deliveries acknowledged.")
        self.stale_acks = self._counter("stale_acks", "Acks dropped because their channel is gone.")
        self.replies = self._counter("replies", "Replies, by what became of them.", "fate")
        self.stored = self._counter("results_stored", "Outcomes stored.")
        self.unstored = self._counter("result_unstored", "Jobs answered without a stored outcome.")
        self.store_errors = self._counter("store_errors", "Failed commands to Redis.", "operation")
        self.undertaken = self._counter("undertaker_handled", "Dead-lettered jobs answered.", "code")
        self.connected = self._gauge("broker_connected", "1 while connected to the broker.", "link")
        self.blocked = self._gauge("broker_blocked", "1 while the broker takes no publishes.", "link")
        self.reconnects = self._counter("broker_reconnects", "Connections to the broker after the first.", "link")
        self.redis = self._gauge("redis_available", "1 while Redis answers.")
        self.replies.create(REPLY_FATES)
        self.store_errors.create((*STORE_OPERATIONS, OTHER))
        self.undertaken.create(CODES)
        self.connected.create(LINKS)
        self.blocked.create(LINKS)
        self.reconnects.create(LINKS)

    def _make_process_metrics(self) -> None:
        self.build = self._gauge("build_info", "What runs here.", "version", "python", "role", "worker")
        self.model_info = self._gauge("model_info", "The model version that is served.", "model", "version", "sha256")
        self.provider = self._gauge(
            "execution_provider_info", "What was asked for and what runs.", "model", "requested", "provider"
        )
        self.nodes = self._gauge("session_nodes", "Graph nodes by the provider that runs them.", "model", "provider")
        self.warm_up = self._gauge("warmup_duration_seconds", "How long the warm-up took.", "model")
        self.draining = self._gauge("draining", "1 while the worker finishes and takes nothing new.")
        self.skew = self._gauge("clock_skew_seconds", "How far the last sender's clock was ahead; 0 if it was not.")
        self.lag = self._gauge("event_loop_lag_seconds", "How late the event loop's last beat was.")
        self.resident = self._gauge("resident_bytes", "Memory of the process that is in memory, of whatever kind.")
        self.anonymous = self._gauge("anonymous_bytes", "Memory that no file backs; the limit is about this.")
        self.memory_limit = self._gauge("memory_limit_bytes", "Anonymous memory at which the worker leaves; 0 = none.")
        self.memory_growth = self._gauge(
            "memory_growth_bytes_per_thousand_batches", "Slope of anonymous memory; 0 until it is known."
        )
        self.device_used = self._gauge("gpu_memory_used_bytes", "Memory of the GPU in use, by anybody.", "device")
        self.device_total = self._gauge("gpu_memory_total_bytes", "Memory of the GPU.", "device")
        self.progress = self._gauge("last_progress_timestamp_seconds", "When the last batch ended, Unix time.")

    def create_model(self, model: str, lanes: Sequence[str], role: str) -> None:
        """Start the series of a model at zero."""
        self.received.create((model,), lanes)
        self.answered.create((model,), lanes, (role,), CODES)
        self.queue_time.create((model,), lanes)
        self.total_time.create((model,), lanes)
        self.deadline_missed.create((model,), lanes, DEADLINE_STAGES)
        for counter in (self.window_full, self.duplicates, self.requeued):
            counter.create((model,), lanes)
        for gauge in (self.held_jobs, self.held_rows, self.held_bytes, self.oldest_age):
            gauge.create((model,), lanes)
        self.paused.create((model,), lanes, PAUSE_REASONS)
        self.parked.create((model,), CODES[1:])
        self.diverted.create((model,), DIVERT_REASONS)
        for counter in (self.conflicts, self.suspects, self.padded_rows, self.timed_out):
            counter.create((model,))
        if role == "cpu":
            self.fallback_latency.create((model,))
        self.breaker_state.create((model,), BREAKER_STATES)
        for state, reason in BREAKER_TRANSITIONS:
            self.breaker_transitions(model, state, reason)
        for limit in (self.capped_shapes, self.lowest_cap):
            limit.create((model,))
        self.batches.create((model,), BATCH_REASONS)
        self.batch_rows.create((model,))
        self.run_time.create((model,), (role,))
