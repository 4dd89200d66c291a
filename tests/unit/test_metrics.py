"""The worker's metrics on a registry of the test's own."""

import inspect
import re
from collections.abc import Callable
from typing import get_args

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from inferq_schemas import ERROR_CODES
from inferq_worker.consume import PauseReason
from inferq_worker.observe.metrics import (
    BATCH_REASONS,
    BREAKER_STATES,
    BREAKER_TRANSITIONS,
    CODES,
    DEADLINE_STAGES,
    LINKS,
    PAUSE_REASONS,
    Metrics,
)
from inferq_worker.runtime.breaker import State, Trip

AT = {"model": "m", "lane": "bulk"}


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def metrics(registry: CollectorRegistry) -> Metrics:
    made = Metrics(registry, role="gpu", deadlines_s=(0.3,))
    made.model_served("m", ("interactive", "bulk", "fallback"))
    return made


@pytest.fixture
def value(registry: CollectorRegistry) -> Callable[..., float | None]:
    def read(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"inferq_{name}", labels)

    return read


Value = Callable[..., float | None]


def test_the_series_of_a_model_stand_at_zero_before_anything_happens(metrics: Metrics, value: Value) -> None:
    assert value("jobs_received_total", **AT) == 0
    for code in CODES:
        assert value("jobs_answered_total", **AT, role="gpu", code=code) == 0
    for reason in BATCH_REASONS:
        assert value("batches_total", model="m", reason=reason) == 0
    for stage in DEADLINE_STAGES:
        assert value("deadline_missed_total", **AT, stage=stage) == 0
    for link in LINKS:
        assert value("broker_connected", link=link) == 0
    assert value("result_unstored_total") == 0


def test_jobs_are_counted_by_model_lane_role_and_code(metrics: Metrics, value: Value) -> None:
    metrics.job_received("m", "bulk", jobs=3)
    metrics.job_answered("m", "bulk")
    metrics.job_answered("m", "bulk", "deadline_exceeded")
    assert value("jobs_received_total", **AT) == 3
    assert value("jobs_answered_total", **AT, role="gpu", code="ok") == 1
    assert value("jobs_answered_total", **AT, role="gpu", code="deadline_exceeded") == 1


def test_a_batch_shows_its_real_rows_its_padding_its_reason_and_its_run(metrics: Metrics, value: Value) -> None:
    metrics.batch_done("m", rows=5, padded_rows=3, reason="wait", run_s=0.004)
    assert value("batches_total", model="m", reason="wait") == 1
    assert value("batch_rows_sum", model="m") == 5
    assert value("batch_rows_bucket", model="m", le="4.0") == 0
    assert value("batch_rows_bucket", model="m", le="8.0") == 1
    assert value("padded_rows_total", model="m") == 3
    assert value("inference_duration_seconds_bucket", model="m", role="gpu", le="0.005") == 1
    assert (value("last_progress_timestamp_seconds") or 0) > 1.7e9


def test_shapes_that_find_less_memory_than_others_are_seen(metrics: Metrics, value: Value) -> None:
    metrics.row_caps("m", shapes=2, lowest_rows=4)
    assert value("capped_shapes", model="m") == 2
    assert value("lowest_cap_rows", model="m") == 4


def test_a_deadline_that_is_a_service_level_is_a_bucket_bound(metrics: Metrics, value: Value) -> None:
    metrics.total_time("m", "bulk", 0.29)
    assert value("job_duration_seconds_bucket", **AT, le="0.25") == 0
    assert value("job_duration_seconds_bucket", **AT, le="0.3") == 1


def test_no_value_of_a_client_creates_a_series(metrics: Metrics, registry: CollectorRegistry) -> None:
    metrics.job_received("'; drop", "x")
    before = len(generate_latest(registry).splitlines())
    for number in range(50):
        metrics.job_received(f"evil-{number}", f"lane-{number}")
        metrics.job_received("m", f"lane-{number}")
        metrics.requeued("m", "bulk")
    # One more: model m in lane "other".
    assert len(generate_latest(registry).splitlines()) == before + 1
    assert registry.get_sample_value("inferq_jobs_received_total", {"model": "other", "lane": "other"}) == 51


def test_values_outside_a_closed_set_become_its_catch_all(metrics: Metrics, value: Value) -> None:
    metrics.job_answered("m", "bulk", "from_the_future")
    metrics.batch_done("m", rows=1, padded_rows=0, reason="whim", run_s=0.1)
    metrics.reply("lost")
    metrics.store_error("explode")
    assert value("jobs_answered_total", **AT, role="gpu", code="internal") == 1
    assert value("batches_total", model="m", reason="other") == 1
    assert value("replies_total", fate="other") == 1
    assert value("store_errors_total", operation="other") == 1


def test_a_breaker_is_in_one_state_and_its_changes_are_counted_by_reason(metrics: Metrics, value: Value) -> None:
    assert value("breaker_transitions_total", model="m", state="open", reason="failures") == 0
    metrics.breaker_state("m", "closed")
    metrics.breaker_state("m", "open")
    metrics.breaker_transition("m", "open", "failures")
    metrics.breaker_transition("m", "closed", "failures")
    assert [value("breaker_state", model="m", state=one) for one in BREAKER_STATES] == [0, 0, 1]
    assert value("breaker_transitions_total", model="m", state="open", reason="failures") == 1
    assert value("breaker_transitions_total", model="m", state="other", reason="other") == 1, "no such change"


