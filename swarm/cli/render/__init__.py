"""One set of renderers for all commands: JSON lines, plain lines, and a live picture on a terminal.

A command emits events (`swarm.run.events`, or events of its own). `make_output` chooses the renderer, and the
command's `Presentation` describes the events in words and draws the picture.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from swarm.cli.render.output import (
    JsonOutput,
    Output,
    PlainOutput,
    Presentation,
    Result,
    output_kind,
)
from swarm.core.working import Work, shown_by

__all__ = ["Output", "Presentation", "make_output", "output_kind", "print_result", "shown_work"]


def make_output(presentation: Presentation, *, as_json: bool) -> Output:
    """Return JSON lines if requested, else a live view on a terminal, else plain lines."""
    kind = output_kind(as_json=as_json)
    if kind == "json":
        return JsonOutput(sys.stdout)
    if kind == "live":
        from swarm.cli.render.live import LiveOutput

        return LiveOutput(presentation)
    return PlainOutput(presentation, sys.stdout)


@contextlib.contextmanager
def shown_work(arguments: Sequence[str]) -> Iterator[None]:
    """Show work of a command that has no `Output` of its own, or before it has one. `arguments`: those of the
    command.
    """
    with contextlib.ExitStack() as stack:
        made: list[Output] = []
        lock = threading.Lock()

        def show(work: Work) -> None:
            with lock:  # rich is imported when there is something to show
                if not made:
                    made.append(make_output(Presentation(), as_json="--json" in arguments))
                    stack.callback(made[0].close)
            made[0].show_work(work)

        with shown_by(show):
            yield


def print_result(kind: str, fields: Mapping[str, Any], text: str, *, as_json: bool) -> None:
    """Print the result of a command that ends at once: `fields` as JSON, or `text`."""
    output = JsonOutput(sys.stdout) if as_json else PlainOutput(Presentation(), sys.stdout)
    output.emit(Result(name=kind, fields=fields, text=text))
