"""The history of others that a peer should follow."""

from __future__ import annotations

from dataclasses import dataclass

from averaging.history.certificate import Certificate, RoundKind
from averaging.history.lineage import Chain, Lineage, Relation
from swarm.core.ids import Contact


@dataclass(frozen=True, slots=True)
class Ahead:
    """A history that this peer should follow: it extends this peer's own, or wins against it."""

    chain: Chain
    contact: Contact  # of a peer that has it
    epochs_given_up: int = 0  # this peer's own since the two parted; 0: it is merely behind

    def extending(self, root: Chain, kind: RoundKind, epoch: int, *, is_break: bool) -> Certificate | None:
        """Return the certificate that extends this head (an empty chain), if it is of a round of this kind,
        after which the state is of `epoch`, and a break where `is_break` says so; else None.
        """
        for certificate in self.chain.certificates:
            proposal = certificate.proposal
            if proposal.head == root.head:
                fits = (proposal.kind, proposal.epoch, proposal.is_break) == (kind, epoch, is_break)
                return certificate if fits else None
        return None


def what_to_follow(
    relation: Relation, lineage: Lineage, chain: Chain, contact: Contact, *, breaks: bool
) -> Ahead | None:
    """Return what a peer with this lineage should follow, when another one has this chain; None: it stays.
    Raise PeerError when the chain is not valid. `breaks`: the peer waited for its electors in vain.

    A history without a common head is followed by a peer that has none of its own, and by one that was away
    for longer than histories are kept.
    """
    theirs = chain.certificates
    if relation is Relation.AHEAD:
        return Ahead(chain, contact)
    if relation is Relation.WINS:
        return Ahead(chain, contact, epochs_given_up=lineage.epochs_after(chain))
    if relation is Relation.LOSES and breaks and theirs and theirs[0].proposal.head == lineage.head:
        return Ahead(chain, contact)  # those that break it have waited in vain, too
    if relation is Relation.UNRELATED and (not lineage.electors or lineage.is_waiting):
        chain.check(lineage.run)
        if chain.epoch > lineage.epoch or (not lineage.electors and chain.epoch >= lineage.epoch):
            return Ahead(chain, contact)
    return None
