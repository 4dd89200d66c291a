"""The way out, in this order: outcome stored, reply confirmed, failures parked, message settled.

A crash between any two steps is safe: the message comes again, its outcome is found in the store, and the remaining
steps are done then.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from inferq.amqp import PublishFailed, Unroutable
from inferq.outcome import Outcome
from inferq_schemas import DEFAULT_LIMITS, FALLBACK_EXCHANGE, JOBS_EXCHANGE, Result, Tensor, encode_job
from inferq_worker.errors import CALLERS_FAULT, StoreUnavailable
from inferq_worker.publish import sendable
from inferq_worker.tries import Tries
from inferq_worker.work import Answer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from inferq_schemas import Job
    from inferq_worker.held import Held
    from inferq_worker.observe.metrics import Metrics
    from inferq_worker.poison import RunRecord
    from inferq_worker.publish import Mover, Replies
    from inferq_worker.store import Store
    from inferq_worker.tasks import Tasks
    from inferq_worker.work import Request, WorkItem

_log = logging.getLogger(__name__)
_RETRY_MIN_S, _RETRY_MAX_S = 0.1, 5.0
_INLINE_BYTES = DEFAULT_LIMITS.body_bytes // 2
_CONFLICT = "this id already has the outcome of another content; use a new id, or force to run again"


@dataclass(frozen=True, slots=True)
class _Final:
    """An answer with the result that everybody gets, and whether the store has it."""

    answer: Answer
    result: Result
    stored: bool

    @property
    def for_operators(self) -> bool:
        """Whether it goes to parking: not the caller's fault, and not just read back from the store."""
        again = any(request.delivery.redelivered for request in self.answer.requests)
        error = self.result.error
        return error is not None and error.code not in CALLERS_FAULT and (again or not self.answer.from_store)


