"""How commands show events: JSON lines, plain text, a live view."""

from __future__ import annotations

import sys

from swarm.cli.render.output import JsonOutput, Output, is_terminal


def make_output(*, as_json: bool) -> Output:
    """JSON when asked for, a live view on a terminal, plain lines otherwise."""
    if as_json:
        return JsonOutput(sys.stdout)
    if is_terminal(sys.stdout):
        from swarm.cli.render.live import LiveOutput

        return LiveOutput()
    from swarm.cli.render.plain import PlainOutput

    return PlainOutput(sys.stdout)
