"""Chains: parts of a history, certificates that extend one another. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum, auto

from averaging.history.certificate import Certificate, RoundKind, epoch_follows, genesis
from averaging.history.electors import NEW_REGISTER, Register, first_electors, first_register
from swarm.core.errors import PeerError
from swarm.core.ids import PeerId
from swarm.core.standing import Founding


class Relation(Enum):
    """How another peer's history relates to this peer's."""

    SAME = auto()  # equal heads
    BEHIND = auto()  # its head is in this peer's history
    AHEAD = auto()  # this peer's head is in its history: fetch the state
    LOSES = auto()  # the histories have parted, and this peer's one continues
    WINS = auto()  # the histories have parted, and the other one continues: fetch the state
    UNRELATED = auto()  # no common head is known, so nothing can be concluded


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """A part of a history: certificates, each extending the one before."""

    head: bytes  # before the first certificate
    electors: tuple[PeerId, ...]  # electors of that head
    certificates: tuple[Certificate, ...]
    root_epoch: int = 0  # epoch of the state at `head`
    root_line: bytes = b""  # the last break before `head`, as `Lineage.line`
    root_grid_rounds: int = 1  # rounds of the epoch after `head`
    root_register: Register = NEW_REGISTER  # register of `head`

    @property
    def last_head(self) -> bytes:
        """Return the head after the last certificate."""
        return self.certificates[-1].head if self.certificates else self.head

    @property
    def last_electors(self) -> tuple[PeerId, ...]:
        """Return the electors of the last head."""
        return self.certificates[-1].electors if self.certificates else self.electors

    @property
    def epoch(self) -> int:
        """Return the epoch after the last certificate."""
        return self.certificates[-1].proposal.epoch if self.certificates else self.root_epoch

    def contributors(self, epochs: int) -> tuple[int, int]:
        """Return how many peers contributed to the last epoch, and to the one `epochs` before it, or to the
        first one that is known; 0 without one.
        """
        known = [
            len(one.proposal.contributors)
            for one in self.certificates
            if one.proposal.kind is RoundKind.EPOCH
        ]
        return (known[-1], known[max(len(known) - 1 - epochs, 0)]) if known else (0, 0)

    def has_worked(self, peer: PeerId) -> bool:
        """Return whether the average of one of these epochs has this peer's values."""
        return any(one.proposal.kind is RoundKind.EPOCH and peer in one.workers for one in self.certificates)

    @property
    def end(self) -> Chain:
        """Return the empty chain that begins at the last head."""
        root = replace(self, certificates=())
        for certificate in self.certificates:
            root = after(certificate, root.root_line)
        return root

    def until(self, head: bytes) -> Chain | None:
        """Return the chain up to this head; None when it does not contain the head."""
        if head == self.head:
            return replace(self, certificates=())
        for place, certificate in enumerate(self.certificates, 1):
            if certificate.head == head:
                return replace(self, certificates=self.certificates[:place])
        return None

    def check(self, run: str) -> None:
        """Raise PeerError unless every certificate is valid, belongs to `run`, and extends the one before, by
        one epoch at most.
        """
        head, electors, epoch, register = self.head, self.electors, self.root_epoch, self.root_register
        for certificate in self.certificates:
            if certificate.proposal.run != run or certificate.proposal.head != head:
                raise PeerError("a history whose certificates do not follow from one another")
            certificate.check(electors, register)
            if not epoch_follows(certificate.proposal, epoch):
                raise PeerError(
                    f"a certificate of epoch {certificate.proposal.epoch} after one of epoch {epoch}"
                )
            head, electors = certificate.head, certificate.electors
            epoch, register = certificate.proposal.epoch, certificate.register

    def valid_part(self, run: str) -> Chain:
        """Return this chain if it is valid, else its end: of a checkpoint's chain that is damaged, or of
        another run, whose state may begin this one.
        """
        try:
            self.check(run)
        except PeerError:
            return self.end
        return self


def beginning(run: str, founding: Founding) -> Chain:
    """Return the empty chain at the beginning of a run."""
    return Chain(
        head=genesis(run),
        electors=first_electors(founding),
        certificates=(),
        root_register=first_register(founding),
    )


def after(certificate: Certificate, line: bytes) -> Chain:
    """Return the empty chain that begins after a certificate. `line`: the last break before it."""
    proposal = certificate.proposal
    return Chain(
        head=certificate.head,
        electors=certificate.electors,
        certificates=(),
        root_epoch=proposal.epoch,
        root_line=certificate.head if proposal.is_break else line,
        root_grid_rounds=proposal.grid_rounds,
        root_register=certificate.register,
    )
