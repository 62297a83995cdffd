"""Lines of text for all commands."""

from __future__ import annotations

from collections.abc import Sequence

_BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw a series in one line of at most `width` columns, the newest value at the right.

    Each column is the mean of an equal part of the values.
    """
    if not values:
        return ""
    step = max(1.0, len(values) / width)
    columns = []
    for place in range(min(width, len(values))):
        part = values[int(place * step) : max(int((place + 1) * step), int(place * step) + 1)]
        columns.append(sum(part) / len(part))
    low, high = min(columns), max(columns)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((value - low) * scale)] for value in columns)
