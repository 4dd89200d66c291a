"""Lanes that operators paused: who, when, why, until when. Written by `inferq pause`, obeyed by workers.

One hash in Redis, read by every worker with its heartbeat. An entry ends by its own time, so that it does with Redis
away as well.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, cast

import msgpack

from inferq.errors import StoreUnavailable
from inferq.keys import paused_key
from inferq.redis_pools import REDIS_ERRORS, open_redis, redis_problem

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from types import TracebackType

    from inferq.settings import RedisSettings

__all__ = ["Pause", "Pauses", "decode_pauses", "in_force"]


@dataclass(frozen=True, slots=True)
class Pause:
    """One decision to stop taking jobs.

    Attributes:
        target: `model`, for all its lanes and its fallback queue, or `model.lane`.
        by: who decided.
        why: in words; may be empty.
        since_unix_ms: when.
        until_unix_ms: when it ends by itself; None = never.
    """

    target: str
    by: str
    why: str
    since_unix_ms: int
    until_unix_ms: int | None = None

    def encode(self) -> bytes:
        """As it stands in the store, under its target."""
        record = {"by": self.by, "why": self.why, "since": self.since_unix_ms, "until": self.until_unix_ms}
        return bytes(msgpack.packb(record))

    @classmethod
    def decode(cls, target: str, raw: bytes) -> Self:
        """Read a stored pause. One that cannot be read holds until it is lifted: somebody wanted it."""
        try:
            record = msgpack.unpackb(raw)
            until = record["until"]
            return cls(
                target,
                str(record["by"]),
                str(record["why"]),
                int(record["since"]),
                None if until is None else int(until),
            )
        except (ValueError, TypeError, KeyError, OverflowError, msgpack.UnpackException):
            return cls(target, "unknown", "its record cannot be read", 0)

    def holds(self, now_ms: int) -> bool:
        """Whether it has not ended by itself."""
        return self.until_unix_ms is None or now_ms < self.until_unix_ms

    def to_map(self) -> dict[str, Any]:
        """For JSON."""
        fields = {"target": self.target, "by": self.by, "why": self.why, "since_unix_ms": self.since_unix_ms}
        return fields | {"until_unix_ms": self.until_unix_ms}


def decode_pauses(raw: Mapping[bytes, bytes]) -> dict[str, Pause]:
    """The stored pauses by target."""
    return {
        name: Pause.decode(name, record)
        for name, record in ((key.decode(errors="replace"), value) for key, value in raw.items())
    }


def in_force(pauses: Mapping[str, Pause], model: str, lane: str, now_ms: int) -> Pause | None:
    """The pause that holds for a lane (`fallback` is one here), the whole model's before its own; None if none does."""
    found = (pauses.get(model), pauses.get(f"{model}.{lane}"))
    return next((pause for pause in found if pause is not None and pause.holds(now_ms)), None)


class Pauses:
    """The pauses in Redis, for commands; use it with `async with`.

    Args:
        settings: where Redis is, and the prefix.
    """

    def __init__(self, settings: RedisSettings) -> None:
        self._settings = settings
        self._key = paused_key(settings.prefix)
        self._redis = open_redis(settings, retries=2, max_connections=2)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(*REDIS_ERRORS):
            await self._redis.aclose()

    async def read(self) -> dict[str, Pause]:
        """Those that hold now, by target. Writes nothing: senders may only read.

        Raises:
            StoreUnavailable: Redis did not answer.
        """
        now_ms = time.time_ns() // 1_000_000
        return {target: pause for target, pause in (await self._all()).items() if pause.holds(now_ms)}

    async def set(self, pause: Pause) -> None:
        """Store a pause, in place of an earlier one of the same target; those that have ended are removed."""
        now_ms = time.time_ns() // 1_000_000
        await self.lift([target for target, old in (await self._all()).items() if not old.holds(now_ms)])
        with self._translated():
            await self._redis.hset(self._key, pause.target, pause.encode())

    async def lift(self, targets: Iterable[str]) -> None:
        """Remove pauses; no error where there is none."""
        if targets := list(targets):
            with self._translated():
                await self._redis.hdel(self._key, *targets)

    async def _all(self) -> dict[str, Pause]:
        with self._translated():
            return decode_pauses(cast("dict[bytes, bytes]", await self._redis.hgetall(self._key)))

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except REDIS_ERRORS as error:
            problem = redis_problem(error, self._settings, first=True)
            raise StoreUnavailable(f"Redis, where pauses are kept, does not let us ({problem})") from error
