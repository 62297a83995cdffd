"""The signature of a member's vote, and the check by its run's history that comes first."""

from __future__ import annotations

from averaging.history.certificate import Proposal, Vote, vote_statement
from averaging.history.round_lineage import RoundLineage
from swarm.core.identity import Signer
from swarm.core.ids import Contact, PeerId

IN_ANOTHER_ROUND = "this peer is in another round on this head"


class Voter:
    """This peer as a voter in one round."""

    def __init__(self, signer: Signer, proposal: Proposal, history: RoundLineage | None) -> None:
        self._signer, self._proposal, self._history = signer, proposal, history

    def vote(self, result: bytes) -> Vote | str:
        """Return the vote for `result` (b"": for none), or why this peer must not vote for it."""
        if self._history is not None:
            reason = self._history.may_vote(self._proposal, result)
            if reason:
                return reason
        statement = vote_statement(self._proposal.digest(), result)
        return Vote(voter=self._signer.peer_id, result=result, signature=self._signer.sign(statement))

    def competes_with(self, proposal: Proposal) -> bool:
        """Return whether another group's round extends the same head: with this peer's vote for it, this
        round would fail.
        """
        own = self._proposal
        same_head = (own.run, own.head) == (proposal.run, proposal.head)
        return same_head and own.group_id != proposal.group_id

    async def find_contact(self, elector: PeerId) -> Contact | None:
        """Return the contact of an elector outside of the group; None when it is not known."""
        return await self._history.find_contact(elector) if self._history is not None else None
