"""What a log line holds, and what it must never hold."""

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import structlog

from inferq_worker.observe.logs import configure_logging, redacted


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    """Collects the lines; puts the logging of the test run back afterwards."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    levels = {name: logging.getLogger(name).level for name in ("aio_pika", "aiormq", "asyncio")}
    yield io.StringIO()
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()
    root.handlers[:] = handlers
    root.setLevel(level)
    for name, former in levels.items():
        logging.getLogger(name).setLevel(former)


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_line_of_ours_and_one_of_a_library_have_the_same_form(stream: io.StringIO) -> None:
    configure_logging("info", as_json=True, fields={"service": "inferq", "worker_id": "w1"}, stream=stream)
    structlog.get_logger().info("batch.done", model="m", rows=3)
    logging.getLogger("some.library").warning("slow %s", "thing", extra={"queue": "q"})
    ours, theirs = lines(stream)
    assert ours["message"] == "batch.done"
    assert (ours["model"], ours["rows"], ours["level"]) == ("m", 3, "info")
    assert (theirs["message"], theirs["level"], theirs["logger"]) == ("slow thing", "warning", "some.library")
    assert theirs["queue"] == "q"
    for line in (ours, theirs):
        assert (line["service"], line["worker_id"]) == ("inferq", "w1")
        assert line["timestamp"].endswith("Z")


def test_what_is_below_the_level_is_not_written(stream: io.StringIO) -> None:
    configure_logging("warning", as_json=True, stream=stream)
    structlog.get_logger().info("quiet")
    logging.getLogger("library").info("quiet")
    assert stream.getvalue() == ""


def test_libraries_that_narrate_are_heard_from_warning_up_only(stream: io.StringIO) -> None:
    configure_logging("info", as_json=True, stream=stream)
    logging.getLogger("aiormq").info("chatter")
    assert stream.getvalue() == ""
    configure_logging("debug", as_json=True, stream=stream)
    logging.getLogger("aiormq").info("chatter")
    assert lines(stream)[0]["message"] == "chatter"


def test_setting_up_again_does_not_double_the_lines(stream: io.StringIO) -> None:
    for _ in range(2):
        configure_logging("info", as_json=True, stream=stream)
    logging.getLogger("library").warning("once")
    assert len(lines(stream)) == 1


@pytest.mark.parametrize("as_json", [True, False])
def test_secrets_are_masked_wherever_they_stand(as_json: bool, stream: io.StringIO) -> None:
    configure_logging("info", as_json=as_json, stream=stream)
    logger = structlog.get_logger()
    logger.info("connect amqp://user:hunter2@host/", url="redis://:hunter2@host/0", broker_password="hunter2")  # noqa: S106
    logger.info("headers", headers={"Authorization": "hunter2", "deep": [{"api_key": "hunter2"}], "kept": "visible"})
    logging.getLogger("library").warning("to %s", "amqp://user:hunter2@host/", extra={"token": "hunter2"})
    text = stream.getvalue()
    assert "hunter2" not in text
    assert "visible" in text
    assert "@host/" in text


@pytest.mark.parametrize("as_json", [True, False])
@pytest.mark.parametrize("ours", [True, False])
def test_a_traceback_is_written_without_passwords_and_local_variables(
    as_json: bool, ours: bool, stream: io.StringIO
) -> None:
    configure_logging("info", as_json=as_json, stream=stream)

    def connect(payload: bytes) -> None:
        raise ConnectionError(f"cannot reach amqp://user:hunter2@host/ with {len(payload)} bytes")

    try:
        connect(b"etavirp"[::-1])
    except ConnectionError:
        if ours:
            structlog.get_logger().exception("broker.lost")
        else:
            logging.getLogger("library").exception("broker.lost")
    text = stream.getvalue()
    assert "ConnectionError" in text
    assert "test_logs" in text
    assert "hunter2" not in text
    assert "private" not in text, "local variables hold payloads"
    assert not as_json or len(text.splitlines()) == 1


def test_the_context_of_a_task_stands_on_its_lines(stream: io.StringIO) -> None:
    configure_logging("info", as_json=True, stream=stream)
    with structlog.contextvars.bound_contextvars(batch_id="b1"):
        structlog.get_logger().info("inside")
    structlog.get_logger().info("outside")
    inside, outside = lines(stream)
    assert inside["batch_id"] == "b1"
    assert "batch_id" not in outside


def test_what_json_cannot_hold_is_written_as_text(stream: io.StringIO) -> None:
    configure_logging("info", as_json=True, stream=stream)
    structlog.get_logger().info("odd", value=b"\xff", kind={1})
    assert lines(stream)[0]["kind"] == "{1}"


def test_without_a_stream_lines_go_to_the_stderr_of_the_moment(
    stream: io.StringIO, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    configure_logging("info", as_json=True)
    logger = structlog.get_logger()
    logger.info("first")
    assert json.loads(capsys.readouterr().err)["message"] == "first"
    monkeypatch.setattr("sys.stderr", stream)
    logger.info("second")
    assert lines(stream)[0]["message"] == "second"


def test_where_a_secret_lies_is_shown() -> None:
    assert redacted({"password_file": "/run/secrets/broker", "key_password_file": None}) == {
        "password_file": "/run/secrets/broker",
        "key_password_file": None,
    }


def test_masking_leaves_the_original_alone() -> None:
    original = {"password": "p", "list": ["amqp://u:p@h"]}
    assert redacted(original) == {"password": "**********", "list": ["amqp://u:**********@h"]}
    assert original == {"password": "p", "list": ["amqp://u:p@h"]}
