"""The private broker and Redis of `infra/local`: what they leave behind, and what they leave alone."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from socket import SO_REUSEADDR, SOL_SOCKET, create_connection, socket
from urllib.parse import urlsplit

import pytest
from infra.local import install, processes
from infra.local.management import Management
from infra.local.processes import Identity
from tests.stack import PROJECT_FOLDER

pytestmark = [
    pytest.mark.stack,
    pytest.mark.timeout(120),
    pytest.mark.skipif(bool(install.missing()), reason=f"not installed: {install.missing()}"),
]

RUN_FOLDER = PROJECT_FOLDER / ".run"
COMMAND = [sys.executable, str(PROJECT_FOLDER / "infra" / "local" / "stack.py")]
SYSTEM_PORTS = (5672, 4369, 6379, 15672, 25672)


@pytest.fixture
def environment(tmp_path: Path) -> Mapping[str, str]:
    """An environment that names no stack, with an empty home folder."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("INFERQ_")}
    (tmp_path / "home").mkdir()
    return {**kept, "HOME": str(tmp_path / "home"), "INFERQ_STACK": "binaries"}


@contextmanager
def held(name: str, environment: Mapping[str, str]) -> Iterator[tuple[subprocess.Popen[str], Mapping[str, str]]]:
    with subprocess.Popen(
        [*COMMAND, "hold", "--name", name], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        yield holder, json.loads(holder.stdout.readline())["environment"]
        if holder.poll() is None:
            holder.communicate()


def listens(url: str) -> bool:
    parts = urlsplit(url)
    with suppress(OSError), create_connection((parts.hostname or "", parts.port or 0), timeout=1.0):
        return True
    return False


def listening_addresses(pid: int) -> list[IPv4Address | IPv6Address]:
    """The addresses that a process listens on, from /proc: `ss` is not everywhere."""
    links = [str(path.readlink()) for path in Path(f"/proc/{pid}/fd").iterdir()]
    inodes = {link[len("socket:[") : -1] for link in links if link.startswith("socket:[")}
    found: list[IPv4Address | IPv6Address] = []
    for table in ("tcp", "tcp6"):
        for fields in map(str.split, Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]):
            if fields[3] == "0A" and fields[9] in inodes:  # LISTEN; the address is in little-endian words
                raw = bytes.fromhex(fields[1].partition(":")[0])
                found.append(ip_address(b"".join(raw[at : at + 4][::-1] for at in range(0, len(raw), 4))))
    return found


def within(limit_s: float, condition: Callable[[], bool]) -> bool:
    give_up_s = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > give_up_s:
            return False
        time.sleep(0.05)
    return True


def occupy(ports: ExitStack) -> None:
    """Take the ports of a system's RabbitMQ, epmd and Redis, unless such a system has them already."""
    for number in SYSTEM_PORTS:
        taken = ports.enter_context(socket())
        taken.setsockopt(SOL_SOCKET, SO_REUSEADDR, 1)
        with suppress(OSError):
            taken.bind(("127.0.0.1", number))
            taken.listen()


def test_it_runs_a_command_beside_other_servers_and_leaves_nothing(
    environment: Mapping[str, str], tmp_path: Path
) -> None:
    ask = "import json, os; print(json.dumps({k: v for k, v in os.environ.items() if k.startswith('INFERQ_')}))"
    words = [*COMMAND, "run", "--name", "test-beside", "--", sys.executable, "-c", f"{ask}; raise SystemExit(7)"]

    with ExitStack() as ports:
        occupy(ports)
        started_s = time.monotonic()
        done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False, cwd=tmp_path)
        took_s = time.monotonic() - started_s

    assert done.returncode == 7, done.stderr
    given = json.loads(done.stdout)
    assert given["INFERQ_BROKER__URL"].startswith("amqp://")
    assert not any(listens(url) for key, url in given.items() if key.endswith("URL"))
    assert not (RUN_FOLDER / "test-beside").exists()
    assert processes.of_folder(RUN_FOLDER / "test-beside") == ()
    assert [path for path in tmp_path.rglob("*") if path.name != "home"] == []
    assert took_s < 60, "20 s on an idle machine"


def test_the_broker_has_the_committed_topology_and_only_loopback_ports(environment: Mapping[str, str]) -> None:
    committed = json.loads((PROJECT_FOLDER / "infra" / "rabbitmq" / "definitions.json").read_text())

    with held("test-topology", environment) as (_, given):
        actual = Management(given["INFERQ_BROKER__MANAGEMENT_URL"]).call("GET", "/api/definitions")
        pids = processes.of_folder(RUN_FOLDER / "test-topology")
        ours = [address for pid in pids for address in listening_addresses(pid)]

    assert {queue["name"] for queue in actual["queues"]} == {queue["name"] for queue in committed["queues"]}
    assert len(ours) >= 6, "AMQP, management, prometheus, distribution, epmd, Redis"
    assert all(address.is_loopback for address in ours)


