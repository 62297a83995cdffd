"""Numbers as people say them. Pure functions."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """Return a number with a noun that takes an s in the plural: 1 peer, 1,200 peers."""
    return f"{number:,} {noun}{'s' if number != 1 else ''}"


def duration(seconds: float) -> str:
    """Return a time as people say it: 0.5 s, 40 s, 12 min, 3.5 h, 2.1 days."""
    if seconds < 100:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    if seconds < 100 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.1f} days"


def size(count: float) -> str:
    """Return a number of bytes in decimal units, as links and disks are sold."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "bytes" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def one_line(what: str, text: str) -> str:
    """Return a text. Raise ValueError, which names `what` it is, if it is more than one printable line."""
    if not text.isprintable():
        raise ValueError(f"{what} is one line, without control characters")
    return text
