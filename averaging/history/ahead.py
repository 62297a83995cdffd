"""The history of others that a peer should follow. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from averaging.history.certificate import Certificate, RoundKind
from averaging.history.chain import Chain, Relation
from averaging.history.lineage import Lineage
from swarm.core.errors import PeerError
from swarm.core.ids import Contact, PeerId


@dataclass(frozen=True, slots=True)
class Ahead:
    """A history that this peer should follow: it extends this peer's own, or wins against it."""

    chain: Chain
    contact: Contact  # a peer that has it
    epochs_given_up: int = 0  # epochs of this peer since the histories parted; 0: it is only behind

    @property
    def electors(self) -> tuple[PeerId, ...]:
        """Return the electors of the last head."""
        return self.chain.last_electors

    def extending(self, head: bytes, kind: RoundKind, epoch: int) -> Certificate | None:
        """Return the certificate that extends this head, if it is of a round of this kind, after which the
        state is of `epoch`; else None.
        """
        for certificate in self.chain.certificates:
            proposal = certificate.proposal
            if proposal.head == head:
                return certificate if (proposal.kind, proposal.epoch) == (kind, epoch) else None
        return None


def what_to_follow(
    relation: Relation, lineage: Lineage, chain: Chain, contact: Contact, *, breaks: bool
) -> Ahead | None:
    """Return what a peer that has a history should follow, when another one has this chain, whose relation to
    it is known; None: it stays. `breaks`: the peer waited for its electors in vain. Where the relation alone
    cannot decide, voices do (`averaging.history.offers`).
    """
    theirs = chain.certificates
    if relation is Relation.AHEAD:
        return Ahead(chain, contact)
    if relation is Relation.WINS:
        return Ahead(chain, contact, epochs_given_up=lineage.epochs_after(chain))
    if relation is Relation.LOSES and breaks and theirs and theirs[0].proposal.head == lineage.head:
        return Ahead(chain, contact)  # the peers that broke the history have also waited in vain
    return None


def still_ahead(ahead: Ahead | None, lineage: Lineage) -> Ahead | None:
    """Return the part of `ahead` that a peer should still follow after its own history has moved. A history
    that it was to follow while it waited may lose against its own commits since then.
    """
    if ahead is None or lineage.knows(ahead.chain.last_head):
        return None
    try:
        relation = lineage.relation(ahead.chain)
    except PeerError:  # it was valid after this peer's earlier history
        return None
    if relation is Relation.UNRELATED:  # the voices have chosen this history
        return ahead
    return what_to_follow(relation, lineage, ahead.chain, ahead.contact, breaks=False)


def work_kept(left: Lineage, followed: Lineage, peer: PeerId) -> tuple[bool, bool]:
    """Return whether the history that a peer follows has parted from the one that it left; and, where it only
    continues that one, whether values of this peer count in a round since then.
    """
    has_parted = not followed.knows(left.head)
    return has_parted, not has_parted and followed.chain([left.head]).has_worked(peer)
