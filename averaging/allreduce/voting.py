"""Votes as they travel."""

from __future__ import annotations

from averaging.allreduce.commit import Ballot
from averaging.allreduce.config import REASON_CHARACTERS_MAX
from swarm.core.errors import PeerError
from swarm.wire.reduce_pb2 import LeftOut, Vote


def vote_of(ballot: Ballot) -> Vote:
    """A ballot as a message."""
    left_out = [
        LeftOut(place=place, reason=reason[:REASON_CHARACTERS_MAX])
        for place, reason in ballot.left_out.items()
    ]
    return Vote(
        place=ballot.place,
        failed=ballot.failure is not None,
        reason=ballot.failure or "",
        digest=ballot.digest,
        left_out=left_out,
        number=ballot.number,
        excluded=sorted(ballot.excluded),
        committed=ballot.committed,
    )


def ballot_of(vote: Vote, members: int) -> Ballot:
    """Return the ballot in a message. Raises PeerError when it names a place outside of this group of
    `members`, or is no valid ballot.
    """
    if vote.place >= members:
        raise PeerError(f"a vote for place {vote.place} in a group of {members}")
    if any(place >= members for place in vote.excluded):
        raise PeerError(f"a vote that excludes a member beyond {members}")
    return Ballot(
        place=vote.place,
        number=vote.number or 1,
        digest=vote.digest,
        failure=vote.reason[:REASON_CHARACTERS_MAX] if vote.failed else None,
        excluded=frozenset(vote.excluded),
        committed=vote.committed and not vote.failed,
        left_out={
            item.place: item.reason[:REASON_CHARACTERS_MAX] for item in vote.left_out if item.place < members
        },
    )
