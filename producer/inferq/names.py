"""What models and lanes may be called, said in words. The patterns themselves are the contract's."""

from __future__ import annotations

import re

from inferq_schemas import FALLBACK_LANE, LANE_PATTERN, MODEL_PATTERN

__all__ = ["lane_problem", "model_problem"]


def model_problem(model: object) -> str | None:
    """What is wrong with a model's name, and the mend; None if nothing is."""
    if isinstance(model, str) and re.fullmatch(MODEL_PATTERN, model):
        return None
    return f"{model!r} is no model name: {_words(64)}, such as 'resnet50'"


def lane_problem(lane: object) -> str | None:
    """What is wrong with a lane's name, and the mend; None if nothing is."""
    if lane == FALLBACK_LANE:
        return f"no lane can be called {lane!r}: that queue is filled by the broker alone; use another name"
    if isinstance(lane, str) and re.fullmatch(LANE_PATTERN, lane):
        return None
    return f"{lane!r} is no lane name: {_words(32)}, such as 'bulk'"


def _words(longest: int) -> str:
    return f"use small letters a-z, digits, - and _, the first a letter or digit, at most {longest} characters"
