"""The detection of stragglers: members that are alive but delay a round. A pure state machine.

A member that sends heartbeats and does not work would delay all others for ever. It is given up after a
multiple of the longest recent pause of any member in this round, and never before a minimum time; time during
which this process itself did not run does not count. A member that works steadily but too slowly for the time
of the round is detected from its transfer rate.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from swarm.core.errors import UsageError

UNDER_WAY_BYTES = 16 << 10  # may be nearly here and not to be seen yet: a piece of a message
_SIGN_BYTES_MAX = 64  # messages up to this say that a member lives, and are none of what it owes
_FADING = 0.98  # of the longest pause, per sign of work


@dataclass(frozen=True, slots=True, kw_only=True)
class PacingConfig:
    """The time after which the round continues without a member that is alive and whose work is missing."""

    tick_s: float = 0.25  # between two looks
    # a sender whose contribution is the one that a chunk waits for; too small: slow links are cut off, too
    # large: one holds all
    sender_s: float = 4.0
    # a reducer that takes no contribution and gives no average; it may itself wait for a sender, so: more
    # than twice sender_s
    reducer_s: float = 10.0
    voter_s: float = 15.0  # a member that has not voted although most have; it may itself wait for a reducer
    first_s: float = 5.0  # more for the first sign of work: a member may still have to begin
    slack: float = 4.0  # that many of the longest recent pauses instead, if that is longer
    # Share of the time until the round's deadline; a member that would not finish by then at its rate is left
    # out. The chunks of a lost reducer have to be reduced again, and a reducer may itself wait for a sender:
    # sender_share below reducer_share, and that well below 1
    sender_share: float = 0.5
    reducer_share: float = 0.7
    timeout_s_max: float = 120.0  # but never more

    def __post_init__(self) -> None:
        if not (
            0 < self.tick_s <= self.sender_s <= self.reducer_s <= self.voter_s <= self.timeout_s_max
            and self.slack >= 0
        ):
            raise UsageError(
                "tick_s, sender_s, reducer_s, voter_s and timeout_s_max are positive and grow in this order"
            )
        if not 0 < self.sender_share <= self.reducer_share <= 1:
            raise UsageError(
                "sender_share and reducer_share are above 0 and at most 1, and grow in this order"
            )


class StragglerDetector:
    """The pauses of members in one kind of work. Members are places in the group."""

    def __init__(self, floor_s: float, config: PacingConfig, now_s: float) -> None:
        self._floor_s = floor_s
        self._config = config
        self._ticked_s = now_s
        self._awake_s = 0.0  # seconds during which this process ran, as far as ticks show
        self._waiting: dict[int, float] = {}  # since when each is waited for, without a sign of work
        self._worked: set[int] = set()
        self._longest_s = 0.0

    def worked(self, place: int) -> None:
        """Record that some of this member's work came."""
        since_s = self._waiting.get(place)
        if since_s is not None:
            pause_s = self._awake_s - since_s
            if place in self._worked:  # how long a member takes to begin says nothing about its pace
                self._longest_s = max(_FADING * self._longest_s, pause_s)
            self._waiting[place] = self._awake_s
        self._worked.add(place)

    def timeout_s(self, place: int) -> float:
        """Return how long to wait for this member's work."""
        timeout_s = max(self._floor_s, self._config.slack * self._longest_s)
        return min(
            timeout_s + (0.0 if place in self._worked else self._config.first_s), self._config.timeout_s_max
        )

    def tick(self, waited_for: Collection[int], now_s: float) -> list[tuple[int, float]]:
        """Advance the clock; call it every `tick_s` with the members whose work is missing. Returns the
        members to continue without, with their idle time in seconds.
        """
        self._awake_s += min(now_s - self._ticked_s, 2.0 * self._config.tick_s)
        self._ticked_s = now_s
        self._waiting = {place: self._waiting.get(place, self._awake_s) for place in waited_for}
        over = [(place, self._awake_s - since_s) for place, since_s in sorted(self._waiting.items())]
        return [(place, idle_s) for place, idle_s in over if idle_s > self.timeout_s(place)]


class TransferEta:
    """The estimated time at which members finish their transfers, from their rates so far. Members are places
    in the group.
    """

    def __init__(self, owed_bytes: Mapping[int, int], floor_s: float, now_s: float) -> None:
        """Begin the estimate. `floor_s`: how long a rate is measured before it is used."""
        self.due_s = math.inf  # by when everything should be here
        self._owed = dict(owed_bytes)
        self._came = dict.fromkeys(owed_bytes, 0)
        self._floor_s = floor_s
        # since when, and from which byte on, a pace is watched
        self._since = dict.fromkeys(owed_bytes, (now_s, 0))

    def came(self, place: int, size_bytes: int) -> None:
        """Record that `size_bytes` of this member's transfer came."""
        if place in self._came and size_bytes > _SIGN_BYTES_MAX:
            self._came[place] += size_bytes

    def excused(self, place: int, now_s: float) -> None:
        """Restart the measurement of a member's rate, because another member delayed it."""
        if place in self._came:
            self._since[place] = now_s, self._came[place]

    def late(self, waited_for: Collection[int], now_s: float) -> list[tuple[int, float]]:
        """Return the members that will not finish in time, with the number of seconds that they still need.

        Empty when most members are late: then this member is slow to receive. A member that has sent nothing
        has no rate, and is returned once the time is over.
        """
        found = []
        for place in waited_for:
            came, owed = self._came.get(place, 0), self._owed.get(place, 0)
            since_s, before = self._since.get(place, (now_s, 0))
            elapsed_s = now_s - since_s
            if not came and now_s > self.due_s:
                found.append((place, math.inf))
            elif came > before and owed > came and elapsed_s >= self._floor_s:
                more_s = (owed - came) * elapsed_s / (came - before + UNDER_WAY_BYTES)
                if now_s + more_s > self.due_s:
                    found.append((place, more_s))
        return found if 2 * len(found) <= len(self._owed) or len(self._owed) == 1 else []
