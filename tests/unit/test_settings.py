"""Precedence, refusals and printing of the configuration. Files and environment, but no sockets."""

import json
import os
import traceback
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, Field, SecretStr, ValidationError

from inferq.settings import (
    CLIENT_SECTIONS,
    WORKER_SECTIONS,
    BrokerSettings,
    ClientSettings,
    ConfigurationError,
    Section,
    Settings,
    effective,
    load_settings,
    settings_table,
)
from inferq_worker.settings import WorkerSettings


@pytest.fixture(autouse=True)
def only_this_test_configures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in list(os.environ):
        if name.startswith("INFERQ_"):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def load(*overrides: str, config_file: Path | None = None) -> ClientSettings:
    return load_settings(ClientSettings, config_file=config_file, overrides=overrides)


def refusal(*overrides: str, config_file: Path | None = None) -> str:
    with pytest.raises(ConfigurationError) as caught:
        load(*overrides, config_file=config_file)
    return str(caught.value)


def test_without_any_source_the_defaults_hold() -> None:
    settings = load()
    assert settings == ClientSettings()
    assert settings.broker.heartbeat_s == 20
    assert settings.redis.replied_ttl_s == 300
    assert settings.client.deadline_s == 30


def test_each_source_overrides_the_weaker_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def heartbeat() -> int:
        return load(*overrides).broker.heartbeat_s

    overrides: list[str] = []
    (tmp_path / "inferq.toml").write_text("[broker]\nheartbeat_s = 1\n")
    assert heartbeat() == 1
    monkeypatch.setenv("INFERQ_BROKER__HEARTBEAT_S", "2")
    assert heartbeat() == 2
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets" / "inferq_broker__heartbeat_s").write_text("3\n")
    monkeypatch.setenv("INFERQ_SECRETS_DIR", str(tmp_path / "secrets"))
    assert heartbeat() == 3
    overrides.append("broker.heartbeat_s=4")
    assert heartbeat() == 4


def test_sources_merge_key_by_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "inferq.toml").write_text('[broker]\nheartbeat_s = 1\n[topology.models.a]\nlanes = ["x"]\n')
    monkeypatch.setenv("INFERQ_BROKER__PUBLISH_TIMEOUT_S", "2.5")
    monkeypatch.setenv("INFERQ_TOPOLOGY__MODELS__B__LANES", "y, z")
    settings = load('topology.models={"a": {"fallback": false}, "b": {}, "c": {}}')
    assert (settings.broker.heartbeat_s, settings.broker.publish_timeout_s) == (1, 2.5)
    models = {name: (model.lanes, model.fallback) for name, model in settings.topology.models.items()}
    both = ("interactive", "bulk")
    assert models == {"a": (("x",), False), "b": (("y", "z"), True), "c": (both, True)}


def test_the_config_file_is_the_option_then_the_environment_then_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, name in enumerate(("inferq.toml", "env.toml", "option.toml"), start=1):
        (tmp_path / name).write_text(f"[broker]\nheartbeat_s = {number}\n")
    assert load().broker.heartbeat_s == 1
    monkeypatch.setenv("INFERQ_CONFIG", str(tmp_path / "env.toml"))
    assert load().broker.heartbeat_s == 2
    assert load(config_file=tmp_path / "option.toml").broker.heartbeat_s == 3


def test_a_named_config_file_that_is_missing_is_an_error(tmp_path: Path) -> None:
    assert "named by --config) cannot be read: No such file" in refusal(config_file=tmp_path / "nope.toml")


def test_broken_toml_is_named_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "inferq.toml").write_text("[broker\n")
    assert "inferq.toml is not valid TOML" in refusal()
    assert "line 1" in refusal()


