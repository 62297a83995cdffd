"""The slow uplink of a simulated peer: its messages share it evenly, slice by slice, as TCP connections share
a link.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable

SLICE_BYTES = 1448  # payload of a TCP packet


class Uplink:
    """A link of `bytes_per_s`. Messages of one flow (a direction of a stream, or a call) leave one after the
    other; flows take turns.
    """

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self._flows: OrderedDict[Hashable, deque[tuple[int, Callable[[], object]]]] = OrderedDict()
        self._running = False

    def push(self, flow: Hashable, size_bytes: int, left: Callable[[], object]) -> None:
        """Send a message; `left` is called when its last byte has gone."""
        self._flows.setdefault(flow, deque()).append((size_bytes, left))
        if not self._running:
            self._running = True
            self._next()

    def _next(self) -> None:
        flow, messages = next(iter(self._flows.items()))
        size_bytes = min(messages[0][0], SLICE_BYTES)
        asyncio.get_running_loop().call_later(size_bytes / self.bytes_per_s, self._passed, flow, size_bytes)

    def _passed(self, flow: Hashable, size_bytes: int) -> None:
        messages = self._flows[flow]
        remaining, left = messages.popleft()
        if remaining > size_bytes:
            messages.appendleft((remaining - size_bytes, left))
        else:
            left()
        if messages:
            self._flows.move_to_end(flow)
        else:
            del self._flows[flow]
        self._running = bool(self._flows)
        if self._running:
            self._next()
