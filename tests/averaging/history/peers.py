"""Identities from seeds, and certificates that they sign."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from blake3 import blake3
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from averaging.history.certificate import Certificate, Proposal, RoundKind, Vote, vote_statement
from averaging.history.electors import NEW_REGISTER, Register, electors_after, leaving
from averaging.history.lineage import Lineage
from swarm.core.identity import Identity
from swarm.core.ids import PeerId

RUN = "a run"
NEW = NEW_REGISTER


def identity(number: int) -> Identity:
    """Return the identity with this number, always the same."""
    return Identity(Ed25519PrivateKey.from_private_bytes(blake3(number.to_bytes(4, "little")).digest()))


IDENTITIES = [identity(number) for number in range(8)]
PEERS = [one.peer_id for one in IDENTITIES]
SIGNERS = {one.peer_id: one.sign for one in IDENTITIES}


def proposal(
    head: bytes,
    electors: Sequence[PeerId],
    contributors: Sequence[PeerId],
    *,
    epoch: int = 1,
    is_break: bool = False,
    attempt: int = 0,
    register: Register = NEW,
    new_hour: bool = False,
    gone: Sequence[PeerId] = (),
) -> Proposal:
    """Return a proposal of these contributors after a head with these electors and this register."""
    gone = leaving(electors, register, contributors, gone, is_break=is_break)
    next_electors, next_register = electors_after(
        electors, register, contributors, gone=gone, is_break=is_break, new_hour=new_hour
    )
    return Proposal(
        run=RUN,
        head=head,
        epoch=epoch,
        kind=RoundKind.EPOCH,
        group_id=blake3(b"group" + attempt.to_bytes(4, "little")).digest(),
        contributors=tuple(contributors),
        electors=next_electors,
        register=next_register,
        gone=gone,
        new_hour=new_hour,
        is_break=is_break,
    )


def upon(
    after: Lineage, contributors: Sequence[PeerId], *, is_break: bool = False, attempt: int = 0
) -> Proposal:
    """Return a proposal of these contributors for the next epoch of a history."""
    return proposal(
        after.head,
        after.electors,
        contributors,
        epoch=after.epoch + 1,
        is_break=is_break,
        attempt=attempt,
        register=after.register,
    )


def vote(voter: PeerId, about: Proposal, result: bytes) -> Vote:
    """Return a signed vote."""
    signature = SIGNERS[voter](vote_statement(about.digest(), result))
    return Vote(voter=voter, result=result, signature=signature)


def certificate(about: Proposal, voters: Iterable[PeerId], content: bytes = b"averages") -> Certificate:
    """Return the certificate that these voters sign, whether or not they are enough."""
    result = blake3(content).digest()
    votes = {voter: vote(voter, about, result).signature for voter in voters}
    return Certificate(proposal=about, result=result, votes=votes, goodbyes={})
