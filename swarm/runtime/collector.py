"""Settings of Python's garbage collector for the processes of our commands."""

from __future__ import annotations

import gc


def keep_present_objects() -> None:
    """Exclude all existing objects, such as those of imported modules, from garbage collection.

    With torch there are half a million of them, and a full collection, which inspects all, stopped every
    thread of the process for 0.2 s. Excluded objects are never freed when they become garbage. Therefore
    commands call this before they build anything, and the library never does, because the collector belongs
    to its user's process.
    """
    gc.collect()
    gc.freeze()
