"""Two peers in one process: run their work concurrently, and measure stalls of their network threads."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from averaging.averager import Averager
from averaging.result import RoundResult
from swarm.node import Node

T = TypeVar("T")
_BEAT_S = 0.002


def at_once(calls: Sequence[Callable[[], T]], timeout_s: float) -> list[T]:
    """Run each call in a thread of its own and return their results. Raises the exception of a call."""
    with concurrent.futures.ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(timeout_s) for future in [pool.submit(call) for call in calls]]


def step_all(averagers: Sequence[Averager], timeout_s: float = 30.0, **options: Any) -> list[RoundResult]:
    """Run one round of all these averagers."""
    calls = [functools.partial(one.step, timeout_s=timeout_s, **options) for one in averagers]
    return at_once(calls, timeout_s + 10.0)


@dataclass(slots=True)
class LoopWatch:
    """The longest time in which an event loop did nothing else than one callback."""

    stalls_s: list[float] = field(default_factory=list)

    @property
    def longest_s(self) -> float:
        return max(self.stalls_s, default=0.0)


@contextlib.contextmanager
def watched_loop(node: Node) -> Iterator[LoopWatch]:
    """Measure stalls of the node's network thread."""
    watch, stop = LoopWatch(), threading.Event()

    async def beat() -> None:
        while not stop.is_set():
            began_s = time.monotonic()
            await asyncio.sleep(_BEAT_S)
            watch.stalls_s.append(time.monotonic() - began_s - _BEAT_S)

    beating = node.network.submit(beat())
    try:
        yield watch
    finally:
        stop.set()
        beating.result(10.0)


@contextlib.contextmanager
def recorded_waits(threads: Sequence[str]) -> Iterator[list[str]]:
    """Yield a list of the calls to CUDA by which threads of these names wait for a device or page-lock host
    memory, one line each. It grows within the context.

    Explicit calls are recorded by replacing them; implicit synchronisation by torch's own sync debug mode,
    which warns.
    """
    found: list[str] = []

    def note(what: str) -> None:
        name = threading.current_thread().name
        if name in threads:
            found.append(f"{what} on {name}")

    with contextlib.ExitStack() as stack:
        waits = (
            (torch.cuda.Event, "synchronize"),
            (torch.cuda.Stream, "synchronize"),
            (torch.cuda, "synchronize"),
        )
        for owner, name in (
            *waits,
            (torch.Tensor, "pin_memory"),
            (torch.Tensor, "item"),
            (torch.Tensor, "tolist"),
        ):
            stack.enter_context(_replaced(owner, name, lambda *_, what=name: note(what)))
        for name in ("empty", "zeros", "empty_like", "zeros_like", "tensor"):
            stack.enter_context(
                _replaced(
                    torch,
                    name,
                    lambda given, what=name: note(f"pinned {what}") if given.get("pin_memory") else None,
                )
            )
        if torch.cuda.is_available():
            stack.callback(torch.cuda.set_sync_debug_mode, torch.cuda.get_sync_debug_mode())
            torch.cuda.set_sync_debug_mode("warn")
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("always")
        shown = warnings.showwarning

        def show(message: Warning | str, *details: Any, **more: Any) -> None:
            if "synchroniz" in str(message):
                note(str(message))
            else:
                shown(message, *details, **more)

        warnings.showwarning = show  # catch_warnings puts it back
        yield found


@contextlib.contextmanager
def _replaced(owner: Any, name: str, note: Callable[..., None]) -> Iterator[None]:
    """Replace `owner.name` within the context: each call first calls `note(keyword arguments)`. Tensors on
    the host, which never wait, are not counted.
    """
    plain = getattr(owner, name)
    own = name in vars(owner)

    def noted(*arguments: Any, **given: Any) -> Any:
        if not (
            arguments
            and isinstance(arguments[0], torch.Tensor)
            and name in ("item", "tolist")
            and not arguments[0].is_cuda
        ):
            note(given)
        return plain(*arguments, **given)

    setattr(owner, name, noted)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, plain)
        else:
            delattr(owner, name)
