"""The upload speed of this peer's link, measured in the rounds that it took part in, so that no user has to
guess it.

The speed of a round is the bytes sent divided by the time in which at least one message was being sent. A
message counts as sent when the transport has accepted it, which for the first few megabytes only means that
they lie in buffers. For a short round only the duration of the whole round is used, which gives a lower bound
of the link's speed. The median over the last rounds is announced to the next group, and shares and sizes of
chunks follow it (`averaging.reduction.balance`, `averaging.reduction.partition`). Pure; times are monotonic
seconds.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field

UNKNOWN_BYTES_PER_S = 12.5e6  # assumed before anything was measured: 100 Mbit/s
BYTES_PER_S_MAX = 125e6  # faster links count as equal, because the processor limits a round on them
_ROUND_BYTES_MIN = 8 << 20
_ROUND_S_MIN = 2.0  # or this time spent sending: the buffers of a slow link are small, and fill sooner
_SLOW_ROUND_BYTES_MIN = 256 << 10
_ROUNDS_MAX = 5


@dataclass(slots=True)
class Speed:
    """The measured speed of a node's link. There is one per node, since its averagers share a link."""

    _sending: int = 0
    _since_s: float = 0.0
    _busy_s: float = 0.0
    _sent_bytes: int = 0
    _rounds: deque[float] = field(default_factory=lambda: deque(maxlen=_ROUNDS_MAX))
    # lower bounds of all committed rounds, including short ones
    _at_least: deque[float] = field(default_factory=lambda: deque(maxlen=_ROUNDS_MAX))

    def begin(self, now_s: float) -> None:
        """Record that sending a message began."""
        if not self._sending:
            self._since_s = now_s
        self._sending += 1

    def end(self, size_bytes: int, now_s: float) -> None:
        """Record that a message was sent, or that sending it failed."""
        self._sending -= 1
        self._sent_bytes += size_bytes
        if not self._sending:
            self._busy_s += max(now_s - self._since_s, 0.0)

    def round_over(self) -> None:
        """Close the measurement of a round, or of several rounds that ran at the same time."""
        long = self._busy_s >= _ROUND_S_MIN and self._sent_bytes >= _SLOW_ROUND_BYTES_MIN
        if (self._sent_bytes >= _ROUND_BYTES_MIN or long) and not self._sending:
            self._rounds.append(self._sent_bytes / max(self._busy_s, 1e-9))
        if not self._sending:
            self._sent_bytes, self._busy_s = 0, 0.0

    def committed(self, sent_bytes: int, took_s: float) -> None:
        """Record a committed round: these bytes were sent and received within `took_s`."""
        self._at_least.append(sent_bytes / max(took_s, 1e-9))

    @property
    def known_bytes_per_s(self) -> float | None:
        """Return a lower bound of the link's speed; None before the first round."""
        return statistics.median(self._rounds) if self._rounds else max(self._at_least, default=None)

    @property
    def bytes_per_s(self) -> float:
        """Return the speed to announce."""
        known = (
            statistics.median(self._rounds) if self._rounds else max([UNKNOWN_BYTES_PER_S, *self._at_least])
        )
        return min(known, BYTES_PER_S_MAX)
