"""One configuration to simulate: what the worker's settings say, changed by what `--case` says."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from inferq.commands import CommandError
from inferq.settings import Settings
from inferq_worker.scheduling import Policy, SizeOrTimeout
from inferq_worker.scheduling.earliest_deadline import EarliestDeadline
from inferq_worker.scheduling.simulator import Setup, SimulatedJob
from inferq_worker.settings import BatchingSettings, LanesSettings

if TYPE_CHECKING:
    from random import Random

    from inferq_worker.whatif.latencies import Latency

POLICIES = ("earliest_deadline", "size_or_timeout")
_ANY_BYTES = 1


class SchedulingSettings(Settings):
    """What of the worker's configuration a simulation reads; it needs neither a model nor a broker."""

    batching: BatchingSettings = BatchingSettings()
    lanes: LanesSettings = LanesSettings()


@dataclass(frozen=True, slots=True)
class Case:
    """What is compared. Times in seconds.

    Attributes:
        margin_s: kept between the expected end of a run and a deadline.
        bulk_share: rows that bulk jobs get under overload; of earliest_deadline only.
        window_jobs: urgent jobs in hand at a time, the rest waits in the broker; 0 = no limit.
        bulk_window_jobs: the same for the bulk lane.
        hand_over_s: the next batch is frozen this long before the running one ends.
        gap_s: the device idles this long between two runs.
        after_s: from the end of a run to the answer.
        cpu_lanes: jobs that CPU workers run at a time; 0 = none lives.
        cpu_run_s: seconds of one job there.
        admit: whether jobs are judged on arrival; by earliest_deadline only.
        spread: runs take up to this share longer or shorter than predicted.
    """

    name: str
    policy: str = POLICIES[0]
    max_rows: int = 32
    max_wait_s: float = 0.005
    margin_s: float = 0.002
    bulk_share: float = 0.1
    window_jobs: int = 256
    bulk_window_jobs: int = 1024
    hand_over_s: float = 0.002
    gap_s: float = 0.0
    after_s: float = 0.001
    cpu_lanes: int = 0
    cpu_run_s: float = 0.0
    admit: bool = True
    spread: float = 0.0

    @classmethod
    def configured(cls, settings: SchedulingSettings) -> Case:
        """What a worker with these settings does."""
        return cls(
            name=POLICIES[0],
            max_rows=settings.batching.max_rows,
            max_wait_s=settings.batching.max_wait_s,
            window_jobs=settings.lanes.interactive_window,
            bulk_window_jobs=settings.lanes.bulk_window_rows,
        )

    def setup(self, latency: Latency, random: Random) -> Setup:
        """What the simulator needs; `random` makes run times differ from their prediction."""

        def run_s(rows: int) -> float:
            return latency.run_s(rows) * (1 + random.uniform(-self.spread, self.spread))

        return Setup(
            policy=lambda: self._policy(latency),
            run_s=run_s if self.spread else latency.run_s,
            predict_s=latency.run_s,
            after_s=self.after_s,
            hand_over_s=self.hand_over_s,
            gap_s=self.gap_s,
            window_jobs=self.window_jobs or None,
            bulk_window_jobs=self.bulk_window_jobs or None,
            step_rows=self.max_rows,
            cpu_lanes=self.cpu_lanes,
            cpu_run_s=self.cpu_run_s,
            admits=self.admit,
        )

    def jobs_per_s(self, latency: Latency, mean_rows: float) -> float:
        """What device and CPU lanes do at best."""
        cpu = self.cpu_lanes / self.cpu_run_s if self.cpu_lanes else 0.0
        return latency.rows_per_s(self.max_rows) / mean_rows + cpu

    def _policy(self, latency: Latency) -> Policy[SimulatedJob]:
        limits: dict[str, Any] = {
            "max_rows": self.max_rows,
            "max_bytes": _ANY_BYTES,  # simulated jobs have no bytes
            "max_wait_s": self.max_wait_s,
            "margin_s": self.margin_s,
            "predict_s": lambda _bucket, rows: latency.run_s(rows),
        }
        if self.policy == "size_or_timeout":
            return SizeOrTimeout(**limits)
        return EarliestDeadline(**limits, bulk_share=self.bulk_share)


_DEFAULTS = Case("")
_KNOBS: dict[str, Any] = {one.name: type(getattr(_DEFAULTS, one.name)) for one in fields(Case) if one.name != "name"}
_WORDS = {"yes": True, "true": True, "no": False, "false": False}


def parse_case(text: str, base: Case) -> Case:
    """Read `NAME: KNOB=VALUE KNOB=VALUE ...`; a knob that is not named stays as in `base`.

    Raises:
        CommandError: it is not of that form, or a value is not possible.
    """
    name, colon, rest = text.partition(":")
    if not colon or not name.strip():
        raise CommandError(f'--case {text!r}: say "NAME: KNOB=VALUE ...", as in "narrow: window_jobs=64"')
    case = replace(base, name=name.strip(), **dict(_knob(name, pair) for pair in rest.replace(",", " ").split()))
    _check(case)
    return case


def _knob(name: str, pair: str) -> tuple[str, Any]:
    knob, _, value = pair.partition("=")
    if knob not in _KNOBS:
        raise CommandError(f"--case {name}: there is no {knob!r}; knobs are {', '.join(_KNOBS)}")
    kind = _KNOBS[knob]
    try:
        return knob, _WORDS[value] if kind is bool else kind(value)
    except (ValueError, KeyError) as error:
        wanted = "yes or no" if kind is bool else "a whole number" if kind is int else "a number"
        raise CommandError(f"--case {name}: {knob} is {wanted}, not {value!r}") from error


def _check(case: Case) -> None:
    wrong = [
        (case.policy not in POLICIES, f"policy is one of {', '.join(POLICIES)}"),
        (not 1 <= case.max_rows <= 65_536, "max_rows is 1 to 65536"),
        (not 0 <= case.bulk_share <= 1, "bulk_share is 0 to 1"),
        (not 0 <= case.spread < 1, "spread is at least 0 and below 1"),
        (case.cpu_lanes > 0 and case.cpu_run_s <= 0, "cpu_lanes need cpu_run_s, the seconds of one job on a CPU"),
        *(
            (not 0 <= getattr(case, knob) < math.inf, f"{knob} is at least 0")
            for knob, kind in _KNOBS.items()
            if kind in (int, float)
        ),
    ]
    for is_wrong, mend in wrong:
        if is_wrong:
            raise CommandError(f"--case {case.name}: {mend}")
