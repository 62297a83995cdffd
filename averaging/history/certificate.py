"""Certificates: signed votes that prove that a round was committed, chained by hashes. Pure.

Every certificate names the electors of the next round, in order of seniority. The next round commits with
the votes of a quorum of these electors, so no two groups can extend the same head: dynamic linear voting
(Jajodia and Mutchler, ACM TODS 15(2), 1990) over a hash chain. Everybody who knows the electors of a head can
check the certificate that extends it.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from blake3 import blake3

from averaging.history.electors import (
    ELECTORS_MAX,
    NEW_REGISTER,
    Register,
    electors_after,
    grants_hour,
    is_quorum,
    leaving,
)
from swarm.core.errors import PeerError
from swarm.core.identity import verify
from swarm.core.ids import PeerId

DIGEST_BYTES: Final = 32
SIGNATURE_BYTES: Final = 64
CONTRIBUTORS_MAX: Final = 256
RESULT_BYTES_MAX: Final = DIGEST_BYTES + CONTRIBUTORS_MAX // 8
EPOCH_MAX: Final = 1 << 40
SAMPLES_MAX: Final = 1 << 40  # maximum of one contributor in one round
GRID_ROUNDS_MAX: Final = 16  # rounds in one epoch: 2^16 peers in groups of two
NO_HEAD: Final = bytes(DIGEST_BYTES)  # the head of a round without a history

_SIGNATURES_MAX: Final = 4096  # cached signatures: a vote of every elector on 64 certificates

_HEAD: Final = b"swarm head\0"
_GENESIS: Final = b"swarm genesis\0"
_PROPOSAL: Final = b"swarm proposal\0"
_VOTE: Final = b"swarm vote\0"
_ABSTENTION: Final = b"swarm abstention\0"
_GOODBYE: Final = b"swarm goodbye\0"


class RoundKind(Enum):
    """The kind of values that a round averaged."""

    EPOCH = 0  # it ended an epoch
    STATE = 1  # the state, within an epoch


def genesis(run: str) -> bytes:
    """Return the head of a run before its first certificate, 32 bytes."""
    return blake3(_GENESIS + run.encode()).digest()


@functools.lru_cache(maxsize=_SIGNATURES_MAX)
def _has_signed(peer: PeerId, statement: bytes, signature: bytes) -> bool:
    """Return whether a peer has signed a statement. Many peers show a newcomer the same certificates."""
    return verify(peer, statement, signature)


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """The content that the members of one group vote on, apart from the result. All members derive it from
    the group and from the head that they share; it is never sent before the vote.
    """

    run: str
    head: bytes  # the head that this round extends
    epoch: int  # epoch of the state after the round
    kind: RoundKind
    group_id: bytes  # one attempt at this round
    contributors: tuple[PeerId, ...]  # members whose weight is above 0, in group order
    electors: tuple[PeerId, ...]  # electors of the next round, computed by `electors_after`
    register: Register = NEW_REGISTER  # register of the next round
    # electors that leave the list at once; the certificate contains their goodbyes
    gone: tuple[PeerId, ...] = ()
    new_hour: bool = False  # most electors agree that a quarter more may be admitted now
    # commits without a quorum of the electors: a cut-off minority continues alone after the grace
    is_break: bool = False
    # rounds of the next epoch, through the cells of the grid; 1: one group has room for the whole swarm
    grid_rounds: int = 1
    # samples of each contributor, in their order, as the group weighs them; (): nobody is credited
    samples: tuple[int, ...] = ()
    _digest: bytes = field(default=b"", init=False, repr=False, compare=False)  # cached after first use

    def __post_init__(self) -> None:
        if len(self.head) != DIGEST_BYTES or len(self.group_id) != DIGEST_BYTES:
            raise PeerError(f"a head and the name of a group have {DIGEST_BYTES} bytes")
        if not 0 <= self.epoch <= EPOCH_MAX:
            raise PeerError(f"an epoch is between 0 and {EPOCH_MAX}, not {self.epoch}")
        if len(self.contributors) > CONTRIBUTORS_MAX or len(self.electors) > ELECTORS_MAX:
            raise PeerError(
                f"a round has at most {CONTRIBUTORS_MAX} contributors and {ELECTORS_MAX} electors, not "
                f"{len(self.contributors)} and {len(self.electors)}"
            )
        if not 1 <= self.grid_rounds <= GRID_ROUNDS_MAX:
            raise PeerError(f"an epoch has 1 to {GRID_ROUNDS_MAX} rounds, not {self.grid_rounds}")
        if len(set(self.contributors)) != len(self.contributors):
            raise PeerError("a peer contributes to a round once")
        if self.samples and len(self.samples) != len(self.contributors):
            raise PeerError(
                f"{len(self.samples)} numbers of samples of {len(self.contributors)} contributors"
            )
        if any(not 0 <= samples <= SAMPLES_MAX for samples in self.samples):
            raise PeerError(f"a contributor has 0 to {SAMPLES_MAX} samples in a round")

    def digest(self) -> bytes:
        """Return the digest of all fields, 32 bytes."""
        if not self._digest:  # needed for signatures, the tally and the head
            object.__setattr__(self, "_digest", self._computed_digest())
        return self._digest

    def _computed_digest(self) -> bytes:
        run = self.run.encode()
        state = blake3(_PROPOSAL + len(run).to_bytes(4, "little") + run + self.head + self.group_id)
        state.update(
            self.epoch.to_bytes(8, "little")
            + bytes([self.kind.value, self.is_break, self.grid_rounds, self.new_hour, self.register.seats])
            + self.register.at_once.to_bytes(4, "little")
        )
        for peers in (self.contributors, self.electors, self.gone):
            state.update(len(peers).to_bytes(4, "little"))
            for peer in peers:
                state.update(peer.public_key)
        state.update(bytes([len(self.register.misses), *self.register.misses]))
        for known in self.register.known:
            state.update(known.peer.public_key + bytes([known.rounds, known.was_elector]))
        for samples in self.samples:
            state.update(samples.to_bytes(8, "little"))
        return state.digest()

    @property
    def deciders(self) -> tuple[PeerId, ...]:
        """Return the contributors whose votes count for the result: those that are or become electors, so
        that no number of newcomers in a group can keep it from committing. Without any, all contributors.
        """
        electors = set(self.electors)
        return tuple(peer for peer in self.contributors if peer in electors) or self.contributors

    def follows(self, electors: Sequence[PeerId], register: Register) -> bool:
        """Return whether the next electors and register are those that follow after a head with these."""
        if self.new_hour and (
            self.is_break or register.at_once or not grants_hour(electors, self.contributors)
        ):
            return False
        if self.gone != leaving(electors, register, self.contributors, self.gone, is_break=self.is_break):
            return False
        return (self.electors, self.register) == electors_after(
            electors,
            register,
            self.contributors,
            gone=self.gone,
            is_break=self.is_break,
            new_hour=self.new_hour,
        )


def make_result(digest: bytes, idle: Collection[int], contributors: int) -> bytes:
    """Return the result of a round: the digest of all averages with who is in them, 32 bytes. Where
    contributors were `idle` (their values are in less than half of the averages) a bitmap of them follows, by
    place among the contributors, so that the certificate alone tells who worked.
    """
    if not idle:
        return digest
    return digest + sum(1 << place for place in idle).to_bytes((contributors + 7) // 8, "little")


def read_idle(proposal: Proposal, result: bytes) -> tuple[PeerId, ...]:
    """Return the contributors that were idle, according to a result. Raise PeerError when it is none."""
    if len(result) == DIGEST_BYTES:
        return ()
    count = len(proposal.contributors)
    bits = int.from_bytes(result[DIGEST_BYTES:], "little")
    if len(result) != DIGEST_BYTES + (count + 7) // 8 or not 0 < bits < 1 << count:
        raise PeerError(
            f"a result of {len(result)} bytes: it has {DIGEST_BYTES} bytes, and more only to name some of "
            f"{count} contributors"
        )
    return tuple(peer for place, peer in enumerate(proposal.contributors) if bits >> place & 1)


def settle(
    proposal: Proposal, result: bytes, electors: Sequence[PeerId], register: Register
) -> tuple[tuple[PeerId, ...], Register] | None:
    """Return the electors and the register after a round on a head with these; None: those of the proposal,
    because all peers that were no electors did work. An elector counts as present also when its values were
    lost: it took part in the decision.
    """
    idle = {*read_idle(proposal, result)}.difference(electors)
    worked = [peer for peer in proposal.contributors if peer not in idle]
    if not idle or not worked:
        return None
    return electors_after(
        electors,
        register,
        worked,
        gone=proposal.gone,
        is_break=proposal.is_break,
        new_hour=proposal.new_hour,
    )


def epoch_follows(proposal: Proposal, epoch: int) -> bool:
    """Return whether the epoch of a proposal is the one that follows after a head whose state is of `epoch`:
    a round over the state stays in it, every other one is one epoch further. The first certificate of a run
    may begin with the epoch of a checkpoint.
    """
    follows = proposal.epoch == epoch + (proposal.kind is RoundKind.EPOCH)
    return follows or proposal.head == genesis(proposal.run)


@dataclass(frozen=True, slots=True, kw_only=True)
class Vote:
    """One peer's signed vote on a proposal. It votes once: either for a result, or for none, which is a
    promise never to vote for one in this attempt.
    """

    voter: PeerId
    result: bytes  # made by `make_result`; b"": none
    signature: bytes

    def check(self, proposal: bytes) -> None:
        """Raise PeerError unless `voter` signed this vote on the proposal with the digest `proposal`."""
        if self.result and not DIGEST_BYTES <= len(self.result) <= RESULT_BYTES_MAX:
            raise PeerError(f"a vote has a digest of {DIGEST_BYTES} bytes or none, not {len(self.result)}")
        if not _has_signed(self.voter, vote_statement(proposal, self.result), self.signature):
            raise PeerError(f"a vote of {self.voter} that this peer did not sign")


def vote_statement(proposal: bytes, result: bytes) -> bytes:
    """Return the bytes that a voter signs. `proposal`: digest of the proposal; `result`: as in `Vote`."""
    return (_VOTE + proposal + result) if result else (_ABSTENTION + proposal)


def goodbye_statement(run: str, head: bytes) -> bytes:
    """Return the bytes that an elector signs when it leaves: it has not voted on this head, and will not."""
    return _GOODBYE + head + run.encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """The proof that a round was committed."""

    proposal: Proposal
    result: bytes
    votes: Mapping[PeerId, bytes]  # signatures of those that voted for this result
    goodbyes: Mapping[PeerId, bytes]  # signatures of electors that have left and are not counted
    # electors and register of the next round, by `settle`; None: those of the proposal
    settled: tuple[tuple[PeerId, ...], Register] | None = None

    # The head after this round: the hash of what was decided, which includes the previous head. It does not
    # depend on which of the votes were collected. Cached, because each report of another peer is compared
    # with it.
    head: bytes = field(init=False, repr=False, compare=False)
    # electors and register with which `check` found it valid; cached, because many peers show a newcomer the
    # same history
    _valid_after: list[tuple[Sequence[PeerId], Register]] = field(
        default_factory=list, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "head", blake3(_HEAD + self.proposal.digest() + self.result).digest())

    @property
    def electors(self) -> tuple[PeerId, ...]:
        """Return the electors of the next round, the most senior first."""
        return self.settled[0] if self.settled is not None else self.proposal.electors

    @property
    def register(self) -> Register:
        """Return what the head after this round remembers about the admission of electors."""
        return self.settled[1] if self.settled is not None else self.proposal.register

    @property
    def workers(self) -> tuple[PeerId, ...]:
        """Return the contributors whose values are in at least half of the averages."""
        idle = read_idle(self.proposal, self.result)
        return tuple(peer for peer in self.proposal.contributors if peer not in idle)

    def check(self, electors: Sequence[PeerId], register: Register) -> None:
        """Raise PeerError unless this certificate is valid after a head with these electors and this
        register.
        """
        if (electors, register) not in self._valid_after:
            self._check(electors, register)
            self._valid_after[:] = [(electors, register)]

    def _check(self, electors: Sequence[PeerId], register: Register) -> None:
        proposal = self.proposal
        if len(self.votes) > CONTRIBUTORS_MAX + ELECTORS_MAX or len(self.goodbyes) > ELECTORS_MAX:
            raise PeerError("a certificate with more votes than there can be voters")
        if not proposal.follows(electors, register):
            raise PeerError("a certificate names other electors than follow from its contributors")
        if self.settled != settle(proposal, self.result, electors, register):
            raise PeerError("a certificate names other electors than follow from who worked")
        statement = vote_statement(proposal.digest(), self.result)
        for voter, signature in self.votes.items():
            if not _has_signed(voter, statement, signature):
                raise PeerError(f"a certificate with a vote that {voter} did not sign")
        statement = goodbye_statement(proposal.run, proposal.head)
        for peer, signature in self.goodbyes.items():
            if not _has_signed(peer, statement, signature):
                raise PeerError(f"a certificate with a goodbye that {peer} did not sign")
        if not self.goodbyes.keys() >= {*proposal.gone}:
            raise PeerError("a certificate takes electors from the list that have not said goodbye")
        if not is_majority(proposal.deciders, self.votes):
            found = sum(peer in self.votes for peer in proposal.deciders)
            raise PeerError(
                f"a certificate with the votes of {found} of {len(proposal.deciders)} contributors, "
                "which is no majority"
            )
        if not proposal.is_break and not is_quorum(electors, self.votes, self.goodbyes):
            raise PeerError(
                f"a certificate with the votes of {sum(peer in self.votes for peer in electors)} of "
                f"{len(electors)} electors, which is no quorum"
            )


def is_majority(deciders: Sequence[PeerId], present: Collection[PeerId]) -> bool:
    """Return whether more than half of the contributors whose votes count (`Proposal.deciders`) are
    `present`.
    """
    return 2 * sum(peer in present for peer in deciders) > len(deciders)
