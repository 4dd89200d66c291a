"""Looks into `inferq.parking` as an operator would, and takes out what the demo itself put there."""

from dataclasses import dataclass

import aio_pika
from aio_pika.abc import AbstractIncomingMessage

from inferq_schemas import PARKING_QUEUE

_MOST = 200


@dataclass(frozen=True, slots=True)
class Parked:
    """One parked job: its id, why it is there, and the queue key it came under."""

    job_id: str
    reason: str
    routing_key: str


async def find_parked(broker_url: str, job_id: str, *, remove: bool = False) -> Parked | None:
    """Find a job among the parked ones; all of them stay where they are, unless this one is to be removed.

    Looks at the oldest 200 messages and holds them meanwhile; closing the connection puts them back in order.
    """
    async with await aio_pika.connect(broker_url) as connection:
        channel = await connection.channel()
        queue = await channel.get_queue(PARKING_QUEUE)
        for _ in range(_MOST):
            message = await queue.get(no_ack=False, fail=False)
            if message is None:
                return None
            if message.headers.get("inferq-job") == job_id:
                if remove:
                    await message.ack()
                return _parked(message)
    return None


def _parked(message: AbstractIncomingMessage) -> Parked:
    headers = message.headers
    return Parked(str(headers["inferq-job"]), str(headers.get("inferq-reason")), message.routing_key or "")
