"""Stands in for an accelerator where there is none: over tensors on the host, with copies that come as late
as they may.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_POISON = 0xA5


class LateFetch:
    """A copy that is made when it is waited for, and not a moment earlier."""

    def __init__(self, source: torch.Tensor, target: torch.Tensor) -> None:
        self._source, self._target = source, target
        self.done = False
        self._lock = threading.Lock()
        target.view(torch.uint8).fill_(_POISON)  # who reads too early finds this

    def wait(self) -> None:
        with self._lock:
            if not self.done:
                self._target.copy_(self._source)
                self.done = True


class LateQueue:
    """Satisfies `averaging.reduction.devices.Queue`. AssertionError for whoever does not keep to its rules."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.forks = 0
        self.fetches: list[LateFetch] = []
        self.brought: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._forked = False
        self._here = threading.local()

    def fork(self) -> None:
        self.forks += 1
        self._forked = True

    @contextmanager
    def working(self) -> Iterator[None]:
        assert self._forked, "work begins after a fork: else it may read values that are not there yet"
        before, self._here.working = getattr(self._here, "working", False), True
        try:
            yield
        finally:
            self._here.working = before

    def fetch(self, source: torch.Tensor, target: torch.Tensor) -> LateFetch:
        assert target.device.type == "cpu"
        assert source.numel() == target.numel()
        fetch = LateFetch(source, target)
        self.fetches.append(fetch)
        return fetch

    def bring(self, source: torch.Tensor) -> torch.Tensor:
        self.brought.append((source, source.clone()))
        return source.clone()

    def finish(self) -> None:
        for fetch in self.fetches:
            fetch.wait()
        for source, then in self.brought:
            assert torch.equal(source, then), "host memory changed while a copy of it was under way"
        self.brought.clear()

    @property
    def under_way(self) -> int:
        """Copies that nobody has waited for."""
        return sum(not fetch.done for fetch in self.fetches)
