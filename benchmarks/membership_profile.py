"""The processor time that the membership of a run takes in a process, by the functions of its modules.

It resolves less than a hundredth, which the comparison of whole runs does not. The profiler makes short
functions look more expensive than they are, so that the share is an upper limit.
"""

from __future__ import annotations

import cProfile
import pstats
import time
from collections.abc import Callable
from typing import Any

import swarm

# capabilities, standing, ledger, and the members that hold records for one another
_MODULES = (
    "swarm/membership/",
    "swarm/net/membership.py",
    "swarm/core/standing.py",
    "averaging/run_ledger.py",
    "swarm/dht/logic/companions.py",
)
# certificates, electors and histories, with the checks of their signatures
_HISTORY_MODULES = ("averaging/history/", "averaging/optim/history.py")
_CALL_S = 60.0
_SHOWING = ("request", "answer")  # of `RunMembership`: each is one message with a capability


class ThreadProfile:
    """A profile of the processor time of one thread, which begins and ends it."""

    def __init__(self) -> None:
        self._profile = cProfile.Profile(time.thread_time)

    def begin(self) -> None:
        """Begin, in this thread."""
        self._profile.enable()

    def end(self) -> dict[str, float]:
        """End, in this thread. Return seconds, and how many messages showed a capability."""
        self._profile.disable()
        stats: Any = pstats.Stats(self._profile)
        return {
            "membership_s": _seconds(stats.stats, lambda path: any(one in path for one in _MODULES)),
            "history_s": _seconds(stats.stats, lambda path: any(one in path for one in _HISTORY_MODULES)),
            "shown": sum(
                calls
                for (path, _, name), (_, calls, *_) in stats.stats.items()
                if path.endswith("swarm/net/membership.py") and name in _SHOWING
            ),
        }


class ProcessProfile:
    """Profiles of a peer's network thread, and of the thread that calls this."""

    def __init__(self, node: swarm.Node) -> None:
        self._node, self._own, self._network = node, ThreadProfile(), ThreadProfile()

        async def begin() -> None:
            self._network.begin()

        node.network.run(begin(), _CALL_S)
        self._own.begin()

    def end(self) -> dict[str, float]:
        """End both, and return the sums of their figures."""

        async def end() -> dict[str, float]:
            return self._network.end()

        own, network = self._own.end(), self._node.network.run(end(), _CALL_S)
        return {name: own[name] + network[name] for name in own}


def _seconds(stats: dict[Any, Any], is_one: Callable[[str], bool]) -> float:
    """Return the time in functions of some modules, and in all that these call."""
    found: float = sum(
        cumulative_s
        for (path, _, _), (_, _, _, _, callers) in stats.items()
        if is_one(path)
        for (caller, _, _), (_, _, _, cumulative_s) in callers.items()
        if not is_one(caller)
    )
    return found
