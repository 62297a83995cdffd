"""The share of the vector that each member reduces, chosen so that the slowest member of the round is as fast
as possible.

Member i with upload bandwidth u, download bandwidth d and share f of the vector (size 1) sends its own values
for the rest, 1 - f, if it contributes, and the averages of its share to every other receiver; it takes every
other contributor's values for its share, and the averages of the rest, if it receives. Both amounts are
linear in f, so that the least time T in which all shares can be handled,

    minimise T  subject to  sent(f_i) <= T u_i,  taken(f_i) <= T d_i,  f_i >= 0,  sum f_i = 1,

is a linear program with one variable per member and one constraint that joins them. For a given T each member
can handle at most some share, which grows with T. Bisection finds the least T at which these shares add up to
1. All members get the same solution, because additions, multiplications and divisions of float64 are the same
everywhere.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from averaging.matchmaking.logic.group import Member, can_dial
from swarm.core.errors import UsageError
from swarm.core.ids import PeerId

# Relative error of an amount: the time of the whole vector times the speed may be a little less.
_ROUNDING = 1e-9
_HALVINGS = 200  # enough until two neighbouring floats are left
# Two bounds on measured bandwidths. Those that a user has set are taken as they are.
_SLOWER = 1.5  # bandwidths down to the median over this count as the median: measurements are never exact
# Bandwidths above the median are divided by this, down to the median at least. A member that reduces more is
# sent more: where all links are alike, a member that was mistaken for a fast one becomes the bottleneck, the
# others' sends wait for it, and next time they look slower still.
_FASTER = 2.0
# Every reducer exchanges a stream with every other member: n reducers among n members cost n * n streams,
# each about a millisecond of processor time on both ends. A group of up to REDUCERS_ALWAYS members shares any
# vector among all of them; a larger one only as far as shards have SHARD_BYTES_MIN. Smaller: rounds of many
# members over a small vector cost more than their bytes; larger: fast links stay idle.
SHARD_BYTES_MIN = 64 << 10
REDUCERS_ALWAYS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ReducerLoad:
    """The bandwidth of a member and its roles in a round."""

    up: float  # bytes/s that it can send; only ratios matter
    down: float  # and take
    contributes: bool
    receives: bool
    reduces: bool  # it can be dialed
    is_set: bool = False  # its user has set the bandwidth; False: it was measured


def shares_of(
    members: Sequence[Member], size_bytes: int, reducers: Collection[PeerId] | None = None
) -> list[float]:
    """Return the shares of a group's members of a vector with `size_bytes` encoded bytes, computed from the
    bandwidths that they announced. When the vector is too small for all of them, those that could take the
    largest shares reduce; of equals, the earlier in group order. Members without a weight that are no
    auxiliary peers are on their way into the run, and reduce only where the others are too few. `reducers`:
    those that may have a share; None: all that can be dialed.
    """
    loads = [
        ReducerLoad(
            up=member.bandwidth,
            down=member.bandwidth,
            contributes=member.weight > 0.0,
            receives=not member.auxiliary,
            reduces=_may_reduce(member, reducers),
            is_set=member.bandwidth_is_set,
        )
        for member in members
    ]
    reducers_max = max(REDUCERS_ALWAYS, size_bytes // SHARD_BYTES_MIN)
    staying = [load.reduces and (load.contributes or not load.receives) for load in loads]
    if len(loads) > reducers_max and sum(staying) >= reducers_max:
        loads = [replace(load, reduces=stays) for load, stays in zip(loads, staying, strict=True)]
    found = shares(loads)
    if sum(share > 0.0 for share in found) <= reducers_max:
        return found
    chosen = sorted(range(len(loads)), key=lambda place: (-found[place], place))[:reducers_max]
    return shares(
        [replace(load, reduces=load.reduces and place in chosen) for place, load in enumerate(loads)]
    )


def speeds_of(members: Sequence[Member], reducers: Collection[PeerId] | None = None) -> list[float]:
    """Return the announced bandwidths, in bytes/s, of the members that may reduce; what others announce
    decides nothing. `reducers`: as in `shares_of`.
    """
    return [member.bandwidth for member in members if _may_reduce(member, reducers)]


def _may_reduce(member: Member, reducers: Collection[PeerId] | None) -> bool:
    return can_dial(member) and (reducers is None or member.peer_id in reducers)


def shares(members: Sequence[ReducerLoad]) -> list[float]:
    """Return each member's share of the vector, in the same order, adding up to 1; 0.0 for members that do
    not reduce.

    A member so slow that its own values and averages alone delay the others gets no share, and the others are
    balanced among themselves. Where shares make no difference (two members), they follow the upload
    bandwidths. Raises UsageError when nobody reduces, or a bandwidth is not a positive finite number.
    """
    for member in members:
        if member.reduces and not (0.0 < member.up < math.inf and 0.0 < member.down < math.inf):
            raise UsageError(
                f"a bandwidth is a positive number of bytes per second, not {member.up!r} and {member.down!r}"
            )
    if not any(member.reduces for member in members):
        raise UsageError("nobody in this group can reduce: no member has a port that others can dial")
    reducing = [member for member in members if member.reduces]
    measured = [not member.is_set for member in reducing]
    ups = _levelled([member.up for member in reducing], measured)
    downs = _levelled([member.down for member in reducing], measured)
    contributors = sum(member.contributes for member in members)
    receivers = sum(member.receives for member in members)
    lines = []
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
    """Return the share of each reducer in the least time in which all shares together cover the vector."""
    counts = Counter(lines)  # mostly one, since measured speeds are levelled
    if len(counts) == 1:
        return [1.0] * len(lines)
    low, high = 0.0, max(line.whole_time for line in counts)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        covered = sum([count * line.share_max(middle) for line, count in counts.items()])
        low, high = (low, middle) if covered >= 1.0 else (middle, high)
    return [line.share_max(high) for line in lines]


@dataclass(frozen=True, slots=True)
class _Line:
    """The two constraints of a reducer. `sends` and `takes` are (amount at share 0, increase per unit of
    share).
    """

    up: float
    down: float
    sends: tuple[float, float]
    takes: tuple[float, float]

    @property
    def whole_time(self) -> float:
        """Return the time that it would take to reduce the whole vector."""
        return max(sum(self.sends) / self.up, sum(self.takes) / self.down, 0.0)

    def share_max(self, time: float) -> float:
        """Return the largest share that the reducer can handle in this time; 0.0 when it cannot handle even
        share 0.
        """
        share = 1.0
        for (constant, slope), speed in ((self.sends, self.up), (self.takes, self.down)):
            room = time * speed - constant
            if slope > 0.0:
                share = min(share, room / slope)
            elif room < slope - _ROUNDING * constant:  # even with the whole vector as its share
                return 0.0
        return max(share, 0.0)


def _levelled(speeds: Sequence[float], measured: Sequence[bool]) -> list[float]:
    """Return the speeds. Measured ones close to the median are replaced by the median, and those above it
    reduced.
    """
    middle = sorted(speeds)[(len(speeds) - 1) // 2]
    return [
        max(middle, speed / _FASTER) if doubtful and speed >= middle / _SLOWER else speed
        for speed, doubtful in zip(speeds, measured, strict=True)
    ]
