"""A private RabbitMQ node from the installed binaries: own data, ports, name, cookie and epmd, all on the loopback.

Calls the server's script directly: Debian's wrapper in /usr/sbin changes the user and insists on /var/lib/rabbitmq.
Everything that the node would look for outside is pointed into the run folder.
"""

import contextlib
import json
import shutil
import socket
import ssl
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from infra.local import install, processes
from infra.local import tls as local_tls
from infra.local.errors import StackError
from infra.local.management import Management
from infra.local.processes import LOOPBACK

CONFIG_FOLDER = Path(__file__).resolve().parents[1] / "rabbitmq"
_READY_LIMIT_S = 60.0  # seen: 5 s on an idle machine, 9 s on a busy one
_CREDENTIALS = "guest:guest"  # RabbitMQ's own default; it works from the loopback only
_NODE_FILE = "node.json"  # what `launch` needs to start the same node again
_SERVER_SCRIPTS = ("/usr/lib/rabbitmq/bin/rabbitmq-server", "/usr/local/sbin/rabbitmq-server")


@dataclass(frozen=True, slots=True)
class Ports:
    """The loopback ports of one node."""

    amqp: int
    management: int
    prometheus: int
    epmd: int
    distribution: int


def start(folder: Path, *, suffix: str, tls: Path | None = None) -> dict[str, str]:
    """Start epmd and the node, wait until both AMQP and the management API serve.

    Args:
        folder: the run folder, existing; the node lives in its `rabbitmq/`.
        suffix: makes the node's name unique on this machine.
        tls: folder with `ca.pem`, `server.pem` and `server.key`; then AMQP and the management API speak TLS only, to
            clients that have a certificate of that authority.

    Returns:
        The addresses, as environment variables.

    Raises:
        StackError: the node ended or did not get ready; the message holds the end of its log.
    """
    ports = Ports(*processes.free_ports(5))
    credentials = _CREDENTIALS if tls is None else local_tls.login()
    settings = local_settings(ports) if tls is None else tls_settings(ports, tls, credentials)
    home = _prepare(folder / "rabbitmq", settings)
    environment = node_environment(home, ports, suffix)
    node = {"ports": asdict(ports), "environment": environment, "credentials": credentials}
    (home / _NODE_FILE).write_text(json.dumps(node | {"tls": str(tls) if tls else None}))
    epmd = [install.find("epmd"), "-address", LOOPBACK, "-port", str(ports.epmd)]
    epmd_process = processes.start(epmd, name="epmd", folder=folder, environment=environment)
    processes.wait_until(lambda: _accepts(ports.epmd), what="epmd", limit_s=10.0, servers=[epmd_process])
    launch(folder)
    return addresses(
        ports.amqp, ports.management, ports.prometheus, credentials=credentials, secure="" if tls is None else "s"
    )


def launch(folder: Path) -> subprocess.Popen[bytes]:
    """Start the node of a run folder, for the first time or after it ended, and wait until it serves.

    Raises:
        StackError: the node ended or did not get ready; the message holds the end of its log.
    """
    home = folder / "rabbitmq"
    node = json.loads((home / _NODE_FILE).read_text())
    ports, environment = Ports(**node["ports"]), node["environment"]
    server = processes.start([server_script()], name="rabbitmq", folder=folder, environment=environment)
    context = local_tls.context(Path(node["tls"])) if node["tls"] else None
    management_url = f"{'https' if context else 'http'}://{node['credentials']}@{LOOPBACK}:{ports.management}"
    try:
        processes.wait_until(
            lambda: serves(ports.amqp, management_url, tls=context),
            what="RabbitMQ",
            limit_s=_READY_LIMIT_S,
            servers=[server],
        )
    except StackError as reason:
        raise StackError(f"{reason}:\n{_last_lines(folder / 'rabbitmq.log', home / 'log' / 'node.log')}") from None
    return server


def control(folder: Path, *words: str, limit_s: float = 30.0) -> str:
    """Run `rabbitmqctl` on the node of a run folder; returns what it says.

    Raises:
        StackError: the command failed or took longer than `limit_s`; the message holds its words.
    """
    environment = json.loads((folder / "rabbitmq" / _NODE_FILE).read_text())["environment"]
    command = [str(Path(server_script()).with_name("rabbitmqctl")), *words]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        raise StackError(f"rabbitmqctl {' '.join(words)} took longer than {limit_s:g} s") from None
    if done.returncode != 0:
        raise StackError(f"rabbitmqctl {' '.join(words)} failed: {(done.stderr or done.stdout).strip()[-500:]}")
    return done.stdout


def addresses(
    amqp: int, management: int, prometheus: int, *, credentials: str = _CREDENTIALS, secure: str = ""
) -> dict[str, str]:
    """Name a broker's loopback ports as environment variables; `secure` is "s" where they speak TLS."""
    return {
        "INFERQ_BROKER__URL": f"amqp{secure}://{credentials}@{LOOPBACK}:{amqp}/",
        "INFERQ_BROKER__MANAGEMENT_URL": f"http{secure}://{credentials}@{LOOPBACK}:{management}",
        "INFERQ_STACK_PROMETHEUS_URL": f"http://{LOOPBACK}:{prometheus}",
    }


