"""Bar charts as SVG, readable on a light and on a dark page."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

_WIDTH, _BAR, _GAP, _RIGHT, _TOP = 860, 18, 10, 90, 52
_CHARACTER = 6.6  # mean width of a character, in units of the picture
_BLUE, _RED, _INK, _PALE = "#2f81f7", "#cf222e", "#1f2328", "#57606a"


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar: its label, its length, and the text at its end. `marked` bars are below their aim."""

    label: str
    value: float
    text: str
    marked: bool = False


def bars(title: str, axis: str, found: Sequence[Bar]) -> str:
    """Draw horizontal bars on a logarithmic scale from 1, the value at which both sides are equal.

    A bar below 1 grows to the left of that line. `found` must not be empty, and every value is above 0.
    """
    left = min(500, 20 + int(_CHARACTER * max(len(bar.label) for bar in found)))
    least = min(0.0, *(math.log10(bar.value) for bar in found))
    most = max(0.3, *(math.log10(bar.value) for bar in found))
    scale = (_WIDTH - left - _RIGHT) / (most - least)
    height = _TOP + len(found) * (_BAR + _GAP) + 12
    one = left - least * scale
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" '
        f'height="{height}" font-family="system-ui, sans-serif" font-size="13" role="img">',
        f"<title>{html.escape(title)}</title>",
        f'<rect width="{_WIDTH}" height="{height}" rx="8" fill="#ffffff"/>',
        f'<text x="{_WIDTH - 20}" y="22" fill="{_PALE}" text-anchor="end">{html.escape(axis)}</text>',
    ]
    for power in range(math.ceil(least - 1e-9), math.floor(most + 1e-9) + 1):
        x = one + power * scale
        lines.append(f'<line x1="{x:.1f}" y1="44" x2="{x:.1f}" y2="{height - 10}" stroke="#d0d7de"/>')
        lines.append(
            f'<text x="{x:.1f}" y="40" fill="{_PALE}" font-size="11" text-anchor="middle">'
            f"{10.0**power:g}</text>"
        )
    for number, bar in enumerate(found):
        y = _TOP + number * (_BAR + _GAP)
        end = one + math.log10(bar.value) * scale
        begin, width = min(one, end), max(2.0, abs(end - one))
        middle = y + _BAR * 0.72
        colour = _RED if bar.marked else _BLUE
        lines += [
            f'<text x="{left - 10}" y="{middle:.1f}" fill="{_INK}" text-anchor="end">'
            f"{html.escape(bar.label)}</text>",
            f'<rect x="{begin:.1f}" y="{y}" width="{width:.1f}" height="{_BAR}" rx="3" fill="{colour}"/>',
            f'<text x="{max(end, one) + 8:.1f}" y="{middle:.1f}" fill="{_INK}">'
            f"{html.escape(bar.text)}</text>",
        ]
    return "\n".join([*lines, "</svg>", ""])
