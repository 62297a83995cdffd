"""The history of others that a peer should follow."""

from __future__ import annotations

from dataclasses import dataclass

from averaging.history.certificate import Certificate, RoundKind
from averaging.history.lineage import Chain
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
