"""The worker's knobs: which sections there are, their bounds, and contradictions with their mend."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from pydantic import ValidationError

from inferq.configuration import CLIENT_SECTIONS, WORKER_SECTIONS, ConfigurationError, load_settings
from inferq.settings import ClientSettings
from inferq_schemas import DEFAULT_LIMITS, Limits
from inferq_worker.publish import ReplyAllowList
from inferq_worker.settings import WorkerSettings

MODEL = "models.files=model.onnx"


@pytest.fixture(autouse=True)
def only_this_test_configures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in list(os.environ):
        if name.startswith("INFERQ_"):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def load(*overrides: str) -> WorkerSettings:
    return load_settings(WorkerSettings, overrides=(MODEL, *overrides))


def refusal(*overrides: str, model: bool = True) -> str:
    with pytest.raises(ConfigurationError) as caught:
        load_settings(WorkerSettings, overrides=((MODEL,) if model else ()) + overrides)
    return str(caught.value)


def test_the_worker_reads_the_clients_sections_and_its_own() -> None:
    assert WorkerSettings.model_fields.keys() == CLIENT_SECTIONS | WORKER_SECTIONS
    assert ClientSettings.model_fields.keys() == CLIENT_SECTIONS


def test_one_file_serves_client_and_worker(tmp_path: Path) -> None:
    (tmp_path / "inferq.toml").write_text(
        'role = "cpu"\n[client]\ndeadline_s = 5\n[batching]\nmax_rows = 64\n[replies]\nallow = ["answers\\\\..+"]\n'
    )
    settings = load()
    assert (settings.role, settings.batching.max_rows, settings.client.deadline_s) == ("cpu", 64, 5)
    assert ReplyAllowList(settings.replies.allow).allows("answers.me")
    assert load_settings(ClientSettings).client.deadline_s == 5


@pytest.mark.parametrize(("given", "buckets"), [("off", "off"), ("[16, 4]", [16, 4]), ("16,4", [16, 4])])
def test_buckets_are_a_word_or_sizes_from_wherever_they_come(
    monkeypatch: pytest.MonkeyPatch, given: str, buckets: object
) -> None:
    assert load().runtime.buckets == "auto"
    assert load(f"runtime.buckets={given}").runtime.buckets == buckets
    monkeypatch.setenv("INFERQ_RUNTIME__BUCKETS", given)
    assert load().runtime.buckets == buckets


def test_a_bucket_of_no_rows_is_refused() -> None:
    assert "runtime.buckets" in refusal("runtime.buckets=[0]")


def test_the_defaults_are_those_of_the_design() -> None:
    settings = load()
    assert settings.role == "gpu"
    assert (settings.batching.max_rows, settings.batching.max_wait_s) == (32, 0.005)
    assert settings.lanes.bulk_window == 4
    assert settings.drain.limit_s == 60
    assert settings.limits.body_bytes == DEFAULT_LIMITS.body_bytes
    assert (settings.redis.result_ttl_s, settings.redis.replied_ttl_s) == (3600, 300)
    assert settings.admin.host == "127.0.0.1"


def test_the_limits_fit_the_contract() -> None:
    for knob in ("body_bytes", "bundle_jobs"):
        field = type(load().limits).model_fields[knob]
        most = next(one.le for one in field.metadata if hasattr(one, "le"))
        assert getattr(Limits(**{knob: most}), knob) == most


def test_settings_are_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        load().batching.max_rows = 1  # type: ignore[misc]  # that is the point


def test_no_model_is_a_start_up_error_with_the_mend() -> None:
    message = refusal(model=False)
    assert "no model to serve" in message
    assert "--model" in message
    assert "models.dir" in message


def test_a_folder_of_models_is_enough() -> None:
    settings = load_settings(WorkerSettings, overrides=("models.dir=models",))
    assert settings.models.dir == Path("models")


@pytest.mark.parametrize(
    ("override", "knob"),
    [
        ("batching.max_rows=0", "batching.max_rows"),
        ("batching.max_wait_s=-0.001", "batching.max_wait_s"),
        ("batching.max_wait_s=nan", "batching.max_wait_s"),
        ("lanes.interactive_window=2001", "lanes.interactive_window"),
        ("limits.body_bytes=16777217", "limits.body_bytes"),
        ("limits.bundle_jobs=257", "limits.bundle_jobs"),
        ("admin.port=65536", "admin.port"),
        ("drain.limit_s=0", "drain.limit_s"),
        ("role=tpu", "role"),
        ("log.level=loud", "log.level"),
        ("runtime.slots=0", "runtime.slots"),
    ],
)
def test_a_value_out_of_bounds_names_its_knob(override: str, knob: str) -> None:
    assert knob in refusal(override)


def test_an_unknown_knob_is_refused_with_the_nearest_one() -> None:
    assert "batching.max_rows" in refusal("batching.max_row=1")


def test_a_pattern_that_is_no_regular_expression_is_a_start_up_error() -> None:
    message = refusal('replies.allow=["reply.(", "fine"]')
    assert "replies.allow" in message
    assert "reply.(" in message


def test_a_section_that_nobody_reads_is_refused(tmp_path: Path) -> None:
    (tmp_path / "inferq.toml").write_text("[worker]\nslots = 2\n")
    assert "worker.slots" in refusal()
    with pytest.raises(ConfigurationError, match=r"worker\.slots"):
        load_settings(ClientSettings)


def test_a_contradiction_in_the_runtime_names_the_mend() -> None:
    message = refusal("runtime.provider=cpu", "runtime.gpu_memory_limit_bytes=1073741824")
    assert "gpu_memory_limit_bytes" in message
    assert "remove one" in message


def test_the_environment_sets_worker_knobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFERQ_BATCHING__MAX_WAIT_S", "0.02")
    monkeypatch.setenv("INFERQ_REPLIES__ALLOW", r"a\..+, b\..+")
    settings = load()
    assert settings.batching.max_wait_s == 0.02
    assert settings.replies.allow == (r"a\..+", r"b\..+")
