"""Refuses answers that hold NaN or infinity, for models that ask for it: a row at fault costs only its own item."""

from collections.abc import Mapping, Sequence

import numpy as np

from inferq_worker.runtime.interface import Array, Feeds, RowError, TensorSpec

_BFLOAT16_EXPONENT = 0x7F80
"""All ones in NaN and in both infinities."""


def refuse_nonfinite(
    outputs: Feeds, answers: Sequence[Feeds], specs: Sequence[TensorSpec]
) -> Sequence[Feeds | RowError]:
    """Replace the answers that hold NaN or infinity by an error that names the output.

    Args:
        outputs: of the whole run; looked at once, so that good runs cost little.
        answers: views into them, one per item.
        specs: of the outputs; float types are checked, others cannot hold either.
    """
    dtypes = {spec.name: spec.dtype for spec in specs}
    suspects = [name for name, array in outputs.items() if not _finite(array, dtypes.get(name)).all()]
    return [_judge(answer, suspects, dtypes) for answer in answers] if suspects else answers


def _judge(answer: Feeds, suspects: Sequence[str], dtypes: Mapping[str, str]) -> Feeds | RowError:
    for name in suspects:
        finite = _finite(answer[name], dtypes.get(name))
        if not finite.all():
            bad = finite.size - np.count_nonzero(finite)
            return RowError(
                "inference_failed", f"output {name!r} holds NaN or infinity in {bad} of {finite.size} values"
            )
    return answer


def _finite(array: Array, dtype: str | None) -> Array:
    if dtype == "bfloat16":  # as uint16: NumPy has no such type
        return np.asarray((array & _BFLOAT16_EXPONENT) != _BFLOAT16_EXPONENT)
    return np.asarray(np.isfinite(array)) if array.dtype.kind == "f" else np.ones(1, np.bool_)
