"""Parked messages as operators see them: what one is, why it is there, and which of them are meant.

Pure, and tolerant: whatever a stranger sent can end in parking, and each such message must be listed and droppable.
"""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final

from inferq_schemas import ContractError, Job, decode_jobs, parse_routing_key

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aiormq.abc import DeliveredMessage

__all__ = [
    "JOB_HEADER",
    "MESSAGE_HEADER",
    "PARKED_HEADER",
    "REASON_HEADER",
    "REQUEUES_HEADER",
    "Parked",
    "Selection",
    "key_of",
    "parked",
    "printable",
    "readable_jobs",
]

REASON_HEADER: Final = "inferq-reason"
MESSAGE_HEADER: Final = "inferq-message"
JOB_HEADER: Final = "inferq-job"
PARKED_HEADER: Final = "inferq-parked-unix-ms"
REQUEUES_HEADER: Final = "inferq-requeues"
"""How often operators sent it back before it was parked again."""
_SHOWN_BYTES: Final = 32
_KEY_BYTES: Final = 8
_NAME_DIGITS: Final = 8


@dataclass(frozen=True, slots=True)
class Parked:
    """One parked message.

    Attributes:
        key: names this message among all parked ones, 16 hexadecimal digits.
        routing_key: as its sender published it.
        model: "" where the routing key names none.
        lane: "" as `model`.
        reason: error code, or what the broker says that it parked it for; "unknown" where nobody said.
        message: the reason in words; may be empty.
        job_ids: of the jobs in it that have one; more than one only in a bundle.
        parked_unix_ms: when, None = unknown.
        body_bytes: length of the body.
        body_start: its first bytes.
        problem: why it cannot be sent back as it is; None = it can.
        expires_unix_ms: from when on it would only expire again; None = never.
        requeues: how often it was sent back before.
    """

    key: str
    routing_key: str
    model: str
    lane: str
    reason: str
    message: str
    job_ids: tuple[str, ...]
    parked_unix_ms: int | None
    body_bytes: int
    body_start: bytes
    problem: str | None
    expires_unix_ms: int | None
    requeues: int

    def is_called(self, name: str) -> bool:
        """Whether that is the id of a job in it, or the beginning of its key."""
        return name in self.job_ids or (len(name) >= _NAME_DIGITS and self.key.startswith(name))

    def age_s(self, now_ms: int) -> float | None:
        """How long it has been parked, seconds, >= 0."""
        return None if self.parked_unix_ms is None else max(0, now_ms - self.parked_unix_ms) / 1000

    def expired(self, now_ms: int) -> bool:
        """Whether it would only expire again, sent back with its own deadline."""
        return self.expires_unix_ms is not None and self.expires_unix_ms <= now_ms

    def to_map(self, now_ms: int) -> dict[str, Any]:
        """For JSON."""
        fields: dict[str, Any] = {"key": self.key, "jobs": list(self.job_ids), "model": self.model, "lane": self.lane}
        fields |= {"reason": self.reason, "message": self.message, "parked_unix_ms": self.parked_unix_ms}
        fields |= {"age_s": self.age_s(now_ms), "body_bytes": self.body_bytes, "requeues": self.requeues}
        fields |= {"expires_unix_ms": self.expires_unix_ms, "expired": self.expired(now_ms), "problem": self.problem}
        return fields | ({"body_start_hex": self.body_start.hex()} if self.problem else {})


@dataclass(frozen=True, slots=True)
class Selection:
    """Which parked messages are meant; what is empty or None lets all pass.

    Attributes:
        models: names.
        reasons: error codes.
        names: job ids, or beginnings of keys of at least 8 digits.
        older_s: parked at least so long ago.
        younger_s: parked at most so long ago.
        unreadable: only those that cannot be sent back.
    """

    models: frozenset[str] = frozenset()
    reasons: frozenset[str] = frozenset()
    names: frozenset[str] = frozenset()
    older_s: float | None = None
    younger_s: float | None = None
    unreadable: bool = False

    @property
    def everything(self) -> bool:
        """Whether it lets all pass."""
        return self == Selection()

    def takes(self, message: Parked, now_ms: int) -> bool:
        """Whether this one is meant. A message of unknown age is neither older nor younger than anything."""
        return (
            (not self.models or message.model in self.models)
            and (not self.reasons or message.reason in self.reasons)
            and (not self.names or any(map(message.is_called, self.names)))
            and (not self.unreadable or message.problem is not None)
            and self._has_age(message.age_s(now_ms))
        )

    def _has_age(self, age_s: float | None) -> bool:
        if self.older_s is None and self.younger_s is None:
            return True
        return (
            age_s is not None
            and (self.older_s is None or age_s >= self.older_s)
            and (self.younger_s is None or age_s <= self.younger_s)
        )


