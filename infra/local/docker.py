"""The broker and Redis of `docker-compose.yml`, under a project name of their own and on free loopback ports."""

import os
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from infra.local import processes, rabbitmq
from infra.local.errors import StackError
from infra.local.processes import LOOPBACK

PROJECT_FOLDER = Path(__file__).resolve().parents[2]
_COMPOSE_FILE = PROJECT_FOLDER / "docker-compose.yml"
_ENV_FILE = PROJECT_FOLDER / "infra" / "docker" / "local.env"
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


def fetch() -> bool:
    """Pull the two images unless they are here; returns whether both are here now."""
    listing = ["docker", "compose", "--file", str(_COMPOSE_FILE), "config", "--images", "rabbitmq", "redis"]
    images = subprocess.run(listing, capture_output=True, text=True, check=False).stdout.split()
    return bool(images) and all(_is_here(image) or _quietly("docker", "pull", "--quiet", image) for image in images)


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
    user, password = credentials(Path(os.environ.get("INFERQ_STACK_ENV_FILE") or _ENV_FILE).read_text())
    found = rabbitmq.addresses(amqp, management, prometheus, credentials=f"{user}:{password}")
    return {**found, "INFERQ_REDIS__URL": f"redis://{LOOPBACK}:{redis}/0"}


def credentials(env_file: str) -> tuple[str, str]:
    """Read the broker's user and password, percent-encoded for a URL, from the text of the compose env file."""
    values = dict(line.split("=", 1) for line in env_file.splitlines() if "=" in line and not line.startswith("#"))
    return quote(values["RABBITMQ_DEFAULT_USER"], safe=""), quote(values["RABBITMQ_DEFAULT_PASS"], safe="")


def stop(project: str) -> None:
    """Remove the services, their network and their volumes.

    Raises:
        StackError: the engine refused.
    """
    _compose(project, "down", "--volumes", "--remove-orphans", "--timeout", "2")


@dataclass(frozen=True, slots=True)
class Service:
    """One service of a project that is up, to be ended and started again; its volumes and ports stay.

    Every method raises StackError when the engine or the command refuses.
    """

    project: str
    name: str

    def send(self, number: signal.Signals) -> None:
        """Signal the container's first process; SIGKILL returns when it has ended; nothing restarts it then."""
        _compose(self.project, "kill", "--signal", number.name, self.name)

    def start(self) -> None:
        """Start the ended container again; does not wait until it serves."""
        _compose(self.project, "start", self.name)

    def run(self, *words: str) -> str:
        """Run a command in the running container; returns what it says."""
        return _compose(self.project, "exec", "-T", self.name, *words)

    def empty_folder(self) -> None:
        """Delete every file below the working folder of the ended container, which is that of its data."""
        delete = ("run", "--rm", "-T", "--no-deps", "--entrypoint", "find")
        _compose(self.project, *delete, self.name, ".", "-type", "f", "-delete")

    def save(self, path: str, target: Path) -> None:
        """Copy a file or folder out of the container, ended or not."""
        _compose(self.project, "cp", f"{self.name}:{path}", str(target))

    def output(self) -> str:
        """What the container has printed since it was made."""
        return _compose(self.project, "logs", "--no-color", "--no-log-prefix", self.name)


def _is_here(image: str) -> bool:
    return _quietly("docker", "image", "inspect", image)


def _quietly(*command: str) -> bool:
    try:
        return subprocess.run(command, capture_output=True, timeout=_UP_LIMIT_S, check=False).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def _compose(project: str, *arguments: str, environment: dict[str, str] | None = None) -> str:
    command = [
        "docker",
        "compose",
        "--project-name",
        project,
        "--file",
        str(_COMPOSE_FILE),
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
    return done.stdout
