"""Delivered messages as aiormq gives them, for tests of what reads the parking queue."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiormq.abc import DeliveredMessage
from pamqp.commands import Basic
from pamqp.header import ContentHeader

if TYPE_CHECKING:
    from collections.abc import Mapping

    import aiormq

NOW_MS = 1_796_000_000_000


def message_of(
    body: bytes,
    *,
    routing_key: str = "m.bulk",
    message_id: str | None = "id",
    headers: Mapping[str, Any] | None = None,
    reply_to: str | None = None,
    correlation_id: str | None = None,
    channel: aiormq.abc.AbstractChannel | None = None,
) -> DeliveredMessage:
    """A message as it is delivered out of parking."""
    properties = Basic.Properties(
        message_id=message_id, headers=dict(headers or {}), reply_to=reply_to, correlation_id=correlation_id
    )
    return DeliveredMessage(
        delivery=Basic.Deliver("c", 1, redelivered=True, exchange="inferq.parking", routing_key=routing_key),
        header=ContentHeader(0, len(body), properties),
        body=body,
        channel=channel,  # type: ignore[arg-type]  # nothing here asks for it
    )