def test_a_killed_run_is_cleared_away_by_the_next_one_which_spares_the_living(environment: Mapping[str, str]) -> None:
    with held("test-living", environment) as (_, living), held("test-killed", environment) as (killed, orphaned):
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        assert listens(orphaned["INFERQ_BROKER__URL"]), "nobody has ended the servers of the killed run yet"

        with held("test-next", environment) as (_, following):
            assert listens(following["INFERQ_BROKER__URL"])
            assert not listens(orphaned["INFERQ_BROKER__URL"])
            assert not listens(orphaned["INFERQ_REDIS__URL"])
            assert not (RUN_FOLDER / "test-killed").exists()
            assert listens(living["INFERQ_BROKER__URL"])
            assert listens(living["INFERQ_REDIS__URL"])


def test_a_stack_is_brought_up_once_and_taken_down_once(environment: Mapping[str, str]) -> None:
    def stack(command: str) -> subprocess.CompletedProcess[str]:
        return call(command, "test-twice", environment)

    try:
        first, second = stack("up"), stack("up")
        assert first.returncode == 0, first.stderr
        assert "private pair of processes" in first.stderr
        assert first.stdout == second.stdout == stack("env").stdout
        assert stack("status").returncode == 0
    finally:
        last = stack("down")

    assert last.returncode == 0
    assert stack("down").returncode == 0
    assert stack("status").returncode == 1
    assert processes.of_folder(RUN_FOLDER / "test-twice") == ()


def test_a_signal_reaches_the_command_and_the_stack_still_goes_down(environment: Mapping[str, str]) -> None:
    words = [*COMMAND, "run", "--name", "test-signal", "--", "sleep", "100"]
    with subprocess.Popen(words, env=environment) as runner:
        assert within(60, (RUN_FOLDER / "test-signal" / "stack.json").exists)
        runner.send_signal(signal.SIGTERM)
        runner.wait()

    assert runner.returncode == 128 + signal.SIGTERM
    assert not (RUN_FOLDER / "test-signal").exists()
    assert processes.of_folder(RUN_FOLDER / "test-signal") == ()


def call(command: str, name: str, environment: Mapping[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    whole = [*COMMAND, command, "--name", name, *words]
    return subprocess.run(whole, env=environment, capture_output=True, text=True, check=False)


def test_addresses_of_the_environment_are_used_only_if_that_is_said_and_only_if_they_answer(
    environment: Mapping[str, str],
) -> None:
    with held("test-old", environment) as (_, old):
        said = call("up", "test-given", {**environment, **old, "INFERQ_STACK": "environment"})
        own = call("run", "test-own", {**environment, **old}, "--", "printenv", "INFERQ_BROKER__URL")
        listened = listens(old["INFERQ_BROKER__URL"])
    dead = call("up", "test-given", {**environment, **old, "INFERQ_STACK": "environment"})

    assert listened
    assert said.returncode == 0, said.stderr
    assert old["INFERQ_BROKER__URL"] in said.stdout
    assert "using the broker and Redis of INFERQ_BROKER__URL and INFERQ_REDIS__URL" in said.stderr
    assert own.returncode == 0, own.stderr
    assert own.stdout.strip() != old["INFERQ_BROKER__URL"]
    assert "INFERQ_BROKER__URL, INFERQ_REDIS__URL" in own.stderr, "what is set aside is said"
    assert dead.returncode == 2
    assert dead.stdout == ""
    assert "INFERQ_BROKER__URL names" in dead.stderr
    assert "unset INFERQ_STACK" in dead.stderr
    assert not (RUN_FOLDER / "test-given").exists()


def test_what_a_killed_command_leaves_behind_ends_with_the_stack(environment: Mapping[str, str]) -> None:
    leave = (
        "import os, signal, subprocess\n"
        "left = subprocess.Popen(['sleep', '100'], start_new_session=True, stdout=subprocess.DEVNULL)\n"
        "print(left.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )

    done = call("run", "test-left", environment, "--", sys.executable, "-c", leave)

    assert done.returncode == 128 + signal.SIGKILL, done.stderr
    assert Identity.of(int(done.stdout)) is None
    assert processes.of_folder(RUN_FOLDER / "test-left") == ()