def server_script() -> str:
    """Find the server's own script, never Debian's wrapper.

    Raises:
        StackError: RabbitMQ is not installed.
    """
    for script in _SERVER_SCRIPTS:
        if Path(script).is_file():
            return script
    return install.find("rabbitmq-server")


def node_environment(home: Path, ports: Ports, suffix: str) -> dict[str, str]:
    """Build the node's whole environment."""
    return {
        "PATH": install.SEARCH_PATH,
        "HOME": str(home),  # the Erlang cookie is made here
        "LANG": "C.UTF-8",
        "ERL_EPMD_ADDRESS": LOOPBACK,
        "ERL_EPMD_PORT": str(ports.epmd),
        "RABBITMQ_NODENAME": f"inferq-{suffix}@localhost",
        "RABBITMQ_DIST_PORT": str(ports.distribution),
        "RABBITMQ_MNESIA_BASE": str(home / "data"),
        "RABBITMQ_LOG_BASE": str(home / "log"),
        "RABBITMQ_LOGS": str(home / "log" / "node.log"),
        "RABBITMQ_PID_FILE": str(home / "node.pid"),
        "RABBITMQ_PLUGINS_EXPAND_DIR": str(home / "plugins"),
        "RABBITMQ_ENABLED_PLUGINS_FILE": str(home / "enabled_plugins"),
        "RABBITMQ_CONFIG_FILE": str(CONFIG_FOLDER / "rabbitmq.conf"),
        "RABBITMQ_CONFIG_FILES": str(home / "conf.d"),
        # Both exist and say nothing, so that the machine's /etc/rabbitmq is not read.
        "RABBITMQ_ADVANCED_CONFIG_FILE": str(home / "advanced.config"),
        "RABBITMQ_CONF_ENV_FILE": str(home / "rabbitmq-env.conf"),
        # Two schedulers start faster than one a core and are plenty here; distribution stays on the loopback.
        "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "+S 2:2 +SDcpu 1:1 -kernel inet_dist_use_interface {127,0,0,1}",
        # The script then replaces itself by the Erlang VM instead of standing between us and it.
        "RUNNING_UNDER_SYSTEMD": "true",
    }


def tls_settings(ports: Ports, tls: Path, credentials: str) -> dict[str, str | int]:
    """Settings of a private node that speaks TLS only, has no user `guest`, and one of these credentials instead."""
    user, _, password = credentials.partition(":")
    return {
        "listeners.tcp": "none",
        "listeners.ssl.1": f"{LOOPBACK}:{ports.amqp}",
        **local_tls.rabbitmq_settings(tls, "ssl_options"),
        "management.ssl.ip": LOOPBACK,
        "management.ssl.port": ports.management,
        **local_tls.rabbitmq_settings(tls, "management.ssl"),
        "default_user": user,
        "default_pass": password,
        **_common_settings(ports),
    }


def local_settings(ports: Ports) -> dict[str, str | int]:
    """Settings of the private node over those of `infra/rabbitmq/rabbitmq.conf`."""
    return {
        "listeners.tcp.1": f"{LOOPBACK}:{ports.amqp}",
        "management.tcp.ip": LOOPBACK,
        "management.tcp.port": ports.management,
        **_common_settings(ports),
    }


def _common_settings(ports: Ports) -> dict[str, str | int]:
    return {
        "prometheus.tcp.ip": LOOPBACK,
        "prometheus.tcp.port": ports.prometheus,
        "collect_statistics_interval": 1000,  # tests look at the figures
        "disk_free_limit.absolute": "100MB",  # a laptop's nearly full disk must not block the demo
    }


def serves(amqp_port: int, management_url: str, *, tls: ssl.SSLContext | None = None) -> bool:
    """Tell whether both AMQP and the management API answer."""
    return speaks_amqp(amqp_port, tls=tls) and Management(management_url, tls=tls).answers()


def speaks_amqp(port: int, host: str = LOOPBACK, *, tls: ssl.SSLContext | None = None) -> bool:
    """Tell whether the port answers an AMQP 0-9-1 protocol header with its first method frame."""
    with contextlib.suppress(OSError), processes.connected(port, host, tls) as connection:
        connection.sendall(b"AMQP\x00\x00\x09\x01")
        return connection.recv(1) == b"\x01"
    return False


def _prepare(home: Path, settings: Mapping[str, str | int]) -> Path:
    for name in ("conf.d", "data", "log", "plugins"):
        (home / name).mkdir(parents=True)
    (home / "conf.d" / "local.conf").write_text("".join(f"{key} = {value}\n" for key, value in settings.items()))
    (home / "advanced.config").write_text("[].\n")
    (home / "rabbitmq-env.conf").touch()
    shutil.copy(CONFIG_FOLDER / "enabled_plugins", home)  # a copy: the node rewrites this file
    return home


def _accepts(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((LOOPBACK, port), timeout=2.0):
        return True
    return False


def _last_lines(*logs: Path) -> str:
    return "\n".join(
        line for log in logs if log.is_file() for line in log.read_text(errors="replace").splitlines()[-12:]
    )