@pytest.mark.parametrize(
    ("toml", "suggestion"),
    [
        ("[broker]\nheartbeet_s = 1", "did you mean broker.heartbeat_s?"),
        ("[brokr]\nheartbeat_s = 1", "did you mean broker.heartbeat_s?"),
        ("[batchin]\nmax_rows = 1", "did you mean the section batching?"),
        ("[client]\nq = 1", "known in client: bundle_jobs, cpu_reserve_ratio, deadline_s, window_jobs"),
        ("[zzz]\nq = 1", "known sections: broker, client, redis, topology"),
        ("[topology.models.m]\nlane = []", "did you mean topology.models.<name>.lanes?"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_known_one(tmp_path: Path, toml: str, suggestion: str) -> None:
    (tmp_path / "inferq.toml").write_text(toml)
    assert suggestion in refusal()


def test_an_unknown_environment_name_is_refused_with_the_nearest_known_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFERQ_BROKER__HEARTBEAT", "1")
    message = refusal()
    assert "environment variable INFERQ_BROKER__HEARTBEAT is no knob" in message
    assert "did you mean INFERQ_BROKER__HEARTBEAT_S?" in message


@pytest.mark.parametrize(
    "name", ["INFERQ_TEST_X", "INFERQ_STACK_Y", "INFERQ_STACK", "INFERQ_BASE_IMAGE", "INFERQ_MODELS_DIR"]
)
def test_environment_names_that_are_no_knobs_are_left_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "anything")
    assert load() == ClientSettings()


def test_an_empty_environment_variable_counts_as_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFERQ_BROKER__HEARTBEAT_S", "")
    assert load() == ClientSettings()


def test_the_client_skips_what_only_the_worker_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "inferq.toml").write_text('role = "cpu"\n[batching]\nmax_rows = 7\n[models.m]\nx = 1\n')
    monkeypatch.setenv("INFERQ_BATCHING__MAX_WAIT_S", "1")
    monkeypatch.setenv("INFERQ_ROLE", "gpu")
    assert load() == ClientSettings()


def test_on_the_command_line_a_foreign_section_is_refused() -> None:
    assert "--set batching.max_rows: only the worker read" in refusal("batching.max_rows=1")


def test_all_bad_values_are_listed_with_knob_environment_name_and_origin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFERQ_REDIS__MAX_CONNECTIONS", "0")
    lines = refusal("broker.heartbeat_s=soon").splitlines()
    assert len(lines) == 3
    assert "broker.heartbeat_s (INFERQ_BROKER__HEARTBEAT_S)" in lines[1]
    assert "[set by --set broker.heartbeat_s]" in lines[1]
    assert "redis.max_connections (INFERQ_REDIS__MAX_CONNECTIONS)" in lines[2]
    assert "[set by environment variable INFERQ_REDIS__MAX_CONNECTIONS]" in lines[2]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["broker.reconnect_min_s=20"], "reconnect_min_s is above reconnect_max_s"),
        (["redis.replied_ttl_s=7200"], "replied_ttl_s is above result_ttl_s"),
        (["client.bundle_jobs=200", "client.window_jobs=100"], "bundle_jobs is above window_jobs"),
        (["broker.ca_file=/ca.pem"], "amqp:// is not encrypted: use amqps:// or drop them"),
        (["broker.url=amqps://h/", "broker.cert_file=/c.pem"], "cert_file and key_file belong together"),
        (["topology.models.m.lanes=a,a"], "names a lane twice"),
        (["topology.models.m.lanes=fallback"], "is the CPU's own queue"),
        (["topology.models.m.lanes="], "at least 1 item"),
        (["topology.models.M.fallback=true"], "should match pattern"),
        (["broker.heartbeat_s"], "write it as section.key=value"),
        (["broker.connect_timeout_s=inf"], "finite number"),
        (["topology.models=[1]"], "valid dictionary"),
    ],
)
def test_contradictions_and_bad_values_say_what_to_do(overrides: list[str], message: str) -> None:
    assert message in refusal(*overrides)


def test_two_contradictions_of_one_section_are_both_listed() -> None:
    message = refusal("broker.cert_file=/c.pem")
    assert "not encrypted" in message
    assert "belong together" in message


@pytest.mark.parametrize(
    "value",
    [
        "http://user:hunter2@host/",
        "amqp://user:hunter2@",
        "amqp://user:@hunter2:x/",
        "hunter2",
        "amqp://host:hunter2",
        "amqp://[hunter2",
    ],
)
@pytest.mark.parametrize("source", ["file", "environment", "secret", "override"])
def test_a_secret_never_stands_in_an_error_or_its_traceback(
    value: str, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides: list[str] = []
    if source == "file":
        (tmp_path / "inferq.toml").write_text(f"[broker]\nurl = {json.dumps(value)}\n")
    elif source == "environment":
        monkeypatch.setenv("INFERQ_BROKER__URL", value)
    elif source == "secret":
        (tmp_path / "inferq_broker__url").write_text(value)
        monkeypatch.setenv("INFERQ_SECRETS_DIR", str(tmp_path))
    else:
        overrides.append(f"broker.url={value}")
    with pytest.raises(ConfigurationError) as caught:
        load(*overrides)
    assert "broker.url (INFERQ_BROKER__URL)" in str(caught.value)
    # capture_locals stays off: a traceback as Python prints it.
    assert "hunter2" not in "".join(traceback.format_exception(caught.value))


def test_a_secrets_directory_that_cannot_be_read_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFERQ_SECRETS_DIR", str(tmp_path / "nope"))
    assert "secrets directory (INFERQ_SECRETS_DIR)" in refusal()


def test_an_unknown_secret_file_is_refused_and_strange_files_are_not_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "..data").mkdir()
    (tmp_path / "README").write_bytes(b"\xff")
    monkeypatch.setenv("INFERQ_SECRETS_DIR", str(tmp_path))
    assert load() == ClientSettings()
    (tmp_path / "inferq_broker__ulr").write_text("x")
    assert "did you mean broker.url?" in refusal()


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("amqp://user:hunter2@host:5672/vhost", "amqp://user:**********@host:5672/vhost"),
        ("amqp://user:hun/ter2@host/", "amqp://user:**********@host/"),
        ("amqp://user:hun@ter2@host/", "**********"),
        ("redis://:hunter2@host/0?password=hunter2", "redis://:**********@host/0?**********"),
        ("redis://host/0", "redis://host/0"),
        ("hunter2", "**********"),
    ],
)
def test_the_printable_configuration_shows_the_host_and_never_the_password(url: str, shown: str) -> None:
    class Anything(Section):
        url: SecretStr

    assert effective(Anything(url=SecretStr(url))) == {"url": shown}


