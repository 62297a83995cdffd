"""How long the start of a round waits for a peer that is not there yet: as long as that peer has been late
before.

Without it a group either waits its whole window for every idle peer (hivemind: 5 to 15 s a round), or starts
without whoever is a moment late.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from swarm.core.ids import PeerId

PEERS_MAX = 4096
_GAIN = 0.25  # of the newest observation in the running mean and deviation, as in TCP's round-trip estimate
_DEVIATIONS = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PatienceConfig:
    # for a peer never seen stepping. Too small: the first round of a run leaves slow starters out; too large:
    # an idle peer delays it
    first_s: float = 3.0
    # added to what was observed: noise of training steps, a starved processor. Too small: a punctual peer is
    # left out
    floor_s: float = 2.5
    max_s: float = 10.0  # nobody is waited for longer than this, however late it used to be


@dataclass(slots=True)
class _Habit:
    mean_s: float = -1.0  # of how late it was; -1: never seen
    deviation_s: float = 0.0
    misses: int = 0  # rounds in a row that began without it while it was idle


class GracePeriod:
    def __init__(self, config: PatienceConfig) -> None:
        self._config = config
        self._habits: OrderedDict[PeerId, _Habit] = OrderedDict()

    def grace_s(self, peer_id: PeerId) -> float:
        """How long after our own arrival this peer may still come. Each round that it misses halves it."""
        habit = self._habits.get(peer_id)
        if habit is None or habit.mean_s < 0.0:
            grace = self._config.first_s
        else:
            grace = habit.mean_s + _DEVIATIONS * habit.deviation_s + self._config.floor_s
        return float(min(grace, self._config.max_s)) * 0.5 ** (habit.misses if habit is not None else 0)

    @property
    def max_s(self) -> float:
        return self._config.max_s

    def arrived(self, peer_id: PeerId, late_s: float) -> None:
        """The peer began to look for a group `late_s` after we did."""
        late_s = min(max(late_s, 0.0), self._config.max_s)
        habit = self._habit(peer_id)
        habit.misses = 0
        if habit.mean_s < 0.0:
            habit.mean_s, habit.deviation_s = late_s, late_s / 2
            return
        error_s = late_s - habit.mean_s
        habit.mean_s += _GAIN * error_s
        habit.deviation_s += _GAIN * (abs(error_s) - habit.deviation_s)

    def missed(self, peer_id: PeerId) -> None:
        """A round began without this peer, which was idle."""
        habit = self._habit(peer_id)
        habit.misses = min(habit.misses + 1, 16)

    def filled(self, cell: PeerId, late_s: float, full: bool) -> None:
        """A group of a cell (under the name of a peer in it) began: the last who was expected came so late,
        or did not.
        """
        if full:
            self.arrived(cell, late_s)
        else:
            self.missed(cell)

    def _habit(self, peer_id: PeerId) -> _Habit:
        habit = self._habits.setdefault(peer_id, _Habit())
        self._habits.move_to_end(peer_id)
        while len(self._habits) > PEERS_MAX:
            self._habits.popitem(last=False)
        return habit
