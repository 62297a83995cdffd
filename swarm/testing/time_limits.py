"""Time limits of operations in a simulation: every operation that has one must end by it.

    with watched_time_limits(Deadlines(violations)):
        run_virtual(...)

An operation is a call of a method of a class in `LIMITED` that takes its limit as an argument: `timeout_s`
is how long it may take, `deadline_s` the moment of the monotonic clock by which it must end, and `options`
has a `timeout_s`. Calls, streams, reads and writes of the DHT, searches for a group, rounds, downloads and
blocking waits are all of this kind.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import math
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from averaging.allreduce.allreduce import AllReduce
from averaging.matchmaking.service.matchmaking_service import GroupService
from averaging.optim.catchup import CatchUp
from averaging.optim.progress.tracker import Tracker
from averaging.optim.state.download import Download
from averaging.step_runner import StepRunner
from swarm.dht.service.dht_service import DhtService
from swarm.testing.caller import SimulatedCaller
from swarm.testing.checkers import Deadlines
from swarm.testing.green_threads import GreenNetwork

LIMITED: tuple[type, ...] = (
    SimulatedCaller,
    DhtService,
    GroupService,
    AllReduce,
    StepRunner,
    Download,
    CatchUp,
    Tracker,
    GreenNetwork,
)
# by the name of the argument: when an operation that begins at `now_s` must have ended
_ENDS_S: dict[str, Callable[[Any, float], float]] = {
    "timeout_s": lambda timeout_s, now_s: now_s + max(timeout_s, 0.0),
    "deadline_s": max,
    "options": lambda options, now_s: now_s + options.timeout_s,
}


@dataclass(frozen=True, slots=True)
class LimitedMethod:
    """A method whose calls are operations with a time limit."""

    owner: type
    name: str
    text: str  # both, for people
    function: Callable[..., Any]
    argument: str  # that holds the limit
    place: int | None  # of this argument; None: it is passed by keyword only
    default: Any

    def end_s(self, arguments: tuple[Any, ...], options: dict[str, Any], now_s: float) -> float:
        """Return when a call with these arguments must have ended; infinity: it has no limit."""
        if self.argument in options:
            limit = options[self.argument]
        elif self.place is not None and self.place < len(arguments):
            limit = arguments[self.place]
        else:
            limit = self.default
        return math.inf if limit is None else _ENDS_S[self.argument](limit, now_s)


def limited_methods(classes: Iterable[type] = LIMITED) -> list[LimitedMethod]:
    """Return the public methods of these classes that take a time limit."""
    found = []
    for owner in classes:
        for name, function in vars(owner).items():
            if name.startswith("_") or not inspect.isfunction(function):
                continue
            for place, parameter in enumerate(inspect.signature(function).parameters.values()):
                if parameter.name in _ENDS_S:
                    is_named = parameter.kind is parameter.KEYWORD_ONLY
                    default = None if parameter.default is parameter.empty else parameter.default
                    text, position = f"{owner.__name__}.{name}", None if is_named else place
                    found.append(
                        LimitedMethod(owner, name, text, function, parameter.name, position, default)
                    )
                    break
    return found


@contextlib.contextmanager
def watched_time_limits(deadlines: Deadlines, classes: Iterable[type] = LIMITED) -> Iterator[None]:
    """Let `deadlines` know of the beginning and the end of every operation of these classes meanwhile."""
    with contextlib.ExitStack() as stack:
        for method in limited_methods(classes):
            stack.enter_context(mock.patch.object(method.owner, method.name, _watched(method, deadlines)))
        yield


class _Operation:
    """One call, from its beginning to its end. Written out, because a simulation makes thousands a second."""

    __slots__ = ("_deadlines", "_loop", "_number")

    def __init__(
        self,
        method: LimitedMethod,
        deadlines: Deadlines,
        arguments: tuple[Any, ...],
        options: dict[str, Any],
    ) -> None:
        self._deadlines = deadlines
        self._loop = asyncio.get_running_loop()  # what is left of killed processes ends after it was closed
        end_s = method.end_s(arguments, options, self._loop.time())
        self._number = deadlines.begin(method.text, end_s)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        self._deadlines.end(self._number, self._loop.time())


def _watched(method: LimitedMethod, deadlines: Deadlines) -> Callable[..., Any]:
    """Return the method with its calls reported: a coroutine, an asynchronous context or a blocking call."""
    function = method.function

    def operation(arguments: tuple[Any, ...], options: dict[str, Any]) -> _Operation:
        return _Operation(method, deadlines, arguments, options)

    @functools.wraps(function)
    async def coroutine(*arguments: Any, **options: Any) -> Any:
        with operation(arguments, options):
            return await function(*arguments, **options)

    @functools.wraps(function)
    @contextlib.asynccontextmanager
    async def context(*arguments: Any, **options: Any) -> AsyncIterator[Any]:
        with operation(arguments, options):
            made: AbstractAsyncContextManager[Any] = function(*arguments, **options)
            async with made as entered:
                yield entered

    @functools.wraps(function)
    def blocking(*arguments: Any, **options: Any) -> Any:
        with operation(arguments, options):
            return function(*arguments, **options)

    if inspect.iscoroutinefunction(function):
        return coroutine
    return context if inspect.isasyncgenfunction(inspect.unwrap(function)) else blocking
