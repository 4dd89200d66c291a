"""Judges a run from what was written down: the ledger, the outcomes left in Redis, and the messages left in queues.

Pure: it is handed evidence and asks nobody. A job counts by what its sender may believe: once a publish was confirmed
it must have at least one terminal answer; whatever answers there are must be right, and the same.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tests.chaos.ledger import Entry, History, Told

_EXAMPLES = 5


@dataclass(frozen=True, slots=True)
class Parked:
    """A message found in parking, read as an operator reads it.

    Attributes:
        ids: of the jobs in its body; empty where the body cannot be read.
        reason: its code, "" for none.
        message: the reason in words.
    """

    ids: tuple[str, ...]
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Evidence:
    """What was found when the run was over and everything had come to rest.

    Attributes:
        outcomes: result by id as Redis has it: entries like those of the ledger.
        parked: every message in parking.
        waiting: ids of jobs still in a lane, in the fallback or among the dead.
        unsettled: messages that somebody holds or that are still queued, by queue.
        unstored: ids that workers say they answered without a stored outcome.
        crashes: workers that ended by themselves and senders that broke: how, how often.
    """

    outcomes: Mapping[str, Entry]
    parked: Sequence[Parked]
    waiting: frozenset[str]
    unsettled: Mapping[str, int]
    unstored: frozenset[str]
    crashes: Mapping[str, int]


@dataclass(slots=True)
class Verdict:
    """The figures of a run, and examples of what is wrong.

    Attributes:
        published, confirmed, ok: jobs.
        errors: jobs by the code of their answer.
        lost: confirmed jobs without answer, outcome, place in parking or in a queue.
        stuck: confirmed jobs without answer that are still in a queue: nobody lost them, and nobody serves them.
        wrong: jobs with an answer that says ok and is not right.
        conflicting: jobs with two answers that differ, unexplained by an outcome that Redis refused or lost.
        excused: jobs with two answers that differ, and such an explanation.
        unreplied: confirmed jobs of the raw publisher that have an outcome and no reply in its durable queue.
        unended: jobs for which the client library gave neither an answer nor an error.
        unstored: jobs answered without a stored outcome, as workers say.
        forgotten: confirmed jobs whose only answer lay in a Redis that lost its data.
        unexplained: messages in parking that cannot be read or do not say why.
        unsettled: messages left in queues or in hands.
        crashes: workers that ended by themselves, and senders that broke.
        strangers: replies to jobs that nobody sent.
        examples: a few ids of each fault, with what is known of them.
    """

    published: int = 0
    confirmed: int = 0
    ok: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    lost: int = 0
    stuck: int = 0
    wrong: int = 0
    conflicting: int = 0
    excused: int = 0
    unreplied: int = 0
    unended: int = 0
    unstored: int = 0
    forgotten: int = 0
    unexplained: int = 0
    unsettled: int = 0
    crashes: int = 0
    strangers: int = 0
    examples: dict[str, list[Any]] = field(default_factory=dict)

    FAILURES = (
        "lost",
        "stuck",
        "wrong",
        "conflicting",
        "unreplied",
        "unended",
        "unexplained",
        "unsettled",
        "crashes",
        "strangers",
    )

    @property
    def failed(self) -> bool:
        """Whether a promise was broken."""
        return any(getattr(self, name) for name in self.FAILURES)

    def found(self, fault: str, example: object, *, count: int = 1) -> None:
        """Count a fault and keep a few examples."""
        setattr(self, fault, getattr(self, fault) + count)
        kept = self.examples.setdefault(fault, [])
        if len(kept) < _EXAMPLES:
            kept.append(example)


def check(history: History, evidence: Evidence) -> Verdict:
    """Judge a run."""
    verdict = Verdict(published=len(history.jobs), unstored=len(evidence.unstored))
    parked = Counter(job_id for message in evidence.parked for job_id in message.ids)
    for job_id, told in history.jobs.items():
        outcome = evidence.outcomes.get(job_id)
        results = [*told.results, *([outcome] if outcome is not None else [])]
        _count(verdict, told, results)
        _judge_end(verdict, history, evidence, job_id, in_parking=bool(parked[job_id]))
        _judge_content(verdict, job_id, results)
        _judge_sameness(verdict, history, evidence, job_id, results)
    for message in evidence.parked:
        if not (message.ids and message.reason and message.message):
            verdict.found("unexplained", {"jobs": message.ids, "reason": message.reason})
    for queue, count in evidence.unsettled.items():
        verdict.found("unsettled", {queue: count}, count=count)
    for how, count in evidence.crashes.items():
        verdict.found("crashes", how, count=count)
    for entry in history.strangers:
        verdict.found("strangers", entry)
    return verdict


def _count(verdict: Verdict, told: Told, results: Sequence[Entry]) -> None:
    verdict.confirmed += told.confirmed_t is not None
    codes = {entry["code"] for entry in results}
    if "ok" in codes:
        verdict.ok += 1
    elif codes:
        verdict.errors[min(codes)] += 1


def _judge_end(verdict: Verdict, history: History, evidence: Evidence, job_id: str, *, in_parking: bool) -> None:
    """Whether a confirmed job has its terminal answer, where its sender finds it."""
    told, outcome = history.jobs[job_id], evidence.outcomes.get(job_id)
    if told.unended:
        verdict.found("unended", {"id": job_id, "sent": told.sent, "outcome": outcome})
    if told.confirmed_t is None:
        return
    if not told.results and outcome is None and not in_parking:
        example = {"id": job_id, "sent": told.sent}
        if job_id in evidence.waiting:
            verdict.found("stuck", example)
        elif told.sent["sender"] == "poller" and any(t >= told.confirmed_t for _, t in history.lost_data):
            verdict.found("forgotten", example)
        else:
            verdict.found("lost", example)
    elif told.sent["sender"] == "raw" and not told.replies and job_id not in evidence.waiting:
        verdict.found("unreplied", {"id": job_id, "sent": told.sent, "outcome": outcome})


def _judge_content(verdict: Verdict, job_id: str, results: Sequence[Entry]) -> None:
    bad = [entry for entry in results if entry["code"] == "ok" and not entry["right"]]
    if bad:
        verdict.found("wrong", {"id": job_id, "entries": bad[:3]})


def _judge_sameness(
    verdict: Verdict, history: History, evidence: Evidence, job_id: str, results: Sequence[Entry]
) -> None:
    if len({entry["likeness"] for entry in results}) < 2:
        return
    times = [entry["t"] for entry in results]
    # An outcome may have been stored some seconds before its first reply was read.
    lost_between = any(
        since <= max(times) and until >= (history.jobs[job_id].sent["t"]) for since, until in history.lost_data
    )
    excused = lost_between or job_id in evidence.unstored
    entries = [{key: entry.get(key) for key in ("t", "e", "code", "likeness", "message")} for entry in results]
    verdict.found("excused" if excused else "conflicting", {"id": job_id, "entries": entries[:6]})
