"""A thread that waits for an epoch's round, and for a condition of its own as well, is woken by either."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from types import SimpleNamespace
from typing import Any

from averaging.optim.progress.tracker import Tracker
from swarm.core.clock import SystemClock
from swarm.core.ids import Contact
from swarm.testing.network import SimulatedNetwork
from swarm.testing.simulated_node import SimulatedNode

UNUSED: Any = SimpleNamespace()


def test_a_waiting_thread_is_woken_when_its_own_condition_is_met() -> None:
    done, asked = threading.Event(), threading.Event()
    begun: list[bool] = []

    def until() -> bool:
        asked.set()
        return done.is_set()

    with contextlib.closing(asyncio.new_event_loop()) as loop:
        own = Contact(SimulatedNetwork(1).peer().peer_id)
        node = SimulatedNode(lambda: own, SystemClock(), UNUSED, loop=loop)
        tracker = Tracker(node, "run", 100)
        waiting = threading.Thread(
            target=lambda: begun.append(tracker.wait_full(0, 60.0, until)), daemon=True
        )
        waiting.start()
        assert asked.wait(20)
        asked.clear()
        tracker.wake_waiters()
        assert asked.wait(20), "it looks again"
        assert not begun
        done.set()
        tracker.wake_waiters()
        waiting.join(20)
        assert begun == [False], "the epoch has not begun"
