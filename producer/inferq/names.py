"""What models and lanes may be called, said in words. The patterns themselves are the contract's."""

from __future__ import annotations

import re

from inferq_schemas import FALLBACK_LANE, LANE_PATTERN, MODEL_PATTERN

__all__ = ["name_problem"]


def name_problem(model: object, *lanes: object) -> str | None:
    """What is wrong with a model's name or its lanes' names, and the mend; None if nothing is."""
    if not isinstance(model, str) or re.fullmatch(MODEL_PATTERN, model) is None:
        return f"{model!r} is no model name: {_words(64)}, such as 'resnet50'"
    for lane in lanes:
        if lane == FALLBACK_LANE:
            return f"no lane can be called {lane!r}: that queue is filled by the broker alone; use another name"
        if not isinstance(lane, str) or re.fullmatch(LANE_PATTERN, lane) is None:
            return f"{lane!r} is no lane name: {_words(32)}, such as 'bulk'"
    return None


def _words(longest: int) -> str:
    return f"use small letters a-z, digits, - and _, the first a letter or digit, at most {longest} characters"
