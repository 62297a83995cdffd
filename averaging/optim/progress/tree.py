"""Network side of `averaging.optim.progress.logic.shards`: the keys that a member of a large run reads and
writes, and the work of its aggregators.

Runs on the network thread, called by the tracker after each refresh. A run of up to 64 peers has one
dictionary, and nothing here costs it anything. In larger runs a newcomer finds in that dictionary, instead
of reports, a notice of the root's aggregators how the run is divided.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from averaging.optim.progress.logic.reports import ProgressConfig, ProgressReport, ProgressTotal
from averaging.optim.progress.logic.shards import (
    FLAT_MAX,
    TreeNode,
    aggregators,
    bits_for,
    children_of,
    median_of,
    shard_of,
    sum_of_children,
    sum_of_claims,
)
from swarm.core.errors import PeerError, SwarmError
from swarm.core.ids import Key, PeerId
from swarm.dht.service.dht_service import DhtService, Entry

_log = logging.getLogger(__name__)

_TIMEOUT_S = 5.0
_FRESH_S = 15.0  # an older total is ignored
_LOST_S = 30.0  # without a total for this long, a member starts again from the dictionary of small runs
# after a change of the division there is no other for this long, until all peers have followed
_HOLD_S = 30.0
_DISTRUST_S = 600.0  # a member that found no total where a notice sent it ignores such notices for this long


class Tree:
    """One peer's place in the tree of its run."""

    def __init__(self, dht: DhtService, run: str, own: PeerId, config: ProgressConfig, now_s: float) -> None:
        self._dht, self._run, self._own, self._config = dht, run, own, config
        self.bits = 0
        # of the whole run, as far as it is known; None in a small one
        self.total: ProgressTotal | None = None
        # the total that this peer publishes to its shard as an aggregator
        self.said: ProgressTotal | None = None
        self._moved_s = self._heard_s = now_s
        self._distrust_s = 0.0
        # the totals that this peer publishes as an aggregator of higher nodes
        self._totals: dict[TreeNode, ProgressTotal] = {}

    @property
    def leaf(self) -> TreeNode:
        """Return this peer's shard."""
        return shard_of(self._run, self._own, self.bits)

    @property
    def key(self) -> Key:
        """Return the DHT key of this peer's shard, under which its own report stands."""
        return self._key(self.leaf)

    def _key(self, node: TreeNode) -> Key:
        return Key(f"run.{self._run}", node.name)

    def is_here(self, peer: PeerId) -> bool:
        """Return whether a peer is in this peer's shard."""
        return shard_of(self._run, peer, self.bits) == self.leaf

    async def after_look(
        self, entries: Iterable[Entry], claims: Mapping[PeerId, ProgressReport], now_s: float
    ) -> bool:
        """Update the totals from the shard's dictionary, and do an aggregator's work if this peer is one.
        `claims` are the live reports, this peer's included. Return whether this peer belongs to another
        shard now.
        """
        told = self._told(entries, now_s)
        if self.bits == 0:
            return self._enter(told, claims, now_s)
        here = {peer: claim for peer, claim in claims.items() if self.is_here(peer)}
        adding = aggregators(self.leaf, self._run, here, now_s)
        self.said = None
        if self._own in adding:
            try:
                self.said = await self._climb(sum_of_claims(here, now_s, self._config), now_s)
            except SwarmError as error:
                _log.info("the sums of run %s were not published: %s", self._run, error)
            if self.said is not None:
                told[self._own] = self.said
        said = [told[peer] for peer in adding if peer in told]
        total = median_of(said) if len(said) > 1 else None
        if total is not None:
            self.total, self._heard_s = total, now_s
            if total.bits != self.bits and now_s - self._moved_s > _HOLD_S:
                return self._move(total.bits, now_s)
        elif self.total is not None and now_s - self.total.at_s > _FRESH_S:
            self.total = None
        if now_s - self._heard_s > _LOST_S:
            self._distrust_s = now_s + _DISTRUST_S
            return self._move(0, now_s)
        return False

    def _enter(
        self, told: Mapping[PeerId, ProgressTotal], claims: Mapping[PeerId, ProgressReport], now_s: float
    ) -> bool:
        """Decide, from the single dictionary of a small run, whether the run is larger than that: by the
        reports there, or by the notices of a larger part.
        """
        self.total = self.said = None
        present = len(claims)
        bits = bits_for(present, 0)
        word = median_of(list(told.values())[:3]) if len(told) > 1 else None
        if (
            word is not None
            and word.bits
            and word.peers > max(present, FLAT_MAX // 2)
            and now_s > self._distrust_s
        ):
            bits = word.bits
        return self._move(bits, now_s) if bits else False

    def _move(self, bits: int, now_s: float) -> bool:
        """Switch to another number of shards. The old record is left to expire, so that peers that have not
        moved yet see how many there were.
        """
        if bits == self.bits:
            return False
        _log.info("run %s is divided into %d shards now", self._run, 1 << bits)
        self.bits, self._moved_s, self._heard_s = bits, now_s, now_s
        self.total = self.said = None
        self._totals.clear()
        return True

    def _told(self, entries: Iterable[Entry], now_s: float) -> dict[PeerId, ProgressTotal]:
        """Return the totals in a dictionary, by writer."""
        found = {}
        for entry in entries:
            value = entry.value
            if isinstance(value, dict) and "total" in value:
                try:
                    total = ProgressTotal.decode(value["total"], now_s, self._config)
                except PeerError as error:
                    _log.info("peer %s published a malformed total: %s", entry.writer, error)
                    continue
                if now_s - total.at_s < _FRESH_S:
                    found[entry.writer] = total
        return found

    async def _climb(self, own: ProgressTotal, now_s: float) -> ProgressTotal | None:
        """Write the shard's sum upwards, as far as this peer is an aggregator. Return the total of the run,
        or None when it is not known.
        """
        node, mine = self.leaf, list[TreeNode]()
        total: ProgressTotal | None = None
        while True:
            parent = node.parent
            written, told = await self._bring(node, parent, own, now_s)
            added = sum_of_children(
                children_of(parent, self._run, written, now_s), parent.level, now_s, self._config
            )
            adding = aggregators(parent, self._run, written, now_s)
            above = [told[peer] for peer in adding if peer in told and peer != self._own]
            said = median_of(above) if len(above) > 1 else None
            if self._own in adding:
                mine.append(parent)
            if parent.is_root:
                bits = (
                    await self._divide(added, now_s)
                    if self._own in adding
                    else said.bits
                    if said is not None
                    else self.bits
                )
                total = replace(added, bits=bits)
                break
            if self._own not in adding:
                total = said
                break
            node, own = parent, added
        self._totals = dict.fromkeys(mine, total) if total is not None else {}
        return total

    async def _bring(
        self, node: TreeNode, parent: TreeNode, own: ProgressTotal, now_s: float
    ) -> tuple[dict[PeerId, tuple[int, ProgressTotal]], dict[PeerId, ProgressTotal]]:
        """Write a node's sum into the dictionary above. Return the sums that stand there, and the totals
        that its aggregators published.
        """
        value: dict[str, Any] = {"child": node.prefix, "sum": own.encode()}
        if parent in self._totals:
            value["total"] = self._totals[parent].encode()
        await self._dht.store(
            self._key(parent),
            value,
            ttl_s=self._config.claim_ttl_s,
            subkey=str(self._own),
            timeout_s=_TIMEOUT_S,
        )
        entries = await self._entries(parent)
        return {**self._written(entries, now_s), self._own: (node.prefix, own)}, self._told(entries, now_s)

    async def _divide(self, total: ProgressTotal, now_s: float) -> int:
        """Return how the run is to be divided, as an aggregator of the root, and publish a notice for
        newcomers. A larger part that is divided otherwise is joined.
        """
        flat = TreeNode(0, 0, 0)
        others = [
            one
            for peer, one in self._told(await self._entries(flat), now_s).items()
            if one.bits != self.bits and peer != self._own
        ]
        bits = self.bits
        larger = median_of(others[:3]) if len(others) > 1 else None
        if now_s - self._moved_s > _HOLD_S:
            bits = (
                larger.bits
                if larger is not None and larger.peers > total.peers
                else bits_for(total.peers, self.bits)
            )
        word = ProgressReport(epoch=total.epoch, samples=0, rate=0.0, at_s=total.at_s, since_s=total.since_s)
        value = {**word.encode(), "total": replace(total, bits=bits).encode()}
        await self._dht.store(
            self._key(flat),
            value,
            ttl_s=self._config.claim_ttl_s,
            subkey=str(self._own),
            timeout_s=_TIMEOUT_S,
        )
        return bits

    async def _entries(self, node: TreeNode) -> list[Entry]:
        found = await self._dht.get(self._key(node), timeout_s=_TIMEOUT_S)
        return list(found.values()) if isinstance(found, dict) else []

    def _written(self, entries: Iterable[Entry], now_s: float) -> dict[PeerId, tuple[int, ProgressTotal]]:
        """Return the well-formed sums in a dictionary, by writer, with the prefix of their child."""
        found = {}
        for entry in entries:
            value = entry.value
            try:
                if isinstance(value, dict) and isinstance(value.get("child"), int):
                    found[entry.writer] = (
                        value["child"],
                        ProgressTotal.decode(value.get("sum"), now_s, self._config),
                    )
            except PeerError as error:
                _log.info("peer %s published a malformed sum: %s", entry.writer, error)
        return found
