"""The heads that other peers report, and which of these peers cannot be reached. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator

from swarm.core.ids import Contact, PeerId

_PEERS_MAX = 256  # beyond this the peer that was silent for the longest time is forgotten


class KnownHeads:
    """Reports of other peers, the latest of each."""

    def __init__(self) -> None:
        self._heads: OrderedDict[PeerId, tuple[bytes, Contact]] = OrderedDict()
        self._refused: set[PeerId] = set()  # peers whose hosts refused the last connection

    def heard(self, contact: Contact, head: bytes) -> None:
        """Record what a peer reports."""
        # the record of a dead peer is read again and again: only news shows that it lives
        if self._heads.get(contact.peer_id, (b"",))[0] != head:
            self._refused.discard(contact.peer_id)
        self._heads[contact.peer_id] = head, contact
        self._heads.move_to_end(contact.peer_id)
        if len(self._heads) > _PEERS_MAX:
            self._heads.popitem(last=False)

    def answered(self, peer: PeerId) -> None:
        """Record that a peer answered a call."""
        self._refused.discard(peer)

    def refused(self, peer: PeerId) -> None:
        """Record that a peer's host refused a connection."""
        self._refused.add(peer)

    def is_gone(self, peer: PeerId) -> bool:
        """Return whether the peer has ended, as far as this process can know: its host refuses connections,
        or there is no trace of it.
        """
        return peer in self._refused or peer not in self._heads

    def forget(self, peer: PeerId) -> None:
        """Forget what a peer reported."""
        self._heads.pop(peer, None)

    def contacts(self, peers: Iterable[PeerId]) -> list[Contact]:
        """Return the contacts of those of the peers that are known."""
        return [self._heads[peer][1] for peer in peers if peer in self._heads]

    def __iter__(self) -> Iterator[tuple[PeerId, bytes, Contact]]:
        return iter([(peer, head, contact) for peer, (head, contact) in self._heads.items()])
