"""Progress records of a run in the DHT: this peer's record is written, those of the others are read, with
their contacts.

Runs on the network thread. Malformed records are skipped.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace

from averaging.blocklist import PeerBlocklist
from averaging.optim.progress.logic.relays import relays
from averaging.optim.progress.logic.reports import PEERS_MAX, REPORT_TTL_S, ProgressReport
from averaging.optim.progress.tree import Tree
from swarm.core.clock import Clock
from swarm.core.errors import PeerError, SwarmError, UsageError
from swarm.core.ids import Contact, PeerId
from swarm.dht.service.dht_service import DhtService, Entry

_log = logging.getLogger(__name__)

_TIMEOUT_S = 5.0


class ProgressRecords:
    """Reader and writer of the progress records of one run."""

    def __init__(self, own: Callable[[], Contact], dht: DhtService, clock: Clock, tree: Tree) -> None:
        self.contacts: dict[PeerId, Contact] = {}
        self._own, self._dht, self._clock, self._tree = own, dht, clock, tree
        self._own_id = own().peer_id
        self._published: tuple[ProgressReport, float] | None = None
        # of the last read, by writer: when each record was issued, and its report
        self._read: dict[PeerId, tuple[float, ProgressReport]] = {}

    def invalidate(self) -> None:
        """Forget the last publication: the record belongs under another key, or has new contents, so that
        the next `publish` writes it in any case.
        """
        self._published = None

    async def publish(self, report: ProgressReport) -> bool:
        """Write this peer's record if it has new contents or grows old. Return False after a failure, which
        is logged; the next call tries again.
        """
        now_s = self._clock.swarm_s()
        if self._published is not None:
            last, at_s = self._published
            changed = replace(report, rate=last.rate, at_s=last.at_s, since_s=last.since_s) != last
            if not changed and self._tree.published is None and now_s - at_s < REPORT_TTL_S / 3:
                return True
            # others drop a peer whose values are as old as a record's lifetime, so a waiting peer must renew
            # its values
            aged = not changed or now_s - report.at_s >= REPORT_TTL_S / 3
            report = replace(report, at_s=max(report.at_s, now_s if aged else 0.0))
        value = {**report.encode(), "addresses": self._own().published}
        if self._tree.published is not None:
            value["total"] = self._tree.published.encode()
        ttl_s = REPORT_TTL_S
        try:
            await self._dht.store(
                self._tree.key, value, ttl_s=ttl_s, subkey=str(self._own_id), timeout_s=_TIMEOUT_S
            )
            self._published = (report, now_s)
        except UsageError:
            raise
        except SwarmError as error:
            _log.info("a record of progress was not published (%s): %s", self._tree.key, error)
            return False
        return True

    async def withdraw(self, timeout_s: float) -> None:
        """Delete this peer's record, if there is one."""
        if self._published is None:
            return
        try:
            await self._dht.delete(self._tree.key, subkey=str(self._own_id), timeout_s=timeout_s)
        except SwarmError as error:
            _log.debug("a record of progress was not withdrawn (%s): %s", self._tree.key, error)

    async def read(
        self, blocklist: PeerBlocklist, *, thorough: bool = False, confirmed: bool = False
    ) -> list[Entry] | None:
        """Return the records of this peer's dictionary; None when it could not be read. `thorough`: ask more
        peers than the replicas if these know nobody else; replicas that have just come may lack records.
        `confirmed`: ask them in any case; without an answer of another peer it is no read.
        """
        read = self._dht.get_confirmed if confirmed else self._dht.get
        try:
            found = await read(self._tree.key, timeout_s=_TIMEOUT_S)
            if (
                thorough
                and not confirmed
                and not (isinstance(found, dict) and found.keys() - {str(self._own_id)})
            ):
                found = await self._dht.get(self._tree.key, latest=True, timeout_s=_TIMEOUT_S)
        except SwarmError as error:
            _log.info("the progress of a run could not be read (%s): %s", self._tree.key, error)
            return None
        return (
            [entry for entry in found.values() if entry.writer not in blocklist.banned]
            if isinstance(found, dict)
            else []
        )

    def reports(
        self, entries: Iterable[Entry]
    ) -> tuple[list[tuple[PeerId, ProgressReport, float]], list[PeerId]]:
        """Return the others' reports with the time when they expire, and the peers whose contacts are new."""
        received, newcomers, now_s = [], [], self._clock.swarm_s()
        before, self._read = self._read, {}
        for entry in entries:
            if entry.writer == self._own_id or (
                self._tree.bits == 0 and isinstance(entry.value, dict) and "total" in entry.value
            ):
                continue  # not a report but a notice about a run of several shards
            known, contact = before.get(entry.writer), self.contacts.get(entry.writer)
            try:
                if known is None or contact is None or known[0] != entry.issued_at:
                    known = entry.issued_at, ProgressReport.decode(entry.value, now_s)
                    contact = self._contact_of(entry)
            except PeerError as error:
                _log.info("peer %s keeps a malformed progress record: %s", entry.writer, error)
                continue
            self._read[entry.writer] = known
            received.append((entry.writer, known[1], entry.expiration))
            if entry.writer not in self.contacts:
                newcomers.append(entry.writer)
            self.contacts[entry.writer] = contact
        writers = {writer for writer, _, _ in received}
        for peer in [
            peer for peer in self.contacts if peer not in writers and len(self.contacts) > PEERS_MAX
        ]:
            del self.contacts[peer]
        return received, newcomers

    def relays(self, peers: Iterable[PeerId], known: Iterable[PeerId] = ()) -> list[PeerId]:
        """Return those of `peers` that this one passes news to. Peers that cannot be called read the DHT, and
        so do those that name an address of this peer, or of one of the `known` peers: a call there ends in
        the handshake, and costs both ends one.
        """
        own, contacts = self._own(), self.contacts
        taken = {
            *own.addresses,
            *(at for peer in known if peer in contacts for at in contacts[peer].addresses),
        }
        callable_ = (
            peer
            for peer in peers
            if (one := contacts.get(peer)) and one.is_called_by(own) and taken.isdisjoint(one.addresses)
        )
        return relays(self._own_id, callable_)

    def _contact_of(self, entry: Entry) -> Contact:
        """Return the contact in a record. Raise PeerError when it is malformed. Unchanged addresses are not
        parsed again: records come every second, and few peers move.
        """
        raw = entry.value.get("addresses")
        known = self.contacts.get(entry.writer)
        if known is not None and isinstance(raw, list) and raw == known.published:
            return known
        return Contact.from_record(entry.writer, raw)
