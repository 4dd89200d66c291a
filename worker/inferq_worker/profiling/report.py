"""What a profile found: as tables for people, as JSON for programs."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from inferq_worker.columns import aligned

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import TypeAlias

    from inferq_worker.profiling.measure import Measured
    from inferq_worker.profiling.trace import Cost, Profile

    _Line: TypeAlias = Callable[[Cost, int], dict[str, str]]

_NAME_CHARS = 60
_HOST_ONLY = (
    "kernels on a GPU go on after their launch has returned: these are times on the host; for those on the device, use "
    "NVIDIA Nsight Systems"
)


def as_text(measured: Measured, *, top: int) -> str:
    """Head line, operators, the `top` dearest nodes, and where the trace is."""
    return "\n\n".join("\n".join(part) for part in _parts(measured, top))


def _parts(measured: Measured, top: int) -> Iterator[list[str]]:
    profile, placement = measured.profile, measured.placement
    yield list(_head(measured))
    yield _table(profile.operators, profile, _operator)
    yield [f"dearest nodes of {len(profile.nodes)}", *_table(profile.nodes[:top], profile, _node)]
    notes = [placement.warning] if placement.warning else []
    if placement.provider != "CPUExecutionProvider":
        notes.append(_HOST_ONLY)
    yield [*notes, f"trace: {measured.trace} (open it in https://ui.perfetto.dev or chrome://tracing)"]


def _head(measured: Measured) -> Iterator[str]:
    profile = measured.profile
    shapes = ", ".join(f"{name} {list(shape)}" for name, shape in measured.shapes.items())
    yield f"{profile.runs} runs on {measured.placement.provider} with {shapes}"
    inside = profile.kernels_s / profile.run_s if profile.run_s else 0.0
    yield (
        f"{_ms(profile.run_s / profile.runs)} ms a run, {_ms(profile.kernels_s / profile.runs)} ms of it in operators "
        f"({inside:.0%}), under the profiler"
    )


def _table(costs: Sequence[Cost], profile: Profile, line: _Line) -> list[str]:
    lines = [line(cost, profile.runs) for cost in costs]
    if not lines:
        return ["nothing ran"]
    return aligned(list(lines[0]), lines, left={"operator", "node", "provider", "outputs"}).splitlines()


def _operator(cost: Cost, runs: int) -> dict[str, str]:
    return {
        "operator": cost.name,
        "nodes": str(cost.nodes),
        "count": str(cost.executions),
        "total ms": _ms(cost.own_s),
        "ms/run": _ms(cost.own_s / runs),
        "share": f"{cost.share:.1%}",
        "provider": cost.provider.removesuffix("ExecutionProvider"),
    }


def _node(cost: Cost, runs: int) -> dict[str, str]:
    return {
        "node": _shortened(cost.name),
        "operator": cost.operator,
        "ms/run": _ms(cost.own_s / runs),
        "share": f"{cost.share:.1%}",
        "provider": cost.provider.removesuffix("ExecutionProvider"),
        "outputs": cost.shapes,
    }


def _shortened(name: str) -> str:
    """Exporters put the whole path of the module in front; its end tells more."""
    return name if len(name) <= _NAME_CHARS else f"...{name[3 - _NAME_CHARS :]}"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3f}"


def as_json(measured: Measured) -> dict[str, Any]:
    """All figures, those of every node among them, in milliseconds."""
    profile = measured.profile
    return {
        "runs": profile.runs,
        "run_ms": 1000 * profile.run_s / profile.runs,
        "operators_ms": 1000 * profile.kernels_s / profile.runs,
        "provider": measured.placement.provider,
        "provider_warning": measured.placement.warning,
        "shapes": {name: list(shape) for name, shape in measured.shapes.items()},
        "trace": str(measured.trace),
        "operators": [_cost(cost) for cost in profile.operators],
        "nodes": [_cost(cost) for cost in profile.nodes],
    }


def _cost(cost: Cost) -> dict[str, Any]:
    values = asdict(cost)
    own_s = values.pop("own_s")
    return {**values, "own_ms": 1000 * own_s}
