"""Pure parts of `infra/local` and the lock, and the parts that touch nothing but a folder and a child process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from infra.docker import make_example
from infra.local import docker, given, install, lifecycle, processes, rabbitmq, redis
from infra.local.errors import StackError
from infra.local.management import differences
from infra.local.processes import Identity
from infra.lock import lock
from infra.rabbitmq import generate
from tests.stack import PROJECT_FOLDER, Stack


def test_the_committed_definitions_and_users_are_those_of_topology_and_access() -> None:
    for path, text in generate.FILES.items():
        assert path.read_text() == text(), "run: make docs"


def test_a_definition_that_the_broker_lacks_or_changed_is_named() -> None:
    queue = {"name": "inferq.dead", "vhost": "/", "durable": True}
    binding = {"source": "inferq.dead", "destination": "inferq.dead", "routing_key": "#"}
    expected = {"queues": [queue], "bindings": [binding]}

    assert list(differences(expected, {"queues": [{**queue, "type": "quorum"}], "bindings": [binding]})) == []
    assert list(differences(expected, {"queues": [{**queue, "durable": False}]})) == [
        "queues: inferq.dead",
        "bindings: inferq.dead -> inferq.dead (#)",
    ]


def test_a_recycled_process_id_is_not_ours(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "100"]) as stranger:
        real = Identity.of(stranger.pid)
        assert real is not None
        Identity(real.pid, real.start_ticks - 1, real.boot_id).write(tmp_path / "broker.pid")
        (tmp_path / "redis.pid").write_text('{"pid": 1')  # cut short by a crash

        processes.end(tmp_path, grace_s=0.0)

        assert processes.of_folder(tmp_path) == ()
        assert stranger.poll() is None
        stranger.kill()


def test_ending_a_folder_takes_recorded_servers_and_their_unrecorded_helpers(tmp_path: Path) -> None:
    helper = (
        "import subprocess, time\n"
        "print(subprocess.Popen(['sleep', '100'], start_new_session=True).pid, flush=True)\n"
        "time.sleep(100)"
    )
    server = processes.start([sys.executable, "-c", helper], name="server", folder=tmp_path, environment={})
    processes.wait_until(lambda: bool((tmp_path / "server.log").read_text()), what="the helper", limit_s=10.0)
    child = int((tmp_path / "server.log").read_text())
    assert set(processes.of_folder(tmp_path)) == {server.pid, child}

    processes.end(tmp_path, grace_s=0.0)

    assert processes.of_folder(tmp_path) == ()
    assert Identity.of(child) is None
    assert server.wait() != 0


def test_waiting_for_a_server_that_has_ended_does_not_wait_for_the_limit(tmp_path: Path) -> None:
    server = processes.start(["false"], name="server", folder=tmp_path, environment={})

    with pytest.raises(StackError, match="ended while starting"):
        processes.wait_until(lambda: False, what="it", limit_s=1000.0, servers=[server])


def test_ended_children_are_seen_off_except_the_one_that_is_waited_for() -> None:
    ended = subprocess.Popen(["true"])
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)

    processes.collect_ended(spare=ended.pid)
    assert os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    processes.collect_ended()
    with pytest.raises(ChildProcessError):
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOHANG)
    ended.wait()


def test_ports_are_distinct_and_below_those_of_outgoing_connections() -> None:
    ports = processes.free_ports(50)

    assert len(set(ports)) == 50
    assert max(ports) < 32_768


def test_the_node_looks_for_nothing_outside_its_folder(tmp_path: Path) -> None:
    environment = rabbitmq.node_environment(tmp_path, rabbitmq.Ports(1, 2, 3, 4, 5), "x")

    paths = {key: value for key, value in environment.items() if value.startswith("/") and key != "PATH"}
    assert paths.pop("RABBITMQ_CONFIG_FILE") == str(PROJECT_FOLDER / "infra" / "rabbitmq" / "rabbitmq.conf")
    assert all(value.startswith(str(tmp_path)) for value in paths.values())


def test_redis_listens_on_the_loopback_and_keeps_nothing(tmp_path: Path) -> None:
    lines = redis.local_configuration(tmp_path, 7000).splitlines()

    assert {"bind 127.0.0.1", "port 7000", "appendonly no", f'dir "{tmp_path}"'} <= set(lines)


def test_what_to_type_is_said_where_nothing_may_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "missing", lambda: ("rabbitmq-server", "redis-server"))
    monkeypatch.setenv("INFERQ_STACK_INSTALL", "no")

    with pytest.raises(StackError, match="sudo apt-get install --no-install-recommends rabbitmq-server redis-server"):
        install.ensure()


def test_an_address_that_is_chosen_but_not_given_is_named() -> None:
    with pytest.raises(StackError, match=r"INFERQ_REDIS__URL is not set.*unset INFERQ_STACK INFERQ_BROKER__URL"):
        given.addresses({"INFERQ_STACK": "environment", "INFERQ_BROKER__URL": "amqp://elsewhere/"})


def test_an_address_where_nothing_answers_is_refused_without_its_password() -> None:
    (port,) = processes.free_ports(1)
    environment = {"INFERQ_BROKER__URL": f"amqp://me:secret@127.0.0.1:{port}/", "INFERQ_REDIS__URL": "redis://b/"}

    with pytest.raises(StackError, match=rf"no RabbitMQ answers at amqp://127.0.0.1:{port}/.*unset") as refusal:
        given.addresses(environment)

    assert "secret" not in str(refusal.value)


def test_nothing_leads_a_command_away_from_a_stack_of_ours_and_it_can_be_found_again() -> None:
    exported = {
        "PATH": "/bin",
        "INFERQ_BROKER__URL": "amqps://production/",
        "INFERQ_BROKER__CA_FILE": "/ca.pem",
        "INFERQ_BROKER__MANAGEMENT_URL": "http://production/",
        "INFERQ_REDIS__PREFIX": "production",
        "INFERQ_SECRETS_DIR": "/run/secrets",
        "INFERQ_CONFIG": "production.toml",
        "INFERQ_LOG__LEVEL": "debug",
    }
    ours = lifecycle.Stack("binaries", {"INFERQ_BROKER__URL": "amqp://ours/"})

    assert lifecycle.command_environment("x", ours, exported) == {
        "PATH": "/bin",
        "INFERQ_LOG__LEVEL": "debug",
        "INFERQ_BROKER__URL": "amqp://ours/",
        "INFERQ_STACK_FOLDER": str(lifecycle.RUN_FOLDER / "x"),
    }
    chosen = lifecycle.Stack("environment", {"INFERQ_BROKER__URL": "amqps://production/"})
    assert lifecycle.command_environment("x", chosen, exported) == exported


def test_an_unknown_kind_of_stack_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(lifecycle, "RUN_FOLDER", tmp_path)
    monkeypatch.setenv("INFERQ_STACK", "podman")

    with pytest.raises(StackError, match="'podman' is not a kind of stack"):
        lifecycle.up("test-unit", owned=True)

    assert list(tmp_path.iterdir()) == []


def test_a_stack_that_another_process_is_bringing_up_is_not_taken_from_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(lifecycle, "RUN_FOLDER", tmp_path)
    monkeypatch.delenv("INFERQ_STACK", raising=False)
    (tmp_path / "busy").mkdir()
    owner = Identity.of(os.getppid())
    assert owner is not None
    owner.write(tmp_path / "busy" / "owner.json")

    with pytest.raises(StackError, match=f"process {owner.pid} is bringing busy up"):
        lifecycle.up("busy", owned=False)

    assert (tmp_path / "busy").exists()


def test_without_an_engine_docker_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")

    assert not docker.answers()


def test_the_credentials_of_the_env_file_fit_into_a_url() -> None:
    text = "# a=comment\nRABBITMQ_DEFAULT_USER=me\nRABBITMQ_DEFAULT_PASS=p@ss=/\n"

    assert docker.credentials(text) == ("me", "p%40ss%3D%2F")
    assert docker.credentials((PROJECT_FOLDER / "infra/docker/local.env").read_text()) == ("inferq", "inferq")


def test_the_example_model_is_the_one_that_its_script_writes() -> None:
    assert make_example.MODEL_FILE.read_bytes() == make_example.model_bytes()


def test_a_test_run_takes_its_stack_from_the_environment_only_if_it_is_whole() -> None:
    whole = {
        "INFERQ_BROKER__URL": "amqp://a/",
        "INFERQ_BROKER__MANAGEMENT_URL": "http://a/",
        "INFERQ_REDIS__URL": "redis://a/",
    }

    assert Stack.from_environment(whole) == Stack("amqp://a/", "http://a/", "redis://a/")
    assert Stack.from_environment({**whole, "INFERQ_REDIS__URL": ""}) is None


def test_the_lock_follows_the_extras_that_an_extra_names() -> None:
    project = {
        "name": "inferq",
        "dependencies": ["msgpack"],
        "optional-dependencies": {"dev": ["inferq[worker]", "pytest"], "worker": ["onnxruntime-gpu"], "cuda": ["x"]},
    }

    assert sorted(lock.direct_requirements(project, "dev")) == ["msgpack", "onnxruntime-gpu", "pytest"]


def test_the_versions_of_one_lock_constrain_the_next() -> None:
    pins = ["# x==9", "a==1 ; python_version < '3.12' \\", "    --hash=sha256:1", "b==2 \\", "    --hash=sha256:2"]
    text = "\n".join(pins)

    assert lock.without_hashes(text) == "a==1 ; python_version < '3.12'\nb==2\n"


@pytest.mark.parametrize("name", lock.LOCK_FILES)
def test_a_committed_lock_pins_every_package_with_hashes_and_names_no_place(name: str) -> None:
    text = (PROJECT_FOLDER / name).read_text()
    entries = [entry for entry in text.replace("\\\n", "").splitlines() if not entry.startswith("#")]

    assert {"aio-pika", "hatchling", "onnxruntime-gpu"} <= {entry.partition("==")[0] for entry in entries}
    assert all("==" in entry and "--hash=sha256:" in entry for entry in entries)
    assert "://" not in text
    assert not any(line.startswith("-") for line in text.splitlines())


def test_definitions_hold_no_user_and_no_secret() -> None:
    assert set(json.loads(generate.DEFINITIONS.read_text())) == {
        "vhosts",
        "exchanges",
        "queues",
        "bindings",
        "policies",
    }
