"""The load of a chaos run: a service, a pipeline and a poller on the client library, with the ledger beside them.

They do what callers do: pace themselves, ask again where a publish is unknown, and never look into queues. The raw
publisher, which keeps every reply, is a module of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.chaos.work import Kind, Work, any_rows

from inferq import Answer, Client, Item, JobFailed
from inferq.errors import AnswerLost, AnswerTimeout, InferqError, NotSent, SendUnknown

if TYPE_CHECKING:
    import random
    from collections.abc import AsyncIterator, Callable, Iterator, Mapping

    from tests.chaos.ledger import Ledger

    from inferq.settings import ClientSettings

_DEADLINES_S = (1.0, 5.0, 30.0, 60.0)
_BULK_DEADLINES_S = (None, None, None, 60.0)
_POLL_LIMIT_S = 60.0
_BEHIND_S = 0.5


@dataclass(slots=True)
class Mix:
    """What jobs the senders make, and when they must stop or hold back.

    Args:
        run: makes ids of this run differ from any other's.
        due: special kinds that the next jobs are to have; the saboteur puts them in.
        rate: 1.0 = about 150 jobs a second over all senders.
        models: name to gate; a sender asks its model's gate before each job.
        crowded: whether so much is unanswered that callers hold back; a load that only grows would test nothing else.
    """

    run: str
    chance: random.Random
    rate: float
    models: Mapping[str, asyncio.Event]
    crowded: Callable[[], bool] = lambda: False
    due: deque[Kind] = field(default_factory=deque)
    numbers: Iterator[int] = field(default_factory=itertools.count)
    stopping: asyncio.Event = field(default_factory=asyncio.Event)

    def work(self, *, rows: int | None = None) -> Work:
        """The next job's content."""
        kind = self.due.popleft() if self.due else Kind.RIGHT
        return Work(next(self.numbers), any_rows(self.chance) if rows is None else rows, kind)

    def job_id(self, sender: str, work: Work) -> str:
        """An id that names run and sender."""
        return f"{self.run}-{sender}-{work.number}"

    def deadline_s(self) -> float:
        """A deadline in the interactive lane, most of them patient."""
        return self.chance.choice(_DEADLINES_S)

    def bulk_deadline_s(self) -> float | None:
        """A deadline in the bulk lane, most often none."""
        return self.chance.choice(_BULK_DEADLINES_S)

    async def ticks(self, per_s: float) -> AsyncIterator[None]:
        """Times to send at, until the run stops; Poisson, so that jobs come in bursts and gaps."""
        loop = asyncio.get_running_loop()
        next_s = loop.time()
        while not self.stopping.is_set():
            # Against the clock, not against the last tick: what a tick takes must not slow the load down.
            next_s = max(next_s + self.chance.expovariate(per_s * self.rate), loop.time() - _BEHIND_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(next_s):
                    await self.stopping.wait()
                    return
            if not self.crowded():
                yield

    async def model(self) -> str:
        """A model to ask; one that is held back is not chosen."""
        free = [name for name, gate in self.models.items() if gate.is_set()]
        return self.chance.choice(free)


def new_run() -> str:
    """A name for one run."""
    return secrets.token_hex(3)


class Senders:
    """Callers on the client library, writing what they do and get into the ledger.

    Args:
        settings: of each client; they connect through the clients' proxies.
    """

    def __init__(self, mix: Mix, ledger: Ledger, settings: ClientSettings) -> None:
        self._mix = mix
        self._ledger = ledger
        self._settings = settings
        self._works: dict[str, Work] = {}

    async def run(self) -> None:
        """Send until the mix stops, then wait for the answers that callers would wait for."""
        async with asyncio.TaskGroup() as group:
            for sender in (self._service, self._pipeline, self._poller):
                group.create_task(sender())

    async def _service(self) -> None:
        """Interactive jobs, each awaited on its own."""
        async with Client(self._settings) as client, asyncio.TaskGroup() as group:
            async for _ in self._mix.ticks(25):
                group.create_task(self._ask(client, self._mix.work()))

    async def _ask(self, client: Client, work: Work) -> None:
        job_id, deadline_s, model = self._mix.job_id("service", work), self._mix.deadline_s(), await self._mix.model()
        self._sent(job_id, work, sender="service", model=model, lane="interactive", deadline_s=deadline_s)
        await self._note(job_id, lambda: client.infer(model, {"x": work.x}, id=job_id, deadline_s=deadline_s))

    async def _poller(self) -> None:
        """Jobs without a reply address, whose answers are fetched from Redis."""
        async with Client(self._settings) as client, asyncio.TaskGroup() as group:
            async for _ in self._mix.ticks(8):
                group.create_task(self._submit(client, self._mix.work()))

    async def _submit(self, client: Client, work: Work) -> None:
        job_id, model = self._mix.job_id("poller", work), await self._mix.model()
        self._sent(job_id, work, sender="poller", model=model, lane="bulk", deadline_s=None)
        try:
            await client.submit(model, {"x": work.x}, id=job_id, lane="bulk", deadline_s=None)
        except InferqError as error:
            self._failed(job_id, error)
            return
        self._ledger.write("confirmed", job_id)
        await self._note(job_id, lambda: client.result(job_id, timeout_s=_POLL_LIMIT_S))

    async def _pipeline(self) -> None:
        """A stream of bundles."""
        names: list[str] = []

        async def items(model: str) -> AsyncIterator[Item]:
            async for _ in self._mix.ticks(60):
                if not self._mix.models[model].is_set():
                    continue
                work = self._mix.work(rows=1)
                job_id, deadline_s = self._mix.job_id("pipeline", work), self._mix.bulk_deadline_s()
                self._sent(job_id, work, sender="pipeline", model=model, lane="bulk", deadline_s=deadline_s)
                names.append(job_id)
                yield Item({"x": work.x}, id=job_id, deadline_s=deadline_s)

        model = next(iter(self._mix.models))
        async with Client(self._settings) as client:
            async for answer in client.infer_many(model, items(model), bundle_jobs=16, window_jobs=256):
                assert answer.index is not None
                self._took(names[answer.index], answer)

    def give_up(self) -> None:
        """The run is over: whatever the client library has not given an answer or an error for is noted."""
        for job_id in self._works:
            self._ledger.gave_up(job_id)
            self._ledger.write("unended", job_id)

    def _sent(self, job_id: str, work: Work, **fields: object) -> None:
        self._works[job_id] = work
        self._ledger.sent(job_id, work, **fields)  # type: ignore[arg-type]  # the same names, handed through

    async def _note(self, job_id: str, ask: Callable[[], object]) -> None:
        try:
            answer = await ask()  # type: ignore[misc]  # a coroutine of the client
        except InferqError as error:
            self._failed(job_id, error)
        else:
            self._took(job_id, answer)

    def _took(self, job_id: str, answer: Answer) -> None:
        if answer.error is not None:
            self._failed(job_id, answer.error)
            return
        self._ledger.write("confirmed", job_id)
        self._ledger.answered("answer", answer.result, self._works.pop(job_id, None))

    def _failed(self, job_id: str, error: InferqError) -> None:
        """Sort a failure by what it says of the job: answered, perhaps sent, or certainly not."""
        work = self._works.pop(job_id, None)
        match error:
            case JobFailed():
                self._ledger.write("confirmed", job_id)
                self._ledger.answered("answer", error.result, work)
                return
            case SendUnknown():
                event = "unknown"
            case NotSent():
                event = "refused"
            case AnswerTimeout():
                # Raised by what was confirmed, and by what was given up while it was still being sent.
                event = "unanswered"
            case AnswerLost():
                event = "answer_lost"
            case _:
                event = "gave_up"
        self._ledger.gave_up(job_id)
        self._ledger.write(event, job_id, why=f"{type(error).__name__}: {error}"[:200])
