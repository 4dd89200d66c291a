"""How `inferq dead` shows parked messages: a table, one in full, JSON lines, and what a command did. Pure."""

from __future__ import annotations

import datetime as dt
import json
from typing import TYPE_CHECKING, Any, Final

from inferq.commands.durations import short_time
from inferq.parking import printable, readable_jobs
from inferq_schemas import ContractError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from aiormq.abc import DeliveredMessage

    from inferq.dead_work import Work
    from inferq.parking import Parked
    from inferq_schemas import Job

__all__ = ["as_json", "details", "summary", "table"]

_HEAD: Final = ("KEY", "AGE", "QUEUE", "REASON", "BYTES", "JOB")
_CELL_CHARS: Final = 48


def table(messages: Sequence[Parked], now_ms: int) -> list[str]:
    """Aligned lines under a headline; none for no messages."""
    rows = [_row(message, now_ms) for message in messages]
    if not rows:
        return []
    widths = [max(len(row[column]) for row in (_HEAD, *rows)) for column in range(len(_HEAD))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in (_HEAD, *rows)
    ]


def _row(message: Parked, now_ms: int) -> tuple[str, ...]:
    age_s = message.age_s(now_ms)
    return (
        message.key,
        "?" if age_s is None else short_time(age_s),
        _cell(message.routing_key or "?"),
        _cell(message.reason),
        f"{message.body_bytes:,}",
        _cell(_jobs(message)),
    )


def _jobs(message: Parked) -> str:
    if message.problem is not None:
        return f"unreadable: {message.body_start[:16].hex(' ')}"
    more = f" and {len(message.job_ids) - 1} more" if len(message.job_ids) > 1 else ""
    return f"{message.job_ids[0]}{more}"


def _cell(text: str) -> str:
    text = printable(text)
    return text if len(text) <= _CELL_CHARS else f"{text[: _CELL_CHARS - 3]}..."


def as_json(message: Parked, now_ms: int, **more: str) -> str:
    """One line of JSON."""
    return json.dumps(message.to_map(now_ms) | more)


def details(message: Parked, delivered: DeliveredMessage, now_ms: int, *, json_line: bool) -> str:
    """Everything about one message but the data of its tensors."""
    properties = delivered.header.properties
    headers = {name: _plain(value) for name, value in (properties.headers or {}).items()}
    sent = {"correlation_id": properties.correlation_id, "reply_to": properties.reply_to, "headers": headers}
    content = [_job(job) for job in _readable(delivered.body)]
    if json_line:
        return json.dumps(message.to_map(now_ms) | sent | {"content": content})
    lines = [f"{message.key}  {printable(message.reason)}: {printable(message.message) or '(no message)'}"]
    lines += _told(message, now_ms)
    lines += [f"  {name}: {printable(str(value))}" for name, value in sent.items() if name != "headers"]
    lines += [f"  header {printable(name)}: {printable(str(value))}" for name, value in headers.items()]
    lines += [f"  job {json.dumps(job)}" for job in content]
    return "\n".join(lines)


def _told(message: Parked, now_ms: int) -> list[str]:
    lines = [f"  routing key {printable(message.routing_key)!r}, {message.body_bytes:,} bytes"]
    if message.parked_unix_ms is not None:
        age = short_time(message.age_s(now_ms) or 0.0)
        lines.append(
            f"  parked {_moment(message.parked_unix_ms)}, {age} ago, sent back {message.requeues} times before"
        )
    if message.problem is not None:
        lines += [f"  unreadable: {printable(message.problem)}", f"  begins with {message.body_start.hex(' ')}"]
    if message.expires_unix_ms is not None:
        passed = "has passed" if message.expired(now_ms) else "has not passed"
        lines.append(f"  its deadline {_moment(message.expires_unix_ms)} {passed}")
    return lines


def _readable(body: bytes) -> tuple[Job, ...]:
    try:
        return readable_jobs(body)
    except ContractError:
        return ()


def _job(job: Job) -> dict[str, Any]:
    fields = job.model_dump(exclude={"inputs"}, exclude_defaults=True)
    inputs = {name: f"{one.dtype} {list(one.shape)}" for name, one in job.inputs.items()}
    kept_apart = sorted(name for name, one in job.inputs.items() if one.ref is not None)
    return fields | {"inputs": inputs} | ({"inputs_in_redis": kept_apart} if kept_apart else {})


def _plain(value: object) -> Any:
    """A header's value as JSON takes it."""
    if isinstance(value, dict):
        return {str(name): _plain(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [_plain(entry) for entry in value]
    return value if isinstance(value, str | int | bool | None) else str(value)


def _moment(unix_ms: int) -> str:
    try:
        return dt.datetime.fromtimestamp(unix_ms / 1000, dt.UTC).isoformat(timespec="seconds")
    except (OverflowError, OSError, ValueError):
        return f"at {unix_ms} ms"


def summary(work: Work, *, dry_run: bool) -> str:
    """What a command did, or would do."""
    head = f"{work.parked:,} parked, {work.wanted:,} meant: "
    count, verb = (work.possible, "would be ") if dry_run else (work.done, "")
    parts = [f"{count:,} {verb}{work.action.done}"]
    parts += [f"{count:,} stay: {printable(reason)}" for reason, count in _by_count(work.stays)]
    parts += [f"{work.gone:,} are not there any more"] if work.gone else []
    return head + "; ".join(parts)


def _by_count(stays: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted(stays.items(), key=lambda entry: -entry[1])
