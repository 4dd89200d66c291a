"""Which reply queues take nothing, so that one caller's full queue does not hold the window that all callers share.

Pure: time is an argument, monotonic seconds.
"""

from __future__ import annotations

from dataclasses import dataclass

_PATIENCE_S = 2.0
_PROBE_EVERY_S = 10.0
_MAX_QUEUES = 1_000
"""More than this at once: the one that has refused for longest is tried anew."""


@dataclass(slots=True)
class _Refusal:
    since_s: float
    last_s: float
    probe_s: float | None = None


class RefusingQueues:
    """Remembers refusals by queue, until the queue takes a reply."""

    def __init__(self) -> None:
        self._refusals: dict[str, _Refusal] = {}

    def closed(self, queue: str, now_s: float) -> bool:
        """Whether to spare the try. Once in ten seconds one caller is told to try all the same."""
        refusal = self._refusals.get(queue)
        if refusal is None or refusal.probe_s is None:
            return False
        if now_s < refusal.probe_s:
            return True
        refusal.probe_s = now_s + _PROBE_EVERY_S
        return False

    def refused(self, queue: str, now_s: float) -> bool:
        """Note a refusal; returns whether the queue has refused for so long that it counts as unreachable."""
        refusal = self._refusals.get(queue)
        if refusal is None or now_s - refusal.last_s > 2 * _PROBE_EVERY_S:
            self._make_room()
            refusal = self._refusals[queue] = _Refusal(now_s, now_s)
        refusal.last_s = now_s
        if refusal.probe_s is None and now_s - refusal.since_s >= _PATIENCE_S:
            refusal.probe_s = now_s + _PROBE_EVERY_S
        return refusal.probe_s is not None

    def took(self, queue: str) -> None:
        """The queue has taken a reply, or is gone."""
        self._refusals.pop(queue, None)

    def _make_room(self) -> None:
        if len(self._refusals) >= _MAX_QUEUES:
            del self._refusals[next(iter(self._refusals))]
