"""Gives dynamic axes the sizes that a person named. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from inferq.commands import CommandError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from inferq_worker.runtime.interface import TensorSpec
    from inferq_worker.runtime.onnxfile import DeclaredTensor


def sized(
    specs: Sequence[TensorSpec], declared: Sequence[DeclaredTensor], sizes: Mapping[str, int]
) -> tuple[TensorSpec, ...]:
    """Fix dynamic inner axes; axis 0 is left to the number of rows.

    Args:
        specs: inputs as the loaded graph has them.
        declared: the same as the file has them, with the names of their axes.
        sizes: by the name of an axis, or as `INPUT:AXIS` with the axis counted from 0.

    Raises:
        CommandError: no input has such an axis.
    """
    names = {tensor.name: tensor.shape or () for tensor in declared}
    labels = {spec.name: _labels(spec, names.get(spec.name, ())) for spec in specs}
    known = {label for axes in labels.values() for axis in axes.values() for label in axis}
    if unknown := sorted(sizes.keys() - known):
        listed = ", ".join(sorted(known)) or "none"
        raise CommandError(f"--dim {unknown[0]}: no input has such a dynamic inner axis; there are: {listed}")
    return tuple(replace(spec, shape=_filled(spec, labels[spec.name], sizes)) for spec in specs)


def _labels(spec: TensorSpec, names: Sequence[int | str | None]) -> dict[int, tuple[str, ...]]:
    """What each dynamic inner axis may be called."""
    found = {}
    for axis, size in enumerate(spec.shape):
        if axis > 0 and size is None:
            name = names[axis] if axis < len(names) else None
            found[axis] = (f"{spec.name}:{axis}", *([name] if isinstance(name, str) else []))
    return found


def _filled(spec: TensorSpec, labels: Mapping[int, Sequence[str]], sizes: Mapping[str, int]) -> tuple[int | None, ...]:
    shape = list(spec.shape)
    for axis, called in labels.items():
        shape[axis] = next((sizes[label] for label in called if label in sizes), shape[axis])
    return tuple(shape)
