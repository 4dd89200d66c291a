"""A private Redis from the installed binary: own port on the loopback, own folder, nothing kept."""

import contextlib
import socket
from pathlib import Path

from infra.local import install, processes
from infra.local.processes import LOOPBACK

CONFIG_FILE = Path(__file__).resolve().parents[1] / "redis" / "redis.conf"


def start(folder: Path) -> dict[str, str]:
    """Start Redis and wait until it answers.

    Returns:
        Its address, as an environment variable.

    Raises:
        StackError: it ended or did not answer within 10 s.
    """
    (port,) = processes.free_ports(1)
    (folder / "redis").mkdir()
    configuration = folder / "redis" / "redis.conf"
    configuration.write_text(local_configuration(folder / "redis", port))
    command = [install.find("redis-server"), str(configuration)]
    server = processes.start(command, name="redis", folder=folder, environment={"PATH": install.SEARCH_PATH})
    processes.wait_until(
        lambda: answers(port), what=f"Redis (see {folder / 'redis.log'})", limit_s=10.0, servers=[server]
    )
    return {"INFERQ_REDIS__URL": f"redis://{LOOPBACK}:{port}/0"}


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


def answers(port: int, host: str = LOOPBACK) -> bool:
    """Tell whether a Redis on this port answers PING, be it by asking for a password."""
    with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=2.0) as connection:
        connection.sendall(b"PING\r\n")
        return connection.recv(7).startswith((b"+PONG", b"-NOAUTH"))
    return False
