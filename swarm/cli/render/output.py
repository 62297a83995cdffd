"""The renderers without a terminal (JSON lines and plain lines), and the base classes of all renderers.

Texts from other peers (names, descriptions, reasons) are stripped of control characters before they are
printed, so that a peer cannot control the terminal.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TextIO

from swarm.core.working import Work, shown_by
from swarm.run.events import Event, Failed, Listening, Notice

if TYPE_CHECKING:
    from rich.console import RenderableType

_TEXT_MAX = 2000
_WORK_LINE_S = 10.0  # between two lines about the same work


@dataclass(frozen=True, slots=True, kw_only=True)
class Result(Event):
    """The result of a command that ends at once."""

    name: str
    fields: Mapping[str, Any]
    text: str

    def json_line(self) -> str:
        return json.dumps({"event": self.name, **self.fields}, ensure_ascii=False)


class Presentation:
    """Describes the events of one command in words and draws them. The base class handles the common
    events.
    """

    # events that a live view shows in its picture only, and not as a line
    picture_events: ClassVar[tuple[type[Event], ...]] = ()
    # events that end a live picture
    final_events: ClassVar[tuple[type[Event], ...]] = ()
    # whether the last picture stays on the terminal
    keeps_picture: ClassVar[bool] = False

    def sentence(self, event: Event) -> str:
        """Return the event in words; empty for events that are not shown as a line."""
        match event:
            case Listening():
                if event.addresses:
                    return f"peer {event.peer_id} listens at {event.addresses[0]}"
                asks = event.reach == "unknown"
                return f"peer {event.peer_id} " + (
                    "listens, and asks others whether they can call it" if asks else "takes no calls"
                )
            case Notice() | Failed() | Result():
                return event.text
        return ""

    def is_due(self, event: Event) -> bool:
        """Return whether a log should show the event. Frequent events are shown only once in a while."""
        return True

    def draw(self, event: Event) -> RenderableType | None:
        """Return the picture after the event, or None if there is none or it does not change."""
        return None


class Output:
    """Base class of the renderers: a context manager that shows events, and meanwhile the work of this
    process that takes longer than a second (`swarm.core.working`).
    """

    _shown: contextlib.ExitStack

    def __enter__(self) -> Self:
        self._shown = contextlib.ExitStack()
        self._shown.enter_context(shown_by(self.show_work))
        return self

    def __exit__(self, *_: object) -> None:
        self._shown.close()
        self.close()

    def emit(self, event: Event) -> None:
        """Show an event. May be called from any thread."""
        raise NotImplementedError

    def show_work(self, work: Work) -> None:
        """Show work that takes longer than a second. May be called from any thread."""

    def ask(self, text: str) -> bool:
        """Ask the user a question. Return False if there is no terminal."""
        return False

    def choose(self, text: str, count: int) -> int | None:
        """Ask the user for a number from 1 to `count`. Return None if there is no terminal."""
        return None

    def close(self) -> None:
        """Restore the terminal. May be called more than once."""


class JsonOutput(Output):
    """Prints one JSON line per event and flushes it at once, because a program waits for it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def emit(self, event: Event) -> None:
        line = event.json_line()
        if line:
            _write_line(self._stream, line)


class PlainOutput(Output):
    """Prints events as sentences without control characters, for logs and pipes. Lines about work in progress
    go to standard error, so that a pipe has the results only.
    """

    def __init__(self, presentation: Presentation, stream: TextIO) -> None:
        self._presentation = presentation
        self._stream = stream
        self._work_shown_s: dict[str, float] = {}  # seconds of each work at its last line

    def emit(self, event: Event) -> None:
        text = self._presentation.sentence(event) if self._presentation.is_due(event) else ""
        if text:
            _write_line(self._stream, printable(text))

    def ask(self, text: str) -> bool:
        if not (sys.stdin.isatty() and self._stream.isatty()):
            return False
        import click

        return click.confirm(printable(text), default=True)

    def choose(self, text: str, count: int) -> int | None:
        if not (sys.stdin.isatty() and self._stream.isatty()):
            return None
        import click

        return int(click.prompt(printable(text), type=click.IntRange(1, count)))

    def show_work(self, work: Work) -> None:
        """Print a line when the work begins to be shown, and then one every `_WORK_LINE_S`."""
        if work.is_over:
            self._work_shown_s.pop(work.what, None)
            return
        before_s = self._work_shown_s.get(work.what)
        if before_s is None or work.seconds - before_s >= _WORK_LINE_S:
            self._work_shown_s[work.what] = work.seconds
            _write_line(sys.stderr, printable(work.text))


def _write_line(stream: TextIO, line: str) -> None:
    """Write a line and flush it.

    A line is a single write, because events come from several threads (training, network, checkpoints) and
    must not mix in one line. If the reader has closed the output, the main thread ends the command; other
    threads ignore the error.
    """
    try:
        stream.write(line + "\n")
        stream.flush()
    except BrokenPipeError:
        if threading.current_thread() is threading.main_thread():
            raise


def output_kind(*, as_json: bool) -> Literal["json", "live", "plain"]:
    """Return the kind of output of a command, from its option --json and its standard output."""
    if as_json:
        return "json"
    return "live" if is_terminal(sys.stdout) else "plain"


def printable(text: str) -> str:
    """Return the text without control characters and invisible formatting characters. Line breaks stay."""
    kept = (
        c for c in text[:_TEXT_MAX] if c == "\n" or unicodedata.category(c) not in ("Cc", "Cf", "Cs", "Co")
    )
    return "".join(kept)


def report_error(text: str, *, as_json: bool) -> None:
    """Print an error on standard error and, with `--json`, as an `error` line on standard output."""
    text = printable(text)
    if as_json:
        print(json.dumps({"event": "error", "text": text}, ensure_ascii=False), flush=True)
    print(f"swarm: {text}", file=sys.stderr, flush=True)


def is_terminal(stream: TextIO) -> bool:
    return stream.isatty() and os.environ.get("TERM") != "dumb"
