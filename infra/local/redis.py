"""A private Redis from the installed binary: own port on the loopback, own folder, nothing kept."""

import contextlib
import socket
import subprocess
from pathlib import Path

from infra.local import install, processes
from infra.local.processes import LOOPBACK

CONFIG_FILE = Path(__file__).resolve().parents[1] / "redis" / "redis.conf"


def start(folder: Path, *, tls: Path | None = None) -> dict[str, str]:
    """Start Redis and wait until it answers.

    Args:
        folder: the run folder, existing; the server lives in its `redis/`.
        tls: folder with `ca.pem`, `server.pem` and `server.key`; then a second port speaks TLS to clients that have a
            certificate of that authority.

    Returns:
        Its address, as an environment variable.

    Raises:
        StackError: it ended or did not answer within 10 s.
    """
    port, tls_port = processes.free_ports(2)
    (folder / "redis").mkdir()
    configuration = folder / "redis" / "redis.conf"
    secured = tls_configuration(tls, tls_port) if tls else ""
    configuration.write_text(local_configuration(folder / "redis", port) + secured)
    launch(folder, port)
    place = {"INFERQ_STACK_REDISS_PORT": str(tls_port)} if tls else {}
    return {"INFERQ_REDIS__URL": f"redis://{LOOPBACK}:{port}/0", **place}


def launch(folder: Path, port: int, *options: str) -> subprocess.Popen[bytes]:
    """Start the Redis of a run folder, for the first time or after it ended, and wait until it answers.

    Args:
        folder: the run folder, with the `redis/` that `start` made.
        port: the port in its configuration.
        options: on the command line, over the configuration.

    Raises:
        StackError: it ended or did not answer within 10 s.
    """
    command = [install.find("redis-server"), str(folder / "redis" / "redis.conf"), *options]
    server = processes.start(command, name="redis", folder=folder, environment={"PATH": install.SEARCH_PATH})
    processes.wait_until(
        lambda: answers(port), what=f"Redis (see {folder / 'redis.log'})", limit_s=10.0, servers=[server]
    )
    return server


def local_configuration(folder: Path, port: int) -> str:
    """Write the private server's settings over those of `infra/redis/redis.conf`."""
    return f"""include "{CONFIG_FILE}"
bind {LOOPBACK}
port {port}
dir "{folder}"
daemonize no
# The data is thrown away when the stack goes down.
appendonly no
# Rewriting the title would overwrite the environment by which the process is known to be ours.
set-proc-title no
"""


def tls_configuration(tls: Path, port: int) -> str:
    """Write the settings of the port that asks for a certificate of the folder's own authority."""
    return f"""tls-port {port}
tls-ca-cert-file "{tls / "ca.pem"}"
tls-cert-file "{tls / "server.pem"}"
tls-key-file "{tls / "server.key"}"
tls-auth-clients yes
"""


def answers(port: int, host: str = LOOPBACK) -> bool:
    """Tell whether a Redis on this port answers PING, be it by asking for a password."""
    with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=2.0) as connection:
        connection.sendall(b"PING\r\n")
        return connection.recv(7).startswith((b"+PONG", b"-NOAUTH"))
    return False
