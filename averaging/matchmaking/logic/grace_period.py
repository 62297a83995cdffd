"""Grace periods: how long the start of a round waits for a peer that has not arrived yet.

The period follows from how late that peer was before (mean plus deviations, as in TCP's round-trip estimate).
Without it a group would either wait its whole window for every idle peer (hivemind: 5 to 15 s a round) or
start without a peer that is a moment late.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from swarm.core.ids import PeerId

PEERS_MAX = 4096
_GAIN = 0.25  # weight of the newest observation in the running mean and deviation
_DEVIATIONS = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GracePeriodConfig:
    """Bounds of the grace periods."""

    # grace of a peer that was never seen looking for a group. Too small: the first round of a run leaves slow
    # starters out; too large: an idle peer delays it
    unknown_peer_s: float = 3.0
    # added to the observed lateness, for noise of training steps and a starved processor. Too small: a
    # punctual peer is left out
    margin_s: float = 2.5
    grace_s_max: float = 10.0  # upper bound for every peer, however late it used to be


@dataclass(slots=True)
class _Lateness:
    mean_s: float = -1.0  # running mean of its lateness; -1: never seen
    deviation_s: float = 0.0
    misses: int = 0  # rounds in a row that began without it while it was idle


class GracePeriod:
    """Estimates, for every peer, how long after this peer's own arrival it may still come."""

    def __init__(self, config: GracePeriodConfig) -> None:
        self._config = config
        self._observed: OrderedDict[PeerId, _Lateness] = OrderedDict()

    def grace_s(self, peer_id: PeerId) -> float:
        """Return how long after this peer's own arrival `peer_id` may still come, in seconds. Each
        consecutive round that it missed while idle halves the period.
        """
        lateness = self._observed.get(peer_id)
        if lateness is None or lateness.mean_s < 0.0:
            grace = self._config.unknown_peer_s
        else:
            grace = lateness.mean_s + _DEVIATIONS * lateness.deviation_s + self._config.margin_s
        return float(min(grace, self._config.grace_s_max)) * 0.5 ** (
            lateness.misses if lateness is not None else 0
        )

    @property
    def grace_s_max(self) -> float:
        return self._config.grace_s_max

    def record_arrival(self, peer_id: PeerId, late_s: float) -> None:
        """Record that the peer began to look for a group `late_s` seconds after this peer did."""
        late_s = min(max(late_s, 0.0), self._config.grace_s_max)
        lateness = self._lateness_of(peer_id)
        lateness.misses = 0
        if lateness.mean_s < 0.0:
            lateness.mean_s, lateness.deviation_s = late_s, late_s / 2
            return
        error_s = late_s - lateness.mean_s
        lateness.mean_s += _GAIN * error_s
        lateness.deviation_s += _GAIN * (abs(error_s) - lateness.deviation_s)

    def record_miss(self, peer_id: PeerId) -> None:
        """Record that a round began without this peer although it was idle."""
        lateness = self._lateness_of(peer_id)
        lateness.misses = min(lateness.misses + 1, 16)

    def record_cell_group(self, cell: PeerId, late_s: float, full: bool) -> None:
        """Record that a group of a grid cell began after `late_s` seconds. The cell is represented by the id
        of one peer in it; `full` tells whether all expected members had come.
        """
        if full:
            self.record_arrival(cell, late_s)
        else:
            self.record_miss(cell)

    def _lateness_of(self, peer_id: PeerId) -> _Lateness:
        lateness = self._observed.setdefault(peer_id, _Lateness())
        self._observed.move_to_end(peer_id)
        while len(self._observed) > PEERS_MAX:
            self._observed.popitem(last=False)
        return lateness
