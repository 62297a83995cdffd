"""Progress of large runs at a cost of O(log N) per peer: shards of about 32 members, sums that three
members of each shard sign, and a tree of sums above.

A member reads and writes one dictionary of bounded size, that of its shard. It contains the members'
reports, as in a small run, and, in the records of three members, the shard's aggregators, the total of the
whole run. These three write the shard's sum into the dictionary of the parent node, next to the sums of its
other children, up to 32. Three of the writers there are in turn the node's aggregators, and so on up to the
root. Totals come down on the same way that sums go up. A reader takes the median of three, so that one liar
among three changes nothing.

Members and aggregators of a shard follow from hashes and the dictionary alone; aggregators change with
every period, so that a majority of liars among them does not last. Their influence is bounded even then: a
shard counts at most its maximum of members, and at most `RATE_RATIO_MAX` times the median rate of all
shards. Pure; times are seconds of the swarm's clock.
"""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from averaging.optim.progress.logic.epoch_reached import epoch_of
from averaging.optim.progress.logic.reports import (
    BITS_MAX,
    EXTRAPOLATION_S_MAX,
    SAMPLES_MAX,
    SLACK_S,
    ProgressReport,
    ProgressTotal,
)
from averaging.optim.progress.logic.standing import RATE_RATIO_MAX
from swarm.core.ids import PeerId

FLAT_MAX = 64  # peers that share one dictionary
SHARD_MEMBERS = 32  # nominal size when the number of shards is chosen
SHARD_MEMBERS_MAX = 128  # members of one shard that count at most
FANOUT_BITS = 5  # 32 children under a node
AGGREGATORS = 3
PERIOD_S = 600.0  # how long the same three peers aggregate
# factors on SHARD_MEMBERS: a mean shard size outside of these leads to a split or merge
_ABOVE, _BELOW = 1.5, 0.375


@dataclass(frozen=True, slots=True)
class TreeNode:
    """A node of the tree: the members whose hash begins with `prefix`. With 2^bits shards, the nodes of
    level 0 are the shards.
    """

    bits: int  # number of bits that identify a shard
    level: int
    prefix: int  # the first `length` bits

    @property
    def length(self) -> int:
        """Return the number of bits in the prefix."""
        return max(self.bits - self.level * FANOUT_BITS, 0)

    @property
    def is_root(self) -> bool:
        """Return whether this is the root."""
        return self.length == 0

    @property
    def parent(self) -> TreeNode:
        """Return the node that the sum of this one goes to; the root is its own parent."""
        above = TreeNode(self.bits, self.level + 1, 0)
        return self if self.is_root else replace(above, prefix=self.prefix >> (self.length - above.length))

    @property
    def name(self) -> str:
        """Return the name of the node's dictionary within the run's namespace."""
        if self.bits == 0:
            return "progress"
        return (
            f"progress.{self.bits}.{self.prefix}"
            if self.level == 0
            else f"sums.{self.bits}.{self.level}.{self.prefix}"
        )

    def holds(self, place: int) -> bool:
        """Return whether a member with this hash is below the node."""
        return place >> (64 - self.length) == self.prefix if self.length else True


def place_of(run: str, peer: PeerId) -> int:
    """Return the 64-bit hash that decides in which shards of a run a peer is."""
    return int.from_bytes(
        hashlib.sha256(b"swarm shard\0" + run.encode() + b"\0" + peer.to_bytes()).digest()[:8], "big"
    )


def shard_of(run: str, peer: PeerId, bits: int) -> TreeNode:
    """Return the shard of a peer in a run with 2^bits shards."""
    return TreeNode(bits, 0, place_of(run, peer) >> (64 - bits) if bits else 0)


def bits_for(peers: int, bits: int) -> int:
    """Return the number of bits by which a run of this many peers is divided, given the present division. It
    changes only when shards are far from their nominal size.
    """
    wanted = 0 if peers <= FLAT_MAX else max(math.ceil(math.log2(peers / SHARD_MEMBERS)), 1)
    if bits == 0:
        return min(wanted, BITS_MAX)
    mean = peers / (1 << bits)
    if mean > SHARD_MEMBERS * _ABOVE or mean < SHARD_MEMBERS * _BELOW:
        return 0 if peers <= FLAT_MAX * _ABOVE / 2 else min(max(wanted, 1), BITS_MAX)
    return bits


def aggregators(
    node: TreeNode, run: str, writers: Iterable[PeerId], now_s: float, electors: Collection[PeerId] = ()
) -> list[PeerId]:
    """Return the three aggregators among the writers of a node's dictionary: electors first, and the lowest
    by a hash that changes with the period. Anybody can make an identity with a low hash. All peers with one
    head know the same electors, but not the same members.
    """
    context = f"{run}\0{node.name}\0{int(now_s // PERIOD_S)}\0".encode()

    def rank(peer: PeerId) -> tuple[bool, bytes]:
        return peer not in electors, hashlib.sha256(context + peer.to_bytes()).digest()

    return sorted(writers, key=rank)[:AGGREGATORS]


def counted_sums(
    sums: Mapping[PeerId, ProgressTotal], chosen: Iterable[PeerId], electors: Collection[PeerId]
) -> list[ProgressTotal]:
    """Return those sums of the chosen aggregators that count: of electors alone, where there is one.

    Beside identities that were made for the part, the median of three would be theirs. The sum of a single
    elector is returned twice: it stands as it is (`median_of`).
    """
    found = {peer: sums[peer] for peer in chosen if peer in sums}
    deciding = [one for peer, one in found.items() if peer in electors]
    return (deciding * 2 if len(deciding) == 1 else deciding) or list(found.values())


