"""Logging: structlog for our own lines, the standard library's loggers through the same processors.

JSON on stderr for machines, coloured text for a person at a terminal; stdout stays free for a command's answer.
Payloads and headers are never logged; keys that smell of secrets, and passwords in URLs, are masked as a last defence.
"""

from __future__ import annotations

import logging
import re
import sys
from typing import TYPE_CHECKING, Any, Literal, TextIO

import structlog

if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping, Sequence

    from structlog.typing import EventDict, Processor, WrappedLogger

LevelName = Literal["debug", "info", "warning", "error"]
MASK = "**********"

_DENIED = re.compile(
    r"password|passwd|secret|token|authorization|credential|api_?key|cookie|private_?key", re.IGNORECASE
)
_URL_PASSWORD = re.compile(r"(?<=://)([^:@/\s]*):[^@\s]*@")
_CHATTY = ("aio_pika", "aiormq", "asyncio")
"""Libraries that narrate every reconnect with a traceback; ours say it in one line."""


class _Stderr:
    """Writes to whatever `sys.stderr` is at the time, so that a cached logger outlives a replaced stream."""

    def write(self, text: str) -> int:
        return sys.stderr.write(text)

    def flush(self) -> None:
        sys.stderr.flush()


def redacted(value: Any) -> Any:
    """A copy without secrets: values of denied keys, and passwords inside URLs, are masked at any depth."""
    if isinstance(value, str):
        return _URL_PASSWORD.sub(rf"\1:{MASK}@", value) if "://" in value else value
    if isinstance(value, dict):
        return {key: MASK if _denied(key) else redacted(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [redacted(item) for item in value]
    return value


def _denied(key: Any) -> bool:
    # The name of a file with a secret is none, and an operator looks for it.
    return isinstance(key, str) and _DENIED.search(key) is not None and not key.endswith("_file")


def redact(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Processor: mask secrets in one event, in place."""
    for key, value in event.items():
        if _denied(key):
            event[key] = MASK
        elif isinstance(value, str | dict | list | tuple):
            event[key] = redacted(value)
    return event


def configure_logging(
    level: LevelName = "info",
    as_json: bool | None = None,  # noqa: FBT001 - agreed between the parts
    *,
    fields: Mapping[str, str] | None = None,
    stream: TextIO | None = None,
) -> None:
    """Set up logging for the process; calling it again replaces the former set-up.

    Args:
        level: the least that is written.
        as_json: JSON lines or text; None means text where stderr is a terminal, and else JSON.
        fields: on every line, such as `service`, `version`, `worker_id`.
        stream: where lines go instead of stderr.
    """
    json_lines = not sys.stderr.isatty() if as_json is None else as_json
    output: Any = _Stderr() if stream is None else stream
    shared = _shared_processors(dict(fields or {}))
    last = _last_processors(json_lines=json_lines)
    threshold = logging.getLevelNamesMapping()[level.upper()]
    structlog.configure(
        processors=[*shared, *last],
        wrapper_class=structlog.make_filtering_bound_logger(threshold),
        logger_factory=structlog.WriteLoggerFactory(file=output),
        cache_logger_on_first_use=True,
    )
    _route_standard_logging(output, threshold, shared, last)


def _shared_processors(fields: dict[str, str]) -> list[Processor]:
    def add_fields(_logger: WrappedLogger, _method: str, event: EventDict) -> MutableMapping[str, Any]:
        return {**fields, **event}

    return [
        structlog.contextvars.merge_contextvars,
        add_fields,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]


def _last_processors(*, json_lines: bool) -> list[Processor]:
    if json_lines:
        return [
            # Without local variables: they hold payloads.
            structlog.processors.ExceptionRenderer(structlog.tracebacks.ExceptionDictTransformer(show_locals=False)),
            redact,
            structlog.processors.EventRenamer("message"),
            structlog.processors.JSONRenderer(default=str),
        ]
    # Exceptions become text before the masking: the renderer would print them unmasked.
    return [structlog.processors.format_exc_info, redact, structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())]


def _route_standard_logging(
    output: Any, threshold: int, shared: Sequence[Processor], last: Sequence[Processor]
) -> None:
    handler = logging.StreamHandler(output)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.add_logger_name, structlog.stdlib.ExtraAdder()],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(threshold)
    for name in _CHATTY:
        logging.getLogger(name).setLevel(max(threshold, logging.WARNING) if threshold > logging.DEBUG else threshold)
