"""Network side of `averaging.optim.progress.logic.shards`: the keys that a member of a large run reads and
writes, and the work of its aggregators.

Runs on the network thread, called by the tracker after each refresh. A run of up to 64 peers has one
dictionary, and nothing here costs it anything. In larger runs a newcomer finds in that dictionary, instead
of reports, a notice of the root's aggregators how the run is divided.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from averaging.optim.progress.logic.reports import REPORT_TTL_S, ProgressReport, ProgressTotal
from averaging.optim.progress.logic.shards import (
    FLAT_MAX,
    TreeNode,
    aggregators,
    bits_for,
    children_of,
    counted_sums,
    median_of,
    shard_of,
    sum_of_children,
    sum_of_reports,
)
from averaging.optim.progress.logic.standing import ReportStanding
from swarm.core.errors import PeerError, SwarmError
from swarm.core.ids import Key, PeerId
from swarm.dht.service.dht_service import DhtService, Entry

_log = logging.getLogger(__name__)

_TIMEOUT_S = 5.0
_FRESH_S = 15.0  # an older total is ignored
_LOST_S = 30.0  # without a total for this long, a member starts again from the dictionary of small runs
# minimum time between two changes of the division, so that all peers can follow
_DIVISION_HOLD_S = 30.0
# a member that followed a notice and found no total ignores such notices for this long
_IGNORE_NOTICES_S = 600.0


class Tree:
    """One peer's place in the tree of its run."""

    def __init__(self, dht: DhtService, run: str, own: PeerId, now_s: float) -> None:
        self._dht, self._run, self.own = dht, run, own
        self.bits = 0
        self._electors: Collection[PeerId] = ()  # electors of this peer's head
        # of the whole run, as far as it is known; None in a small one
        self.total: ProgressTotal | None = None
        # the total that this peer publishes to its shard as an aggregator
        self.published: ProgressTotal | None = None
        self._divided_s = self._total_seen_s = now_s
        self._ignore_notices_until_s = 0.0
        # the totals that this peer publishes as an aggregator of higher nodes
        self._totals: dict[TreeNode, ProgressTotal] = {}

    @property
    def leaf(self) -> TreeNode:
        """Return this peer's shard."""
        return shard_of(self._run, self.own, self.bits)

    @property
    def shard_name(self) -> str:
        """Return the name of this peer's shard, `bits.prefix`; "" in a small run."""
        return f"{self.leaf.bits}.{self.leaf.prefix}" if self.bits else ""

    @property
    def key(self) -> Key:
        """Return the DHT key of this peer's shard, under which its own report stands."""
        return self._key(self.leaf)

    def _key(self, node: TreeNode) -> Key:
        return Key(f"run.{self._run}", node.name)

    def is_in_shard(self, peer: PeerId) -> bool:
        """Return whether a peer is in this peer's shard."""
        return shard_of(self._run, peer, self.bits) == self.leaf

    async def after_refresh(
        self,
        entries: Iterable[Entry],
        reports: Mapping[PeerId, ProgressReport],
        standing: ReportStanding,
        now_s: float,
    ) -> bool:
        """Update the totals from the shard's dictionary, and do an aggregator's work if this peer is one.
        `reports` are the live reports, this peer's included; `standing` says which of them count. Return
        whether this peer belongs to another shard now.
        """
        self._electors = standing.electors
        totals = self._totals_by_writer(entries, now_s)
        if self.bits == 0:
            return self._enter_from_flat(totals, reports, standing, now_s)
        members = {peer: report for peer, report in reports.items() if self.is_in_shard(peer)}
        aggregating = aggregators(self.leaf, self._run, members, now_s, self._electors)
        self.published = None
        if self.own in aggregating:
            try:
                self.published = await self.publish_sums(sum_of_reports(members, now_s), now_s)
            except SwarmError as error:
                _log.info("the sums of run %s were not published: %s", self._run, error)
            if self.published is not None:
                totals[self.own] = self.published
        published = [totals[peer] for peer in aggregating if peer in totals]
        total = median_of(published) if len(published) > 1 else None
        if total is not None:
            self.total, self._total_seen_s = total, now_s
            if total.bits != self.bits and now_s - self._divided_s > _DIVISION_HOLD_S:
                return self._change_division(total.bits, now_s)
        elif self.total is not None and now_s - self.total.at_s > _FRESH_S:
            self.total = None
        if now_s - self._total_seen_s > _LOST_S:
            self._ignore_notices_until_s = now_s + _IGNORE_NOTICES_S
            return self._change_division(0, now_s)
        return False

    def _enter_from_flat(
        self,
        totals: Mapping[PeerId, ProgressTotal],
        reports: Mapping[PeerId, ProgressReport],
        standing: ReportStanding,
        now_s: float,
    ) -> bool:
        """Decide, from the single dictionary of a small run, whether the run is larger than that: by the
        reports there, or by the notices of a larger part. Strangers alone do not divide a run: its members
        would not find each other in the parts.
        """
        self.total = self.published = None
        present, _ = standing.peers({peer: one for peer, one in reports.items() if peer != self.own})
        bits = bits_for(min(present, len(reports)), 0)
        notices = [total for peer, total in totals.items() if standing.may_divide(peer)]
        notice = median_of(notices[:3]) if len(notices) > 1 else None
        if (
            notice is not None
            and notice.bits
            and notice.peers > max(present, FLAT_MAX // 2)
            and now_s > self._ignore_notices_until_s
        ):
            bits = notice.bits
        return self._change_division(bits, now_s) if bits else False

    def _change_division(self, bits: int, now_s: float) -> bool:
        """Switch to another number of shards. The old record is left to expire, so that peers that have not
        moved yet see how many there were.
        """
        if bits == self.bits:
            return False
        _log.info("run %s is divided into %d shards now", self._run, 1 << bits)
        self.bits, self._divided_s, self._total_seen_s = bits, now_s, now_s
        self.total = self.published = None
        self._totals.clear()
        return True

    def _totals_by_writer(self, entries: Iterable[Entry], now_s: float) -> dict[PeerId, ProgressTotal]:
        """Return the totals in a dictionary, by writer."""
        found = {}
        for entry in entries:
            value = entry.value
            if isinstance(value, dict) and "total" in value:
                try:
                    total = ProgressTotal.decode(value["total"], now_s)
                except PeerError as error:
                    _log.info("peer %s published a malformed total: %s", entry.writer, error)
                    continue
                if now_s - total.at_s < _FRESH_S:
                    found[entry.writer] = total
        return found

    async def publish_sums(self, own: ProgressTotal, now_s: float) -> ProgressTotal | None:
        """Write sums into the dictionaries above, for each node of which this peer is an aggregator. Return
        the total of the run, or None when it is not known.
        """
        node, own_nodes = self.leaf, list[TreeNode]()
        total: ProgressTotal | None = None
        while True:
            parent = node.parent
            written, totals = await self._publish_sum(node, parent, own, now_s)
            children = children_of(parent, self._run, written, now_s, self._electors)
            summed = sum_of_children(children, parent.level, now_s)
            aggregating = aggregators(parent, self._run, written, now_s, self._electors)
            others = [peer for peer in aggregating if peer != self.own]
            totals_above = counted_sums(totals, others, self._electors)
            published = median_of(totals_above) if len(totals_above) > 1 else None
            if self.own in aggregating:
                own_nodes.append(parent)
            if parent.is_root:
                bits = (
                    await self._publish_division(summed, now_s)
                    if self.own in aggregating
                    else published.bits
                    if published is not None
                    else self.bits
                )
                total = replace(summed, bits=bits)
                break
            if self.own not in aggregating:
                total = published
                break
            node, own = parent, summed
        self._totals = dict.fromkeys(own_nodes, total) if total is not None else {}
        return total

    async def _publish_sum(
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
            ttl_s=REPORT_TTL_S,
            subkey=str(self.own),
            timeout_s=_TIMEOUT_S,
        )
        entries = await self._entries(parent)
        return {
            **self._sums_by_writer(entries, now_s),
            self.own: (node.prefix, own),
        }, self._totals_by_writer(entries, now_s)

    async def _publish_division(self, total: ProgressTotal, now_s: float) -> int:
        """Decide the division of the run as an aggregator of the root, and publish a notice for newcomers.
        When a larger part of the run is divided differently, adopt its division.
        """
        flat = TreeNode(0, 0, 0)
        others = [
            one
            for peer, one in self._totals_by_writer(await self._entries(flat), now_s).items()
            if one.bits != self.bits and peer != self.own
        ]
        bits = self.bits
        larger = median_of(others[:3]) if len(others) > 1 else None
        if now_s - self._divided_s > _DIVISION_HOLD_S:
            bits = (
                larger.bits
                if larger is not None and larger.peers > total.peers
                else bits_for(total.peers, self.bits)
            )
        notice = ProgressReport(
            epoch=total.epoch, samples=0, rate=0.0, at_s=total.at_s, since_s=total.since_s
        )
        value = {**notice.encode(), "total": replace(total, bits=bits).encode()}
        await self._dht.store(
            self._key(flat),
            value,
            ttl_s=REPORT_TTL_S,
            subkey=str(self.own),
            timeout_s=_TIMEOUT_S,
        )
        return bits

    async def _entries(self, node: TreeNode) -> list[Entry]:
        found = await self._dht.get(self._key(node), timeout_s=_TIMEOUT_S)
        return list(found.values()) if isinstance(found, dict) else []

    def _sums_by_writer(
        self, entries: Iterable[Entry], now_s: float
    ) -> dict[PeerId, tuple[int, ProgressTotal]]:
        """Return the well-formed sums in a dictionary, by writer, with the prefix of their child."""
        found = {}
        for entry in entries:
            value = entry.value
            try:
                if isinstance(value, dict) and isinstance(value.get("child"), int):
                    found[entry.writer] = (
                        value["child"],
                        ProgressTotal.decode(value.get("sum"), now_s),
                    )
            except PeerError as error:
                _log.info("peer %s published a malformed sum: %s", entry.writer, error)
        return found
