"""The search for relays by a peer that cannot be called: it decides which peers to ask. Pure; times are
seconds, passed in.

It learns from the answers to its Hellos which peers relay. While it has fewer relays than it wants, it
greets peers that have an address again: some peers start to relay only after others have called them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from swarm.core.backoff import backoff_s
from swarm.core.ids import Contact, PeerId

RELAYS_WANTED = 2  # number of relays that ends the search: a peer has reservations at this many
ASKED_MAX = 4  # peers asked in one round
_ASKED_AGAIN_S = 5.0  # pause before the same peer is asked again, which may have started only a moment ago
_ROUND_FIRST_S, _ROUND_S_MAX = 2.0, 60.0
_REMEMBERED_MAX = 256


class RelaySearch:
    """Decides when to ask which peers."""

    def __init__(self) -> None:
        self._asked_s: dict[PeerId, float] = {}
        self._rounds = 0
        self._next_s = -math.inf

    def due(self, candidates: Iterable[Contact], now_s: float) -> list[Contact]:
        """Return which of these peers, given in order of preference, to ask now, preferring those that were
        asked longest ago or never. The next round is due after a pause that grows from round to round.
        """
        if now_s < self._next_s:
            return []
        free = [
            one for one in candidates if now_s - self._asked_s.get(one.peer_id, -math.inf) >= _ASKED_AGAIN_S
        ]
        chosen = sorted(free, key=lambda one: self._asked_s.get(one.peer_id, -math.inf))[:ASKED_MAX]
        for one in chosen:
            self._asked_s.pop(one.peer_id, None)  # keeps the peers in the order of asking
            self._asked_s[one.peer_id] = now_s
        while len(self._asked_s) > _REMEMBERED_MAX:
            del self._asked_s[next(iter(self._asked_s))]
        self._rounds += 1
        self._next_s = now_s + backoff_s(self._rounds, _ROUND_FIRST_S, _ROUND_S_MAX)
        return chosen

    def wait_s(self, now_s: float) -> float:
        """Return the seconds until the next round is due."""
        return max(self._next_s - now_s, 0.0)

    def restart(self) -> None:
        """Record that relays are needed again: the first rounds follow in quick succession."""
        self._rounds, self._next_s = 0, -math.inf
