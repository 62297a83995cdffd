"""What a command prints: JSON lines, plain lines, or a live view, for the same events.

Whatever a stranger could have written (names, descriptions, reasons) is stripped of control characters first:
a peer must not steer a terminal.
"""

from __future__ import annotations

import json
import sys
import unicodedata
from typing import TYPE_CHECKING, Protocol, TextIO

if TYPE_CHECKING:
    from types import TracebackType

    from swarm.run.events import Event

_TEXT_MAX = 2000


class Output(Protocol):
    """A context manager that takes events."""

    def __enter__(self) -> Output: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

    def emit(self, event: Event) -> None: ...

    def question(self, text: str) -> bool:
        """Ask; only on a terminal."""
        ...


def printable(text: str) -> str:
    """Without control characters and invisible steering marks; line breaks stay."""
    kept = (
        c for c in text[:_TEXT_MAX] if c == "\n" or unicodedata.category(c) not in ("Cc", "Cf", "Cs", "Co")
    )
    return "".join(kept)


def report_error(text: str, *, json_too: bool) -> None:
    """One sentence (or a line per problem) on standard error; with `--json` an `error` line on standard
    output as well.
    """
    text = printable(text)
    if json_too:
        print(json.dumps({"event": "error", "text": text}, ensure_ascii=False), flush=True)
    print(f"swarm: {text}", file=sys.stderr, flush=True)


def is_terminal(stream: TextIO) -> bool:
    import os

    return stream.isatty() and os.environ.get("TERM") != "dumb"


class JsonOutput:
    """A line per event, flushed at once, since a program waits for it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __enter__(self) -> Output:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        return None

    def emit(self, event: Event) -> None:
        # in one piece: events of several threads (the trainer's, the network's, the one that writes
        # checkpoints) must not mix in one line
        self._stream.write(event.json_line() + "\n")
        self._stream.flush()

    def question(self, text: str) -> bool:
        return False
