"""Schedule of hole punching attempts: one at a time per peer, with pauses after failures. Pure; times are
seconds, passed in.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass

from swarm.core.backoff import backoff_s
from swarm.core.ids import PeerId

# the other end may try this much earlier, because its pause began with the end of its own attempt
SLACK_S = 30.0
ATTEMPTS_MAX = 16  # simultaneous attempts; each dials for seconds
PEERS_MAX = 1024  # peers whose failures are remembered; the one that was tried longest ago is forgotten


def pause_s(failures: int) -> float:
    """Return the pause after this number of failures in a row: 60 s, 240 s, then 900 s."""
    return backoff_s(failures, first_s=60.0, max_s=900.0, growth=4.0)


@dataclass(slots=True)
class _Tries:
    failures: int = 0
    not_before_s: float = -math.inf


class Punches:
    """The attempts of one host."""

    def __init__(self) -> None:
        self._peers: OrderedDict[PeerId, _Tries] = OrderedDict()
        self._running: set[PeerId] = set()

    @property
    def remembered(self) -> list[PeerId]:
        """Return the peers with failures, the one that was tried longest ago first."""
        return list(self._peers)

    def next_s(self, peer_id: PeerId) -> float:
        """Return when this side may try again."""
        tries = self._peers.get(peer_id)
        return tries.not_before_s if tries is not None else -math.inf

    def begin(self, peer_id: PeerId, now_s: float, *, is_asked: bool) -> str:
        """Begin an attempt and return an empty text, or return the reason why it must not begin. `is_asked`:
        the peer requested it. Each `begin` that returns an empty text must be followed by `end`.
        """
        if peer_id in self._running:
            return "another attempt is under way"
        if len(self._running) >= ATTEMPTS_MAX:
            return f"{ATTEMPTS_MAX} attempts are under way"
        wait_s = self.next_s(peer_id) - now_s - (SLACK_S if is_asked else 0.0)
        if wait_s > 0.0:
            return f"the next attempt is due in {wait_s:.0f} s"
        tries = self._peers.setdefault(peer_id, _Tries())
        self._peers.move_to_end(peer_id)
        if len(self._peers) > PEERS_MAX:
            self._peers.popitem(last=False)
        tries.not_before_s = now_s + pause_s(1)
        self._running.add(peer_id)
        return ""

    def give_way(self, peer_id: PeerId) -> None:
        """End this side's attempt before dialing, so that another attempt can begin now."""
        self._running.discard(peer_id)
        if peer_id in self._peers:
            self._peers[peer_id].not_before_s = -math.inf

    def end(self, peer_id: PeerId, now_s: float, *, has_worked: bool) -> None:
        """Record the result of an attempt."""
        self._running.discard(peer_id)
        if has_worked:
            self._peers.pop(peer_id, None)
            return
        tries = self._peers.setdefault(peer_id, _Tries())
        tries.failures += 1
        tries.not_before_s = now_s + pause_s(tries.failures)
