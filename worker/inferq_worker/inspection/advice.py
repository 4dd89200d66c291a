"""What the findings mean for the operator: sizes worth a batch, settings, cautions. Pure: facts in, words out."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from inferq_worker.inspection.trial import Timing
    from inferq_worker.models.repository import ModelFile
    from inferq_worker.runtime.onnxfile import DeclaredTensor, GraphFacts

GAIN = 1.05
"""What counts as a rise of throughput: a larger batch must be worth its longer wait, and runs vary by a few percent."""
_LARGE_BYTES = 2**30
_OLDEST_OPSET = 7  # the oldest that ONNX Runtime guarantees to run
# Domains that ONNX Runtime itself implements.
_KNOWN_DOMAINS = frozenset({"ai.onnx.ml", "ai.onnx.preview.training", "ai.onnx.training"})
_KNOWN_PREFIXES = ("com.microsoft", "com.ms.internal")
_LOOPS = ("Loop", "Scan")


def buckets(timings: Sequence[Timing]) -> list[int]:
    """The sizes at which throughput still rises, ascending; the smallest is always one of them."""
    rising: list[int] = []
    best_per_s = 0.0
    for timing in timings:
        if timing.rows_per_s >= GAIN * best_per_s:
            rising.append(timing.rows)
            best_per_s = timing.rows_per_s
    return rising


def settings(model: ModelFile, max_rows: int | None) -> list[str]:
    """The lines of a `model.toml` with which the model can be served; `max_rows` where it was measured."""
    lines = [] if max_rows is None else [f"max_rows = {max_rows}"]
    if model.batch != "probe":
        lines.append(f'batch = "{model.batch}"')
    if model.shared_inputs:
        names = ", ".join(f'"{name}"' for name in sorted(model.shared_inputs))
        lines.append(f"shared_inputs = [{names}]")
    return lines


def misplaced_rows(inputs: Sequence[DeclaredTensor]) -> str:
    """The input whose rows do not lie on axis 0, if the names of the axes tell: a recurrent state, mostly."""
    batch_axes = {
        tensor.shape[0]: tensor.name for tensor in inputs if tensor.shape and isinstance(tensor.shape[0], str)
    }
    for tensor in inputs:
        for axis, name in enumerate(tensor.shape or ()):
            if axis > 0 and isinstance(name, str) and name in batch_axes and (tensor.shape or ())[0] != name:
                return (
                    f"input {tensor.name!r} has its rows on axis {axis} ({name!r}, which is axis 0 of "
                    f"{batch_axes[name]!r}); export the model with rows on axis 0 of all inputs and outputs"
                )
    return ""


def cautions(path: Path, facts: GraphFacts) -> Iterator[str]:
    """What an operator should know of a file before it is served, a line each."""
    if facts.compiled_nodes:
        yield f"{facts.compiled_nodes} EPContext node(s): native code, compiled for one device, that nobody can inspect"
    yield from _operators(facts)
    yield from _weights(path, facts)
    yield from _tensors("input", facts.inputs)
    yield from _tensors("output", facts.outputs)
    yield from _first_axes(facts.inputs)
    opset = facts.opsets.get("ai.onnx", _OLDEST_OPSET)
    if opset < _OLDEST_OPSET:
        yield f"opset {opset} is older than {_OLDEST_OPSET}, the oldest that ONNX Runtime promises to run"


def _first_axes(inputs: Sequence[DeclaredTensor]) -> Iterator[str]:
    sizes = {tensor.name: tensor.shape[0] for tensor in inputs if tensor.shape}
    fixed = [(name, size) for name, size in sizes.items() if isinstance(size, int)]
    dynamic = [name for name, size in sizes.items() if not isinstance(size, int)]
    if fixed and dynamic:
        name, size = fixed[0]
        yield (
            f"axis 0 of {', '.join(map(repr, dynamic))} is dynamic, that of {name!r} is {size}, so every run has "
            f"exactly {size} row(s): one of them is not the axis of the rows, or should be dynamic too"
        )


def _operators(facts: GraphFacts) -> Iterator[str]:
    strange: dict[str, list[str]] = {}
    for operator in facts.operators.keys() - facts.functions:
        domain, _, name = operator.rpartition(":")
        if domain and domain not in _KNOWN_DOMAINS and not domain.startswith(_KNOWN_PREFIXES):
            strange.setdefault(domain, []).append(name)
    for domain, names in sorted(strange.items()):
        yield f"custom operators of the domain {domain!r} ({', '.join(sorted(names))}): ONNX Runtime has none of them"
    if loops := [f"{name} ({facts.operators[name]})" for name in _LOOPS if name in facts.operators]:
        yield f"{' and '.join(loops)}: run times may depend on the values, so those measured here may not hold"


def _weights(path: Path, facts: GraphFacts) -> Iterator[str]:
    folder = path.parent.resolve()
    size = path.stat().st_size
    for name in facts.external_data:
        file = (folder / name).resolve()
        if not file.is_relative_to(folder):
            yield f"weights in {name!r}, outside the model's folder: refused for safety"
        elif not file.is_file():
            yield f"weights in {name!r}, which is not there"
        else:
            size += file.stat().st_size
            yield f"weights in {name!r} ({in_bytes(file.stat().st_size)}): goes where the .onnx file goes"
    if size > _LARGE_BYTES:
        yield f"{in_bytes(size)} to load: start-up takes long, and each worker needs that much memory, or device memory"


def _tensors(what: str, tensors: Sequence[DeclaredTensor]) -> Iterator[str]:
    for tensor in tensors:
        label = f"{what} {tensor.name!r}"
        if not tensor.name:
            yield f"an {what} has no name, so no message can carry it"
        if not tensor.is_tensor:
            yield f"{label} is a {tensor.dtype}: no message carries it (scikit-learn: options={{'zipmap': False}})"
        elif tensor.dtype == "string":
            yield f"{label} is text, which is copied and runs on the CPU whatever the provider"
        if tensor.is_tensor and tensor.shape is None:
            yield f"{label} declares no shape"
        inner = [
            str(size or f"axis {axis}")
            for axis, size in enumerate((tensor.shape or ())[1:], 1)
            if not isinstance(size, int)
        ]
        if what == "input" and inner:
            yield f"{label} has dynamic inner axes ({', '.join(inner)}): only jobs of equal sizes share a batch"


def in_bytes(size: int) -> str:
    """A size for people, in binary units."""
    value = float(size)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"
