"""The routing table: known peers in buckets by distance (Maymounkov and Mazières, "Kademlia", 2002, sections
2.2, 2.4 and 4.2).

Distance is the XOR of 256-bit ids. A bucket holds up to `bucket_max` peers of one aligned range of ids, the
least recently seen first. A full bucket splits when it covers this peer's own id, or when its depth is no
multiple of `depth_step` (which shortens lookups). Otherwise the newcomer becomes a replacement and the least
recently seen peer is pinged: long-lived peers stay, and nobody can flush the table by appearing often.
"""

from __future__ import annotations

import bisect
import operator
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from swarm.core.ids import Contact, PeerId
from swarm.dht.logic.constants import BUCKET_MAX

if TYPE_CHECKING:
    import random

ID_BITS = 256
_DISTANCE = operator.itemgetter(0)


# Buckets that do not cover this peer's id split up to the next multiple of this depth (the paper's b).
DEPTH_STEP = 5
# Consecutive failures after which a peer is dropped: one lost message is no proof.
FAILURES_MAX = 2
# Nearest peers, which are pinged often because they hold the same keys as this peer.
NEAR_COUNT = 10
# Silence after which one of those is pinged.
NEAR_SILENT_S = 60.0
# Any other peer may be silent for as long as it has been known, within these bounds: a peer that has lived
# long is likely to live on (the paper's figure 1).
FAR_SILENT_S_MIN = 300.0
FAR_SILENT_S_MAX = 3600.0
# A newcomer without room causes a ping to the longest silent peer of its bucket if it was silent this long.
QUESTIONABLE_S = 300.0
# Share of the estimated number of peers that counts as most of them. Smaller: more records are written to
# peers that are no replicas; larger: more searches in swarms of two buckets, as the estimate errs by a fifth.
_KNOWN_SHARE_MIN = 0.75


@dataclass(slots=True, eq=False)
class _Node:
    contact: Contact
    dht_id: int
    seen_s: float
    since_s: float
    failures: int = 0
    promoted: bool = False  # promoted from the replacements: stands before peers that were silent for longer


@dataclass(slots=True, eq=False)
class _Bucket:
    """The peers with ids from `lower` with `width_bits` free bits. Both dictionaries have the least recently
    seen peer first.
    """

    lower: int
    width_bits: int
    touched_s: float
    nodes: OrderedDict[PeerId, _Node] = field(default_factory=OrderedDict)
    replacements: OrderedDict[PeerId, _Node] = field(default_factory=OrderedDict)

    @property
    def depth(self) -> int:
        return ID_BITS - self.width_bits

    def distance(self, dht_id: int) -> int:
        """Return the smallest distance from `dht_id` to any id in the bucket's range."""
        return ((self.lower ^ dht_id) >> self.width_bits) << self.width_bits


