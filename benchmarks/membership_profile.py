"""The processor time that the membership of a run takes in a process, by the functions of its modules.

It resolves less than 1 %, unlike the comparison of whole runs. The profiler takes microseconds for each call,
many times the duration of a short function. This `Overhead` is subtracted for the counted functions and all
functions that they call. A function that others also call counts with its average number of calls.
"""

from __future__ import annotations

import cProfile
import pstats
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

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


_TRIALS, _TRIAL_CALLS = 5, 2000
_DEPTH_MAX = 12  # of calls below a function that is counted


@dataclass(frozen=True, slots=True)
class Overhead:
    """The time that the profiler takes for a call, in seconds: `inside_s` counts as the function's own time,
    and `outside_s` as that of its caller.
    """

    inside_s: float
    outside_s: float

    @classmethod
    def measured(cls) -> Self:
        """Measure it in this thread, by calls of a function that does nothing."""
        found = []
        for _ in range(_TRIALS):
            bare_s = _trial_s()
            profile = cProfile.Profile(time.thread_time)
            profile.enable()
            profiled_s = _trial_s()
            profile.disable()
            stats: Any = pstats.Stats(profile)
            own_s = sum(
                own_s for (_, _, name), (_, _, own_s, *_) in stats.stats.items() if name == "_nothing"
            )
            found.append((profiled_s - bare_s, own_s - bare_s))
        total_s, inside_s = min(found)
        inside_s = min(max(inside_s, 0.0), max(total_s, 0.0)) / _TRIAL_CALLS
        return cls(inside_s, max(total_s, 0.0) / _TRIAL_CALLS - inside_s)


def _nothing() -> None:
    pass


def _trial_s() -> float:
    began_s = time.thread_time()
    for _ in range(_TRIAL_CALLS):
        _nothing()
    return time.thread_time() - began_s


class ThreadProfile:
    """A profile of the processor time of one thread, which begins and ends it."""

    def __init__(self) -> None:
        self._profile = cProfile.Profile(time.thread_time)

    def begin(self) -> None:
        """Begin, in this thread."""
        self._profile.enable()

    def end(self) -> dict[str, float]:
        """End, in this thread. Return seconds, those of the profiler among them, and how many messages showed
        a capability.
        """
        self._profile.disable()
        overhead = Overhead.measured()
        stats: Any = pstats.Stats(self._profile)
        calls = sum(calls for _, calls, *_ in stats.stats.values())
        return {
            "membership_s": seconds(
                stats.stats,
                lambda path: _is_in(path, _MODULES),
                overhead,
                is_other=lambda path: _is_in(path, _HISTORY_MODULES),
            ),
            "history_s": seconds(stats.stats, lambda path: _is_in(path, _HISTORY_MODULES), overhead),
            "profiler_s": calls * (overhead.inside_s + overhead.outside_s),
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


def _is_in(path: str, modules: tuple[str, ...]) -> bool:
    return any(one in path for one in modules)


def seconds(
    stats: dict[Any, Any],
    is_one: Callable[[str], bool],
    overhead: Overhead,
    is_other: Callable[[str], bool] = lambda path: False,
) -> float:
    """Return the time in functions of some modules, and in all that these call, by the statistics of a
    `pstats.Stats`; without what the profiler took in them and in all that they call, and without functions of
    modules that count elsewhere (`is_other`).
    """
    below = _calls_below(stats)
    found, whole_s = 0.0, overhead.inside_s + overhead.outside_s
    for function, (_, _, _, _, callers) in stats.items():
        for (caller, _, _), (_, calls, _, cumulative_s) in callers.items():
            if is_one(function[0]) and not is_one(caller):
                found += cumulative_s - calls * overhead.inside_s
            elif is_one(caller) and is_other(function[0]):
                found -= cumulative_s + calls * overhead.outside_s
            elif is_one(caller):
                found -= calls * whole_s
                if not is_one(function[0]):
                    found -= calls * below[function] * whole_s
    return max(found, 0.0)


def _calls_below(stats: dict[Any, Any]) -> dict[Any, float]:
    """Return, for each function, how many calls one call of it makes, with those that these make in turn, on
    average over all its callers.
    """
    own: dict[Any, list[tuple[Any, float]]] = {function: [] for function in stats}
    for function, (_, _, _, _, callers) in stats.items():
        for caller, (_, calls, *_) in callers.items():
            if caller in own:
                own[caller].append((function, calls / max(stats[caller][1], 1)))
    below = dict.fromkeys(stats, 0.0)
    for _ in range(_DEPTH_MAX):
        below = {one: sum(share * (1.0 + below[called]) for called, share in own[one]) for one in stats}
    return below
