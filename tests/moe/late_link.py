"""A stand-in for the link to a CUDA device, over tensors on the host. Its copies arrive when they are waited
for, and not earlier.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch

from moe.server.devices import using

HOST = torch.device("cpu")
_POISON = 0xA5
_TIMEOUT_S = 20.0


class LateLink:
    """A link that satisfies `moe.server.links.DeviceLink`. Code that reads a copy too early finds poison;
    a call on a wrong thread raises AssertionError.

    `events` lists the calls in order: ("in", n) queued, ("used", n), ("out", n) queued, ("waiting", n) on the
    host, ("landed", n). Copies to the host arrive once `open_landing` is set. `fails` names events at which
    the device is lost.
    """

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []
        self.open_landing = threading.Event()
        self.open_landing.set()
        self.fails: set[str] = set()
        self.emptied = 0
        self.lacks_memory_for = 1 << 60  # a copy to the device of this size in bytes or more does not fit
        self._numbers: Counter[str] = Counter()
        self._changed = threading.Condition()

    @contextmanager
    def _converted(self) -> Iterator[None]:
        with using(HOST):
            yield

    def using(self) -> AbstractContextManager[None]:
        assert threading.current_thread().name.startswith("swarm-experts"), threading.current_thread().name
        return self._converted()

    def host_memory(self, numel: int) -> torch.Tensor:
        return torch.full((numel,), _POISON, dtype=torch.uint8)

    def send(self, source: torch.Tensor) -> LateArrival:
        number = self.note("in")
        if source.numel() >= self.lacks_memory_for:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate the inputs")
        return LateArrival(self, number, source, self.host_memory(source.numel()))

    def fetch(self, source: torch.Tensor) -> LateDeparture:
        return LateDeparture(self, self.note("out"), source, self.host_memory(source.numel()))

    def empty_cache(self) -> None:
        self.emptied += 1

    def clear(self) -> None:
        """Forget the events so far, and number them from 0 again."""
        with self._changed:
            self.events.clear()
            self._numbers.clear()

    def note(self, name: str) -> int:
        """Record an event and return its number among those of its kind."""
        with self._changed:
            number = self._numbers[name]
            self._numbers[name] += 1
        self.note_numbered(name, number)
        return number

    def note_numbered(self, name: str, number: int) -> None:
        with self._changed:
            self.events.append((name, number))
            self._changed.notify_all()
        if name in self.fails:
            raise RuntimeError("CUDA error: device-side assert triggered")

    def until(self, name: str, number: int) -> None:
        """Wait for an event."""
        with self._changed:
            assert self._changed.wait_for(lambda: (name, number) in self.events, _TIMEOUT_S), (
                name,
                number,
                self.events,
            )

    def place(self, name: str, number: int) -> int:
        return self.events.index((name, number))


@dataclass
class LateArrival:
    link: LateLink
    number: int
    source: torch.Tensor
    there: torch.Tensor

    def use(self) -> torch.Tensor:
        self.there.copy_(self.source)
        self.link.note_numbered("used", self.number)
        return self.there


@dataclass
class LateDeparture:
    link: LateLink
    number: int
    source: torch.Tensor
    target: torch.Tensor

    def wait(self) -> torch.Tensor:
        self.link.note_numbered("waiting", self.number)
        assert self.link.open_landing.wait(_TIMEOUT_S)
        self.target.copy_(self.source)
        self.link.note_numbered("landed", self.number)
        return self.target
