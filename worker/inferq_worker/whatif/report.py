"""What the simulations found: as tables for people, as JSON for programs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from inferq_worker.columns import aligned

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from inferq_worker.scheduling.simulator import Report

_COLUMNS = ("jobs/s", "case", "goodput", "bound", "p50 ms", "p95 ms", "p99 ms", "rows", "busy", "cpu", "dropped")
_LEFT = frozenset({"case", "dropped", "batches by rows"})


@dataclass(frozen=True, slots=True)
class Outcome:
    """One case under one load. Shares are 0..1 of all jobs.

    Attributes:
        offered_per_s: jobs a second.
        bound: the goodput that no scheduler exceeds for long: capacity over load.
        urgent_goodput: of the urgent lane; None if no job was in it.
        bulk_goodput: of the other lanes.
        latency_ms: of answered jobs, by quantile.
        batch_share: share of the batches, by number of rows.
        dropped_share: by reason.
    """

    case: str
    offered_per_s: float
    jobs: int
    goodput: float
    bound: float
    urgent_goodput: float | None
    bulk_goodput: float | None
    latency_ms: Mapping[str, float]
    mean_batch_rows: float
    busy_share: float
    cpu_share: float
    late_share: float
    dropped_share: Mapping[str, float]
    batch_share: Mapping[int, float]


def outcome(case: str, report: Report, *, offered_per_s: float, jobs_per_s: float) -> Outcome:
    """Sum a simulation up; `jobs_per_s` is what the device and the CPU lanes do at best."""
    jobs, batches = report.jobs or 1, report.batch_rows.total() or 1
    quantiles_s = report.quantiles_s(0.5, 0.95, 0.99)
    return Outcome(
        case=case,
        offered_per_s=offered_per_s,
        jobs=report.jobs,
        goodput=report.goodput,
        bound=min(1.0, jobs_per_s / offered_per_s),
        urgent_goodput=_share(report, urgent=True),
        bulk_goodput=_share(report, urgent=False),
        latency_ms={name: 1000 * value for name, value in zip(("p50", "p95", "p99"), quantiles_s, strict=True)},
        mean_batch_rows=report.mean_rows,
        busy_share=report.busy_share,
        cpu_share=report.by_cpu / jobs,
        late_share=report.late / jobs,
        dropped_share={reason: count / jobs for reason, count in sorted(report.dropped.items()) if count},
        batch_share={rows: count / batches for rows, count in sorted(report.batch_rows.items())},
    )


def _share(report: Report, *, urgent: bool) -> float | None:
    offered = sum(jobs for rank, jobs in report.offered.items() if (rank == 0) is urgent)
    in_time = sum(jobs for rank, jobs in report.in_time.items() if (rank == 0) is urgent)
    return in_time / offered if offered else None


def as_json(outcomes: Iterable[Outcome]) -> list[dict[str, Any]]:
    """Outcomes as JSON values."""
    return [asdict(one) for one in outcomes]


def table(outcomes: Sequence[Outcome]) -> str:
    """The figures, one line for each case under each load."""
    lines = [
        {
            "jobs/s": f"{one.offered_per_s:,.0f}",
            "case": one.case,
            "goodput": f"{one.goodput:.1%}",
            "bound": f"{one.bound:.1%}",
            **{f"{name} ms": f"{ms:.1f}" for name, ms in one.latency_ms.items()},
            "rows": f"{one.mean_batch_rows:.1f}",
            "busy": f"{one.busy_share:.0%}",
            "cpu": f"{one.cpu_share:.1%}",
            "dropped": _shares({**one.dropped_share, **({"late": one.late_share} if one.late_share else {})}),
        }
        for one in outcomes
    ]
    columns = list(_COLUMNS)
    if any(one.bulk_goodput is not None for one in outcomes):
        columns[3:3] = ["urgent", "bulk"]
        for line, one in zip(lines, outcomes, strict=True):
            line |= {"urgent": _percent(one.urgent_goodput), "bulk": _percent(one.bulk_goodput)}
    return aligned(columns, lines, left=_LEFT)


def histogram(outcomes: Sequence[Outcome]) -> str:
    """How large the batches were: their share by number of rows, doubling."""
    lines = [
        {
            "jobs/s": f"{one.offered_per_s:,.0f}",
            "case": one.case,
            "batches by rows": _shares(_by_doubling(one.batch_share)),
        }
        for one in outcomes
    ]
    return aligned(["jobs/s", "case", "batches by rows"], lines, left=_LEFT)


def _by_doubling(share: Mapping[int, float]) -> dict[str, float]:
    """Shares of 1, 2, 3-4, 5-8, ... rows."""
    found: dict[str, float] = {}
    for rows, part in share.items():
        most = 1 << (rows - 1).bit_length()
        name = f"{most // 2 + 1}-{most}" if most > 2 else str(rows)
        found[name] = found.get(name, 0.0) + part
    return found


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _shares(shares: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {share:.1%}" for name, share in shares.items()) or "-"
