"""The runbook names metrics, log lines and commands that exist."""

import re
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from inferq_worker.observe.metrics import Metrics

PROJECT = Path(__file__).resolve().parents[2]
TEXT = (PROJECT / "infra" / "runbook.md").read_text()
CODE = "\n".join(path.read_text() for part in ("worker", "producer") for path in sorted((PROJECT / part).rglob("*.py")))


def test_every_metric_that_it_names_is_exported() -> None:
    registry = CollectorRegistry()
    Metrics(registry, role="gpu")
    exported = set(re.findall(r"^# TYPE (\S+)", generate_latest(registry).decode(), re.MULTILINE))
    named = set(re.findall(r"inferq_[a-z_]+(?![a-z_.])", TEXT))
    assert len(named) > 10
    assert named <= exported


@pytest.mark.parametrize(
    "event", sorted(set(re.findall(r"`([a-z]+\.[a-z_]+)`", TEXT)) - {"inferq.toml", "inferq.amqp"})
)
def test_every_log_line_and_setting_that_it_names_is_known(event: str) -> None:
    section, name = event.split(".")
    is_setting = re.search(rf"^    {name}: ", CODE, re.MULTILINE) and re.search(
        rf"^    {section}: ", CODE, re.MULTILINE
    )
    assert f'"{event}"' in CODE or is_setting
