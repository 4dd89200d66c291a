"""A private Redis from the installed binary: own port on the loopback, own folder, nothing kept."""

import contextlib
import ssl
import subprocess
from pathlib import Path

from infra.local import install, processes
from infra.local import tls as local_tls
from infra.local.processes import LOOPBACK

CONFIG_FILE = Path(__file__).resolve().parents[1] / "redis" / "redis.conf"


def start(folder: Path, *, tls: Path | None = None) -> dict[str, str]:
    """Start Redis and wait until it answers.

    Args:
        folder: the run folder, existing; the server lives in its `redis/`.
        tls: folder with `ca.pem`, `server.pem` and `server.key`; then it speaks TLS only, to clients that have a
            certificate of that authority.

    Returns:
        Its address, as an environment variable.

    Raises:
        StackError: it ended or did not answer within 10 s.
    """
    (port,) = processes.free_ports(1)
    (folder / "redis").mkdir()
    admin = local_tls.login()
    secured = local_tls.redis_configuration(tls, port, admin) if tls else ""
    (folder / "redis" / "redis.conf").write_text(local_configuration(folder / "redis", port) + secured)
    launch(folder, port, tls=tls)
    url = f"redis://{LOOPBACK}:{port}/0" if tls is None else f"rediss://{admin}@{LOOPBACK}:{port}/0"
    return {"INFERQ_REDIS__URL": url}


def launch(folder: Path, port: int, *options: str, tls: Path | None = None) -> subprocess.Popen[bytes]:
    """Start the Redis of a run folder, for the first time or after it ended, and wait until it answers.

    Args:
        folder: the run folder, with the `redis/` that `start` made.
        port: the port in its configuration.
        options: on the command line, over the configuration.
        tls: as for `start`.

    Raises:
        StackError: it ended or did not answer within 10 s.
    """
    command = [install.find("redis-server"), str(folder / "redis" / "redis.conf"), *options]
    server = processes.start(command, name="redis", folder=folder, environment={"PATH": install.SEARCH_PATH})
    context = local_tls.context(tls) if tls else None
    processes.wait_until(
        lambda: answers(port, tls=context), what=f"Redis (see {folder / 'redis.log'})", limit_s=10.0, servers=[server]
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


def answers(port: int, host: str = LOOPBACK, *, tls: ssl.SSLContext | None = None) -> bool:
    """Tell whether a Redis on this port answers PING, be it by asking for a password."""
    with contextlib.suppress(OSError), processes.connected(port, host, tls) as connection:
        connection.sendall(b"PING\r\n")
        return connection.recv(7).startswith((b"+PONG", b"-NOAUTH"))
    return False
