"""Writes an answer as one JSON object. Lossless: what JSON numbers cannot say goes as base64."""

from __future__ import annotations

import base64
import dataclasses
import json
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from inferq.answers import Answer

__all__ = ["answer_line", "answer_map"]


def answer_line(answer: Answer, *, index: int | None = None) -> bytes:
    """The object of `answer_map` as one line with its end."""
    return json.dumps(answer_map(answer, index=index), separators=(",", ":"), allow_nan=False).encode() + b"\n"


def answer_map(answer: Answer, *, index: int | None = None) -> dict[str, Any]:
    """The answer in the contract's words, without what holds its default; outputs as nested lists.

    Args:
        answer: good or failed.
        index: number of the record it answers; None = none.
    """
    result = answer.result
    fields: dict[str, Any] = {} if index is None else {"index": index}
    fields |= {"id": answer.id, "status": "ok" if answer.ok else "error"}
    if answer.error is not None:
        error = result.error
        message = str(answer.error) if error is None else error.message
        fields["error"] = {"code": answer.error.code, "message": message}
    else:
        fields["outputs"] = {name: _value(array, result.outputs[name].dtype) for name, array in answer.outputs.items()}
    fields |= {name: True for name in ("late", "fallback") if getattr(result, name)}
    if result.timing_ms is not None:
        timing = dataclasses.asdict(result.timing_ms)
        fields["timing_ms"] = {name: round(value_ms, 3) for name, value_ms in timing.items()}
    parts = {"served_by": result.served_by, "batch": result.batch}
    return fields | {name: dataclasses.asdict(part) for name, part in parts.items() if part is not None}


def _value(array: np.ndarray[Any, Any], dtype: str) -> Any:
    finite = array.dtype.kind != "f" or bool(np.isfinite(array).all())
    if finite and dtype != "bfloat16":
        return array.tolist()
    data = np.ascontiguousarray(array).tobytes()
    return {"dtype": dtype, "shape": list(array.shape), "data_base64": base64.b64encode(data).decode()}
