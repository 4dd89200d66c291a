"""One lane's consumer: its own channel, its window, and deliveries handed on as they come.

A lane that is lost (connection, channel, queue, or the broker cancelled it) starts again by itself, on a fresh channel,
after its queue was found and with its consumer seen by the broker. Never declares a queue.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from aiormq.exceptions import ChannelNotFoundEntity

from inferq.amqp import CONNECTION_ERRORS, Link, describe, loss_is_an_error
from inferq_worker.settle import Settler
from inferq_worker.work import WINDOW_MIN, Delivery, Lane

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping

    from aiormq.abc import DeliveredMessage
    from aiormq.channel import Channel

    from inferq_worker.observe.metrics import Metrics

_log = logging.getLogger(__name__)
_RETRY_MIN_S, _RETRY_MAX_S = 0.2, 5.0
PauseReason: TypeAlias = Literal["breaker", "bytes", "cpu_worker", "drain", "operator"]
"""Why a lane is not consumed: its model fails, too much in hand, others serve it, the worker ends, people paused it."""


class LaneConsumer:
    """Consumes one lane while the worker lives.

    Args:
        lane: what to consume, and its window at the start.
        link: the consuming connection.
        sink: called with each delivery, in order, from the event loop; must not block or raise. Returns its rows.
        optional: the queue need not exist (a model without fallback); then nothing is consumed, and that is fine.
        paused_by: start without consuming for this reason, until `switch` says that it is gone.
    """

    def __init__(
        self,
        lane: Lane,
        link: Link,
        sink: Callable[[Delivery], int],
        metrics: Metrics,
        *,
        optional: bool = False,
        paused_by: PauseReason | None = None,
    ) -> None:
        self.lane = lane
        self.optional = optional
        self.problem: str | None = "not started"
        self._link = link
        self._sink = sink
        self._metrics = metrics
        self._window = lane.window
        self._window_rows = lane.window_rows
        self._channel: Channel | None = None
        self._settler: Settler | None = None
        self._tag: str | None = None
        self._left: set[Settler] = set()
        self._lost = asyncio.Event()
        self._paused_by: set[PauseReason] = set()
        self._stopped = False
        self._switch = asyncio.Lock()
        self._rows_per_message = 1.0
        self._background: set[asyncio.Task[None]] = set()
        if paused_by is not None:
            self._note(paused_by, paused=True)

    @property
    def consuming(self) -> bool:
        """Whether the broker has us as a consumer of this lane."""
        return self._tag is not None

    async def run(self) -> None:
        """Consume until stopped; comes back after every loss."""
        delay_s = _RETRY_MIN_S
        while not self._stopped:
            await self._link.up.wait()
            try:
                await self._start()
                delay_s = _RETRY_MIN_S
                await self._lost.wait()
            except ChannelNotFoundEntity:
                mend = f"inferq topology add-model {self.lane.model}" if self.lane.model else "inferq topology apply"
                self._set_problem(f"queue {self.lane.queue} does not exist: run `{mend}`")
            except CONNECTION_ERRORS as error:
                self._set_problem(describe(error))
            async with self._switch:
                await self._cancel()
            await asyncio.sleep(delay_s * random.uniform(0.5, 1.5))  # noqa: S311 - jitter, not a secret
            delay_s = min(delay_s * 2, _RETRY_MAX_S)

    @property
    def paused_by(self) -> list[PauseReason]:
        """Why it is not consumed, in alphabetical order; empty when it should be."""
        return sorted(self._paused_by)

    async def switch(self, reason: PauseReason, *, paused: bool) -> None:
        """Take no more deliveries, or take them again once no other reason against it is left.

        Those in hand stay valid. When it returns from pausing, the broker sends no more. Doing it twice does nothing.
        """
        self._note(reason, paused=paused)
        await self._follow()

    def switch_soon(self, reason: PauseReason, *, paused: bool) -> None:
        """`switch`, from where nothing can be awaited; `paused_by` tells of it at once."""
        self._note(reason, paused=paused)
        self._spawn(self._follow())

    def _note(self, reason: PauseReason, *, paused: bool) -> None:
        (self._paused_by.add if paused else self._paused_by.discard)(reason)
        self._metrics.lane_paused(self.lane.model, self.lane.name, reason, paused=paused)

    async def _follow(self) -> None:
        async with self._switch:
            if self._paused_by:
                await self._cancel()
            elif self._tag is None:
                await self._consume_again()

    async def stop(self) -> None:
        """Take no more deliveries for good; the channel stays open for settling."""
        self._stopped = True
        await self.switch("drain", paused=True)
        self._lost.set()

    async def verify(self) -> None:
        """Ask the broker whether it knows our consumer; if not, start again.

        A consumer that is silently gone is the worst kind of outage: everything looks well and nothing moves.
        """
        channel, tag = self._channel, self._tag
        if tag is None:
            return
        try:
            scratch = await self._link.channel(confirms=False)
            with loss_is_an_error():
                declared = await scratch.queue_declare(self.lane.queue, passive=True)
                await scratch.close()
        except CONNECTION_ERRORS as error:
            self._set_problem(f"queue {self.lane.queue}: {describe(error)}")
            self._lost.set()
            return
        if declared.consumer_count == 0 and (self._channel, self._tag) == (channel, tag):
            self._set_problem(f"the broker lost our consumer of {self.lane.queue}")
            self._lost.set()

    def aim(self, window_rows: int) -> None:
        """Let the window hold about so many rows from now on."""
        self._window_rows = window_rows

    @property
    def window(self) -> int:
        """Messages that may be unsettled at once."""
        return self._window

    @property
    def open_deliveries(self) -> int:
        """Messages of this lane in hand and unsettled."""
        return sum(len(settler) for settler in self._settlers())

    async def flushed(self) -> None:
        """Wait until everything settled so far has been handed to the connection."""
        await asyncio.gather(*(settler.flushed() for settler in self._settlers()))

    def _settlers(self) -> list[Settler]:
        return [*self._left, *([] if self._settler is None else [self._settler])]

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def _saw(self, rows: int) -> None:
        """Let the window follow the size of messages, so that it holds about `window_rows` rows."""
        self._rows_per_message += 0.05 * (max(1, rows) - self._rows_per_message)
        wanted = max(WINDOW_MIN, round(self._window_rows / self._rows_per_message))
        wanted = min(wanted, self.lane.window_max)
        if max(wanted, self._window) >= 2 * min(wanted, self._window):
            self._window = wanted
            self._spawn(self._reopen_window())

    async def _reopen_window(self) -> None:
        """Replace the consumer: RabbitMQ applies a prefetch to new consumers only. Nothing in hand is touched."""
        async with self._switch:
            if self.consuming and not self._stopped:
                await self._cancel()
                await self._consume_again()

    async def _consume_again(self) -> None:
        if self._channel is None or self._settler is None:
            return
        try:
            await self._consume(self._channel, self._settler)
        except CONNECTION_ERRORS as error:
            self._set_problem(describe(error))
            self._lost.set()

    async def _start(self) -> None:
        scratch = await self._link.channel(confirms=False)
        with loss_is_an_error():
            await scratch.queue_declare(self.lane.queue, passive=True)
            await scratch.close()
        async with self._switch:
            self._lost.clear()
            channel = await self._link.channel(confirms=False)
            channel.closing.add_done_callback(partial(self._on_lost, channel))
            channel.on_consumer_cancel_callbacks.add(partial(self._on_cancelled, channel))
            if self._channel is not None and self._settler is not None:
                self._spawn(self._leave(self._channel, self._settler))
            self._channel, self._settler = channel, Settler(channel, self._metrics)
            if not self._paused_by:
                await self._consume(channel, self._settler)
        self.problem = None
        _log.info("consuming %s with a window of %d messages", self.lane.queue, self._window)

    async def _leave(self, channel: Channel, settler: Settler) -> None:
        """Close a channel that is not consumed from any more, once all that it brought is settled."""
        self._left.add(settler)
        try:
            if not channel.is_closed:
                await settler.emptied()
                with loss_is_an_error():
                    await channel.close()
        except CONNECTION_ERRORS as error:
            _log.info("closing an old channel of %s: %s", self.lane.queue, describe(error))
        finally:
            self._left.discard(settler)

    async def _consume(self, channel: Channel, settler: Settler) -> None:
        async def on_message(message: DeliveredMessage) -> None:
            self._on_message(settler, message)

        with loss_is_an_error():
            await channel.basic_qos(prefetch_count=self._window)
            ok = await channel.basic_consume(self.lane.queue, on_message)
        self._tag = ok.consumer_tag

    async def _cancel(self) -> None:
        tag, self._tag = self._tag, None
        if tag is not None and self._channel is not None and not self._channel.is_closed:
            try:
                with loss_is_an_error():
                    await self._channel.basic_cancel(tag)
            except CONNECTION_ERRORS as error:
                _log.info("cancelling the consumer of %s: %s", self.lane.queue, describe(error))

    def _on_message(self, settler: Settler, message: DeliveredMessage) -> None:
        tag = message.delivery_tag
        if tag is None or settler.stale:
            return
        settler.open(tag)
        if len(settler) >= self._window:
            self._metrics.window_full(self.lane.model, self.lane.name)
        self._saw(self._sink(delivery_of(message, self.lane, settler, tag)))

    def _on_lost(self, channel: Channel, closing: asyncio.Future[object]) -> None:
        if channel is not self._channel:
            return
        error = None if closing.cancelled() else closing.exception()
        self._set_problem(f"channel of {self.lane.queue} closed: {describe(error) if error else 'by the broker'}")
        self._lost.set()

    def _on_cancelled(self, channel: Channel, _frame: object) -> None:
        if channel is not self._channel:
            return
        self._set_problem(f"the broker cancelled the consumer of {self.lane.queue}: was the queue deleted?")
        self._lost.set()

    def _set_problem(self, problem: str) -> None:
        if problem != self.problem and not self._stopped and not self.optional:
            _log.warning("%s", problem)
        self.problem = problem


def delivery_of(message: DeliveredMessage, lane: Lane, settler: Settler, tag: int) -> Delivery:
    """Translate an AMQP message into a Delivery."""
    props = message.header.properties
    headers: Mapping[str, object] = props.headers or {}
    return Delivery(
        lane=lane,
        settler=settler,
        tag=tag,
        body=message.body,
        routing_key=message.routing_key or "",
        redelivered=bool(message.redelivered),
        content_type=props.content_type,
        reply_to=props.reply_to or None,
        correlation_id=props.correlation_id,
        headers=headers,
        received_s=time.monotonic(),
        received_unix_ms=int(time.time() * 1000),
        deaths=_deaths(headers),
    )


def _deaths(headers: Mapping[str, object]) -> tuple[str, ...]:
    deaths = headers.get("x-death")
    if not isinstance(deaths, list):
        return ()
    return tuple(str(death.get("reason")) for death in deaths if isinstance(death, dict))
