"""The broker and Redis of `docker-compose.yml`, under a project name of their own and on free loopback ports."""

import os
import subprocess
from pathlib import Path

from infra.local import processes, rabbitmq
from infra.local.errors import StackError
from infra.local.processes import LOOPBACK

PROJECT_FOLDER = Path(__file__).resolve().parents[2]
_ANSWER_LIMIT_S = 10.0
_UP_LIMIT_S = 300  # the images may have to be pulled


def answers() -> bool:
    """Tell whether a Docker engine answers and has the compose plugin."""
    for question in (["docker", "version", "--format", "{{.Server.Version}}"], ["docker", "compose", "version"]):
        try:
            subprocess.run(question, check=True, capture_output=True, timeout=_ANSWER_LIMIT_S)
        except (OSError, subprocess.SubprocessError):
            return False
    return True


def start(project: str) -> dict[str, str]:
    """Bring the two services up and wait until both are healthy.

    Returns:
        The addresses, as environment variables.

    Raises:
        StackError: an image could not be had, or a service did not get healthy.
    """
    amqp, management, prometheus, redis = processes.free_ports(4)
    ports = {
        "INFERQ_STACK_AMQP_PORT": amqp,
        "INFERQ_STACK_MANAGEMENT_PORT": management,
        "INFERQ_STACK_PROMETHEUS_PORT": prometheus,
        "INFERQ_STACK_REDIS_PORT": redis,
    }
    wait = ["--wait", "--wait-timeout", str(_UP_LIMIT_S), "--quiet-pull"]
    _compose(
        project,
        "up",
        "--detach",
        *wait,
        "rabbitmq",
        "redis",
        environment={key: str(port) for key, port in ports.items()},
    )
    # The compose file's own defaults; compose has no other place to tell them from.
    user, password = (os.environ.get(name, "inferq") for name in ("INFERQ_STACK_USER", "INFERQ_STACK_PASSWORD"))
    found = rabbitmq.addresses(amqp, management, prometheus, credentials=f"{user}:{password}")
    return {**found, "INFERQ_REDIS__URL": f"redis://{LOOPBACK}:{redis}/0"}


def stop(project: str) -> None:
    """Remove the services, their network and their volumes.

    Raises:
        StackError: the engine refused.
    """
    _compose(project, "down", "--volumes", "--remove-orphans", "--timeout", "2")


def _compose(project: str, *arguments: str, environment: dict[str, str] | None = None) -> None:
    command = [
        "docker",
        "compose",
        "--project-name",
        project,
        "--file",
        str(PROJECT_FOLDER / "docker-compose.yml"),
        *arguments,
    ]
    try:
        done = subprocess.run(
            command,
            env={**os.environ, **(environment or {})},
            capture_output=True,
            text=True,
            timeout=_UP_LIMIT_S + 60,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise StackError(f"docker compose {arguments[0]} took more than {_UP_LIMIT_S + 60} s") from None
    if done.returncode:
        raise StackError(f"docker compose {arguments[0]} failed: {done.stderr[-2000:]}")