class RoutingTable:
    """The peers that can be dialed, by distance. A peer without addresses never enters."""

    def __init__(
        self,
        own: PeerId,
        *,
        bucket_max: int = BUCKET_MAX,
        depth_step: int = DEPTH_STEP,
        near_count: int = NEAR_COUNT,
        questionable_s: float = QUESTIONABLE_S,
    ) -> None:
        self.bucket_max, self.depth_step = bucket_max, depth_step
        self._near_count, self._questionable_s = near_count, questionable_s
        self.own = own
        self.own_id = own.dht_id
        self._buckets = [_Bucket(0, ID_BITS, 0.0)]  # sorted by `lower`; together they cover every id
        self._lowers = [0]  # lower ends of the buckets
        self._by_peer: dict[PeerId, _Bucket] = {}
        # peers of the table with failures, ordered by their first failure
        self._failing: dict[PeerId, None] = {}
        self.changes = 0  # number of peers added and removed so far
        self._knows_most = -1, True  # value of `changes` when it was computed, and the answer

    def __len__(self) -> int:
        return len(self._by_peer)

    def replacements(self) -> set[PeerId]:
        """Return the peers that wait for a place in a full bucket."""
        return {peer_id for bucket in self._buckets for peer_id in bucket.replacements}

    def __contains__(self, peer_id: object) -> bool:
        return peer_id in self._by_peer

    def __iter__(self) -> Iterator[Contact]:
        return (node.contact for bucket in self._buckets for node in bucket.nodes.values())

    @property
    def bucket_count(self) -> int:
        return len(self._buckets)

    def contact(self, peer_id: PeerId) -> Contact | None:
        node = self._node(peer_id)
        return node.contact if node is not None else None

    def _node(self, peer_id: PeerId) -> _Node | None:
        bucket = self._by_peer.get(peer_id)
        return bucket.nodes[peer_id] if bucket is not None else None

    def on_answer(
        self, contact: Contact, now_s: float, *, proven: bool = True, since_s: float | None = None
    ) -> Contact | None:
        """Record that a peer answered. Returns the peer to ping when there is no room: if that one fails, the
        newcomer takes its place.

        A peer that is not `proven` has only called this peer, and is dropped at its first failure. `since_s`
        is when the peer was first met, if that was before this table was created.
        """
        if contact.peer_id == self.own or not contact.addresses:
            return None
        dht_id = contact.peer_id.dht_id
        while True:
            bucket = self._bucket_of(dht_id)
            node = bucket.nodes.get(contact.peer_id)
            if node is not None:
                if node.failures:
                    self._failing.pop(contact.peer_id, None)
                node.contact, node.seen_s, node.failures, node.promoted = contact, now_s, 0, False
                bucket.nodes.move_to_end(contact.peer_id)
                return None
            if len(bucket.nodes) < self.bucket_max:
                failures = 0 if proven else FAILURES_MAX - 1
                bucket.nodes[contact.peer_id] = _Node(
                    contact, dht_id, now_s, now_s if since_s is None else since_s, failures
                )
                if not proven:
                    self._failing[contact.peer_id] = None
                self._by_peer[contact.peer_id] = bucket
                self.changes += 1
                return None
            if not self._may_split(bucket):
                break
            self._split(bucket)
        return self._add_replacement(bucket, contact, now_s)

    def on_call(self, contact: Contact, now_s: float) -> Contact | None:
        """Record that a peer called. Returns the peer to ping, if any: the caller itself, since only an
        answer proves that it can be reached, or the peer whose place it might take.
        """
        if contact.peer_id == self.own or not contact.addresses:
            return None
        bucket = self._bucket_of(contact.peer_id.dht_id)
        node = bucket.nodes.get(contact.peer_id)
        if node is not None:
            if node.failures:
                return contact  # it calls but does not answer, as in a one-way partition
            node.contact, node.seen_s, node.promoted = contact, now_s, False
            bucket.nodes.move_to_end(contact.peer_id)
            return None
        if len(bucket.nodes) < self.bucket_max or self._may_split(bucket):
            return contact
        return self._add_replacement(bucket, contact, now_s)

    def _add_replacement(self, bucket: _Bucket, contact: Contact, now_s: float) -> Contact | None:
        """Keep a newcomer as a replacement, because its bucket is full."""
        bucket.replacements[contact.peer_id] = _Node(contact, contact.peer_id.dht_id, now_s, now_s)
        bucket.replacements.move_to_end(contact.peer_id)
        if len(bucket.replacements) > self.bucket_max:
            bucket.replacements.popitem(last=False)
        oldest = next(iter(bucket.nodes.values()))
        return oldest.contact if oldest.seen_s <= now_s - self._questionable_s else None

    def on_failure(self, peer_id: PeerId, *, at_once: bool = False) -> bool:
        """Record that a peer did not answer. Returns whether it was dropped: after `failures_max` failures in
        a row, or immediately with `at_once`. A replacement takes its place.
        """
        bucket = self._by_peer.get(peer_id)
        if bucket is None:
            return False
        node = bucket.nodes[peer_id]
        node.failures += 1
        if node.failures < FAILURES_MAX and not at_once:
            self._failing[peer_id] = None
            return False
        del bucket.nodes[peer_id], self._by_peer[peer_id]
        self._failing.pop(peer_id, None)
        self.changes += 1
        if bucket.replacements:
            newest_id, newest = bucket.replacements.popitem(last=True)
            bucket.nodes[newest_id] = newest
            bucket.nodes.move_to_end(newest_id, last=False)  # unproven, therefore the first to be pinged
            newest.promoted = True
            self._by_peer[newest_id] = bucket
        return True

    def nearest(self, dht_id: int, count: int, *, exclude: PeerId | None = None) -> list[Contact]:
        """Return the `count` known peers nearest to an id, nearest first. The ranges of buckets are aligned,
        so whole buckets come in order of distance.
        """
        found: list[tuple[int, _Node]] = []
        excluded = self._node(exclude) if exclude is not None else None
        for bucket in (
            sorted(self._buckets, key=lambda bucket: bucket.distance(dht_id))
            if len(self._buckets) > 1
            else self._buckets
        ):
            nodes = [(node.dht_id ^ dht_id, node) for node in bucket.nodes.values() if node is not excluded]
            nodes.sort(key=_DISTANCE)
            found.extend(nodes)
            if len(found) >= count:
                break
        return [node.contact for _, node in found[:count]]

    @property
    def knows_most(self) -> bool:
        """Return whether the table probably holds most peers of the swarm, so that those that it holds
        nearest to a key are most of the key's replicas.
        """
        if self.changes != self._knows_most[0]:
            self._knows_most = self.changes, 1 + len(self) >= _KNOWN_SHARE_MIN * self._swarm_size()
        return self._knows_most[1]

    def _swarm_size(self) -> float:
        """Return an estimate of the number of peers of the swarm, this one included: from the density of the
        peers nearest to this one, all of which the table knows.
        """
        near = self.nearest(self.own_id, self.bucket_max)
        if len(near) < self.bucket_max:
            return 1.0 + len(near)
        return len(near) * (1 << ID_BITS) / (near[-1].peer_id.dht_id ^ self.own_id)

    def is_proven(self, peer_id: PeerId) -> bool:
        """Return whether a peer is in the table, and has answered since it failed or only called."""
        node = self._node(peer_id)
        return node is not None and not node.failures

    def since_s(self, peer_id: PeerId) -> float | None:
        """Return when a peer of the table was first met, None when it is not in the table."""
        node = self._node(peer_id)
        return node.since_s if node is not None else None

    def to_ping(self, now_s: float) -> list[Contact]:
        """Return the peers that were silent for too long, oldest first within each class: the nearest peers
        and those with failures come before all others.
        """
        near = {contact.peer_id: None for contact in self.nearest(self.own_id, self._near_count)}
        due: list[tuple[bool, float, Contact]] = []
        for peer_id in near:
            node = self._by_peer[peer_id].nodes[peer_id]
            if node.failures or now_s - node.seen_s >= NEAR_SILENT_S:
                due.append((False, node.seen_s, node.contact))
        for peer_id in self._failing:
            if peer_id not in near:
                node = self._by_peer[peer_id].nodes[peer_id]
                due.append((False, node.seen_s, node.contact))
        for bucket in self._buckets:
            for peer_id, node in bucket.nodes.items():
                silent_s = now_s - node.seen_s
                if silent_s < FAR_SILENT_S_MIN:
                    if node.promoted:
                        continue
                    # All others were seen later. A table has hundreds of peers, and this runs every few
                    # seconds.
                    break
                silence_s_max = min(max(node.seen_s - node.since_s, FAR_SILENT_S_MIN), FAR_SILENT_S_MAX)
                if silent_s >= silence_s_max and not node.failures and peer_id not in near:
                    due.append((True, node.seen_s, node.contact))
        return [contact for *_, contact in sorted(due, key=lambda one: one[:2])]

    def touch(self, dht_id: int, now_s: float) -> None:
        """Record a lookup for this id: its bucket needs no refresh for some time."""
        self._bucket_of(dht_id).touched_s = now_s

    def stale_ids(self, before_s: float, rng: random.Random) -> list[int]:
        """Return a random id of every bucket that has room and has seen no lookup since `before_s`. A full
        bucket needs no refresh: its dead peers are found by pings and replaced.
        """
        return [
            bucket.lower | rng.getrandbits(bucket.width_bits)
            for bucket in self._buckets
            if bucket.touched_s < before_s and len(bucket.nodes) < self.bucket_max
        ]

    def _bucket_of(self, dht_id: int) -> _Bucket:
        return self._buckets[bisect.bisect_right(self._lowers, dht_id) - 1]

    def _may_split(self, bucket: _Bucket) -> bool:
        if bucket.width_bits == 0:
            return False
        return bucket.distance(self.own_id) == 0 or bucket.depth % self.depth_step != 0

    def _split(self, bucket: _Bucket) -> None:
        assert not bucket.replacements, "nobody waits in a bucket that splits"
        width_bits = bucket.width_bits - 1
        halves = (
            _Bucket(bucket.lower, width_bits, bucket.touched_s),
            _Bucket(bucket.lower | 1 << width_bits, width_bits, bucket.touched_s),
        )
        for node in bucket.nodes.values():
            half = halves[node.dht_id >> width_bits & 1]
            half.nodes[node.contact.peer_id] = node
            self._by_peer[node.contact.peer_id] = half
        position = bisect.bisect_right(self._lowers, bucket.lower) - 1
        self._buckets[position : position + 1] = halves
        self._lowers.insert(position + 1, halves[1].lower)
