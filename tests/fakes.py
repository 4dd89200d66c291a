"""Stand-ins for what the worker's core stands on: clocks, a consuming channel, the store, a publisher; and jobs.

They keep the promises of the real things, and fail the test where the core breaks a rule of the broker. No sockets,
and no test waits for real time.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from aiormq.exceptions import ChannelInvalidStateError
from prometheus_client import CollectorRegistry

from inferq.outcome import Outcome, decode_outcome
from inferq_schemas import (
    FALLBACK_LANE,
    PARKING_EXCHANGE,
    Job,
    Tensor,
)
from inferq_worker.errors import StoreUnavailable
from inferq_worker.observe.metrics import Metrics
from inferq_worker.poison import RunRecord
from inferq_worker.settle import Settler
from inferq_worker.work import Delivery, Lane, Request, WorkItem

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    import pytest

    from inferq.amqp import Properties
    from inferq.pauses import Pause
    from inferq_worker.cpu import CpuWorker

WORKER = "worker-1"
UNIX_S = 1_800_000_000.0
"""Wall clock minus monotonic clock in every test."""


class FakeTimer:
    """A call that waits for its time."""

    def __init__(self, when_s: float, callback: Callable[[], None]) -> None:
        self.when_s = when_s
        self.callback = callback
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class FakeClock:
    """Time that passes when told to; timers fire on their way, each at its own moment."""

    def __init__(self, now_s: float = 1_000.0) -> None:
        self.now_s = now_s
        self.timers: list[FakeTimer] = []

    def now(self) -> float:
        return self.now_s

    def call_at(self, when_s: float, callback: Callable[[], None]) -> FakeTimer:
        self.timers.append(timer := FakeTimer(when_s, callback))
        return timer

    def advance(self, seconds: float) -> None:
        end_s = self.now_s + seconds
        while (due := [timer for timer in self.pending if timer.when_s <= end_s]) != []:
            timer = min(due, key=lambda timer: timer.when_s)
            self.timers.remove(timer)
            self.now_s = max(self.now_s, timer.when_s)
            timer.callback()
        self.now_s = end_s

    @property
    def pending(self) -> list[FakeTimer]:
        return [timer for timer in self.timers if not timer.cancelled]


class VirtualTime:
    """Makes the clock of the running event loop jump to the next timer as soon as nothing else can happen.

    It also stands in for the module `time` in the steps that read the clock.
    """

    def __init__(self, patch: pytest.MonkeyPatch, *modules: object) -> None:
        loop: Any = asyncio.get_running_loop()
        self._now_s: float = loop.time()
        self._select: Callable[[float], list[Any]] = loop._selector.select
        patch.setattr(loop, "time", self.monotonic)
        patch.setattr(loop._selector, "select", self._jump)
        for module in modules:
            patch.setattr(module, "time", self)

    def monotonic(self) -> float:
        return self._now_s

    def time(self) -> float:
        return UNIX_S + self._now_s

    async def advance(self, seconds: float) -> None:
        """Let everything happen that happens within so many seconds."""
        await asyncio.sleep(seconds)

    async def settle(self) -> None:
        """Let everything happen that needs no time."""
        await asyncio.sleep(1e-6)

    def _jump(self, timeout_s: float | None) -> list[Any]:
        events = self._select(0)
        if not events and timeout_s is None:
            raise RuntimeError("the test waits for something that will never happen")
        if not events and timeout_s is not None and timeout_s > 0:
            self._now_s += timeout_s
        return events


class FakeChannel:
    """A consuming channel with its broker: a settlement of a tag that is not open closes it, as RabbitMQ does.

    Attributes:
        open_tags: delivered and not settled.
        fates: how each settled tag was settled: "acked", "requeued" or "dead".
        frames: what was sent, in order.
        error: why the broker closed the channel.
    """

    def __init__(self, journal: list[str] | None = None) -> None:
        self.open_tags: set[int] = set()
        self.fates: dict[int, str] = {}
        self.frames: list[tuple[str, int, bool]] = []
        self.error: str | None = None
        self.is_closed = False
        self.dies_after: int | None = None
        self._journal = [] if journal is None else journal
        self._last_tag = 0

    def deliver(self) -> int:
        self._last_tag += 1
        self.open_tags.add(self._last_tag)
        return self._last_tag

    async def basic_ack(self, delivery_tag: int, multiple: bool = False, wait: bool = True) -> None:
        await self._settle("ack", delivery_tag, multiple, wait, fate="acked")

    async def basic_nack(
        self, delivery_tag: int, multiple: bool = False, requeue: bool = True, wait: bool = True
    ) -> None:
        await self._settle("nack", delivery_tag, multiple, wait, fate="requeued" if requeue else "dead")

    async def _settle(self, frame: str, tag: int, multiple: bool, wait: bool, *, fate: str) -> None:
        assert not wait, "RabbitMQ answers no settlement: waiting for an answer never ends"
        await asyncio.sleep(0)
        if self.dies_after is not None and len(self.frames) >= self.dies_after:
            self.is_closed = True
        if self.is_closed:
            raise ChannelInvalidStateError("channel closed")
        self.frames.append((frame, tag, multiple))
        tags = {one for one in self.open_tags if one <= tag} if multiple else {tag} & self.open_tags
        if not tags:
            self.is_closed, self.error = True, f"PRECONDITION_FAILED - unknown delivery tag {tag}"
            return
        self.open_tags -= tags
        for one in sorted(tags):
            self.fates[one] = fate
            self._journal.append(f"{fate} {one}")


class FakeLanes:
    """The lanes of all models.

    Attributes:
        answers: while it is cleared, the broker does not confirm that a lane is paused or resumed.
    """

    def __init__(self, journal: list[str]) -> None:
        self.answers = asyncio.Event()
        self.answers.set()
        self._journal = journal

    async def pause(self, model: str, paused: bool) -> None:
        await self.answers.wait()
        self._journal.append(f"{'paused' if paused else 'resumed'} {model}")


class FakeStore:
    """Redis for one worker, with the methods of `store.Store`.

    Attributes:
        outcomes: stored outcomes by job id, as bytes.
        running: records of runs that have not ended.
        alive: workers with a current heartbeat.
        inputs: payloads behind claim checks, by job id and input name.
        deaf: when set, commands are carried out but their answers get lost.
    """

    def __init__(self, journal: list[str] | None = None) -> None:
        self.outcomes: dict[str, bytes] = {}
        self.replied: list[str] = []
        self.hinted: list[str] = []
        self.running: dict[str, RunRecord] = {}
        self.alive: set[str] = {WORKER}
        self.inputs: dict[tuple[str, str], bytes] = {}
        self.outputs: dict[str, bytes] = {}
        self.asked: list[tuple[str, tuple[str, ...]]] = []
        self.deaf = False
        self.last_error = ""
        self._up = asyncio.Event()
        self._up.set()
        self._runs = 0
        self._journal = [] if journal is None else journal

    def go_away(self) -> None:
        self._up.clear()

    def come_back(self) -> None:
        self._up.set()

    def put(self, outcome: Outcome) -> None:
        self.outcomes[outcome.result.id] = outcome.encode()

    def get(self, job_id: str) -> Outcome | None:
        raw = self.outcomes.get(job_id)
        return None if raw is None else decode_outcome(raw)

    @property
    def up(self) -> bool:
        return self._up.is_set()

    async def wait_up(self) -> None:
        await self._up.wait()

    async def connect(self) -> None:
        """There is nothing to connect to."""

    def record(self, ids: Collection[str]) -> RunRecord:
        self._runs += 1
        return RunRecord(f"{WORKER}/{self._runs}", WORKER, frozenset(ids), 0)

    async def claim(self, record: RunRecord, ids: Sequence[str], *, forget: Sequence[str] = ()) -> list[Outcome | None]:
        await self._reach("claim", ids)
        self.running[record.key] = record
        for job_id in forget:
            self.outcomes.pop(job_id, None)
        self._answer()
        return [self.get(job_id) for job_id in ids]

    async def look_up(self, ids: Sequence[str]) -> list[Outcome | None]:
        await self._reach("look_up", ids)
        return [self.get(job_id) for job_id in ids]

    async def keep(
        self, outcomes: Sequence[Outcome], *, hint: Collection[str] = (), ended: RunRecord | None = None
    ) -> list[Outcome]:
        await self._reach("keep", [outcome.result.id for outcome in outcomes])
        canonical = []
        for outcome in outcomes:
            known = self.get(outcome.result.id)
            canonical.append(known or outcome)
            if known is None:
                self.put(outcome)
                self._journal.append(f"stored {outcome.result.id}")
        self.hinted.extend(hint)
        if ended is not None:
            self.running.pop(ended.key, None)
        self._answer()
        return canonical

    async def end(self, record: RunRecord) -> None:
        await self._reach("end", sorted(record.ids))
        self.running.pop(record.key, None)

    async def shorten(self, ids: Sequence[str]) -> None:
        await self._reach("shorten", ids)
        self.replied.extend(ids)

    async def runs(self) -> tuple[list[RunRecord], frozenset[str]]:
        await self._reach("runs", ())
        workers = {record.worker for record in self.running.values()}
        return list(self.running.values()), frozenset(workers & self.alive)

    async def forget_runs(self, job_id: str, records: Sequence[RunRecord]) -> None:
        await self._reach("forget_runs", [job_id])
        for record in records:
            if record.ids == {job_id}:
                self.running.pop(record.key, None)

    async def beat(self, *, cpu: Mapping[str, CpuWorker] | None = None, gpu_models: Sequence[str] = ()) -> None:
        await self._reach("beat", [*(cpu or {}), *gpu_models])

    async def pauses(self) -> dict[str, Pause]:
        await self._reach("pauses", [])
        return {}

    async def cpu_workers(self, model: str) -> tuple[dict[str, CpuWorker], int]:
        await self._reach("cpu_workers", [model])
        return {}, 0

    async def retire(self, *, cpu_models: Sequence[str] = (), gpu_models: Sequence[str] = ()) -> None:
        await self._reach("retire", [*cpu_models, *gpu_models])

    async def payloads(self, refs: Sequence[str]) -> list[bytes | None]:
        found = {self.input_ref(*key): data for key, data in self.inputs.items()}
        await self._reach("payloads", [job_id for job_id, _ in self.inputs])
        return [found.get(ref) for ref in refs]

    def input_ref(self, job_id: str, name: str) -> str:
        return f"inferq:{{{job_id}}}:in:{name}"

    async def put_outputs(self, job_id: str, outputs: Mapping[str, bytes]) -> Mapping[str, str]:
        await self._reach("put_outputs", [job_id])
        refs = {name: f"inferq:{{{job_id}}}:out:{name}" for name in outputs}
        self.outputs.update({refs[name]: data for name, data in outputs.items()})
        return refs

    async def _reach(self, operation: str, ids: Iterable[str]) -> None:
        await asyncio.sleep(0)
        self.asked.append((operation, tuple(ids)))
        if not self.up:
            raise StoreUnavailable("redis is away")

    def _answer(self) -> None:
        if self.deaf:
            raise StoreUnavailable("redis: no answer in time")


@dataclass(frozen=True, slots=True)
class Published:
    """One message that reached the broker."""

    body: bytes
    exchange: str
    routing_key: str
    properties: Properties
    mandatory: bool

    @property
    def headers(self) -> Mapping[str, Any]:
        return cast("Mapping[str, Any]", self.properties.headers or {})


class FakePublisher:
    """A confirming publisher.

    Attributes:
        attempts: where each attempt went: the exchange, or the reply queue.
        is_blocked: whether the broker has an alarm.
    """

    def __init__(self, journal: list[str] | None = None) -> None:
        self.published: list[Published] = []
        self.attempts: list[str] = []
        self.is_blocked = False
        self._errors: dict[str, list[Exception]] = {}
        self._journal = [] if journal is None else journal

    def fail(self, where: str, *errors: Exception, times: int = 1) -> None:
        """The next publishes to this exchange or reply queue raise these."""
        self._errors.setdefault(where, []).extend([*errors] * times)

    async def publish(
        self,
        body: bytes,
        *,
        exchange: str,
        routing_key: str,
        properties: Properties,
        mandatory: bool = True,
        timeout_s: float | None = None,
        patient: bool = False,
    ) -> None:
        del timeout_s, patient
        where = exchange or routing_key
        self.attempts.append(where)
        await asyncio.sleep(0)
        if errors := self._errors.get(where):
            raise errors.pop(0)
        message_ids = {one.properties.message_id for one in self.published}
        assert properties.message_id not in message_ids, "aiormq matches returned messages by message_id"
        assert not any(name.lower().startswith("x-") for name in properties.headers or {}), "3.10 drops copied x-death"
        self.published.append(Published(body, exchange, routing_key, properties, mandatory))
        self._journal.append(f"{'parked' if exchange == PARKING_EXCHANGE else 'published'} {where}")

    async def blocked(self) -> bool:
        return self.is_blocked

    def to(self, where: str) -> list[Published]:
        return [one for one in self.published if where in (one.exchange, one.routing_key if not one.exchange else "")]


def metrics_of(registry: CollectorRegistry | None = None, *, role: str = "gpu") -> Metrics:
    metrics = Metrics(registry or CollectorRegistry(), role=role)
    metrics.model_served("m", ("interactive", "bulk", FALLBACK_LANE))
    return metrics


def settler_of(channel: FakeChannel, metrics: Metrics | None = None) -> Settler:
    return Settler(cast("Any", channel), metrics or metrics_of())


def lane_of(name: str = "interactive", *, rank: int | None = None) -> Lane:
    ranks = {"interactive": 0, "bulk": 1, FALLBACK_LANE: 2}
    return Lane("m", name, ranks.get(name, 0) if rank is None else rank, f"inferq.m.{name}", 64, 64)


def tensor(*rows: float) -> Tensor:
    """Input `x` of the fake model: one row of four equal numbers for each argument."""
    return Tensor.from_numpy(np.repeat(np.array(rows, np.float32)[:, None], 4, axis=1))


def job_of(job_id: str = "a", *rows: float, **fields: Any) -> Job:
    return Job.build(id=job_id, model=fields.pop("model", "m"), inputs={"x": tensor(*(rows or (1.0,)))}, **fields)


def delivery_of(body: bytes = b"", *, lane: str = "interactive", **fields: Any) -> Delivery:
    """A delivery on a channel of its own, unless `settler` and `tag` are given."""
    if "settler" not in fields:
        channel = FakeChannel()
        fields |= {"settler": settler_of(channel), "tag": channel.deliver()}
        fields["settler"].open(fields["tag"])
    given: dict[str, Any] = {
        "lane": lane_of(lane),
        "body": body,
        "routing_key": f"m.{lane}",
        "redelivered": False,
        "content_type": "application/msgpack",
        "reply_to": "reply.me",
        "correlation_id": "c",
        "headers": {},
        "received_s": 1_000.0,
        "received_unix_ms": int((UNIX_S + 1_000.0) * 1000),
    }
    return Delivery(**(given | fields))


def request_of(delivery: Delivery | None = None) -> Request:
    delivery = delivery or delivery_of()
    return Request(delivery, delivery.lane.name)


def item_of(job: Job | None = None, *, request: Request | None = None, **fields: Any) -> WorkItem:
    job = job or job_of()
    given: dict[str, Any] = {
        "requests": [request or request_of()],
        "inputs": {name: one.to_numpy() for name, one in job.inputs.items()},
        "step_rows": job.rows,
        "payload_bytes": 16 * job.rows,
        "bucket": "b",
        "digest": job.digest(),
        "lane_rank": 0,
        "arrived_s": 1_000.0,
        "deadline_s": None,
    }
    return WorkItem(job=job, **(given | fields))