class Finisher:
    """Brings answers to everybody who waits for them, then settles their messages.

    Args:
        claim_check_bytes: larger outputs are stored beside the outcome and travel as references.
        held: counts what is in hand.
    """

    def __init__(
        self,
        *,
        store: Store,
        replies: Replies,
        mover: Mover,
        metrics: Metrics,
        tasks: Tasks,
        claim_check_bytes: int,
        held: Held,
    ) -> None:
        self._store = store
        self._replies = replies
        self._mover = mover
        self._metrics = metrics
        self._tasks = tasks
        self._claim_check_bytes = claim_check_bytes
        self._held = held
        self._unended: list[RunRecord] = []

    async def finish(self, answers: Sequence[Answer], record: RunRecord | None) -> None:
        """Store, reply, park, settle.

        With Redis away, interactive jobs that have a reply address go on, answered and counted as unstored; all others
        wait in hand, and their messages stay unsettled, until Redis is back.
        """
        firm = [answer for answer in answers if answer.keep and answer.digest is not None]
        loose = [answer for answer in answers if not (answer.keep and answer.digest is not None)]
        finals = [_Final(answer, answer.result, stored=answer.from_store) for answer in loose]
        try:
            finals += await self._keep(firm, record)
        except StoreUnavailable:
            urgent = [answer for answer in firm if _goes_on_without_store(answer)]
            patient = [answer for answer in firm if not _goes_on_without_store(answer)]
            self._tell_unstored(urgent)
            finals += [_Final(answer, answer.result, stored=False) for answer in urgent]
            if patient:
                self._tasks.spawn(self._finish_once_stored(patient, record))
            elif record is not None:
                self._unended.append(record)
        except Exception:  # noqa: BLE001 - logged whole
            self._could_not_keep(firm, record)
        else:
            await self.abandon(None)
        await self._tell(finals)

    def _tell_unstored(self, answers: Sequence[Answer]) -> None:
        """Count and name answers that Redis will not know: a counter ends with its process, a log line does not."""
        self._metrics.result_unstored(len(answers))
        if answers:
            ids = [answer.result.id for answer in answers]
            _log.warning("answered without a stored outcome", extra={"jobs": ids})

    async def abandon(self, record: RunRecord | None) -> None:
        """Remove the record of a run before anything is stored: it did not take place, or its suspect survived it.

        What cannot be removed now is removed with the next: a record that stays casts suspicion on harmless jobs.
        """
        if record is not None:
            self._unended.append(record)
        while self._unended:
            unended = self._unended.pop()
            try:
                await self._store.end(unended)
            except StoreUnavailable:
                self._unended.append(unended)
                return

    def from_store(self, item: WorkItem, outcome: Outcome) -> Answer:
        """The stored outcome as the answer to a job that came again, or `conflict` if it is not that job's."""
        requests = tuple(item.requests)
        if not outcome.agrees_with(item.digest):
            self._metrics.conflict(item.job.model)
            return Answer(requests, Result.failed(item.job.id, "conflict", _CONFLICT), keep=False)
        return Answer(requests, outcome.result, item.digest, keep=False, job=item.job, from_store=True)

    def settle(self, request: Request) -> None:
        """One job of a message is done with; the last one settles the message."""
        self._held.release(request)
        delivery = request.delivery
        request.settled = True
        delivery.open_requests -= 1
        if delivery.open_requests:
            return
        self._held.leave(delivery)
        if delivery.goes_back:
            delivery.settler.give_back(delivery.tag)
            self._metrics.requeued(delivery.lane.model, delivery.lane.name)
        else:
            delivery.settler.ack(delivery.tag)

    def leave(self, request: Request) -> None:
        """Let the broker deliver a job's message again, because something failed that never should; done once."""
        if not request.settled:
            request.delivery.goes_back = True
            self.settle(request)

    async def hand_on(
        self,
        request: Request,
        job: Job,
        *,
        to_fallback: bool,
        expiration_ms: int | None,
        why: Mapping[str, object] | None = None,
    ) -> bool:
        """Move a job to the fallback or back to its lane, then settle it here.

        A model without a fallback queue sends it back to its lane. Tries until it is confirmed; a job over which the
        broker closes the channel again and again goes without its headers and time limit, and at last back whence it
        came.

        Args:
            request: whose message the job came in.
            job: the job.
            to_fallback: False = only its lane.
            expiration_ms: how long the broker keeps it there; None = for ever.
            why: headers that say so, for operators.

        Returns:
            False if no queue takes it; the request is then still open.
        """
        exchanges = [FALLBACK_EXCHANGE, JOBS_EXCHANGE] if to_fallback else [JOBS_EXCHANGE]
        body = encode_job(job)
        tries = Tries()
        while exchanges:
            try:
                await self._mover.pass_on(
                    request.delivery,
                    body,
                    exchange=exchanges[0],
                    expiration_ms=expiration_ms,
                    why=why or {},
                    bare=tries.bare,
                )
            except Unroutable:
                del exchanges[0]
            except PublishFailed as error:
                tries.failed(error)
                if request.delivery.stale:
                    self.settle(request)
                    return True
                if tries.hopeless:
                    _log.error("job %s cannot be handed on and goes back to its queue: %s", job.id, error)
                    self.leave(request)
                    return True
                await self._pause(tries)
            except Exception:  # noqa: BLE001 - logged whole
                _log.exception("job %s could not be handed on and goes back to its queue", job.id)
                self.leave(request)
                return True
            else:
                self.settle(request)
                return True
        return False

    async def _finish_once_stored(self, answers: Sequence[Answer], record: RunRecord | None) -> None:
        delay_s = _RETRY_MIN_S
        while True:
            await self._store.wait_up()
            answers = self._still_ours(answers)
            try:
                finals = await self._keep(answers, record)
            except StoreUnavailable:
                await asyncio.sleep(delay_s)
                delay_s = min(delay_s * 2, _RETRY_MAX_S)
            except Exception:  # noqa: BLE001 - logged whole
                self._could_not_keep(answers, record)
                return
            else:
                await self._tell(finals)
                return

    def _could_not_keep(self, answers: Sequence[Answer], record: RunRecord | None) -> None:
        _log.exception("outcomes of %d jobs could not be stored; their messages go back", len(answers))
        if record is not None:
            self._unended.append(record)
        for answer in answers:
            for request in answer.requests:
                self.leave(request)

    def _still_ours(self, answers: Sequence[Answer]) -> list[Answer]:
        """Let go of answers whose every message the broker took back: the job comes again."""
        ours = []
        for answer in answers:
            if not all(request.delivery.stale for request in answer.requests):
                ours.append(answer)
                continue
            for request in answer.requests:
                self.settle(request)
        return ours

    async def _keep(self, answers: Sequence[Answer], record: RunRecord | None) -> list[_Final]:
        if not answers and record is None:
            return []
        results = [sendable(await self._with_references(answer.result)) for answer in answers]
        outcomes = [Outcome(answer.digest, result) for answer, result in zip(answers, results, strict=True)]
        hint = [answer.result.id for answer in answers if any(one.reply_to is None for one in answer.requests)]
        canonical = await self._store.keep(outcomes, hint=hint, ended=record)
        self._metrics.outcome_stored(len(canonical))
        return [
            self._final(answer, mine, kept) for answer, mine, kept in zip(answers, outcomes, canonical, strict=True)
        ]

    def _final(self, answer: Answer, mine: Outcome, kept: Outcome) -> _Final:
        # Equal but not the same: our own write, whose confirmation got lost.
        if kept == mine:
            return _Final(answer, mine.result, stored=True)
        delivery = answer.requests[0].delivery
        if answer.digest is not None and not kept.agrees_with(answer.digest):
            self._metrics.conflict(delivery.lane.model)
            conflict = Result.failed(answer.result.id, "conflict", _CONFLICT)
            return _Final(replace(answer, keep=False), conflict, stored=False)
        return _Final(replace(answer, from_store=True), kept.result, stored=True)

    async def _with_references(self, result: Result) -> Result:
        large = self._large(result.outputs)
        if not large:
            return result
        refs = await self._store.put_outputs(result.id, large)
        tensors = {name: result.outputs[name] for name in large}
        referenced = {name: Tensor(dtype=one.dtype, shape=one.shape, ref=refs[name]) for name, one in tensors.items()}
        return replace(result, outputs={**result.outputs, **referenced})

    def _large(self, outputs: Mapping[str, Tensor]) -> dict[str, bytes]:
        """What travels by reference: every large output, and the largest others that would not fit in one message."""
        data = {name: one.data for name, one in outputs.items() if isinstance(one.data, bytes)}
        inline_bytes = sum(one.payload_bytes for one in outputs.values())
        large = {}
        for name, content in sorted(data.items(), key=lambda entry: -len(entry[1])):
            if len(content) <= self._claim_check_bytes and inline_bytes <= _INLINE_BYTES:
                break
            large[name] = content
            inline_bytes -= len(content)
        return large

    async def _tell(self, finals: Sequence[_Final]) -> None:
        pairs = [(request, final.result) for final in finals for request in final.answer.requests]
        confirmed = {request for request, ok in await self._replies.send(pairs) if ok}
        await asyncio.gather(*(self._park(final) for final in finals if self._needs_parking(final, confirmed)))
        replied = [
            final.result.id
            for final in finals
            if final.stored and all(request in confirmed for request in final.answer.requests)
        ]
        if replied:
            with contextlib.suppress(StoreUnavailable):
                await self._store.shorten(replied)
        for final in finals:
            self._count(final)
            for request in final.answer.requests:
                self.settle(request)

    def _needs_parking(self, final: _Final, confirmed: set[Request]) -> bool:
        """Failures that operators should see, and answers that reached nobody and are stored nowhere."""
        told = final.stored or any(request in confirmed for request in final.answer.requests)
        return final.for_operators or not told

    async def _park(self, final: _Final) -> None:
        deliveries = [request.delivery for request in final.answer.requests]
        tries = Tries()
        while ours := [delivery for delivery in deliveries if not delivery.stale]:
            try:
                await self._mover.park(ours[0], final.answer.job, final.result, bare=tries.bare)
            except PublishFailed as error:
                tries.failed(error)
                if not tries.hopeless:
                    await self._pause(tries)
                    continue
                _log.error("job %r cannot be parked and goes back to its queue: %s", final.result.id, error)
            except Exception:  # noqa: BLE001 - logged whole
                _log.exception("job %r could not be parked and goes back to its queue", final.result.id)
            else:
                return
            for delivery in deliveries:
                delivery.goes_back = True
            return

    async def _pause(self, tries: Tries) -> None:
        await tries.pause()
        while await self._mover.blocked():
            await tries.pause()

    def _count(self, final: _Final) -> None:
        error, timing = final.result.error, final.result.timing_ms
        for request in final.answer.requests:
            model = request.delivery.lane.model
            self._metrics.job_answered(model, request.lane, "ok" if error is None else error.code)
            if final.answer.from_store:
                self._metrics.duplicate_answered(model, request.lane)
            elif timing is not None:
                self._metrics.total_time(model, request.lane, timing.total / 1000)
                if final.result.fallback:
                    self._metrics.fallback_answered(model, timing.total / 1000)


def _goes_on_without_store(answer: Answer) -> bool:
    return all(request.reply_to is not None and request.lane == "interactive" for request in answer.requests)
