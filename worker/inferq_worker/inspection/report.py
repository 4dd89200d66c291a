"""What an inspection found: as text for people, as JSON for programs."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from inferq_worker.columns import aligned
from inferq_worker.inspection.advice import in_bytes, settings

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from inferq_worker.inspection.examine import Inspection
    from inferq_worker.inspection.trial import Timing, Trial
    from inferq_worker.runtime.interface import Feeds
    from inferq_worker.runtime.onnxfile import DeclaredTensor

_INDENT = "  "
_MOST_OPERATORS = 8


def as_text(found: Inspection) -> str:
    """The whole report; the verdict stands first."""
    return "\n\n".join("\n".join(part) for part in _parts(found))


def _parts(found: Inspection) -> Iterator[list[str]]:
    yield [f"{found.model.path}: {verdict(found)}"]
    yield list(_file(found))
    yield ["inputs", *_tensors(found.facts.inputs)]
    yield ["outputs", *_tensors(found.facts.outputs)]
    if batching := list(_batching(found)):
        yield ["batch axis", *(_INDENT + line for line in batching)]
    if found.timings or found.timing_note:
        yield list(_timings(found))
    if found.settings:
        yield [f"suggested {found.model.toml.name}", *(_INDENT + line for line in found.settings)]
    yield ["warnings", *(_INDENT + line for line in found.cautions or ["none"])]


def verdict(found: Inspection) -> str:
    """In one sentence, whether a worker serves the file."""
    if found.problem is None:
        return "not run (--no-run)"
    if not found.problem:
        return "a worker serves it as it stands"
    if found.works is None:
        return f"a worker refuses it: {found.problem}"
    return f"a worker refuses it as it stands, and serves it with the {found.model.toml.name} below"


def _file(found: Inspection) -> Iterator[str]:
    facts, newest = found.facts, found.newest
    yield f"size      {in_bytes(found.file_bytes)}, sha256 {found.sha256}"
    if facts.producer:
        yield f"producer  {facts.producer}"
    loads = (
        f"; ONNX Runtime {newest.onnxruntime} loads IR {newest.ir}, opset {newest.opset} and older" if newest else ""
    )
    opsets = ", ".join(f"{domain} {version}" for domain, version in facts.opsets.items()) or "none"
    yield f"format    IR version {facts.ir_version}, opset {opsets}{loads}"
    if found.model.toml.exists():
        yield f"settings  {found.model.toml}"
    most = sorted(facts.operators.items(), key=lambda item: -item[1])
    names = ", ".join(f"{name} {count}" for name, count in most[:_MOST_OPERATORS])
    more = f", {len(most) - _MOST_OPERATORS} more kinds" if len(most) > _MOST_OPERATORS else ""
    yield f"nodes     {sum(facts.operators.values())}: {names}{more}"
    if found.placement:
        parts = ", ".join(f"{name} {count}" for name, count in found.placement.nodes_by_provider.items())
        yield f"runs on   {found.placement.provider} (nodes after optimisation: {parts or 'none'})"


def _tensors(tensors: Sequence[DeclaredTensor]) -> list[str]:
    if not tensors:
        return [f"{_INDENT}none"]
    lines = [{"name": tensor.name or '""', "dtype": tensor.dtype, "shape": shape(tensor)} for tensor in tensors]
    table = aligned(["name", "dtype", "shape"], lines, left={"name", "dtype", "shape"}, indent=_INDENT)
    return table.splitlines()[1:]


def shape(tensor: DeclaredTensor) -> str:
    """Its axes in brackets: `?` is a dynamic one without a name."""
    if tensor.shape is None:
        return "unknown"
    return f"[{', '.join('?' if size is None else str(size) for size in tensor.shape)}]"


def _batching(found: Inspection) -> Iterator[str]:
    for trial in found.trials:
        if trial.problem and found.works:
            yield f"refused{_so(trial)}: {trial.problem}"
    if found.works:
        yield _served(found.works)
    probed = next((trial for trial in reversed(found.trials) if trial.evidence), None)
    if probed:
        yield from _evidence(probed)


def _so(trial: Trial) -> str:
    lines = settings(trial.model, None)
    return f" ({'; '.join(lines)})" if lines else ""


def _served(trial: Trial) -> str:
    info = trial.info
    if info is None or not info.batchable:
        return 'with batch = "single" every job runs alone, whatever its rows: nothing is batched'
    if info.fixed_rows == 1:
        return "fixed at 1 row: every row runs alone; export the model with a dynamic axis 0 to batch"
    if info.fixed_rows:
        return f"fixed at {info.fixed_rows} rows: smaller batches are padded by repeating the last row"
    if info.max_rows == 1:
        return "with max_rows = 1 rows never meet, and were not compared"
    if trial.model.batch == "trust":
        mixed = any(not found.agrees for found in trial.evidence)
        return 'batch = "trust" takes it without proof' + ("; THE ROWS ARE NOT INDEPENDENT" if mixed else "")
    return "rows do not depend on each other: they can be batched"


def _evidence(trial: Trial) -> list[str]:
    what = f"{trial.probed_rows} made-up rows in one batch{_so(trial)}, against"
    lines = [
        {
            what: found.what,
            "output": found.output,
            "difference": f"{found.difference:.2g}",
            "tolerance": f"{found.tolerance:g}",
            "": "" if found.agrees else "differs",
        }
        for found in trial.evidence
    ]
    return aligned(list(lines[0]), lines, left={what, "output", ""}).splitlines()


def _timings(found: Inspection) -> Iterator[str]:
    provider = found.placement.provider if found.placement else ""
    yield f"run times on {provider}{_with_sizes(found)}"
    if found.timings:
        yield from aligned(
            ["rows", "p50 ms", "p95 ms", "rows/s", "runs"], [_timing(one) for one in found.timings], indent=_INDENT
        ).splitlines()
    if found.timing_note:
        yield _INDENT + found.timing_note
    if len(found.timings) > 1 and found.buckets:
        yield _INDENT + _worth(found.buckets, found.timings[-1].rows)


def _with_sizes(found: Inspection) -> str:
    """The sizes that were made up for dynamic inner axes: run times are those of such inputs."""
    trial = found.works
    if trial is None or trial.info is None or trial.sample is None:
        return ""
    specs = [spec for spec in trial.info.inputs if None in spec.shape[1:]]
    shapes = [f"{spec.name} [rows, {', '.join(map(str, trial.sample[spec.name].shape[1:]))}]" for spec in specs]
    return f" with made-up sizes (--dim): {'; '.join(shapes)}" if shapes else ""


def _worth(buckets: Sequence[int], most: int) -> str:
    if len(buckets) == 1:
        return "buckets: 1; larger batches make jobs wait longer and bring no more rows a second here"
    end = "still rises there (--max-rows)" if buckets[-1] == most else "rises no more beyond"
    return f"buckets: {', '.join(map(str, buckets))}; throughput {end}"


def _timing(one: Timing) -> dict[str, str]:
    return {
        "rows": str(one.rows),
        "p50 ms": _ms(one.p50_s),
        "p95 ms": _ms(one.p95_s),
        "rows/s": f"{one.rows_per_s:,.0f}",
        "runs": str(one.runs),
    }


def _ms(seconds: float) -> str:
    """Three digits that tell, without an exponent."""
    ms = 1000 * seconds
    decimals = next((count for count, least in enumerate((100.0, 10.0, 1.0, 0.1)) if ms >= least), 4)
    return f"{ms:,.{decimals}f}"


def as_json(found: Inspection) -> dict[str, Any]:
    """The same as JSON values. `serves` is null if the file was not run."""
    facts, placement = found.facts, found.placement
    return {
        "file": str(found.model.path),
        "bytes": found.file_bytes,
        "sha256": found.sha256,
        "verdict": verdict(found),
        "serves": None if found.problem is None else not found.problem,
        "problem": found.problem,
        "producer": facts.producer,
        "ir_version": facts.ir_version,
        "opsets": dict(facts.opsets),
        "onnxruntime": None
        if found.newest is None
        else {"version": found.newest.onnxruntime, "ir_version": found.newest.ir, "opset": found.newest.opset},
        "operators": dict(facts.operators),
        "external_data": list(facts.external_data),
        "ep_context_nodes": facts.compiled_nodes,
        "inputs": [_tensor(tensor) for tensor in facts.inputs],
        "outputs": [_tensor(tensor) for tensor in facts.outputs],
        "provider": placement.provider if placement else None,
        "provider_warning": placement.warning if placement else "",
        "nodes_by_provider": dict(placement.nodes_by_provider) if placement else {},
        "trials": [_trial(trial) for trial in found.trials],
        "timings": [
            {"rows": one.rows, "runs": one.runs, "p50_ms": 1000 * one.p50_s, "p95_ms": 1000 * one.p95_s}
            | {"rows_per_s": one.rows_per_s}
            for one in found.timings
        ],
        "sample_shapes": {name: list(array.shape[1:]) for name, array in (_sample(found) or {}).items()},
        "timing_note": found.timing_note,
        "buckets": list(found.buckets),
        "suggested_toml": list(found.settings),
        "warnings": list(found.cautions),
    }


def _sample(found: Inspection) -> Feeds | None:
    return found.works.sample if found.works else None


def _tensor(tensor: DeclaredTensor) -> dict[str, Any]:
    axes = None if tensor.shape is None else list(tensor.shape)
    return {"name": tensor.name, "dtype": tensor.dtype, "shape": axes, "tensor": tensor.is_tensor}


def _trial(trial: Trial) -> dict[str, Any]:
    return {
        "batch": trial.model.batch,
        "shared_inputs": sorted(trial.model.shared_inputs),
        "problem": trial.problem,
        "fixed_rows": trial.info.fixed_rows if trial.info else None,
        "probed_rows": trial.probed_rows,
        "evidence": [
            {
                "compared_with": found.what,
                "output": found.output,
                # JSON has no infinity: shapes, or where the NaNs are, differ.
                "difference": found.difference if math.isfinite(found.difference) else None,
                "tolerance": found.tolerance,
                "agrees": found.agrees,
            }
            for found in trial.evidence
        ],
    }
