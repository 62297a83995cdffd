"""Numbers as people say them. Pure functions."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """Return a time as people say it: 0.5 s, 40 s, 12 min, 3.5 h, 2.1 days."""
    if seconds < 100:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    if seconds < 100 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.1f} days"
