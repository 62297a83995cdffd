"""What an averager remembers from one search for a group to the next: who holds it, who did not answer, which
rounds are over.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

from averaging.matchmaking.logic.grace_period import GracePeriod
from averaging.matchmaking.logic.messages import Answer, Holder, LookForGroup, PeerStatus
from swarm.core.ids import PeerId

_PASSED_KEYS_MAX = 64
_UNREACHABLE_MAX = 1024
_HOLDERS_MAX = 4096
_ROUND_GAIN = 0.25  # of the newest round in the running mean of their lengths


@dataclass(slots=True)
class _Round:
    round_key: str
    members: frozenset[PeerId]
    search_started_s: float
    began_s: float
    over: bool = False


class PassedRounds:
    """Keys of rounds that were committed here; the oldest are forgotten. An empty key names no round."""

    def __init__(self) -> None:
        self._keys: OrderedDict[str, None] = OrderedDict()

    def add(self, round_key: str) -> None:
        if not round_key:
            return
        self._keys[round_key] = None
        while len(self._keys) > _PASSED_KEYS_MAX:
            self._keys.popitem(last=False)

    def __contains__(self, round_key: object) -> bool:
        return round_key in self._keys


class RoundHistory:
    def __init__(self, *, patience: GracePeriod, unreachable_s: float, now_s: float) -> None:
        self.patience = patience
        # counts our changes of standing; one who restarts goes on above where it was
        self.turn = max(int(now_s * 1e6), 0)
        self.holders: dict[PeerId, Holder] = {}
        self.view_s = -math.inf  # when the presence records were read
        self._unreachable_s = unreachable_s
        self._unreachable: OrderedDict[PeerId, float] = OrderedDict()
        self.passed = PassedRounds()
        self._round: _Round | None = None
        self._usual_round_s = 1.0

    @property
    def in_round(self) -> bool:
        return self._round is not None and not self._round.over

    def next_turn(self) -> int:
        """We stand elsewhere from now on."""
        self.turn += 1
        return self.turn

    def saw_holders(self, holders: Mapping[PeerId, Holder], now_s: float) -> None:
        self.holders, self.view_s = dict(holders), now_s

    def met(self, holder: Holder) -> None:
        """A holder introduced itself: it is expected from now on, and by the records when they are read next."""
        if len(self.holders) < _HOLDERS_MAX:
            self.holders[holder.contact.peer_id] = holder

    def round_began(
        self, *, round_key: str, members: frozenset[PeerId], search_started_s: float, now_s: float
    ) -> None:
        self.next_turn()
        self._round = _Round(round_key, members, search_started_s, now_s)

    def round_over(self, *, committed: bool, now_s: float) -> None:
        """The round has ended. One that failed may be held again under the same key."""
        if (done := self._round) is None or done.over:
            return
        done.over = True
        self.next_turn()
        if committed:
            self._usual_round_s += _ROUND_GAIN * (now_s - done.began_s - self._usual_round_s)
            self.passed.add(done.round_key)

    def busy(self, now_s: float) -> Answer | None:
        """The answer of a peer that is in a round; None when it is in none."""
        if (current := self._round) is None or current.over:
            return None
        left_s = max(self._usual_round_s - (now_s - current.began_s), 0.05)
        return Answer(
            standing=PeerStatus.BUSY,
            round_key=current.round_key,
            expected_s=left_s,
            members=tuple(sorted(current.members)),
        )

    def note_late(self, seek: LookForGroup, now_s: float) -> None:
        """A peer looks for the round that began without it: it is waited for longer next time."""
        last = self._round
        if last is None or seek.contact.peer_id in last.members or seek.round_key != last.round_key:
            return
        if seek.round_key or not last.over:
            self.patience.arrived(seek.contact.peer_id, now_s - last.search_started_s)

    def mark_unreachable(self, peer_id: PeerId, now_s: float) -> None:
        self._unreachable[peer_id] = now_s + self._unreachable_s
        self._unreachable.move_to_end(peer_id)
        while len(self._unreachable) > _UNREACHABLE_MAX:
            self._unreachable.popitem(last=False)

    def heard(self, peer_id: PeerId) -> None:
        self._unreachable.pop(peer_id, None)

    def unreachable(self, now_s: float) -> list[PeerId]:
        return [peer_id for peer_id, until_s in self._unreachable.items() if now_s < until_s]
