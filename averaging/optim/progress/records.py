"""Progress records of a run in the DHT: this peer's record is written, those of the others are read, with
their contacts.

Runs on the network thread. Malformed records are skipped.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

from averaging.optim.admission import Blocklist
from averaging.optim.contacts import ADDRESSES_MAX, contact_of
from averaging.optim.progress.logic.reports import ProgressConfig, ProgressReport
from averaging.optim.progress.tree import Tree
from swarm.core.clock import Clock
from swarm.core.errors import PeerError, SwarmError, UsageError
from swarm.core.ids import Contact, PeerId
from swarm.dht.service.dht_service import DhtService, Entry

_log = logging.getLogger(__name__)

_TIMEOUT_S = 5.0
_RETRY_S = 1.0


class ProgressRecords:
    """Reader and writer of the progress records of one run."""

    def __init__(
        self, own: Callable[[], Contact], dht: DhtService, clock: Clock, tree: Tree, config: ProgressConfig
    ) -> None:
        self.contacts: dict[PeerId, Contact] = {}
        self._own, self._dht, self._clock, self._tree, self._config = own, dht, clock, tree, config
        self._own_id = own().peer_id
        self._published: tuple[ProgressReport, float] | None = None

    def invalidate(self) -> None:
        """Forget the last publication: the record belongs under another key, or has new contents, so that
        the next `publish` writes it in any case.
        """
        self._published = None

    async def publish(self, report: ProgressReport) -> None:
        """Write this peer's record if it has new contents or grows old. A failure is logged; the next call
        tries again.
        """
        now_s = self._clock.swarm_s()
        if self._published is not None:
            last, at_s = self._published
            changed = (report.epoch, report.samples) != (last.epoch, last.samples)
            if not changed and self._tree.published is None and now_s - at_s < self._config.report_ttl_s / 3:
                return
            report = ProgressReport(
                epoch=report.epoch,
                samples=report.samples,
                rate=report.rate,
                at_s=max(report.at_s, now_s if not changed else 0.0),
                since_s=report.since_s,
            )
        addresses = [address.multiaddr for address in self._own().addresses[:ADDRESSES_MAX]]
        value = {**report.encode(), "addresses": addresses}
        if self._tree.published is not None:
            value["total"] = self._tree.published.encode()
        ttl_s = self._config.report_ttl_s
        try:
            await self._dht.store(
                self._tree.key, value, ttl_s=ttl_s, subkey=str(self._own_id), timeout_s=_TIMEOUT_S
            )
            self._published = (report, now_s)
        except UsageError:
            raise
        except SwarmError as error:
            _log.info("a record of progress was not published (%s): %s", self._tree.key, error)

    async def withdraw(self, timeout_s: float) -> None:
        """Delete this peer's record, if there is one."""
        if self._published is None:
            return
        try:
            await self._dht.delete(self._tree.key, subkey=str(self._own_id), timeout_s=timeout_s)
        except SwarmError as error:
            _log.debug("a record of progress was not withdrawn (%s): %s", self._tree.key, error)

    async def read(self, blocklist: Blocklist) -> list[Entry] | None:
        """Return the records of this peer's dictionary; None, after a pause, when it could not be read."""
        try:
            found = await self._dht.get(self._tree.key, timeout_s=_TIMEOUT_S)
        except SwarmError as error:
            _log.info("the progress of a run could not be read (%s): %s", self._tree.key, error)
            await asyncio.sleep(_RETRY_S)
            return None
        return (
            [entry for entry in found.values() if entry.writer not in blocklist]
            if isinstance(found, dict)
            else []
        )

    def reports(
        self, entries: Iterable[Entry]
    ) -> tuple[list[tuple[PeerId, ProgressReport, float]], list[PeerId]]:
        """Return the others' reports with the time when they expire, and the peers whose contacts are new."""
        received, newcomers, now_s = [], [], self._clock.swarm_s()
        for entry in entries:
            if entry.writer == self._own_id or (
                self._tree.bits == 0 and isinstance(entry.value, dict) and "total" in entry.value
            ):
                continue  # the latter is a notice about a run of several shards, not a report
            try:
                report = ProgressReport.decode(entry.value, now_s, self._config)
                contact = self._contact_of(entry)
            except PeerError as error:
                _log.info("peer %s keeps a malformed progress record: %s", entry.writer, error)
                continue
            received.append((entry.writer, report, entry.expiration))
            if entry.writer not in self.contacts:
                newcomers.append(entry.writer)
            self.contacts[entry.writer] = contact
        writers = {writer for writer, _, _ in received}
        for peer in [
            peer
            for peer in self.contacts
            if peer not in writers and len(self.contacts) > self._config.peers_max
        ]:
            del self.contacts[peer]
        return received, newcomers

    def _contact_of(self, entry: Entry) -> Contact:
        """Return the contact in a record. Raise PeerError when it is malformed. Unchanged addresses are not
        parsed again: records come every second, and few peers move.
        """
        raw = entry.value.get("addresses")
        known = self.contacts.get(entry.writer)
        if (
            known is not None
            and isinstance(raw, list)
            and raw == [address.multiaddr for address in known.addresses]
        ):
            return known
        return contact_of(entry.writer, raw)