def test_the_printable_configuration_is_json_and_complete() -> None:
    printed = effective(load("topology.models.m.lanes=a"))
    assert json.loads(json.dumps(printed)) == printed
    assert printed["topology"] == {"models": {"m": {"lanes": ["a"], "fallback": True}}}
    assert printed["broker"]["url"] == "amqp://guest:**********@127.0.0.1:5672/"


def test_settings_are_frozen() -> None:
    with pytest.raises(ValidationError):
        load().broker.heartbeat_s = 3  # type: ignore[misc]  # the point of the test


def test_building_settings_reads_no_environment_and_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BROKER", '{"heartbeat_s": 1}')
    monkeypatch.setenv("INFERQ_BROKER__HEARTBEAT_S", "1")
    (tmp_path / "inferq.toml").write_text("nonsense")
    assert ClientSettings() == ClientSettings(broker=BrokerSettings())
    assert ClientSettings().broker.heartbeat_s == 20


def test_another_settings_class_loads_the_same_way_and_skips_the_clients_section(tmp_path: Path) -> None:
    class Batching(Section):
        max_rows: int = Field(default=32, ge=1)

    class Worker(Settings):
        role: str = "gpu"
        broker: BrokerSettings = BrokerSettings()
        batching: Batching = Batching()

    (tmp_path / "inferq.toml").write_text('role = "cpu"\n[batching]\nmax_rows = 8\n[client]\ndeadline_s = 1\n')
    loaded = load_settings(Worker, config_file=None, overrides=["batching.max_rows=9"])
    assert (loaded.role, loaded.batching.max_rows) == ("cpu", 9)


def _fields(cls: Any) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, info in cls.model_fields.items():
        inner = info.annotation
        found += _fields(inner) if isinstance(inner, type) and issubclass(inner, BaseModel) else [(name, info)]
    return found


def test_every_knob_has_a_description_and_a_row_in_the_table() -> None:
    table = settings_table(ClientSettings)
    for name, info in _fields(ClientSettings):
        assert info.description, name
    assert "| `client.deadline_s` | `INFERQ_CLIENT__DEADLINE_S` | `30.0` |" in table
    assert (
        "| `topology.models.<name>.lanes` | `INFERQ_TOPOLOGY__MODELS__<name>__LANES` | `interactive, bulk` |" in table
    )
    rows = table.splitlines()
    assert all(row.count(" | ") == 3 for row in rows if not row.startswith("|---"))


def test_every_section_of_the_worker_is_one_that_the_client_skips_or_reads() -> None:
    assert WorkerSettings.model_fields.keys() <= WORKER_SECTIONS | CLIENT_SECTIONS


def test_every_knob_of_the_worker_has_a_description_too() -> None:
    assert not [name for name, info in _fields(WorkerSettings) if not info.description]


def test_all_kinds_of_mistakes_are_shown_at_once(tmp_path: Path) -> None:
    (tmp_path / "inferq.toml").write_text('[brokr]\nurl = "x"\n[broker]\nheartbeat_s = 0\n[redis]\nurl = "http://h"\n')

    text = refusal("client.bundle_jobs=many", "nonsense")

    for part in ("brokr", "broker.heartbeat_s", "redis.url", "client.bundle_jobs", "--set nonsense"):
        assert part in text


def test_what_an_unreadable_file_may_have_said_is_not_called_missing(tmp_path: Path) -> None:
    class Needing(Settings):
        broker: BrokerSettings

    with pytest.raises(ConfigurationError) as caught:
        load_settings(Needing, config_file=tmp_path / "nothing.toml")

    assert "cannot be read" in str(caught.value)
    assert "is required" not in str(caught.value)
