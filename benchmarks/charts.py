"""Bar charts and curves as SVG, readable on a light and on a dark page."""

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


@dataclass(frozen=True, slots=True)
class Curve:
    """One curve: its name, its points (x above 0, y), and whether it is drawn in dashes."""

    label: str
    points: Sequence[tuple[float, float]]
    dashed: bool = False


_PALETTE = ("#1f2328", "#2f81f7", "#1a7f37", "#bf8700", "#cf222e")


def curves(title: str, axes: tuple[str, str], found: Sequence[Curve]) -> str:
    """Draw curves over a logarithmic x axis, with the names of x and y in `axes`. Curves in dashes repeat the
    colours of the others. `found` must not be empty.
    """
    width, height, left, right, top, bottom = _WIDTH, 470, 60, 300, 40, 50
    xs = [math.log10(x) for curve in found for x, _ in curve.points]
    ys = [y for curve in found for _, y in curve.points]
    low_x, high_x, low_y, high_y = min(xs), max(xs), min(ys), max(ys)
    scale_x = (width - left - right) / max(high_x - low_x, 1e-9)
    scale_y = (height - top - bottom) / max(high_y - low_y, 1e-9)

    def at(x: float, y: float) -> str:
        return f"{left + (math.log10(x) - low_x) * scale_x:.1f},{top + (high_y - y) * scale_y:.1f}"

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="system-ui, sans-serif" font-size="13" role="img">',
        f"<title>{html.escape(title)}</title>",
        f'<rect width="{width}" height="{height}" rx="8" fill="#ffffff"/>',
        f'<text x="{left}" y="24" fill="{_PALE}">{html.escape(axes[1])}</text>',
        f'<text x="{left}" y="{height - 12}" fill="{_PALE}">{html.escape(axes[0])}</text>',
    ]
    for power in range(math.ceil(low_x - 1e-9), math.floor(high_x + 1e-9) + 1):
        x = left + (power - low_x) * scale_x
        lines += [
            f'<line x1="{x:.1f}" y1="{top}" x2="{x:.1f}" y2="{height - bottom}" stroke="#d0d7de"/>',
            f'<text x="{x:.1f}" y="{height - bottom + 16}" fill="{_PALE}" font-size="11" '
            f'text-anchor="middle">{10.0**power:g}</text>',
        ]
    for tenth in range(math.ceil(low_y * 5), math.floor(high_y * 5) + 1):
        y = top + (high_y - tenth / 5) * scale_y
        lines += [
            f'<line x1="{left}" y1="{y:.1f}" x2="{width - right}" y2="{y:.1f}" stroke="#eaeef2"/>',
            f'<text x="{left - 6}" y="{y + 4:.1f}" fill="{_PALE}" font-size="11" text-anchor="end">'
            f"{tenth / 5:.1f}</text>",
        ]
    counts = {True: 0, False: 0}
    for number, curve in enumerate(found):
        colour = _PALETTE[counts[curve.dashed] % len(_PALETTE)]
        counts[curve.dashed] += 1
        dashes = ' stroke-dasharray="5 4"' if curve.dashed else ""
        y = top + 8 + 20 * number
        lines += [
            f'<polyline fill="none" stroke="{colour}" stroke-width="2"{dashes} '
            f'points="{" ".join(at(*point) for point in curve.points)}"/>',
            f'<line x1="{width - right + 14}" y1="{y}" x2="{width - right + 42}" y2="{y}" stroke="{colour}" '
            f'stroke-width="2"{dashes}/>',
            f'<text x="{width - right + 50}" y="{y + 4}" fill="{_INK}" font-size="12">'
            f"{html.escape(curve.label)}</text>",
        ]
    return "\n".join([*lines, "</svg>", ""])
