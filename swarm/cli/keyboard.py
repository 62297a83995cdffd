"""Read single keys from a terminal, without echo and without waiting for the end of a line."""

from __future__ import annotations

import os
import select
import sys
import time
from typing import Any

_ESCAPES = {
    b"[A": "up",
    b"[B": "down",
    b"OA": "up",
    b"OB": "down",
    b"[5~": "page up",
    b"[6~": "page down",
    b"[H": "home",
    b"[F": "end",
}
_NAMES = {
    b"\r": "enter",
    b"\n": "enter",
    b"\t": "tab",
    b"\x7f": "back",
    b"\x08": "back",
    b" ": "space",
    b"\x1b": "escape",
}
_BYTES_MAX = 16
_POLL_S = 0.02


class Keys:
    """A context manager that reads keys and restores the terminal at its end. If standard input is not a
    terminal, there are no keys.
    """

    def __init__(self) -> None:
        self._saved: list[Any] | None = None

    def __enter__(self) -> Keys:
        if os.name == "posix" and sys.stdin.isatty():
            import termios
            import tty

            self._saved = termios.tcgetattr(sys.stdin.fileno())
            tty.setcbreak(sys.stdin.fileno())
        return self

    def __exit__(self, *_: object) -> None:
        if self._saved is not None:
            import termios

            termios.tcsetattr(sys.stdin.fileno(), termios.TCSADRAIN, self._saved)
            self._saved = None

    def next(self, timeout_s: float) -> str | None:
        """Return the name of the next key ("up", "enter", "q", …), or None if there is none in time."""
        if os.name != "posix":
            return _windows(timeout_s)
        if self._saved is None:
            time.sleep(timeout_s)
            return None
        ready, _, _ = select.select([sys.stdin.fileno()], [], [], timeout_s)
        if not ready:
            return None
        raw = os.read(sys.stdin.fileno(), _BYTES_MAX)
        if raw[:1] == b"\x1b" and len(raw) > 1:
            return _ESCAPES.get(raw[1:], "")
        return _NAMES.get(raw[:1]) or raw[:1].decode(errors="replace").lower()


def _windows(timeout_s: float) -> str | None:
    import importlib

    console: Any = importlib.import_module("msvcrt")
    deadline_s = time.monotonic() + timeout_s
    while not console.kbhit():
        if time.monotonic() >= deadline_s:
            return None
        time.sleep(_POLL_S)
    raw = console.getch()
    if raw in (b"\x00", b"\xe0"):
        return {b"H": "up", b"P": "down", b"I": "page up", b"Q": "page down", b"G": "home", b"O": "end"}.get(
            console.getch(), ""
        )
    return _NAMES.get(raw) or raw.decode(errors="replace").lower()
