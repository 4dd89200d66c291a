"""Goodput by load as an SVG drawing, one line for each case, under the bound of capacity over load."""

from __future__ import annotations

from typing import TYPE_CHECKING
from xml.sax.saxutils import escape  # nosec B406  # it writes XML and reads none

if TYPE_CHECKING:
    from collections.abc import Sequence

    from inferq_worker.whatif.report import Outcome

_WIDTH, _HEIGHT = 760, 440
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 24, 40, 56
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Okabe and Ito's, which colour-blind people tell apart."""
_BOUND_POINTS = 60
_MOST_RING = 4.5
_STYLE = "font-family='sans-serif' font-size='12' fill='#333'"
_DASHES = "stroke-dasharray='5 4'"
_TITLE_CHARS = 84
"""As many fit in the width, in bold; the whole title is what a reader is told that points at the drawing."""


def svg(outcomes: Sequence[Outcome], title: str) -> str:
    """Draw the outcomes; the bound is that of the case with the most capacity."""
    most_per_s = max(one.offered_per_s for one in outcomes) * 1.05
    capacity = max((one.bound * one.offered_per_s for one in outcomes if one.bound < 1), default=most_per_s)
    steps = [most_per_s * step / _BOUND_POINTS for step in range(_BOUND_POINTS + 1)]
    rates = sorted({*steps, min(capacity, most_per_s)})
    bound = [(rate, min(1.0, capacity / rate) if rate else 1.0) for rate in rates]
    cases = list(dict.fromkeys(one.case for one in outcomes))
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {_WIDTH} {_HEIGHT}' role='img'>",
        f"<title>{escape(title)}</title>",
        f"<rect width='{_WIDTH}' height='{_HEIGHT}' fill='white'/>",
        f"<text x='{_LEFT}' y='22' {_STYLE} font-weight='bold'>{escape(_shortened(title))}</text>",
        *_axes(most_per_s),
        _line(bound, most_per_s, "#888", _DASHES),
        *_legend(["bound", *cases]),
    ]
    for number, case in enumerate(cases):
        points = sorted((one.offered_per_s, one.goodput) for one in outcomes if one.case == case)
        colour = _COLOURS[number % len(_COLOURS)]
        parts.append(_line(points, most_per_s, colour, ""))
        # The first cases get the largest dots, so that one that a later case covers shows as a ring.
        radius = 3 + min(1.5 * (len(cases) - 1 - number), _MOST_RING)
        parts += [
            f"<circle cx='{_x(rate, most_per_s):.1f}' cy='{_y(share):.1f}' r='{radius:g}' fill='{colour}'/>"
            for rate, share in points
        ]
    return "\n".join([*parts, "</svg>", ""])


def _shortened(title: str) -> str:
    return title if len(title) <= _TITLE_CHARS else f"{title[: _TITLE_CHARS - 1]}\N{HORIZONTAL ELLIPSIS}"


def _x(rate_per_s: float, most_per_s: float) -> float:
    return _LEFT + (_WIDTH - _LEFT - _RIGHT) * rate_per_s / most_per_s


def _y(share: float) -> float:
    return _TOP + (_HEIGHT - _TOP - _BOTTOM) * (1 - share)


def _line(points: Sequence[tuple[float, float]], most_per_s: float, colour: str, more: str) -> str:
    path = " ".join(f"{_x(rate, most_per_s):.1f},{_y(share):.1f}" for rate, share in points)
    return f"<polyline points='{path}' fill='none' stroke='{colour}' stroke-width='2' {more}/>"


def _axes(most_per_s: float) -> list[str]:
    parts = []
    for percent in range(0, 101, 20):
        y = _y(percent / 100)
        parts.append(f"<line x1='{_LEFT}' y1='{y:.1f}' x2='{_WIDTH - _RIGHT}' y2='{y:.1f}' stroke='#ddd'/>")
        parts.append(f"<text x='{_LEFT - 8}' y='{y + 4:.1f}' text-anchor='end' {_STYLE}>{percent} %</text>")
    step = _round_step(most_per_s / 6)
    for number in range(int(most_per_s / step) + 1):
        x, y = _x(number * step, most_per_s), _y(0)
        parts.append(f"<line x1='{x:.1f}' y1='{y:.1f}' x2='{x:.1f}' y2='{y + 5:.1f}' stroke='#333'/>")
        parts.append(f"<text x='{x:.1f}' y='{y + 19:.1f}' text-anchor='middle' {_STYLE}>{number * step:,g}</text>")
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    parts.append(
        f"<text x='{middle}' y='{_HEIGHT - 12}' text-anchor='middle' {_STYLE}>"
        "jobs offered a second; share answered by their deadline</text>"
    )
    return parts


def _round_step(least: float) -> float:
    """1, 2 or 5 times a power of ten."""
    power = 10.0 ** len(str(int(least))) / 10 if least >= 1 else 0.1
    return next((power * factor for factor in (1, 2, 5, 10) if power * factor >= least), power * 10)


def _legend(names: Sequence[str]) -> list[str]:
    top, width = _y(0) - 16 * len(names) - 12, 40 + 8 * max(map(len, names))
    parts = [
        f"<rect x='{_LEFT + 8}' y='{top:.1f}' width='{width}' height='{16 * len(names)}' fill='white'/>",
    ]
    for number, name in enumerate(names):
        colour = _COLOURS[(number - 1) % len(_COLOURS)] if number else "#888"
        y = _y(0) - 16 * (len(names) - number)
        parts.append(
            f"<line x1='{_LEFT + 12}' y1='{y - 4:.1f}' x2='{_LEFT + 30}' y2='{y - 4:.1f}' "
            f"stroke='{colour}' stroke-width='2' {'' if number else _DASHES}/>"
        )
        parts.append(f"<text x='{_LEFT + 36}' y='{y:.1f}' {_STYLE}>{escape(name)}</text>")
    return parts
