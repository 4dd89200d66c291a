"""One circuit breaker for each model: fed by its runs; has its lanes paused, and probes it until it works again.

The pipeline reports runs, and asks before it runs anything; what becomes of the jobs is its affair. No job is ever a
probe.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import structlog

from inferq_worker.errors import CALLERS_FAULT
from inferq_worker.runtime import DeviceLost, RowError
from inferq_worker.runtime.breaker import Breaker, State

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from inferq_worker.device import Device
    from inferq_worker.observe.metrics import Metrics
    from inferq_worker.runtime import BreakerSettings, RunReport, Session
    from inferq_worker.scheduling import Clock
    from inferq_worker.scheduling.clock import Timer
    from inferq_worker.served import ServedModel
    from inferq_worker.tasks import Tasks

    PauseLanes: TypeAlias = "Callable[[str, bool], Awaitable[None]]"

_log = structlog.get_logger(__name__)
_ERROR_CHARS = 500


@dataclass(slots=True)
class _Guard:
    """A model's breaker, and what goes on around it.

    Attributes:
        paused: whether its lanes are known to be silent.
        waiting: to be called once they are.
        timer: of the next probe.
        broken: its session is to be rebuilt before it is probed.
    """

    session: Session
    breaker: Breaker
    paused: bool = False
    waiting: list[Callable[[], None]] = field(default_factory=list)
    timer: Timer | None = None
    broken: bool = False


class Breakers:
    """The breakers of all served models, by model name.

    Args:
        settings: limits, the same for all.
        models: what is served; the warm-up's run times say what is slow for each.
        pause: pauses (True) or resumes a model's lanes; when it has paused, no more jobs come.
        device: a probe stands in its line like any batch, and has the time limit of one.
        clock: monotonic seconds, and the timers of probes.
        tasks: owns pauses and probes. A session that is broken for good ends the program through them, as a run would.
    """

    def __init__(
        self,
        settings: BreakerSettings,
        models: Mapping[str, ServedModel],
        pause: PauseLanes,
        *,
        device: Device,
        clock: Clock,
        metrics: Metrics,
        tasks: Tasks,
    ) -> None:
        self._pause = pause
        self._device = device
        self._clock = clock
        self._metrics = metrics
        self._tasks = tasks
        self._guards = {
            name: _Guard(model.session, Breaker(settings, slow_s=_slow_s(settings, model)))
            for name, model in models.items()
        }
        self._on_open: Callable[[str], None] = lambda _model: None
        self._closed = False
        for name in self._guards:
            metrics.breaker_state(name, State.CLOSED.value)

    def on_open(self, tell: Callable[[str], None]) -> None:
        """Call this with the model's name whenever a breaker opens on its runs, before its lanes are paused."""
        self._on_open = tell

    def allows(self, model: str) -> bool:
        """Whether jobs of the model may run now."""
        return self._guards[model].breaker.state is State.CLOSED

    def ran(self, model: str, report: RunReport) -> None:
        """A batch was run. Failures that are the callers' own count neither for nor against the model."""
        breaker, now_s = self._guards[model].breaker, self._clock.now()
        errors = [one for one in report.answers if isinstance(one, RowError)]
        failed = any(error.code not in CALLERS_FAULT for error in errors)
        answered = len(errors) < len(report.answers)
        if report.timed_out:
            opened = breaker.timed_out(now_s)
        else:
            opened = (failed or answered) and breaker.ran(now_s, failed=not answered, run_s=report.run_s)
        if opened:
            self._opened(model, errors[-1].message if errors else "")

    def broke(self, model: str) -> None:
        """The model's session broke under a run: it is rebuilt before the probe, while nothing of the model runs."""
        guard = self._guards[model]
        guard.broken = True
        if guard.breaker.broke(self._clock.now()):
            self._opened(model)

    def when_paused(self, model: str, act: Callable[[], None]) -> None:
        """Call `act` as soon as the model's lanes are paused: a job that goes back before comes straight here again."""
        guard = self._guards[model]
        if guard.paused:
            act()
        else:
            guard.waiting.append(act)

    def retry_s(self, model: str) -> float:
        """When the model may work again at the earliest, monotonic seconds."""
        due_s = self._guards[model].breaker.half_open_s
        return self._clock.now() if due_s is None else due_s

    @property
    def all_open(self) -> bool:
        """Whether no model can be run."""
        return bool(self._guards) and not any(self.allows(model) for model in self._guards)

    def status(self, model: str) -> dict[str, Any]:
        """For `/status`; may be asked from any thread."""
        breaker, now_s = self._guards[model].breaker, self._clock.now()
        seen, due_s = breaker.tally(now_s), breaker.half_open_s
        return {
            "state": breaker.state.value,
            "opened_by": breaker.trip.value if breaker.trip else None,
            "probe_in_s": None if due_s is None else max(0.0, due_s - now_s),
            "slow_above_s": breaker.slow_s,
            "runs": seen.runs,
            "failed": seen.failed,
            "slow": seen.slow,
            "timed_out": seen.timed_out,
        }

    def close(self) -> None:
        """No more probes: the worker drains."""
        self._closed = True
        for guard in self._guards.values():
            if guard.timer is not None:
                guard.timer.cancel()

    def _opened(self, model: str, error: str = "") -> None:
        self._guards[model].paused = False
        self._wait(model, error)
        self._on_open(model)
        self._tasks.spawn(self._pause_lanes(model))

    def _wait(self, model: str, error: str = "") -> None:
        """The breaker is open, newly or again: say so, and set the time of the next probe."""
        guard = self._guards[model]
        breaker = guard.breaker
        reason = breaker.trip.value if breaker.trip else ""
        due_s = self.retry_s(model)
        self._changed(model, reason)
        probe_in_s = round(due_s - self._clock.now(), 3)
        _log.warning(
            "breaker.opened", model=model, reason=reason, last_error=error[:_ERROR_CHARS], probe_in_s=probe_in_s
        )
        if not self._closed:
            guard.timer = self._clock.call_at(due_s, partial(self._half_open, model))

    def _changed(self, model: str, reason: str) -> None:
        state = self._guards[model].breaker.state.value
        self._metrics.breaker_state(model, state)
        self._metrics.breaker_transition(model, state, reason)

    async def _pause_lanes(self, model: str) -> None:
        guard = self._guards[model]
        await self._pause(model, True)
        guard.paused = True
        waiting, guard.waiting = guard.waiting, []
        for act in waiting:
            act()

    def _half_open(self, model: str) -> None:
        self._guards[model].breaker.half_open()
        self._changed(model, "waited")
        self._tasks.spawn(self._probe(model))

    async def _probe(self, model: str) -> None:
        guard = self._guards[model]
        if guard.broken:
            await guard.session.rebuild()
            guard.broken = False
            _log.warning("session.rebuilt", model=model)
        report = await self._ask(guard.session)
        if report is None or self._closed:
            return
        problem = _problem(report, guard.breaker.slow_s)
        guard.breaker.probed(self._clock.now(), passed=problem is None)
        if problem is not None:
            _log.warning("breaker.probe_failed", model=model, reason=problem)
            self._wait(model)
            return
        self._changed(model, "probe_passed")
        _log.warning("breaker.closed", model=model)
        await self._pause(model, False)

    async def _ask(self, session: Session) -> RunReport | None:
        """What came of a probe; None if the device is lost, and the worker about to leave."""
        await self._device.nearly_free()
        run = self._device.enter(None)
        try:
            report = await session.probe(run)
        except DeviceLost:
            return None
        finally:
            self._device.end(run)
        if report.wedged:
            self._device.lose()
        return report


def _slow_s(settings: BreakerSettings, model: ServedModel) -> float:
    """What the model's own largest batch took at the warm-up, with room, if that is above the limit for all."""
    warm_s = model.latency.predict(model.session.info.max_rows) or 0.0
    return max(settings.run_p95_s, settings.slow_factor * warm_s)


def _problem(report: RunReport, slow_s: float) -> str | None:
    """Why the model is not fit to run jobs, by what came of a probe."""
    failure = next((one for one in report.answers if isinstance(one, RowError)), None)
    if failure is not None:
        return f"{failure.code}: {failure.message}"
    return f"the probe ran for {report.run_s:.3g} s, limit {slow_s:g} s" if report.run_s > slow_s else None
