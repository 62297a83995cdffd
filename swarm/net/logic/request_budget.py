"""How often this node calls others back to tell them whether they can be called. Pure; times are seconds."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Final

from swarm.core.ids import PeerId
from swarm.core.standing import PeerStanding

PER_CALLER_S: Final = 10.0  # a peer is called back at most once in this time
WINDOW_S: Final = 60.0
CALLS_MAX: Final = 30  # in one window; half of them for strangers, where members are known
_CALLERS_MAX = 4096


class DialBackBudget:
    """Counts the peers that were called back in the last minute."""

    def __init__(self, standing: PeerStanding) -> None:
        self._standing = standing
        self._called_s: OrderedDict[PeerId, float] = OrderedDict()
        self._members_s: deque[float] = deque()
        self._strangers_s: deque[float] = deque()

    def enter(self, caller: PeerId, now_s: float) -> str:
        """Count a call to this peer, and return ""; or return why it is not made now."""
        if now_s - self._called_s.get(caller, -PER_CALLER_S) < PER_CALLER_S:
            return f"you were called back less than {PER_CALLER_S:g} s ago"
        for times_s in (self._members_s, self._strangers_s):
            while times_s and times_s[0] <= now_s - WINDOW_S:
                times_s.popleft()
        is_member = self._standing.is_member(caller)
        strangers_max = CALLS_MAX // 2 if self._standing.has_members() else CALLS_MAX
        if len(self._members_s) + len(self._strangers_s) >= CALLS_MAX or (
            not is_member and len(self._strangers_s) >= strangers_max
        ):
            return "busy: too many peers were called back in the last minute"
        (self._members_s if is_member else self._strangers_s).append(now_s)
        self._called_s[caller] = now_s
        self._called_s.move_to_end(caller)
        if len(self._called_s) > _CALLERS_MAX:
            self._called_s.popitem(last=False)
        return ""
