"""How many message bytes are in hand. Above the limit bulk lanes pause, until half of it is free again."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from inferq_worker.work import Delivery


class Held:
    """Counts the bytes of unsettled deliveries.

    Args:
        max_bytes: limit.
        on_pressure: called with True when the limit is passed, with False when half of it is free again.
    """

    def __init__(self, max_bytes: int, on_pressure: Callable[[bool], None]) -> None:
        self._max_bytes = max_bytes
        self._on_pressure = on_pressure
        self._pressed = False
        self.bytes = 0
        self.deliveries = 0

    def take(self, delivery: Delivery) -> None:
        """A delivery has come in."""
        self.bytes += len(delivery.body)
        self.deliveries += 1
        self._watch()

    def leave(self, delivery: Delivery) -> None:
        """A delivery is out of our hands."""
        self.bytes -= len(delivery.body)
        self.deliveries -= 1
        self._watch()

    def _watch(self) -> None:
        pressed = self.bytes > (self._max_bytes // 2 if self._pressed else self._max_bytes)
        if pressed != self._pressed:
            self._pressed = pressed
            self._on_pressure(pressed)
