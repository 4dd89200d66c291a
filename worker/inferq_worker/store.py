"""The worker's Redis: canonical outcomes, running records, heartbeats, claim-checked payloads. One round trip a step.

Every command here is safe to repeat, so a time-out is answered by trying again. Knows nothing of AMQP.
"""

from __future__ import annotations

import asyncio
import inspect
import secrets
import time
from typing import TYPE_CHECKING, Any

from inferq.keys import done_channel, input_key, output_key, paused_key, result_key
from inferq.outcome import Outcome, decode_outcome
from inferq.pauses import decode_pauses
from inferq.redis_pools import REDIS_ERRORS, redis_problem
from inferq_schemas import ContractError
from inferq_worker.cpu import CpuWorker
from inferq_worker.errors import StoreUnavailable
from inferq_worker.poison import RunRecord

if TYPE_CHECKING:
    from collections.abc import Awaitable, Collection, Iterable, Mapping, Sequence

    from redis.asyncio import Redis
    from redis.asyncio.client import Pipeline

    from inferq.pauses import Pause
    from inferq.settings import RedisSettings
    from inferq_worker.observe.metrics import Metrics

HEARTBEAT_TTL_S = 10
HEARTBEAT_EVERY_S = 1.0


class Store:
    """Outcomes and records in Redis.

    Args:
        redis: client with a bounded, blocking pool and explicit time-outs; `decode_responses` off.
        settings: prefix and times to live.
        worker: id of this process, new at every start.
    """

    def __init__(self, redis: Redis, settings: RedisSettings, worker: str, metrics: Metrics) -> None:
        self._redis = redis
        self._metrics = metrics
        self._settings = settings
        self._prefix = settings.prefix
        self._ttl_s = settings.result_ttl_s
        self._replied_ttl_s = settings.replied_ttl_s
        self._worker = worker
        self._runs = 0
        self._up = asyncio.Event()
        self._answered = False
        self._refusals: dict[str, str] = {}
        self.last_error = "not asked yet"

    @property
    def up(self) -> bool:
        """Whether Redis answered last time."""
        return self._up.is_set()

    async def wait_up(self) -> None:
        """Wait until Redis answers again; the heartbeat finds out."""
        await self._up.wait()

    async def connect(self) -> None:
        """Open all connections of the pool, before there is work.

        Otherwise the first burst of single outcomes opens them, and each handshake, above all one of TLS, holds the
        event loop up for milliseconds: deadlines are then noticed late. Does nothing while Redis is away.
        """
        pings = (self._call("connect", self._redis.ping()) for _ in range(self._settings.max_connections))
        await asyncio.gather(*pings, return_exceptions=True)

    @property
    def _running_key(self) -> str:
        return f"{self._prefix}:running"

    def record(self, ids: Collection[str]) -> RunRecord:
        """A new running record for these jobs; `claim` stores it, `keep` or `end` removes it."""
        self._runs += 1
        return RunRecord(f"{self._worker}/{self._runs}", self._worker, frozenset(ids), int(time.time() * 1000))

    async def claim(self, record: RunRecord, ids: Sequence[str], *, forget: Sequence[str] = ()) -> list[Outcome | None]:
        """Before a run: look the jobs' outcomes up, and store their running record, in one round trip.

        Args:
            record: from `record`. If the call fails, it may be stored all the same: end it.
            ids: jobs of the batch.
            forget: of these, the jobs whose stored outcome is deleted first (`force`).

        Returns:
            For each id its outcome or None, in the order of `ids`. They are told even where Redis is full and refused
            the record: a crash of the run then casts no suspicion on its jobs.
        """
        pipe = self._pipeline()
        if forget:
            pipe.delete(*(result_key(self._prefix, job_id) for job_id in forget))
        pipe.hset(self._running_key, record.key, record.encode())
        pipe.mget([result_key(self._prefix, job_id) for job_id in ids])
        *forgotten, recorded, raw = await self._call("lookup", pipe.execute(raise_on_error=False))
        self._raise_refusal([*forgotten, raw], "lookup")
        if isinstance(recorded, Exception):
            # A full Redis refuses to write, and still knows which jobs are answered or cancelled.
            self._refused("running", recorded)
        return [_outcome(value) for value in raw]

    async def look_up(self, ids: Sequence[str]) -> list[Outcome | None]:
        """Stored outcomes of `ids`, in order; None where there is none."""
        raw = await self._call("lookup", self._redis.mget([result_key(self._prefix, job_id) for job_id in ids]))
        return [_outcome(value) for value in raw]

    async def keep(
        self, outcomes: Sequence[Outcome], *, hint: Collection[str] = (), ended: RunRecord | None = None
    ) -> list[Outcome]:
        """After a run: store outcomes, the first write wins, and remove the running record, in one round trip.

        Args:
            outcomes: one per job.
            hint: ids of jobs whose sender waits on Redis: their channel is told that there is something to read.
            ended: the run's record.

        Returns:
            The canonical outcome of each, in order: the given one, or the one that was there before.

        Raises:
            StoreUnavailable: not all of them are known to be stored.
        """
        pipe = self._pipeline()
        for outcome in outcomes:
            pipe.set(result_key(self._prefix, outcome.result.id), outcome.encode(), nx=True, get=True, ex=self._ttl_s)
        for job_id in hint:
            pipe.publish(done_channel(self._prefix, job_id), b"")
        if ended is not None:
            pipe.hdel(self._running_key, ended.key)
        replies = await self._execute(pipe, "store")
        return [_outcome(raw) or mine for mine, raw in zip(outcomes, replies, strict=False)]

    async def end(self, record: RunRecord) -> None:
        """Remove a running record whose run has no outcome to store."""
        await self._call("running", self._redis.hdel(self._running_key, record.key))

    async def shorten(self, ids: Sequence[str]) -> None:
        """The replies are confirmed: the stored outcomes are now only for duplicates and live shorter."""
        pipe = self._pipeline()
        for job_id in ids:
            pipe.expire(result_key(self._prefix, job_id), self._replied_ttl_s)
        await self._execute(pipe, "store")

    async def runs(self) -> tuple[list[RunRecord], frozenset[str]]:
        """Runs that have not ended, and the workers whose heartbeat is current. Sweeps records past their use."""
        raw = await self._call("running", self._redis.hgetall(self._running_key))
        records = [RunRecord.decode(key.decode(), value) for key, value in raw.items()]
        oldest_ms = int(time.time() * 1000) - self._ttl_s * 1000
        old = [record.key for record in records if record.started_unix_ms < oldest_ms]
        if old:
            await self._call("running", self._redis.hdel(self._running_key, *old))
        alive = await self._alive({record.worker for record in records})
        return [record for record in records if record.started_unix_ms >= oldest_ms], alive

    async def _alive(self, workers: Collection[str]) -> frozenset[str]:
        """Those whose heartbeat is current."""
        ids = sorted(workers)
        if not ids:
            return frozenset()
        beats = await self._call("running", self._redis.mget([self._beat_key(worker) for worker in ids]))
        return frozenset(worker for worker, beat in zip(ids, beats, strict=True) if beat is not None)

    async def forget_runs(self, job_id: str, records: Sequence[RunRecord]) -> None:
        """Remove the solo records of a job that was parked, so that an operator's requeue starts afresh."""
        keys = [record.key for record in records if record.ids == {job_id}]
        if keys:
            await self._call("running", self._redis.hdel(self._running_key, *keys))

    async def beat(self, *, cpu: Mapping[str, CpuWorker] | None = None, gpu_models: Sequence[str] = ()) -> None:
        """Say that this worker lives, good for `HEARTBEAT_TTL_S` seconds; also finds out that Redis is back.

        Args:
            cpu: in the CPU role, what it can do, by model whose fallback queue it serves.
            gpu_models: in the GPU role, the models that it may divert from.
        """
        pipe = self._pipeline()
        pipe.set(self._beat_key(self._worker), b"1", ex=HEARTBEAT_TTL_S)
        for model, entry in (cpu or {}).items():
            pipe.hset(self._cpu_key(model), self._worker, entry.encode())
            pipe.expire(self._cpu_key(model), HEARTBEAT_TTL_S)
            pipe.hkeys(self._cpu_key(model))
        for model in gpu_models:
            pipe.sadd(self._gpu_key(model), self._worker)
            pipe.expire(self._gpu_key(model), HEARTBEAT_TTL_S)
        try:
            replies = await self._execute(pipe, "running", probe=True)
        finally:
            self._metrics.redis_available(available=self.up)
        for number, model in enumerate(cpu or {}, start=1):
            await self._sweep_cpus(model, {key.decode() for key in replies[3 * number]} - {self._worker})

    async def pauses(self) -> dict[str, Pause]:
        """What operators paused, by target; entries that have ended by themselves may be among them."""
        return decode_pauses(await self._call("running", self._redis.hgetall(paused_key(self._prefix))))

    async def cpu_workers(self, model: str) -> tuple[dict[str, CpuWorker], int]:
        """Workers in the CPU role that serve a model's fallback queue, by id, and how many GPU workers divert to them.

        Counted is whose heartbeat has not lapsed, by Redis' own time: clocks of several machines are never compared.
        Each role sweeps its own that ended without a word; the CPU role at its beats.
        """
        pipe = self._pipeline()
        pipe.hgetall(self._cpu_key(model))
        pipe.smembers(self._gpu_key(model))
        entries, members = await self._execute(pipe, "running")
        cpus = {key.decode(errors="replace"): CpuWorker.decode(raw) for key, raw in entries.items()}
        gpus = {key.decode(errors="replace") for key in members}
        alive = await self._alive(cpus.keys() | gpus)
        if gpus - alive:
            await self._call("running", self._redis.srem(self._gpu_key(model), *(gpus - alive)))
        return {worker: entry for worker, entry in cpus.items() if worker in alive}, len(gpus & alive)

    async def _sweep_cpus(self, model: str, others: Collection[str]) -> None:
        gone = set(others) - await self._alive(others)
        if gone:
            await self._call("running", self._redis.hdel(self._cpu_key(model), *gone))

    async def retire(self, *, cpu_models: Sequence[str] = (), gpu_models: Sequence[str] = ()) -> None:
        """A clean end: the heartbeat goes at once, and nobody counts on this worker any more. Models as in `beat`."""
        pipe = self._pipeline()
        pipe.delete(self._beat_key(self._worker))
        for model in cpu_models:
            pipe.hdel(self._cpu_key(model), self._worker)
        for model in gpu_models:
            pipe.srem(self._gpu_key(model), self._worker)
        await self._execute(pipe, "running")

    async def payloads(self, refs: Sequence[str]) -> list[bytes | None]:
        """Raw bytes behind claim checks of the caller's own job, in order; None where the key is gone."""
        raw: list[bytes | None] = await self._call("input", self._redis.mget(list(refs)))
        return raw

    def input_ref(self, job_id: str, name: str) -> str:
        """The only reference that a job's input may carry, with a mark (see `inferq.keys`) or without."""
        return input_key(self._prefix, job_id, name)

    async def put_outputs(self, job_id: str, outputs: Mapping[str, bytes]) -> Mapping[str, str]:
        """Store large outputs beside the outcome; returns name -> reference."""
        pipe, mark = self._pipeline(), secrets.token_hex(16)
        refs = {name: output_key(self._prefix, job_id, name, mark) for name in outputs}
        for name, data in outputs.items():
            pipe.set(refs[name], data, ex=self._ttl_s)
        await self._execute(pipe, "output")
        return refs

    def _beat_key(self, worker: str) -> str:
        return f"{self._prefix}:worker:{worker}"

    def _cpu_key(self, model: str) -> str:
        return f"{self._prefix}:cpu:{model}"

    def _gpu_key(self, model: str) -> str:
        return f"{self._prefix}:gpu:{model}"

    def _pipeline(self) -> Pipeline:
        return self._redis.pipeline(transaction=False)

    async def _execute(self, pipe: Pipeline, operation: str, *, probe: bool = False) -> list[Any]:
        replies: list[Any] = await self._call(operation, pipe.execute(raise_on_error=False), probe=probe)
        self._raise_refusal(replies, operation)
        self._refusals.pop(operation, None)
        return replies

    def _raise_refusal(self, replies: Iterable[object], operation: str) -> None:
        for reply in replies:
            if isinstance(reply, Exception):
                self._refused(operation, reply)
                raise StoreUnavailable(f"redis refused: {self._refusals[operation]}") from reply

    def _refused(self, operation: str, reply: Exception) -> None:
        self._refusals[operation] = f"{type(reply).__name__}: {reply}"[:300]
        self._metrics.store_error(operation)

    @property
    def refusal(self) -> str | None:
        """What Redis refuses at present although it answers (it is full, this user may not), in its own words."""
        return next(iter(self._refusals.values()), None)

    async def _call(self, operation: str, command: Awaitable[Any], *, probe: bool = False) -> Any:
        """Run a command. While Redis is known to be away only probes are sent: nobody waits out time-outs in turn."""
        if not (self.up or probe):
            if inspect.iscoroutine(command):
                command.close()
            raise StoreUnavailable(f"redis is away: {self.last_error}")
        try:
            answer = await command
        except REDIS_ERRORS as error:
            self.last_error = redis_problem(error, self._settings, first=not self._answered)
            self._up.clear()
            self._metrics.store_error(operation)
            raise StoreUnavailable(f"redis: {self.last_error}") from error
        self._up.set()
        self._answered = True
        return answer


def _outcome(raw: object) -> Outcome | None:
    """Decode a stored outcome. What cannot be read counts as absent: the job runs and is answered again."""
    if not isinstance(raw, bytes):
        return None
    try:
        return decode_outcome(raw)
    except ContractError:
        return None
