"""Running a test on the kind of event loop that nodes have. uvloop behaves unlike asyncio's loop in places,
for example after a connection was reset.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from swarm.runtime.thread import new_event_loop

T = TypeVar("T")


def run_on_loop(work: Coroutine[Any, Any, T], timeout_s: float = 60.0) -> T:
    """Run a coroutine to its end on a new event loop. Raise TimeoutError after `timeout_s` seconds."""
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(asyncio.wait_for(work, timeout_s))
