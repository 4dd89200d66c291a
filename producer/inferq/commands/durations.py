"""Lengths of time as people type and read them at a shell: `90`, `90s`, `10m`, `2h`, `1d`."""

from __future__ import annotations

import argparse
import re
from typing import Final

__all__ = ["length_of_time", "short_time"]

_UNITS_S: Final = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_FORM: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)([smhd]?)")
_LONGEST_S: Final = 3650 * 86_400.0


def length_of_time(text: str) -> float:
    """Seconds of a length of time, > 0; a type for argparse."""
    match = _FORM.fullmatch(text)
    seconds = float(match[1]) * _UNITS_S[match[2]] if match else 0.0
    if not 0 < seconds <= _LONGEST_S:
        raise argparse.ArgumentTypeError(f"{text!r} is no length of time above 0, such as 90s, 10m, 2h or 1d")
    return seconds


def short_time(seconds: float) -> str:
    """A length of time in its largest fitting unit, rounded down: `45s`, `3m`, `2h`, `5d`."""
    for unit in ("d", "h", "m"):
        if seconds >= _UNITS_S[unit]:
            return f"{int(seconds // _UNITS_S[unit])}{unit}"
    return f"{int(seconds)}s"
