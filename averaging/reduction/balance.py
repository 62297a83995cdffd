"""Who reduces how much: the shares of the vector that make a round's slowest member as fast as can be.

Member i with upload bandwidth u, download bandwidth d and share f of the vector (size 1) sends its own values
for the rest, 1 - f, if it contributes, and the averages of its share to every other receiver; it takes every
other contributor's values for its share, and the averages of the rest, if it receives. Each is linear in f,
so that the least time T in which all shares can be handled,

    minimise T  subject to  sent(f_i) <= T u_i,  taken(f_i) <= T d_i,  f_i >= 0,  sum f_i = 1,

is a linear program with one variable per member and one constraint that joins them: for a given T each member
can take at most some share, which grows with T, and the least T at which these add up to 1 is found by
halving. All members solve it alike: additions, multiplications and divisions of float64 are the same
everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from averaging.matchmaking.logic.group import Member, can_dial
from swarm.core.errors import UsageError

_HALVINGS = 200  # until two neighbouring floats are left
_SLOWER = 1.5  # bandwidths down to the median over this count as the median: what is measured is never exact
# And those above it count as so many times less, but no less than the median. Who reduces more is sent more:
# where all links are alike, a member that was taken for a fast one becomes the bottleneck, the others' sends
# wait for it, and next time they look slower still.
_FASTER = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReducerLoad:
    """What a member has to do with a round, as far as the balance is concerned."""

    up: float  # bytes/s that it can send; only ratios matter
    down: float  # and take
    contributes: bool
    receives: bool
    reduces: bool  # it can be dialed


def shares_of(members: Sequence[Member]) -> list[float]:
    """The shares of a group's members, by the bandwidths that they announced."""
    return shares(
        [
            ReducerLoad(
                up=member.bandwidth,
                down=member.bandwidth,
                contributes=member.weight > 0.0,
                receives=not member.auxiliary,
                reduces=can_dial(member),
            )
            for member in members
        ]
    )


def shares(members: Sequence[ReducerLoad]) -> list[float]:
    """Each member's share of the vector, in the same order, adding up to 1; 0.0 for who does not reduce.

    A member so slow that its own values and averages alone hold everybody up gets no share, and the others
    are balanced among themselves. Where shares make no difference (two members), they follow the upload
    bandwidths. UsageError: nobody reduces, or a bandwidth is not a positive finite number.
    """
    for member in members:
        if member.reduces and not (0.0 < member.up < math.inf and 0.0 < member.down < math.inf):
            raise UsageError(
                f"a bandwidth is a positive number of bytes per second, not {member.up!r} and {member.down!r}"
            )
    if not any(member.reduces for member in members):
        raise UsageError("nobody in this group can reduce: no member has a port that others can dial")
    ups = _levelled([member.up for member in members if member.reduces])
    downs = _levelled([member.down for member in members if member.reduces])
    contributors = sum(member.contributes for member in members)
    receivers = sum(member.receives for member in members)
    lines = []
    reducing = [member for member in members if member.reduces]
    for member, up, down in zip(reducing, ups, downs, strict=True):
        sends = (float(member.contributes), float(receivers - member.receives - member.contributes))
        takes = (float(member.receives), float(contributors - member.contributes - member.receives))
        lines.append(_Line(up, down, sends, takes))
    found = (
        _solved(lines)
        if any(line.sends[1] > 0.0 or line.takes[1] > 0.0 for line in lines)
        else [member.up for member in reducing]
    )
    by_member, total = iter(found), sum(found)
    return [next(by_member) / total if member.reduces else 0.0 for member in members]


def _solved(lines: Sequence[_Line]) -> list[float]:
    """What each can handle in the least time in which all of it can be handled."""
    low, high = 0.0, max(line.whole_time for line in lines)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (low, middle) if sum(line.share_max(middle) for line in lines) >= 1.0 else (middle, high)
    return [line.share_max(high) for line in lines]


@dataclass(frozen=True, slots=True)
class _Line:
    """A reducer's two constraints: what it sends and takes, (when its share is 0, more per unit of its
    share).
    """

    up: float
    down: float
    sends: tuple[float, float]
    takes: tuple[float, float]

    @property
    def whole_time(self) -> float:
        """What the whole vector as its share would take."""
        return max(sum(self.sends) / self.up, sum(self.takes) / self.down, 0.0)

    def share_max(self, time: float) -> float:
        """The largest share that it can handle in this time; 0.0 when it cannot even handle none."""
        share = 1.0
        for (constant, slope), speed in ((self.sends, self.up), (self.takes, self.down)):
            room = time * speed - constant
            if slope > 0.0:
                share = min(share, room / slope)
            elif room < slope:  # even with the whole vector as its share
                return 0.0
        return max(share, 0.0)


def _levelled(speeds: Sequence[float]) -> list[float]:
    """Speeds that are nearly the median become the median, and only a part of being faster counts."""
    middle = sorted(speeds)[(len(speeds) - 1) // 2]
    return [speed if speed < middle / _SLOWER else max(middle, speed / _FASTER) for speed in speeds]