def test_runs_that_were_cut_off_are_counted_under_the_name_that_alerts_know(
    metrics: Metrics, registry: CollectorRegistry
) -> None:
    assert registry.get_sample_value("onnx_inference_timeout_total", {"model": "m"}) == 0
    metrics.run_timed_out("m")
    assert registry.get_sample_value("onnx_inference_timeout_total", {"model": "m"}) == 1


def test_the_latency_of_the_fallback_exists_where_the_fallback_answers(registry: CollectorRegistry) -> None:
    cpu = Metrics(registry, role="cpu")
    cpu.model_served("m", ("fallback",))
    assert registry.get_sample_value("inferq_fallback_latency_seconds_count", {"model": "m"}) == 0
    cpu.fallback_answered("m", 0.2)
    assert registry.get_sample_value("inferq_fallback_latency_seconds_bucket", {"model": "m", "le": "0.25"}) == 1


def test_the_states_and_changes_are_those_of_the_breaker() -> None:
    assert set(BREAKER_STATES) == {one.value for one in State}
    assert {reason for state, reason in BREAKER_TRANSITIONS if state == "open"} == {one.value for one in Trip}


def test_a_lane_is_paused_for_the_reasons_of_its_consumer(metrics: Metrics, value: Value) -> None:
    assert get_args(PauseReason) == PAUSE_REASONS
    metrics.lane_paused("m", "bulk", "bytes", paused=True)
    metrics.lane_paused("m", "bulk", "breaker", paused=True)
    metrics.lane_paused("m", "bulk", "bytes", paused=False)
    found = {reason: value("lane_paused", **AT, reason=reason) for reason in PAUSE_REASONS}
    assert found == dict.fromkeys(PAUSE_REASONS, 0) | {"breaker": 1}


def test_a_new_version_replaces_the_information_about_the_old_one(metrics: Metrics, value: Value) -> None:
    metrics.model_info("m", version="1", sha256="aa")
    metrics.model_info("m", version="2", sha256="bb")
    assert value("model_info", model="m", version="1", sha256="aa") is None
    assert value("model_info", model="m", version="2", sha256="bb") == 1


def test_the_provider_that_runs_stands_beside_the_one_asked_for(metrics: Metrics, value: Value) -> None:
    metrics.provider("m", requested="cuda", provider="CUDA", nodes_by_provider={"CUDA": 9, "CPU": 1})
    metrics.provider("m", requested="cuda", provider="CPU", nodes_by_provider={"CPU": 10})
    assert value("execution_provider_info", model="m", requested="cuda", provider="CUDA") is None
    assert value("execution_provider_info", model="m", requested="cuda", provider="CPU") == 1
    assert value("session_nodes", model="m", provider="CPU") == 10
    assert value("session_nodes", model="m", provider="CUDA") is None


def test_every_event_moves_a_series(metrics: Metrics, registry: CollectorRegistry) -> None:
    samples = {
        "model": "m", "lane": "bulk", "code": "conflict", "jobs": 2, "rows": 2, "payload_bytes": 2, "padded_rows": 1,
        "seconds": 2.0, "waits_s": (2.0,), "ratio": 0.5, "age_s": 2.0, "run_s": 2.0, "ahead_s": 2.0, "stage": "run",
        "reason": "deadline", "shapes": 2, "lowest_rows": 2,
        "deliveries": 2, "fate": "returned", "operation": "store", "link": "publish", "connected": True,
        "blocked": True, "available": True, "draining": True, "paused": True, "requested": "cuda", "provider": "CPU",
        "nodes_by_provider": {"CPU": 1}, "version": "1", "sha256": "a", "worker": "w", "lanes": ("new",),
        "state": "open",
        "limit_bytes": 2, "resident_bytes": 2, "anonymous_bytes": 2, "growth_bytes_per_thousand": 2.0, "device": "0",
        "used_bytes": 2, "total_bytes": 2,
    }  # fmt: skip
    events = [name for name, _ in inspect.getmembers(Metrics, inspect.isfunction) if not name.startswith("_")]
    for name in events:
        before = generate_latest(registry)
        method = getattr(metrics, name)
        method(**{argument: samples[argument] for argument in inspect.signature(method).parameters})
        assert generate_latest(registry) != before, name


def test_names_follow_the_rules_of_prometheus(metrics: Metrics, registry: CollectorRegistry) -> None:
    for family in registry.collect():
        assert re.fullmatch(r"(inferq|onnx)_[a-z]+(_[a-z0-9]+)*", family.name), family.name
        assert not family.name.endswith(("_ms", "_count", "_sum"))
        assert family.documentation.endswith(".")
        assert family.type != "gauge" or not family.name.endswith("_total")


def test_a_model_costs_about_two_hundred_and_fifty_series(registry: CollectorRegistry, metrics: Metrics) -> None:
    def count() -> int:
        return sum(len(family.samples) for family in registry.collect())

    before = count()
    metrics.model_served("another", ("interactive", "bulk", "fallback"))
    assert 200 < count() - before < 300
    assert not any("_created" in line for line in generate_latest(registry).decode().splitlines())


def test_the_codes_are_those_of_the_contract() -> None:
    assert set(CODES) == ERROR_CODES | {"ok"}


def test_two_workers_in_one_process_do_not_meet() -> None:
    for _ in range(2):
        Metrics(CollectorRegistry(), role="cpu")
