"""The choice between histories that nothing ties to a peer's own, by the voices of peers that it has reason
to ask. Pure.

An identity costs nothing, so neither the longest history nor the one that most strangers report is believed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from averaging.history.ahead import Ahead
from averaging.history.certificate import genesis
from averaging.history.chain import Chain, Relation
from averaging.history.electors import seats_of
from averaging.history.lineage import Lineage
from swarm.core.ids import Contact, PeerId

_OFFERS_MAX: Final = 16  # up to 2 MiB each
_APART_MAX: Final = 8  # electors of another line that are asked for their histories at once


@dataclass(frozen=True, slots=True)
class _Offer:
    chain: Chain
    contact: Contact
    heads: frozenset[bytes]  # heads for which the voice supports it


class Offers:
    """Histories of other peers between which voices decide, and who has one."""

    def __init__(
        self, introducers: Sequence[PeerId] = (), named: Callable[[], Sequence[PeerId]] = tuple
    ) -> None:
        """`introducers`: the peers that the user named to enter the swarm, in their order. `named` returns
        the members of the run that these have named to this peer.
        """
        self.introducers, self._named = tuple(introducers), named
        self._offers: OrderedDict[PeerId, _Offer] = OrderedDict()

    def asked_first(self, lineage: Lineage) -> Sequence[PeerId]:
        """Return the peers whose histories this peer needs: the introducers of a newcomer, and the electors
        of a peer that found no quorum.
        """
        if not lineage.has_begun:
            return (*lineage.electors, *self.introducers, *self._named())
        return (*lineage.electors, *self.introducers) if lineage.is_waiting else ()

    def to_ask(self, lineage: Lineage, heads: Mapping[PeerId, bytes]) -> list[PeerId]:
        """Return those of `asked_first` that may have something new. A newcomer does not ask for a history
        that a peer has shown with the head that it reports (`heads`), nor a peer that reports no other head
        than this one's own: it is as new.
        """
        first = self.asked_first(lineage)
        if lineage.has_begun:
            electors = {peer for parting in lineage.partings() for peer in parting.electors}
            elsewhere = {head for head in heads.values() if not lineage.knows(head)} - {genesis(lineage.run)}
            apart = [peer for peer in electors.difference(first) if heads.get(peer) in elsewhere]
            # whether these peers answer is also relevant
            return [*first, *sorted(apart)[:_APART_MAX]]
        return [
            one
            for one in first
            if heads.get(one) != lineage.head
            and (one not in self._offers or heads.get(one) not in self._offers[one].heads)
        ]

    def takes(self, relation: Relation, lineage: Lineage, chain: Chain, contact: Contact) -> bool:
        """Keep a history if voices decide about it, and return whether they do. Raise PeerError when it is
        not valid. `relation`: its relation to `lineage`.
        """
        if lineage.has_begun:
            is_open = relation is Relation.UNRELATED and (
                (lineage.is_waiting and chain.epoch > lineage.epoch)
                or _parting_of(lineage, chain, contact.peer_id) is not None
            )
        else:
            is_open = relation in (Relation.UNRELATED, Relation.AHEAD) and chain.epoch >= lineage.epoch
        if is_open:
            chain.check(lineage.run)
            self._offers[contact.peer_id] = _Offer(chain, contact, _supported_heads(chain))
            self._offers.move_to_end(contact.peer_id)
            strangers = [peer for peer in self._offers if peer not in self.asked_first(lineage)]
            if len(self._offers) > _OFFERS_MAX:
                del self._offers[(strangers or list(self._offers))[0]]
        return is_open

    def choose(self, lineage: Lineage, heads: Mapping[PeerId, bytes]) -> Ahead | None:
        """Return the history that most voices are for, the longest where several are parts of one; in a tie
        that of the voice that comes first. `heads`: what live peers report.

        None while no history has as many voices as another head, whose history could not be fetched. A voice
        for a head supports what follows it up to the next break: a break needs no quorum, so that anybody
        could add one.
        """
        if (found := self._after_parting(lineage, heads)) is not None:
            return found
        if lineage.has_begun and not lineage.is_waiting:
            return None
        voices = self._voices(lineage, heads)
        wanted = {peer: self._head_of(peer, heads) for peer in voices}
        best: tuple[int, int, int] | None = None
        counted = set[PeerId]()
        for offer in self._offers.values():
            supporters = [place for place, peer in enumerate(voices) if wanted[peer] in offer.heads]
            if not supporters:
                continue
            counted.update(voices[place] for place in supporters)
            rank = len(supporters), -supporters[0], offer.chain.epoch
            if best is None or rank > best:
                best, found = rank, Ahead(offer.chain, offer.contact)
        silent = [wanted[peer] for peer in voices if peer not in counted]
        largest = max((silent.count(head) for head in silent), default=0)
        return found if best is not None and best[0] >= largest else None

    def _after_parting(self, lineage: Lineage, heads: Mapping[PeerId, bytes]) -> Ahead | None:
        """Return a history that parted from this one at a break of this one, more certificates ago than are
        kept, if it continues: where most of the electors of that time are that can be reached, then where the
        most senior is. None: this one does.
        """
        for parting in lineage.partings():
            wanted = {peer: self._head_of(peer, heads) for peer in parting.electors}
            here = {lineage.own, *(peer for peer, head in wanted.items() if lineage.knows(head))}
            sides = [
                (
                    seats_of([peer for peer in wanted if wanted[peer] in offer.heads], parting.electors),
                    offer.chain.epoch,
                    Ahead(offer.chain, offer.contact, max(lineage.epoch - parting.root_epoch, 0)),
                )
                for offer in self._offers.values()
                if _parting_of(lineage, offer.chain, offer.contact.peer_id) == parting
            ]
            if sides:
                seats, _, ahead = max(sides, key=lambda side: side[:2])
                return ahead if seats > seats_of(here, parting.electors) else None
        return None

    def _voices(self, lineage: Lineage, heads: Mapping[PeerId, bytes]) -> Sequence[PeerId]:
        """Return the peers that have a voice: the live electors of this peer's own head; without any, the
        introducers that take part in the run; for a newcomer whose introducers do not, the members that they
        have named; without any, everybody.
        """
        nobody = genesis(lineage.run)
        live = [peer for peer in {**heads, **self._offers} if self._head_of(peer, heads) not in (b"", nobody)]
        for group in (lineage.electors, self.introducers):
            present = [peer for peer in group if peer in live and peer != lineage.own]
            if present:
                return present
        if lineage.has_begun:
            return ()
        return [peer for peer in self._named() if peer in live and peer != lineage.own] or live

    def _head_of(self, peer: PeerId, heads: Mapping[PeerId, bytes]) -> bytes:
        """Return the head that a peer is for: of the history that it has shown, else the reported one."""
        return self._offers[peer].chain.last_head if peer in self._offers else heads.get(peer, b"")

    def has(self, head: bytes) -> bool:
        """Return whether this head is in one of the histories."""
        return any(head in offer.heads for offer in self._offers.values())

    def __str__(self) -> str:
        return f"the histories that {len(self._offers)} peers have shown"

    def forget(self, peer: PeerId) -> None:
        """Forget the history that a peer has shown."""
        self._offers.pop(peer, None)

    def clear(self) -> None:
        """Forget all histories."""
        self._offers.clear()


def _parting_of(lineage: Lineage, chain: Chain, peer: PeerId) -> Chain | None:
    """Return the newest break of a history at which this peer decided, and its chain may have parted; None:
    there is none. A chain that begins before the break would show where the two parted; its peer has slept.
    """
    for parting in lineage.partings():
        if peer in parting.electors:
            return parting if chain.root_epoch > parting.root_epoch else None
    return None


def _supported_heads(chain: Chain) -> frozenset[bytes]:
    """Return the heads of a chain after which it has no break, but not the one that it begins with."""
    supported = {chain.last_head}
    for certificate in reversed(chain.certificates):
        supported.add(certificate.head)
        if certificate.proposal.is_break:
            break
    return frozenset(supported)
