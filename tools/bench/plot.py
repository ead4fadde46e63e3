"""A plot of decode speed against context, as an SVG that reads on light and dark pages; no library."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

_WIDTH, _HEIGHT = 840, 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 160, 40, 44
# Readable on white and on black alike.
_COLOURS = ("#d9480f", "#868e96", "#1c7ed6", "#37b24d", "#ae3ec9", "#f08c00")
_STYLE = """
text { font: 13px sans-serif; fill: #343a40 }
.grid { stroke: #adb5bd; stroke-opacity: 0.5; stroke-width: 1 }
@media (prefers-color-scheme: dark) { text { fill: #dee2e6 } }
"""

Points = Sequence[tuple[int, float]]
"""(context in tokens, tokens a second)"""


def decode_plot(lines: Mapping[str, Points], title: str) -> str:
    """An SVG document with a line for each contestant; contexts are spread by their logarithm."""
    contexts = sorted({context for points in lines.values() for context, _ in points})
    top = _round_up(max((rate for points in lines.values() for _, rate in points), default=1.0))
    first, last = math.log2(contexts[0]), math.log2(contexts[-1])

    def x(context: int) -> float:
        share = (math.log2(context) - first) / (last - first) if last > first else 0.5
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    def y(rate: float) -> float:
        return _HEIGHT - _BOTTOM - rate / top * (_HEIGHT - _TOP - _BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">',
        f"<title>{escape(title)}</title>",
        f"<style>{_STYLE}</style>",
        _text(_LEFT, 20, f"{title}: tokens a second at each context", "start"),
    ]
    for step in range(5):
        rate = top * step / 4
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(rate):.1f}" y2="{y(rate):.1f}"/>')
        parts.append(_text(_LEFT - 8, y(rate) + 4, f"{rate:g}", "end"))
    parts += [_text(x(context), _HEIGHT - _BOTTOM + 20, str(context), "middle") for context in contexts]
    for i, (name, points) in enumerate(lines.items()):
        parts += _line(name, [(x(context), y(rate)) for context, rate in points], _COLOURS[i % len(_COLOURS)], i)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _line(name: str, places: Sequence[tuple[float, float]], colour: str, index: int) -> list[str]:
    """A contestant's line, its points, and its name in the legend beside the plot."""
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    legend = _TOP + 12 + 18 * index
    return [
        f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>',
        *(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in places),
        f'<rect x="{_WIDTH - _RIGHT + 16}" y="{legend - 9}" width="12" height="4" fill="{colour}"/>',
        _text(_WIDTH - _RIGHT + 34, legend, name, "start"),
    ]


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _round_up(value: float) -> float:
    """The next number of one or two digits that four divides evenly enough to be read."""
    unit = 10.0 ** math.floor(math.log10(max(value, 1e-9)))
    return next(step * unit for step in (1, 1.2, 1.6, 2, 2.4, 3.2, 4, 6, 8, 10) if step * unit >= value)
