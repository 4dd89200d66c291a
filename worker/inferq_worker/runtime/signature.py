"""Decides from declared inputs and outputs how a model's rows can be batched. Pure; what it admits is then probed."""

import re
from collections.abc import Sequence
from typing import Final

from inferq_schemas.job import NAME_PATTERN
from inferq_schemas.limits import DEFAULT_LIMITS
from inferq_worker.models.repository import ModelFile
from inferq_worker.runtime.interface import ModelRefused, TensorSpec

_NAME: Final = re.compile(NAME_PATTERN)


def fixed_rows(model: ModelFile, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int | None:
    """The batch size that the model insists on, or None when axis 0 is dynamic.

    Raises:
        ModelRefused: more inputs or outputs, or other names, than a job or a result can carry; shared inputs that are
            not there or not scalars, scalars that are not declared shared, inputs that disagree about axis 0 or have
            their rows elsewhere, no batched input at all, or an output whose axis 0 is something else.
    """
    _check_contract(model, "input", inputs)
    _check_contract(model, "output", outputs)
    _check_shared(model, inputs)
    sizes = {spec.shape[0] for spec in inputs if spec.name not in model.shared_inputs}
    fixed = sorted(size for size in sizes if size is not None)
    if not sizes:
        raise ModelRefused(f"{model.name}: no input has a batch axis; export the model with a first axis for rows")
    _check_axis(model, inputs)
    if len(fixed) > 1 or (fixed and fixed[0] < 1):
        raise ModelRefused(
            f"{model.name}: its inputs have first axes of {fixed}; rows must lie on axis 0 of each, all of one size"
        )
    rows = fixed[0] if fixed else None
    if model.batch == "probe":
        _check_outputs(model, outputs, rows)
    return rows


def _check_contract(model: ModelFile, what: str, specs: Sequence[TensorSpec]) -> None:
    """What no job and no result could ever name would be served to nobody."""
    if len(specs) > DEFAULT_LIMITS.inputs:
        raise ModelRefused(
            f"{model.name}: {len(specs)} {what}s; a message carries at most {DEFAULT_LIMITS.inputs}: join some of them"
        )
    for spec in specs:
        if not _NAME.fullmatch(spec.name):
            raise ModelRefused(
                f"{model.name}: the {what} name {spec.name[:80]!r} cannot travel: names have 1 to 256 characters and "
                "no control characters; rename it in the model"
            )


def _check_shared(model: ModelFile, inputs: Sequence[TensorSpec]) -> None:
    ranks = {spec.name: len(spec.shape) for spec in inputs}
    for name in sorted(model.shared_inputs):
        if name not in ranks:
            raise ModelRefused(f"{model.name}: {model.toml} shares {name!r}, but the inputs are {', '.join(ranks)}")
        if ranks[name] > 0:
            raise ModelRefused(f"{model.name}: {model.toml} shares {name!r}, which is no scalar; take it off the list")
    for name, rank in ranks.items():
        if rank == 0 and name not in model.shared_inputs:
            raise ModelRefused(
                f"{model.name}: input {name!r} is a scalar (or has no declared shape), so it has no rows; "
                f'add shared_inputs = ["{name}"] to {model.toml}, or export it with a first axis for rows'
            )


def _check_axis(model: ModelFile, inputs: Sequence[TensorSpec]) -> None:
    """Refuse a state as recurrent nets have it: `(layers, rows, width)`, beside inputs of `(rows, ...)`."""
    batched = [spec for spec in inputs if spec.shape]
    if all(spec.shape[0] is not None for spec in batched):
        return
    for spec in batched:
        if spec.shape[0] is not None and None in spec.shape[1:]:
            raise ModelRefused(
                f"{model.name}: input {spec.name!r} is {_readable(spec)}: its first axis is always {spec.shape[0]} and "
                "a later one is open, so its rows seem to lie there (a recurrent state does that); "
                "export the model with rows on the first axis of every input and output"
            )


def _readable(spec: TensorSpec) -> str:
    return f"[{', '.join('any' if size is None else str(size) for size in spec.shape)}]"


def _check_outputs(model: ModelFile, outputs: Sequence[TensorSpec], rows: int | None) -> None:
    for spec in outputs:
        # No shape at all may also mean that the exporter wrote none: the probe will tell.
        declared = spec.shape[0] if spec.shape else None
        if declared is not None and declared != rows:
            raise ModelRefused(
                f"{model.name}: output {spec.name!r} has a first axis of {declared} whatever the number of rows, so "
                f'its answers cannot be shared out; set batch = "single" in {model.toml} to run each job alone'
            )
