"""One set of renderers for all commands: JSON lines, plain lines, and a live picture on a terminal.

A command emits events (`swarm.run.events`, or events of its own). `make_output` chooses the renderer, and the
command's `Presentation` describes the events in words and draws the picture.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from swarm.cli.render.output import (
    JsonOutput,
    Output,
    PlainOutput,
    Presentation,
    Result,
    output_kind,
)

__all__ = ["Output", "Presentation", "make_output", "output_kind", "print_result"]


def make_output(presentation: Presentation, *, as_json: bool) -> Output:
    """Return JSON lines if requested, else a live view on a terminal, else plain lines."""
    kind = output_kind(as_json=as_json)
    if kind == "json":
        return JsonOutput(sys.stdout)
    if kind == "live":
        from swarm.cli.render.live import LiveOutput

        return LiveOutput(presentation)
    return PlainOutput(presentation, sys.stdout)


def print_result(kind: str, fields: Mapping[str, Any], text: str, *, as_json: bool) -> None:
    """Print the result of a command that ends at once: `fields` as JSON, or `text`."""
    output = JsonOutput(sys.stdout) if as_json else PlainOutput(Presentation(), sys.stdout)
    output.emit(Result(name=kind, fields=fields, text=text))
