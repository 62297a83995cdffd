"""The detection of stragglers: members that are alive but delay a round. A pure state machine.

A member that sends heartbeats and does not work would delay all others forever. It is left out after a
multiple of the longest recent pause of any member in this round, and never before a minimum time; time during
which this process itself did not run does not count. A member that works steadily but too slowly for the time
of the round is detected from its transfer rate. Once a set share of the round's time is over, every member
that is still missing is left out; no message extends that time.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

UNDER_WAY_BYTES = 16 << 10  # bytes that may have arrived without being visible, as part of a message
_SIGN_BYTES_MAX = 64  # messages up to this size are signs of life, but not work
_FADING = 0.98  # factor on the longest pause, per sign of work


PACE_TICK_S = 0.25  # interval of checks
# timeout of a sender whose contribution is the last one missing for a chunk; shorter: slow links are
# excluded, longer: one member delays all
SENDER_S = 4.0
# timeout of a reducer that neither reads contributions nor sends averages; more than twice SENDER_S, because
# it may wait for a sender
REDUCER_S = 10.0
_FIRST_S = 5.0  # additional time for the first sign of work, because a member may still have to begin
_SLACK = 4.0  # or that many of the longest recent pauses, if that is longer
# Share of the time until the round's deadline; a member that would not finish by then at its rate is left
# out. The chunks of a lost reducer have to be reduced again, and a reducer may itself wait for a sender:
# SENDER_SHARE below REDUCER_SHARE, and that well below 1.
SENDER_SHARE = 0.5
REDUCER_SHARE = 0.7
_TIMEOUT_S_MAX = 120.0  # upper limit of a timeout


class StragglerDetector:
    """The pauses of members in one kind of work. Members are places in the group."""

    def __init__(self, floor_s: float, now_s: float, strangers: Collection[int] = ()) -> None:
        """Start. `strangers`: members that get no extra time to begin, because it is unknown whether they
        ever will.
        """
        self._floor_s, self._strangers = floor_s, strangers
        self._ticked_s = now_s
        self._awake_s = 0.0  # seconds during which this process ran, as far as ticks show
        self._waiting: dict[int, float] = {}  # when waiting for each began, since its last sign of work
        self._worked: set[int] = set()
        self._longest_s = 0.0

    def worked(self, place: int) -> None:
        """Record that some of this member's work arrived."""
        since_s = self._waiting.get(place)
        if since_s is not None:
            pause_s = self._awake_s - since_s
            if place in self._worked:  # the time that a member takes to begin says nothing about its rate
                self._longest_s = max(_FADING * self._longest_s, pause_s)
            self._waiting[place] = self._awake_s
        self._worked.add(place)

    def timeout_s(self, place: int) -> float:
        """Return how long to wait for this member's work."""
        timeout_s = max(self._floor_s, _SLACK * self._longest_s)
        begins = place not in self._worked and place not in self._strangers
        return min(timeout_s + (_FIRST_S if begins else 0.0), _TIMEOUT_S_MAX)

    def tick(self, waited_for: Collection[int], now_s: float) -> list[tuple[int, float]]:
        """Advance the clock; call it every `PACE_TICK_S` with the members whose work is missing. Returns the
        members to continue without, with their idle time in seconds.
        """
        self._awake_s += min(now_s - self._ticked_s, 2.0 * PACE_TICK_S)
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
        self.due_s = math.inf  # deadline for everything to arrive
        self._owed = dict(owed_bytes)
        self._came = dict.fromkeys(owed_bytes, 0)
        self._floor_s = floor_s
        # start time and start byte of the measured rate
        self._since = dict.fromkeys(owed_bytes, (now_s, 0))

    def came(self, place: int, size_bytes: int) -> None:
        """Record that `size_bytes` of this member's transfer arrived."""
        if place in self._came and size_bytes > _SIGN_BYTES_MAX:
            self._came[place] += size_bytes

    def excused(self, place: int, now_s: float) -> None:
        """Restart the measurement of a member's rate, because another member delayed it."""
        if place in self._came:
            self._since[place] = now_s, self._came[place]

    def late(self, waited_for: Collection[int], now_s: float) -> list[tuple[int, float]]:
        """Return the members that will not finish in time, with the number of seconds that they still need.

        Once the time is over, every member that is waited for is late by infinity; no message extends its
        time. Empty when most members are late: then this member is slow to receive.
        """
        found = []
        for place in waited_for:
            came, owed = self._came.get(place, 0), self._owed.get(place, 0)
            since_s, before = self._since.get(place, (now_s, 0))
            elapsed_s = now_s - since_s
            if now_s > self.due_s:
                found.append((place, math.inf))
            elif came > before and owed > came and elapsed_s >= self._floor_s:
                more_s = (owed - came) * elapsed_s / (came - before + UNDER_WAY_BYTES)
                if now_s + more_s > self.due_s:
                    found.append((place, more_s))
        return found if 2 * len(found) <= len(self._owed) or len(self._owed) == 1 else []


def too_late(more_s: float) -> str:
    """Return the phrase about a member's late transfer (`TransferEta.late`)."""
    if math.isinf(more_s):
        return "had not come when their time was over"
    return f"would take {more_s:.0f} s more at its pace"