def parked(message: DeliveredMessage) -> Parked:
    """What is known about a parked message. Never raises for what is in it."""
    properties = message.header.properties
    headers: Mapping[str, Any] = properties.headers or {}
    routing_key = message.routing_key or ""
    model, lane, problem = _address(routing_key)
    ids, expires_ms, unreadable = _content(message.body)
    named = headers.get(JOB_HEADER)
    requeues = headers.get(REQUEUES_HEADER)
    return Parked(
        key=key_of(message),
        routing_key=routing_key,
        model=model,
        lane=lane,
        reason=_reason(headers),
        message=_text(headers.get(MESSAGE_HEADER)),
        job_ids=ids or ((named,) if isinstance(named, str) and named else ()),
        parked_unix_ms=_parked_ms(headers),
        body_bytes=len(message.body),
        body_start=message.body[:_SHOWN_BYTES],
        problem=unreadable or problem,
        expires_unix_ms=expires_ms,
        requeues=requeues if isinstance(requeues, int) else 0,
    )


def readable_jobs(body: bytes) -> tuple[Job, ...]:
    """The jobs of a body.

    Raises:
        ContractError: the body, or any job in it, cannot be read.
    """
    jobs = []
    for job in decode_jobs(body):
        if not isinstance(job, Job):
            raise job.error
        jobs.append(job)
    return tuple(jobs)


def printable(text: str) -> str:
    """A stranger's words, harmless in a terminal and in one line."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)


def key_of(message: DeliveredMessage) -> str:
    """The key of a parked message, the same at every look."""
    # Every publish of ours has a message id of its own; what the broker moved here has its sender's, or none.
    message_id = message.header.properties.message_id or ""
    digest = blake2b(message_id.encode(errors="replace"), digest_size=_KEY_BYTES)
    digest.update(b"\0")
    digest.update(message.body)
    return digest.hexdigest()


def _address(routing_key: str) -> tuple[str, str, str | None]:
    try:
        return *parse_routing_key(routing_key), None
    except ContractError as error:
        return "", "", f"routing key: {error.message}"


def _content(body: bytes) -> tuple[tuple[str, ...], int | None, str | None]:
    """Ids of its jobs, when the last of them expires, and why it cannot be read."""
    try:
        found = decode_jobs(body)
    except ContractError as error:
        return (), None, f"{error.code}: {error.message}"
    ids = tuple(job.id for job in found if job.id)
    bad = next((job for job in found if not isinstance(job, Job)), None)
    problem = None if bad is None else f"{bad.error.code}: {bad.error.message}"
    expiries = [_expires_ms(job) for job in found if isinstance(job, Job)]
    latest = None if None in expiries else max((ms for ms in expiries if ms is not None), default=None)
    return ids, latest, problem


def _expires_ms(job: Job) -> int | None:
    return None if job.late == "serve" else job.deadline_unix_ms


def _reason(headers: Mapping[str, Any]) -> str:
    if reason := _text(headers.get(REASON_HEADER)):
        return reason
    death = _last_death(headers)
    return _text(death.get("reason")) or "unknown"


def _parked_ms(headers: Mapping[str, Any]) -> int | None:
    parked_ms = headers.get(PARKED_HEADER)
    if isinstance(parked_ms, int) and not isinstance(parked_ms, bool):
        return parked_ms
    time = _last_death(headers).get("time")
    try:
        return int(time.timestamp() * 1000) if isinstance(time, dt.datetime) else None
    except (OverflowError, ValueError):
        return None


def _last_death(headers: Mapping[str, Any]) -> Mapping[str, Any]:
    deaths = headers.get("x-death")
    newest = deaths[0] if isinstance(deaths, list) and deaths else None
    return newest if isinstance(newest, dict) else {}


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""
