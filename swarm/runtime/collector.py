"""The garbage collector of a process that is ours."""

from __future__ import annotations

import gc


def keep_present_objects() -> None:
    """Let the garbage collector look no more at the objects that exist now, for instance those of imported
    modules.

    With torch there are half a million of them. A full collection, to which records of other peers lead as
    any objects do, looked at all: no thread of the process went on for 0.2 s. What becomes garbage among them
    is never freed, so that this is for commands, which call it before they build anything. A library leaves
    the collector of its user's process alone.
    """
    gc.collect()
    gc.freeze()
