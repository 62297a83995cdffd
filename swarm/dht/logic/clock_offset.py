"""Estimate of this machine's clock offset from swarm time: the median over peers of the offset measured by
one call.

As in NTP, the peer's clock is compared with the midpoint of the round trip; half the round trip bounds the
error. The median keeps a minority of wrong or lying clocks from having any effect.
"""

from __future__ import annotations

import statistics
from collections import OrderedDict

from swarm.core.ids import PeerId
from swarm.core.wording import duration

SAMPLES_MAX = 64
PEERS_MIN = 3  # with fewer samples it is unknown which clock is wrong
ROUND_TRIP_S_MAX = 2.0  # a slower answer is too inaccurate
# A smaller offset is not corrected: record validation tolerates it, and a correction makes the clock jump.
OFFSET_S_MIN = 0.5
AGE_S_MAX = 900.0
# Above this the user is told as well: records from before the correction look late or early.
BOUND_S = 5.0


class ClockOffset:
    """The newest clock sample of each peer."""

    def __init__(self) -> None:
        self._samples: OrderedDict[PeerId, tuple[float, float]] = OrderedDict()  # peer -> (offset, taken at)

    def add(self, peer: PeerId, *, sent_s: float, received_s: float, peer_s: float) -> None:
        """Add a sample. `sent_s` and `received_s` are read from this machine's uncorrected clock, `peer_s`
        from the peer's.
        """
        if not 0.0 <= received_s - sent_s <= ROUND_TRIP_S_MAX:
            return
        self._samples[peer] = (peer_s - (sent_s + received_s) / 2, received_s)
        self._samples.move_to_end(peer)
        if len(self._samples) > SAMPLES_MAX:
            self._samples.popitem(last=False)

    def offset_s(self, now_s: float) -> float | None:
        """Return the seconds to add to this machine's clock: 0.0 when it is close enough, None when there are
        too few samples.
        """
        fresh = [offset_s for offset_s, taken_s in self._samples.values() if now_s - taken_s <= AGE_S_MAX]
        if len(fresh) < PEERS_MIN:
            return None
        # With an even number of peers this machine's own clock counts as a sample too: a median between two
        # groups would be wrong for both.
        median_s = statistics.median(fresh if len(fresh) % 2 else [*fresh, 0.0])
        return median_s if abs(median_s) > OFFSET_S_MIN else 0.0

    def nearest_sample_s(self, now_s: float) -> tuple[PeerId, float] | None:
        """Return the peer whose clock differs least from this one, and the difference in seconds. This is
        used when there are too few peers to know which clock is wrong.
        """
        fresh = [
            (peer, offset_s)
            for peer, (offset_s, taken_s) in self._samples.items()
            if now_s - taken_s <= AGE_S_MAX
        ]
        return min(fresh, key=lambda one: abs(one[1]), default=None)

    def problem(self, own: PeerId, now_s: float) -> str | None:
        """Return a sentence that says how wrong this machine's clock is and what to do; None when no problem
        is known.
        """
        offset_s = self.offset_s(now_s)
        if offset_s is not None:
            if abs(offset_s) < BOUND_S:
                return None
            side = "behind" if offset_s > 0 else "ahead of"
            return (
                f"the clock of this machine (peer {own}) is {duration(abs(offset_s))} {side} its peers' "
                "clocks: swarm corrects that for "
                "itself; set the clock (by NTP), for everything else"
            )
        sample = self.nearest_sample_s(now_s)
        if sample is None or abs(sample[1]) < BOUND_S:
            return None
        peer, ahead_s = sample
        side = "behind" if ahead_s > 0 else "ahead of"
        return (
            f"the clock of this machine (peer {own}) is {duration(abs(ahead_s))} {side} the clock of peer "
            f"{peer}, and with fewer than "
            f"{PEERS_MIN} peers it is unknown which of the two is wrong: compare both with a third and "
            "set the wrong one (by NTP)"
        )
