"""Division of the presence records of an averager among dictionaries of bounded size.

Up to about twice the size of a group all holders stand in one dictionary. More are divided by a hash into
2^bits shards of about 32, and a peer reads the shard that it is in. It estimates the number of holders by the
sizes of the shards that it has read, eight at least, and chooses the number of bits by that. Peers whose
assumptions differ by one bit still find each other, because they read the dictionaries of the next coarser
and finer division, too. A newcomer finds in the one dictionary of small swarms, instead of all holders, those
of the first shard, with the number of bits.

Pure.
"""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from swarm.core.ids import PeerId

FLAT_MAX = 128  # holders that share one dictionary, or twice a group if that is more
SHARD_HOLDERS = 32  # nominal size when the number of shards is chosen
BITS_MIN = 3  # bits of the coarsest division
BITS_MAX = 20
# factors on SHARD_HOLDERS: a shard outside of these leads to a finer or coarser division
_ABOVE, _BELOW = 1.5, 0.375
_RETURNS_BELOW = 0.75  # factor on the maximum of one dictionary below which a divided swarm returns to it
# shards that a peer samples to estimate the number of holders. Fewer: estimates differ so much that peers
# divide the swarm into different cells and rarely meet. More: more reads
SHARDS_COUNTED = 8
# the first shard of a divided swarm has more holders than this; fewer notices are not evidence of one
_NOTICES_MIN = 8


@dataclass(frozen=True, slots=True)
class HolderShard:
    """The holders whose hash begins with these bits; all holders for no bits."""

    bits: int = 0
    prefix: int = 0

    def holds(self, place: int) -> bool:
        """Return whether a holder with this hash is in the shard."""
        return place >> (64 - self.bits) == self.prefix if self.bits else True

    def name(self, averager: str) -> str:
        """Return the name of the shard's dictionary within the run's namespace."""
        return f"holders.{averager}.{self.bits}.{self.prefix}" if self.bits else f"holders.{averager}"

    def neighbours(self) -> list[HolderShard]:
        """Return the shards of the next coarser and finer divisions in which holders of this one may stand,
        by the assumption of a peer that has not followed a change yet.
        """
        if not self.bits:
            return []
        coarser = HolderShard(self.bits - 1, self.prefix >> 1) if self.bits > BITS_MIN else HolderShard()
        finer = [HolderShard(self.bits + 1, 2 * self.prefix + last) for last in (0, 1)]
        return [coarser, *(finer if self.bits < BITS_MAX else [])]

    def others(self, count: int) -> list[HolderShard]:
        """Return this many of the next shards of the same division."""
        shards = 1 << self.bits
        return [
            HolderShard(self.bits, (self.prefix + step) % shards) for step in range(1, min(count + 1, shards))
        ]


def place_of(name: bytes) -> int:
    """Return the 64-bit hash by which a holder, or the name of a cell, belongs to a shard."""
    return int.from_bytes(hashlib.sha256(b"swarm holder\0" + name).digest()[:8], "big")


def shard_at(place: int, bits: int) -> HolderShard:
    """Return the shard of this hash in a division of 2^bits."""
    return HolderShard(bits, place >> (64 - bits)) if bits else HolderShard()


def nearest(name: str, peers: Iterable[PeerId], count: int) -> list[PeerId]:
    """Return the `count` peers whose hashes are nearest to that of a name. Peers that assume divisions that
    differ by one bit find the same ones in the shard of the name.
    """
    place = place_of(name.encode())
    return sorted(peers, key=lambda peer: place_of(peer.to_bytes()) ^ place)[:count]


def holders_estimated(plain: int, notices: Sequence[int]) -> int:
    """Return the number of all holders by the one dictionary of a small swarm: that of its plain records,
    and as many as follow from the notices of a divided swarm. `notices`: the number of bits in each.
    """
    if len(notices) < _NOTICES_MIN:
        return plain + len(notices)
    return plain + (len(notices) << statistics.median_low(notices))


def holders_by_shards(sizes: Sequence[int], bits: int) -> int:
    """Return the estimated number of all holders, from the sizes of some shards of a division of 2^bits."""
    return round(statistics.fmean(sizes) * (1 << bits))


def bits_for(holders: int, bits: int, flat_max: int = FLAT_MAX) -> int:
    """Return the number of bits by which this many holders are divided, given the present division. It
    changes only when shards are far from their nominal size, and then by one bit, so that peers that follow
    late still read the others' records.
    """
    if bits == 0:
        if holders <= flat_max:
            return 0
        return min(max(math.ceil(math.log2(holders / SHARD_HOLDERS)), BITS_MIN), BITS_MAX)
    mean = holders / (1 << bits)
    if mean > SHARD_HOLDERS * _ABOVE:
        return min(bits + 1, BITS_MAX)
    if holders <= flat_max * _RETURNS_BELOW and bits == BITS_MIN:
        return 0
    return bits - 1 if mean < SHARD_HOLDERS * _BELOW and bits > BITS_MIN else bits
