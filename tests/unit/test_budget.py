"""What may be in hand against the memory there is."""

from __future__ import annotations

import re

import pytest

from inferq.configuration import ConfigurationError, load_settings
from inferq_worker.budget import Use, Windows, fit, limit_of
from inferq_worker.settings import MIB, LanesSettings, MemorySettings, WorkerSettings
from inferq_worker.work import WINDOW_MIN

GIB = 2**30
MODEL_BYTES = 200 * MIB


def settings(*overrides: str) -> WorkerSettings:
    return load_settings(WorkerSettings, overrides=("models.files=model.onnx", *overrides))


def use(limit_bytes: int, *, urgent: int = 1, patient: int = 3) -> Use:
    return Use(limit_bytes, MODEL_BYTES, urgent, patient)


def most_bytes(given: WorkerSettings, windows: Windows, used: Use) -> int:
    """What can be in memory at the worst moment."""
    messages = windows.most_urgent * used.urgent_lanes + windows.most_patient * used.patient_lanes
    fetched_bytes = windows.lanes.max_held_bytes
    return used.idle_bytes + given.batching.max_bytes + messages * given.limits.body_bytes + fetched_bytes


def refusal(used: Use, *overrides: str) -> str:
    with pytest.raises(ConfigurationError) as caught:
        fit(settings(*overrides), used)
    return str(caught.value)


def test_on_a_large_machine_nothing_is_lowered() -> None:
    windows = fit(settings(), use(64 * GIB))
    assert (windows.lanes, windows.lowered) == (LanesSettings(), ())
    assert windows.most_urgent == 2000


@pytest.mark.parametrize("limit_bytes", [700 * MIB, 1 * GIB, 2 * GIB, 4 * GIB, 8 * GIB, 32 * GIB])
@pytest.mark.parametrize("lanes", [(1, 1), (1, 3), (4, 9)])
@pytest.mark.parametrize("body", [2**16, MIB, 4 * MIB])
def test_whatever_comes_fits_into_the_limit(limit_bytes: int, lanes: tuple[int, int], body: int) -> None:
    given = settings(f"limits.body_bytes={body}")
    used = use(limit_bytes, urgent=lanes[0], patient=lanes[1])
    windows = fit(given, used)
    assert most_bytes(given, windows, used) <= limit_bytes
    assert windows.most_urgent >= WINDOW_MIN
    assert windows.lanes.interactive_window <= windows.most_urgent
    assert max(windows.lanes.bulk_window, windows.lanes.dead_window, 1) <= max(windows.most_patient, 1)


def test_defaults_that_do_not_fit_are_lowered_and_named() -> None:
    windows = fit(settings(), use(2 * GIB))
    assert windows.lowered == (
        ("lanes.interactive_window", 256, windows.lanes.interactive_window),
        ("lanes.dead_window", 64, windows.lanes.dead_window),
    )
    assert windows.lanes.bulk_window == LanesSettings().bulk_window
    assert 64 <= windows.most_urgent < 256, "two batches of the usual size"


def test_in_a_small_container_less_is_held() -> None:
    windows = fit(settings(), use(GIB))
    assert 8 * MIB <= windows.lanes.max_held_bytes < 512 * MIB
    assert windows.lowered[0] == ("lanes.max_held_bytes", 512 * MIB, windows.lanes.max_held_bytes)


def test_smaller_messages_leave_larger_windows() -> None:
    small = fit(settings("limits.body_bytes=65536"), use(2 * GIB))
    assert small.most_urgent == 2000
    assert small.lanes.interactive_window == 256


@pytest.mark.parametrize(
    ("override", "knob"),
    [
        ("lanes.interactive_window=2000", "lanes.interactive_window"),
        ("lanes.dead_window=200", "lanes.dead_window"),
        ("lanes.bulk_window=1000", "lanes.bulk_window"),
    ],
)
def test_a_window_that_somebody_set_and_that_does_not_fit_is_an_error_whose_mends_work(
    override: str, knob: str
) -> None:
    message = refusal(use(2 * GIB), override)
    assert knob in message
    (fitting,) = re.findall(r"lower it to (\d+),", message)
    (body,) = re.findall(r"limits\.body_bytes to (\d+)", message)
    name = override.partition("=")[0]
    fit(settings(f"{name}={fitting}"), use(2 * GIB))
    fit(settings(override, f"limits.body_bytes={body}"), use(2 * GIB))


def test_a_limit_that_leaves_nothing_for_messages_is_an_error_whose_mends_work() -> None:
    message = refusal(use(340 * MIB))
    assert "memory.limit_bytes" in message
    (needed,) = re.findall(r"at least (\d+) MiB", message)
    (body,) = re.findall(r"limits\.body_bytes from \d+ to (\d+)", message)
    fit(settings(), use((int(needed) + 1) * MIB))
    fit(settings(f"limits.body_bytes={body}"), use(340 * MIB))


def test_where_the_models_alone_are_over_the_limit_no_other_mend_is_offered() -> None:
    message = refusal(use(128 * MIB))
    assert "at least" in message
    assert "body_bytes" not in message


def test_held_bytes_that_somebody_set_are_an_error_if_they_do_not_fit() -> None:
    message = refusal(use(1 * GIB), "lanes.max_held_bytes=1073741824")
    (needed,) = re.findall(r"at least (\d+) MiB", message)
    fit(settings("lanes.max_held_bytes=1073741824"), use((int(needed) + 1) * MIB))


@pytest.mark.parametrize(
    ("knobs", "container_bytes", "limit_bytes"),
    [
        ({}, None, None),
        ({}, GIB, int(0.9 * GIB)),
        ({"limit_share": 0.5}, GIB, GIB // 2),
        ({"limit_share": 0.0}, GIB, None),
        ({"limit_bytes": 100 * MIB}, None, 100 * MIB),
        ({"limit_bytes": 100 * MIB}, GIB, 100 * MIB),
        ({"limit_bytes": 4 * GIB}, GIB, int(0.9 * GIB)),
        ({"limit_bytes": 4 * GIB, "limit_share": 0}, GIB, 4 * GIB),
    ],
)
def test_the_lower_limit_counts(knobs: dict[str, float], container_bytes: int | None, limit_bytes: int | None) -> None:
    assert limit_of(MemorySettings.model_validate(knobs), container_bytes) == limit_bytes
