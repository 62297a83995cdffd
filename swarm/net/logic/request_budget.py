"""Rate limits of costly requests to this node: for each peer, for all strangers, and for all peers. Pure;
times are seconds.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Final

from swarm.core.ids import PeerId
from swarm.core.standing import PeerStanding

PER_CALLER_S: Final = 10.0  # each peer gets at most one in this time
WINDOW_S: Final = 60.0
_CALLERS_MAX = 4096


class RequestBudget:
    """Counts the requests that were granted in the last minute."""

    def __init__(self, standing: PeerStanding, calls_max: int, done: str) -> None:
        """Allow `calls_max` requests in one minute; if members are known, strangers get at most half. `done`:
        the past participle for refusals, such as "called back".
        """
        self._standing, self._calls_max, self._done = standing, calls_max, done
        self._done_s: OrderedDict[PeerId, float] = OrderedDict()
        self._members_s: deque[float] = deque()
        self._strangers_s: deque[float] = deque()

    def enter(self, caller: PeerId, now_s: float) -> str:
        """Count a request of this peer and return "", or return the reason for its refusal."""
        if now_s - self._done_s.get(caller, -PER_CALLER_S) < PER_CALLER_S:
            return f"you were {self._done} less than {PER_CALLER_S:g} s ago"
        for times_s in (self._members_s, self._strangers_s):
            while times_s and times_s[0] <= now_s - WINDOW_S:
                times_s.popleft()
        is_member = self._standing.is_member(caller)
        strangers_max = self._calls_max // 2 if self._standing.has_members() else self._calls_max
        if len(self._members_s) + len(self._strangers_s) >= self._calls_max or (
            not is_member and len(self._strangers_s) >= strangers_max
        ):
            return f"busy: too many peers were {self._done} in the last minute"
        (self._members_s if is_member else self._strangers_s).append(now_s)
        self._done_s[caller] = now_s
        self._done_s.move_to_end(caller)
        if len(self._done_s) > _CALLERS_MAX:
            self._done_s.popitem(last=False)
        return ""
