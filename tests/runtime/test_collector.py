"""A command's process is not held up by collections of what was imported."""

from __future__ import annotations

import subprocess
import sys

_PROGRAM = """
import gc, time
kept = [[] for _ in range(300_000)]
from swarm.runtime.collector import keep_present_objects
keep_present_objects()
assert gc.get_freeze_count() >= 300_000
garbage = []
garbage.append(garbage)
del garbage
assert gc.collect() >= 1, "what is made later is still collected"
"""


def test_a_collection_skips_what_was_there_before_and_finds_later_garbage() -> None:
    subprocess.run([sys.executable, "-c", _PROGRAM], check=True, timeout=60)