def sum_of_reports(reports: Mapping[PeerId, ProgressReport], now_s: float) -> ProgressTotal:
    """Return the sum of a shard's reports. Each counts with at most `RATE_RATIO_MAX` times the median rate
    since the epoch began.
    """
    epoch = epoch_of((report.epoch, 1) for report in reports.values() if not report.joining)
    there = [report for report in reports.values() if report.epoch == epoch]
    since_s = statistics.median_low([report.since_s for report in there]) if there else now_s
    rates = [report.rate for report in reports.values() if report.rate > 0]
    median_rate = statistics.median_low(rates) if rates else 0.0
    rate_max = RATE_RATIO_MAX * median_rate if len(rates) >= 3 else math.inf
    samples = 0.0
    for report in there:
        training_s = max(0.0, report.at_s - since_s) + SLACK_S
        counted = min(float(report.samples), rate_max * training_s)
        silent_s = min(max(0.0, now_s - report.at_s), EXTRAPOLATION_S_MAX)
        samples += counted + min(min(report.rate, rate_max) * silent_s, counted)
    rate = sum(min(report.rate, rate_max) for report in reports.values())
    return ProgressTotal(
        epoch=epoch,
        samples=min(samples, float(SAMPLES_MAX)),
        rate=rate,
        peers=len(reports),
        median_rate=median_rate,
        at_s=now_s,
        since_s=min(since_s, now_s),
    )


def median_of(sums: Sequence[ProgressTotal]) -> ProgressTotal | None:
    """Return the median of three totals, each number separately; of two the lower, so that one liar with
    a failed peer adds nothing.

    A single total is reduced to two peers: a larger shard would have more aggregators. Returns None for an
    empty sequence.
    """
    if not sums:
        return None
    if len(sums) == 1:
        [one] = sums
        share = min(1.0, 2 / one.peers) if one.peers else 0.0
        return replace(one, peers=min(one.peers, 2), samples=one.samples * share, rate=one.rate * share)
    epoch = statistics.median_low([one.epoch for one in sums])
    there = [one for one in sums if one.epoch == epoch] if len(sums) == 2 else sums
    low = statistics.median_low
    at_s = low([one.at_s for one in sums])
    return ProgressTotal(
        epoch=epoch,
        # an aggregator that is an epoch behind knows nothing about this epoch; for one that is ahead, this
        # epoch is complete
        samples=low(
            [one.samples if one.epoch == epoch else 0.0 if one.epoch < epoch else math.inf for one in there]
        ),
        rate=low([one.rate for one in sums]),
        peers=low([one.peers for one in sums]),
        median_rate=low([one.median_rate for one in sums]),
        at_s=at_s,
        since_s=min(low([one.since_s for one in there]), at_s),
        bits=low([one.bits for one in sums]),
    )


def sum_of_children(
    children: Mapping[int, Sequence[ProgressTotal]], level: int, now_s: float
) -> ProgressTotal:
    """Return the sum of a node's children: for each the median of its three totals, limited by the rates of
    the others.

    `children`: by prefix, the totals of a child's aggregators. `level`: of the node.
    """
    found = [one for one in (median_of(sums) for sums in children.values()) if one is not None]
    members_max = SHARD_MEMBERS_MAX << (FANOUT_BITS * (level - 1))
    found = [replace(one, peers=min(one.peers, members_max)) for one in found]
    epoch = epoch_of((one.epoch, one.peers) for one in found)
    there = [one for one in found if one.epoch == epoch]
    since_s = statistics.median_low([one.since_s for one in there]) if there else now_s
    rates = [one.median_rate for one in found if one.median_rate > 0]
    median_rate = statistics.median_low(rates) if rates else 0.0
    rate_max = RATE_RATIO_MAX * median_rate if len(rates) >= 3 else math.inf
    samples = rate = 0.0
    for one in found:
        limit = rate_max * one.peers if one.peers else 0.0  # a shard without members has no rate
        rate += min(one.rate, limit)
        if one.epoch == epoch:
            training_s = max(0.0, one.at_s - since_s) + SLACK_S
            counted = min(one.samples, limit * training_s)
            silent_s = min(max(0.0, now_s - one.at_s), EXTRAPOLATION_S_MAX)
            samples += counted + min(min(one.rate, limit) * silent_s, counted)
    return ProgressTotal(
        epoch=epoch,
        samples=min(samples, float(SAMPLES_MAX)),
        rate=rate,
        peers=sum(one.peers for one in found),
        median_rate=median_rate,
        at_s=now_s,
        since_s=min(since_s, now_s),
    )


def children_of(
    node: TreeNode,
    run: str,
    written: Mapping[PeerId, tuple[int, ProgressTotal]],
    now_s: float,
    electors: Collection[PeerId] = (),
) -> dict[int, list[ProgressTotal]]:
    """Return the totals in a node's dictionary that count, by child: those of the child's aggregators,
    which must be below it by their hash.

    `written`: by writer, the child's prefix and its total. `electors`: see `aggregators`.
    """
    by_child: dict[int, list[PeerId]] = {}
    for writer, (prefix, _) in written.items():
        child = TreeNode(node.bits, node.level - 1, prefix)
        if child.parent == node and child.holds(place_of(run, writer)):
            by_child.setdefault(prefix, []).append(writer)
    sums = {writer: total for writer, (_, total) in written.items()}
    return {
        prefix: counted_sums(
            sums,
            aggregators(TreeNode(node.bits, node.level - 1, prefix), run, writers, now_s, electors),
            electors,
        )
        for prefix, writers in by_child.items()
    }
