"""This peer's vote, as an elector, on rounds of groups in which it is no member."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from averaging.history.certificate import Proposal, Vote, vote_statement
from averaging.history.tally import is_supported
from averaging.optim.history import RunHistory
from swarm.core.ids import PeerId


class Endorser:
    """Votes on rounds that extend the head of one run's history."""

    def __init__(self, history: RunHistory, sign: Callable[[bytes], bytes]) -> None:
        """`sign` signs as the peer whose history this is."""
        self._own, self._history, self._sign = history.own, history, sign

    async def endorse(
        self, caller: PeerId, proposal: Proposal, result: bytes, votes: Sequence[Vote]
    ) -> Vote | str:
        """Vote as an elector on a round in which this peer is no member, once a majority of its contributors
        has voted, or return why not. `result`: b"" for a vote for none, which a contributor of a round that
        this peer never heard of asks for.
        """
        history = self._history
        if self._own not in (electors := history.root.electors):
            return "this peer has no vote on this head"
        declines = caller in electors and self._own in proposal.contributors and not proposal.is_break
        if not (is_supported(proposal, result, votes) if result else declines):
            return "the votes of these contributors are no majority"
        if reason := history.may_vote(proposal, result, outside=True):
            # promised in another attempt: without this vote neither attempt could be declared failed
            if not history.is_promised or history.may_vote(proposal, b"", outside=True):
                return reason
            result = b""
        statement = vote_statement(proposal.digest(), result)
        return Vote(voter=self._own, result=result, signature=self._sign(statement))
