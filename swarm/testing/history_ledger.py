"""All signatures of the peers of a random play, and the certificates that can be made of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from averaging.history.certificate import Certificate, Proposal, Vote, is_majority
from averaging.history.electors import is_quorum
from swarm.core.ids import PeerId


class BrokenPromiseError(AssertionError):
    """A promised property does not hold."""


@dataclass
class VoteLedger:
    """All signatures so far, and the certificates that can be made of them."""

    liar: PeerId | None
    electors: dict[bytes, tuple[PeerId, ...]] = field(default_factory=dict)  # of every head
    votes: dict[tuple[bytes, bytes], dict[PeerId, bytes]] = field(default_factory=dict)
    proposals: dict[bytes, list[Proposal]] = field(default_factory=dict)  # by head
    goodbyes: dict[bytes, dict[PeerId, bytes]] = field(default_factory=dict)  # by head
    certified: dict[bytes, dict[bytes, Certificate]] = field(
        default_factory=dict
    )  # by head, then by next head
    seen: set[tuple[bytes, bytes]] = field(default_factory=set)  # proposal, result: of the liar's, by honest
    counts: Counter[str] = field(default_factory=Counter)

    def voted(self, proposal: Proposal, vote: Vote) -> None:
        """Record a vote, and check whether a result can be certified now."""
        digest = proposal.digest()
        known = self.proposals.setdefault(proposal.head, [])
        if all(one is not proposal and one.digest() != digest for one in known):
            known.append(proposal)
        self.votes.setdefault((digest, vote.result), {})[vote.voter] = vote.signature
        if vote.result:
            self._certify(proposal, vote.result)

    def left(self, peer: PeerId, head: bytes, signature: bytes) -> None:
        """Record a goodbye."""
        self.goodbyes.setdefault(head, {})[peer] = signature
        for proposal in self.proposals.get(head, ()):
            digest = proposal.digest()
            for result in [result for known, result in self.votes if known == digest and result]:
                self._certify(proposal, result)

    def _certify(self, proposal: Proposal, result: bytes) -> None:
        votes = self.votes[proposal.digest(), result]
        # a goodbye of a voter has no effect, unless the proposal needs it
        gone = {
            peer: signature
            for peer, signature in self.goodbyes.get(proposal.head, {}).items()
            if peer not in votes or peer in proposal.gone
        }
        if not gone.keys() >= {*proposal.gone}:
            return
        if proposal.is_break or not is_majority(proposal.deciders, votes):
            return
        if not is_quorum(self.electors[proposal.head], votes, gone):
            return
        made = Certificate(proposal=proposal, result=result, votes=dict(votes), goodbyes=gone)
        known = self.certified.setdefault(proposal.head, {})
        for other in known.values():
            if other.head != made.head:
                self._fork(other, made)
        known[made.head] = made

    def _fork(self, one: Certificate, other: Certificate) -> None:
        """Record two certificates for one head: only a liar can make them, and its lie must be provable."""
        if self.liar is None:
            raise BrokenPromiseError("two certificates without a break extend one head")
        if self.liar in one.votes and self.liar in other.votes:
            self.counts["forks with two votes of the liar"] += 1
            return
        for certificate in (one, other):
            digest = certificate.proposal.digest()
            contradicted = any(
                known == digest and result != certificate.result for known, result in self.seen
            )
            if self.liar in certificate.votes and contradicted:
                self.counts["forks with a vote of the liar that contradicts another one"] += 1
                return
            if self.liar in certificate.goodbyes or self.liar in self.goodbyes.get(one.proposal.head, {}):
                self.counts["forks with a goodbye of the liar"] += 1
                return
        raise BrokenPromiseError("a fork that cannot be proved")
