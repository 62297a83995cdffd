"""How fast this peer's link sends, from the rounds that it took part in: nobody has to guess a number.

A round's speed is what was sent over the time in which at least one message was on its way out. A message
counts as sent when the transport has taken it, which for the first few megabytes only means that they lie in
buffers: of a short round only what it took as a whole is told, which is no more than the link can do. The
median over the last rounds is announced to the next group, and shares and sizes of parts follow it
(`averaging.reduction.balance`, `averaging.reduction.partition`). Pure; times are monotonic seconds.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field

UNKNOWN_BYTES_PER_S = 12.5e6  # before anything was measured: 100 Mbit/s
BYTES_PER_S_MAX = 125e6  # on faster links the processor is what limits a round, and all count alike
_ROUND_BYTES_MIN = 8 << 20
_ROUND_S_MIN = 2.0  # or so long on its way: a slow link's buffers are small, and fill in less
_SLOW_ROUND_BYTES_MIN = 256 << 10
_ROUNDS_MAX = 5


@dataclass(slots=True)
class Speed:
    """One per node: its averagers share a link."""

    _sending: int = 0
    _since_s: float = 0.0
    _busy_s: float = 0.0
    _sent_bytes: int = 0
    _rounds: deque[float] = field(default_factory=lambda: deque(maxlen=_ROUNDS_MAX))
    # of committed rounds, the short ones too
    _at_least: deque[float] = field(default_factory=lambda: deque(maxlen=_ROUNDS_MAX))

    def begin(self, now_s: float) -> None:
        """A message is being sent."""
        if not self._sending:
            self._since_s = now_s
        self._sending += 1

    def end(self, size_bytes: int, now_s: float) -> None:
        """It was taken, or failed."""
        self._sending -= 1
        self._sent_bytes += size_bytes
        if not self._sending:
            self._busy_s += max(now_s - self._since_s, 0.0)

    def round_over(self) -> None:
        """What was sent until now was one round's, or several rounds' side by side."""
        long = self._busy_s >= _ROUND_S_MIN and self._sent_bytes >= _SLOW_ROUND_BYTES_MIN
        if (self._sent_bytes >= _ROUND_BYTES_MIN or long) and not self._sending:
            self._rounds.append(self._sent_bytes / max(self._busy_s, 1e-9))
        if not self._sending:
            self._sent_bytes, self._busy_s = 0, 0.0

    def committed(self, sent_bytes: int, took_s: float) -> None:
        """A round in which so much was sent, and has arrived: everybody voted for the same."""
        self._at_least.append(sent_bytes / max(took_s, 1e-9))

    @property
    def known_bytes_per_s(self) -> float | None:
        """What the link has been seen to do, at least; None before the first round."""
        return statistics.median(self._rounds) if self._rounds else max(self._at_least, default=None)

    @property
    def bytes_per_s(self) -> float:
        """What to announce."""
        known = (
            statistics.median(self._rounds) if self._rounds else max([UNKNOWN_BYTES_PER_S, *self._at_least])
        )
        return min(known, BYTES_PER_S_MAX)
