"""The heads that other peers report, and which of these peers cannot be reached. Pure."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable

from swarm.core.ids import Contact, PeerId

_DISMISSED_MAX = 1024  # beyond this the head that was dismissed first is compared again
_HOLDERS_ASKED_MAX = 3  # for one head, at once
_PEERS_MAX = 256  # beyond this the peer that was silent for the longest time is forgotten


class KnownHeads:
    """Reports of other peers, the latest of each."""

    def __init__(self) -> None:
        self._heads: OrderedDict[PeerId, tuple[bytes, Contact]] = OrderedDict()
        self._dismissed: OrderedDict[bytes, None] = OrderedDict()
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

    def dismiss(self, head: bytes) -> None:
        """Record that the history of this head was compared, and is not followed."""
        self._dismissed[head] = None
        if len(self._dismissed) > _DISMISSED_MAX:
            self._dismissed.popitem(last=False)

    def is_dismissed(self, head: bytes) -> bool:
        """Return whether this head was dismissed."""
        return head in self._dismissed

    def reconsider(self) -> None:
        """Compare all heads again: this peer's own history has changed."""
        self._dismissed.clear()

    def to_ask(self, needed: Collection[PeerId], is_open: Callable[[bytes], bool]) -> dict[PeerId, Contact]:
        """Return the peers to be asked for their histories: those that are `needed`, and for each head that
        is open the last few that reported it: the first may be dead, and named by old records.
        """
        asked: dict[PeerId, Contact] = {}
        heads = Counter[bytes]()
        for peer, (head, contact) in reversed(self._heads.items()):
            if not contact.addresses:
                continue
            if peer in needed:
                asked[peer] = contact
            elif heads[head] < _HOLDERS_ASKED_MAX and is_open(head):
                asked[peer] = contact
                heads[head] += 1
        return asked

    def reported(self) -> dict[PeerId, bytes]:
        """Return the head that each peer reports, without those whose hosts refuse connections."""
        return {peer: head for peer, (head, _) in self._heads.items() if peer not in self._refused}
