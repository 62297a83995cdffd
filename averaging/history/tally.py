"""The tally of one attempt at a round: which votes are known, whether they make a certificate, and whether
they still can. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from averaging.history.certificate import (
    Certificate,
    Proposal,
    Vote,
    goodbye_statement,
    is_majority,
    read_idle,
    settle,
)
from averaging.history.electors import (
    NEW_REGISTER,
    Register,
    is_quorum,
)
from swarm.core.errors import PeerError
from swarm.core.identity import verify
from swarm.core.ids import PeerId


class Tally:
    """The known votes of one attempt.

    A certificate needs votes for one result from more than half of the contributors that are electors (of all
    of them, if none is: `Proposal.deciders`), who hold the bytes, and
    from a quorum of the electors of the head, so that no other group commits on it.
    """

    def __init__(
        self, proposal: Proposal, electors: Sequence[PeerId], register: Register = NEW_REGISTER
    ) -> None:
        """`electors`, `register`: of the head that the proposal extends, in order of seniority; none for a
        round without a history, and for the first round of a run.
        """
        self.proposal = proposal
        self.electors, self._register = tuple(electors), register
        self.votes: dict[PeerId, Vote] = {}
        # peers with two different signed votes in this attempt, and these votes, which do not count
        self.liars: dict[PeerId, tuple[Vote, Vote]] = {}
        self.goodbyes: dict[PeerId, bytes] = {}
        self._digest = proposal.digest()
        self._voters = {*proposal.contributors, *self.electors}
        self._deciders = proposal.deciders
        self._counts = Counter[bytes]()  # votes of deciders, by result
        self.majority: bytes | None = None  # the result that more than half of the deciders voted for
        # cached result of the known votes, because it is needed after every event of a round
        self._certificate: Certificate | None = None
        self._is_known = False  # whether there is a certificate
        self._is_dead: bool | None = None
        self._most_votes: int | None = None

    def add(self, vote: Vote) -> bool:
        """Count a vote, no matter which peer relayed it. Return whether it is new. A voter that signed two
        different votes is remembered as a liar. Raise PeerError for a vote that its voter did not sign, or of
        a peer that has no vote here.
        """
        if vote.voter not in self._voters:
            raise PeerError(f"a vote of {vote.voter}, which is neither a contributor nor an elector")
        known = self.votes.get(vote.voter)
        if known is not None and known.result == vote.result:
            return False
        if vote.voter in self.liars:
            return False
        vote.check(self._digest)
        if vote.result:
            read_idle(self.proposal, vote.result)  # raises PeerError
        self._forget()
        if known is not None:
            self.liars[vote.voter] = (known, vote)
            del self.votes[vote.voter]
            self._count(known, -1)
            return True
        self.votes[vote.voter] = vote
        self._count(vote, 1)
        return True

    def _forget(self) -> None:
        """Forget what followed from the votes and goodbyes before another one is counted."""
        self._certificate = self._is_dead = self._most_votes = None
        self._is_known = False

    def _count(self, vote: Vote, difference: int) -> None:
        if vote.voter in self._deciders and vote.result:
            self._counts[vote.result] += difference
            more = (result for result, count in self._counts.items() if 2 * count > len(self._deciders))
            self.majority = next(more, None)

    def add_goodbye(self, peer: PeerId, signature: bytes) -> bool:
        """Count an elector as gone. Return whether this is new. Raise PeerError when it did not sign it."""
        if peer in self.goodbyes or peer not in self.electors:
            return False
        if not verify(peer, goodbye_statement(self.proposal.run, self.proposal.head), signature):
            raise PeerError(f"a goodbye that {peer} did not sign")
        self._forget()
        self.goodbyes[peer] = signature
        return True

    def supporters(self, result: bytes) -> set[PeerId]:
        """Return the peers that voted for this result."""
        return {voter for voter, vote in self.votes.items() if vote.result == result}

    @property
    def results(self) -> dict[bytes, int]:
        """Return the results that contributors whose votes count voted for, with the number of votes."""
        return dict(+self._counts)

    @property
    def most_votes(self) -> int:
        """Return how many votes that count the result with most of them has."""
        if self._most_votes is None:
            self._most_votes = max(self._counts.values(), default=0)
        return self._most_votes

    @property
    def certificate(self) -> Certificate | None:
        """Return the certificate, once the known votes make one."""
        if not self._is_known:
            self._certificate, self._is_known = self._made_certificate(), True
        return self._certificate

    def _made_certificate(self) -> Certificate | None:
        result = self.majority
        if result is None:
            return None
        supporters = self.supporters(result)
        if not self.goodbyes.keys() >= {*self.proposal.gone}:
            return None
        if not self.proposal.is_break and not is_quorum(self.electors, supporters, self.goodbyes):
            return None
        return Certificate(
            proposal=self.proposal,
            result=result,
            votes={peer: self.votes[peer].signature for peer in sorted(supporters)},
            goodbyes=dict(self.goodbyes),
            settled=settle(self.proposal, result, self.electors, self._register),
        )

    @property
    def electors_missing(self) -> list[PeerId]:
        """Return the electors that have not voted, nor said goodbye."""
        return [
            peer
            for peer in self.electors
            if peer not in self.votes and peer not in self.goodbyes and peer not in self.liars
        ]

    def is_dead(self) -> bool:
        """Return whether no result can be certified any more, whatever the votes that are unknown are: then a
        voter is free to vote on another attempt at this head.
        """
        if self._is_dead is None:
            candidates = {vote.result for vote in self.votes.values() if vote.result}
            self._is_dead = not any(self._is_possible(result) for result in (*candidates, None))
        return self._is_dead

    def _is_possible(self, result: bytes | None) -> bool:
        """Return whether further votes can certify this result. None: one that nobody has voted for yet."""
        # a decider without a vote may still vote for it, unless it has left; a liar may have voted for it
        # elsewhere
        supporters = {
            peer
            for peer in self._voters
            if (
                result is not None and self.votes[peer].result == result
                if peer in self.votes
                else peer not in self.goodbyes
            )
        }
        if not is_majority(self._deciders, supporters):
            return False
        return self.proposal.is_break or is_quorum(
            self.electors, supporters - self.goodbyes.keys(), self.goodbyes
        )


def is_supported(proposal: Proposal, result: bytes, votes: Sequence[Vote]) -> bool:
    """Return whether these are signed votes for the result, of more than half of the contributors whose votes
    count.
    """
    digest = proposal.digest()
    try:
        read_idle(proposal, result)
        for vote in votes:
            vote.check(digest)
    except PeerError:
        return False
    return is_majority(proposal.deciders, {vote.voter for vote in votes if vote.result == result})
