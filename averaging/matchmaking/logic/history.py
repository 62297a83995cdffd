"""State that an averager keeps from one search for a group to the next: the known holders, peers that did not
answer, and finished rounds.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

from averaging.matchmaking.logic.grace_period import GracePeriod
from averaging.matchmaking.logic.messages import Answer, Holder, Leader, LookForGroup, PeerStatus
from swarm.core.ids import PeerId

_PASSED_KEYS_MAX = 64
_UNREACHABLE_MAX = 1024
_HOLDERS_MAX = 4096
_EARLY_MAX = 64
_ROUND_GAIN = 0.25  # weight of the newest round in the running mean of round lengths


@dataclass(slots=True)
class _Round:
    round_key: str
    members: frozenset[PeerId]
    search_started_s: float
    began_s: float
    over: bool = False


class PassedRounds:
    """Keys of rounds that this peer committed. The oldest are forgotten; an empty key names no round."""

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
    """Memory of one averager across its searches and rounds. All times are monotonic seconds."""

    def __init__(self, *, grace_period: GracePeriod, unreachable_s: float, now_s: float) -> None:
        self.grace_period = grace_period
        # number of this peer's changes of status; starts at the clock, so that a restarted peer continues
        # above its earlier values
        self.turn = max(int(now_s * 1e6), 0)
        self.holders: dict[PeerId, Holder] = {}
        self.records_read_s = -math.inf  # when the presence records were read
        self._unreachable_s = unreachable_s
        self._unreachable: OrderedDict[PeerId, float] = OrderedDict()
        self.passed = PassedRounds()
        self._round: _Round | None = None
        self._mean_round_s = 1.0
        self._early: OrderedDict[PeerId, LookForGroup] = OrderedDict()  # queries since the last search

    @property
    def in_round(self) -> bool:
        return self._round is not None and not self._round.over

    def next_turn(self) -> int:
        """Increment the turn, because this peer's status changed, and return it."""
        self.turn += 1
        return self.turn

    def set_holders(self, holders: Mapping[PeerId, Holder], now_s: float) -> None:
        self.holders, self.records_read_s = dict(holders), now_s

    def add_holder(self, holder: Holder) -> None:
        """Add a holder that introduced itself. The next read of the presence records replaces the whole
        table.
        """
        if len(self.holders) < _HOLDERS_MAX:
            self.holders[holder.contact.peer_id] = holder

    def round_began(
        self, *, round_key: str, members: frozenset[PeerId], search_started_s: float, now_s: float
    ) -> None:
        self.next_turn()
        self._round = _Round(round_key, members, search_started_s, now_s)

    def round_over(self, *, committed: bool, now_s: float) -> None:
        """Record the end of the current round. A round that was not committed may be run again under the same
        key.
        """
        if (done := self._round) is None or done.over:
            return
        done.over = True
        self.next_turn()
        if committed:
            self._mean_round_s += _ROUND_GAIN * (now_s - done.began_s - self._mean_round_s)
            self.passed.add(done.round_key)

    def status(self, now_s: float) -> Answer:
        """Return the status of this peer while it does not search."""
        if (current := self._round) is None or current.over:
            return Answer(status=PeerStatus.IDLE, turn=self.turn)
        left_s = max(self._mean_round_s - (now_s - current.began_s), 0.05)
        return Answer(
            status=PeerStatus.BUSY,
            round_key=current.round_key,
            expected_s=left_s,
            members=tuple(sorted(current.members)),
            turn=self.turn,
        )

    def on_early_query(self, query: LookForGroup, now_s: float) -> None:
        """Record the query of a peer that looks for a group while this one does not. It counts for the next
        search, or as an arrival after a round began without it, which lengthens its grace period.
        """
        self._early[query.contact.peer_id] = query
        self._early.move_to_end(query.contact.peer_id)
        while len(self._early) > _EARLY_MAX:
            self._early.popitem(last=False)
        last = self._round
        if last is None or query.contact.peer_id in last.members or query.round_key != last.round_key:
            return
        if query.round_key or not last.over:
            self.grace_period.record_arrival(query.contact.peer_id, now_s - last.search_started_s)

    def take_early_leaders(self, round_key: str) -> list[Leader]:
        """Return the peers that have looked for this round since the last search, and could lead it."""
        early, self._early = self._early, OrderedDict()
        return [
            Leader(contact=query.contact, deadline_s=query.deadline_s)
            for query in early.values()
            if query.round_key == round_key and query.can_lead
        ]

    def mark_unreachable(self, peer_id: PeerId, now_s: float) -> None:
        self._unreachable[peer_id] = now_s + self._unreachable_s
        self._unreachable.move_to_end(peer_id)
        while len(self._unreachable) > _UNREACHABLE_MAX:
            self._unreachable.popitem(last=False)

    def mark_reachable(self, peer_id: PeerId) -> None:
        self._unreachable.pop(peer_id, None)

    def unreachable(self, now_s: float) -> list[PeerId]:
        return [peer_id for peer_id, until_s in self._unreachable.items() if now_s < until_s]
