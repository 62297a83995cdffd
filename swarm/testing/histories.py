"""Random test of peers that keep one history through cuts, losses, restarts and a liar.

Every peer decides with its real `Lineage` and `Tally`; the result of a round is a digest, time is
a number, and messages are functions in a list. `swarm.testing.history_plays` takes the random steps.

The network is as hostile as possible: a certificate exists as soon as the votes for it were signed, because
some peer may collect them.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from blake3 import blake3

from averaging.history.certificate import (
    Certificate,
    Proposal,
    RoundKind,
    Vote,
    goodbye_statement,
    vote_statement,
)
from averaging.history.chain import Chain, Relation
from averaging.history.electors import electors_after, grants_hour
from averaging.history.encoding import decode_chain, encode_chain
from averaging.history.lineage import CERTIFICATES_MAX, Lineage
from averaging.history.tally import Tally
from swarm.core.errors import PeerError
from swarm.core.identity import Signer
from swarm.core.ids import PeerId
from swarm.core.standing import NO_SPECIFICATION, Founding
from swarm.testing.chance import Chance
from swarm.testing.history_ledger import BrokenPromiseError, VoteLedger

RUN: Final = "model"
EPOCH_S: Final = 1.0
ATTEMPTS_MAX: Final = 8  # that a peer of the model follows at once
MESSAGES_MAX: Final = 24  # messages in transit; above this, a random one is lost
CHECKPOINTS_MAX: Final = 3
# without faults, peers must share one head within this time: more than three times the grace
HEAL_S: Final = 90


@dataclass(frozen=True)
class PlayConfig:
    """One play."""

    seed: int
    electors: int = 3  # at the beginning
    newcomers: int = 1  # join later
    steps: int = 2000
    has_liar: bool = False
    quiet_interval: int = 250  # steps between two checks without faults

    @property
    def is_owned(self) -> bool:
        """Return whether the first peer owns the run, so that others become electors one after the other: it
        does in every other play.
        """
        return self.seed % 2 == 1


@dataclass
class Attempt:
    """One attempt at a round as one peer knows it."""

    proposal: Proposal
    members: tuple[int, ...]
    tally: Tally
    result: bytes  # what this peer holds; b"": it is not in the group
    has_voted: bool = False


@dataclass
class Peer:
    """One peer of the model. Without a lineage its process does not run."""

    number: int
    signer: Signer
    lineage: Lineage | None = None
    attempts: dict[bytes, Attempt] = field(default_factory=dict)  # by the digest of the proposal
    checkpoints: deque[Chain] = field(default_factory=lambda: deque(maxlen=CHECKPOINTS_MAX))  # on its disk
    wants_break: bool = False

    @property
    def live(self) -> Lineage:
        """Return the lineage of a peer whose process runs."""
        assert self.lineage is not None
        return self.lineage

    @property
    def is_locked(self) -> bool:
        """Return whether this peer may not vote for a new result on its head."""
        return self.live.is_promised or self.live.abstains


class Play:
    """Peers, the network between them, and the random numbers."""

    def __init__(self, config: PlayConfig, make_signer: Callable[[int], Signer]) -> None:
        self.config = config
        self.chance = Chance("histories", config.seed, config.electors, config.newcomers, config.has_liar)
        count = config.electors + config.newcomers
        self.peers = [Peer(number, make_signer(number)) for number in range(count)]
        self.numbers = {peer.signer.peer_id: peer.number for peer in self.peers}
        owner = self.peers[0].signer.peer_id
        self.founding = Founding(owner) if config.is_owned else NO_SPECIFICATION
        self.liar = self.chance.choice(self.peers[: config.electors]) if config.has_liar else None
        self.ledger = VoteLedger(self.liar.signer.peer_id if self.liar else None)
        self.cuts: set[tuple[int, int]] = set()
        # sender, receiver, effect at the receiver
        self.messages: list[tuple[int, int, Callable[[Peer], None]]] = []
        self.now_s = 0.0
        self.serial = 0
        self._found()

    @property
    def counts(self) -> Counter[str]:
        """Return the counts of events."""
        return self.ledger.counts

    def _found(self) -> None:
        """Let the first electors make the first certificate together."""
        electors = self.peers[: self.config.electors]
        for peer in electors:
            peer.lineage = Lineage(RUN, peer.signer.peer_id, self.founding)
        first = electors[0].live
        self.ledger.electors[first.head] = first.electors
        proposal = self._proposal(electors[0], electors, is_break=False)
        result, votes = _digest("first"), {}
        for peer in electors:
            statement = vote_statement(proposal.digest(), result)
            votes[peer.signer.peer_id] = peer.signer.sign(statement)
        for peer in electors:
            self.extend(peer, Certificate(proposal=proposal, result=result, votes=votes, goodbyes={}))
            peer.checkpoints.append(peer.live.chain())

    # ---- actions of peers

    def running(self, *, honest: bool = False) -> list[Peer]:
        """Return the peers whose processes run."""
        return [
            peer for peer in self.peers if peer.lineage is not None and not (honest and peer is self.liar)
        ]

    def reaches(self, one: Peer, other: Peer) -> bool:
        """Return whether messages pass in both directions between these peers."""
        pair = (one.number, other.number)
        return one is other or not (pair in self.cuts or pair[::-1] in self.cuts)

    def peers_at_head(self, peer: Peer, among: Collection[Peer] | None = None) -> list[Peer]:
        """Return the peers at the same head that this one can reach both ways, itself included."""
        head = peer.live.head
        return [
            other
            for other in (self.running() if among is None else among)
            if other.lineage is not None and other.live.head == head and self.reaches(peer, other)
        ]

    def group_id(self) -> bytes:
        """Return the name of a new group."""
        self.serial += 1
        return _digest(f"group {self.serial}")

    def _proposal(self, leader: Peer, members: Iterable[Peer], *, is_break: bool) -> Proposal:
        members = list(members)
        lineage, contributors = leader.live, [peer.signer.peer_id for peer in members]
        may_grow = not (is_break or lineage.register.at_once) and grants_hour(lineage.electors, contributors)
        proposal = lineage.propose(
            epoch=lineage.epoch + 1,
            kind=RoundKind.EPOCH,
            group_id=self.group_id(),
            contributors=contributors,
            is_break=is_break,
            new_hour=may_grow and self.chance.happens(0.5),
        )
        gone = tuple(peer for peer in proposal.gone if all(peer in one.live.goodbyes for one in members))
        electors, register = electors_after(
            lineage.electors,
            lineage.register,
            contributors,
            gone=gone,
            is_break=is_break,
            new_hour=proposal.new_hour,
        )
        return replace(proposal, gone=gone, electors=electors, register=register)

    def form(self, leader: Peer, members: Sequence[Peer], *, is_break: bool) -> Proposal:
        """Form a group. Every member holds its result once it learns of the group."""
        proposal = self._proposal(leader, members, is_break=is_break)
        splits = self.liar in members and self.chance.happens(0.3)
        numbers = tuple(peer.number for peer in members)
        for peer in members:
            version = self.chance.below(2) if splits else 0
            result = _digest(f"result {self.serial} {version}")

            def join(to: Peer, result: bytes = result) -> None:
                self._join(to, proposal, numbers, result)

            if peer is leader:
                join(peer)
            else:
                self.send(leader, peer, join)
        self.counts["groups"] += 1
        return proposal

    def _join(self, peer: Peer, proposal: Proposal, members: tuple[int, ...], result: bytes) -> None:
        if peer.live.head != proposal.head or (proposal.is_break and not peer.wants_break):
            return
        self._follow(peer, proposal, members, result)

    def _follow(
        self, peer: Peer, proposal: Proposal, members: tuple[int, ...], result: bytes
    ) -> Attempt | None:
        """Return this peer's view of an attempt, a new one if it has room for it."""
        digest = proposal.digest()
        if digest not in peer.attempts:
            if len(peer.attempts) == ATTEMPTS_MAX:
                over = [key for key, one in peer.attempts.items() if self._is_over(peer, one)]
                if not over:
                    return None
                del peer.attempts[over[0]]
            tally = Tally(proposal, peer.live.electors, peer.live.register)
            for other, signature in peer.live.goodbyes.items():
                tally.add_goodbye(other, signature)
            peer.attempts[digest] = Attempt(proposal, members, tally, result)
        attempt = peer.attempts[digest]
        if not attempt.result:  # the peer had endorsed the attempt before it learned of its own membership
            attempt.result = result
        return attempt

    def _is_over(self, peer: Peer, attempt: Attempt) -> bool:
        """Return whether a peer may forget an attempt: it voted for no result that may be certified."""
        own = attempt.tally.votes.get(peer.signer.peer_id)
        return own is None or not own.result or attempt.tally.is_dead()

    def vote(self, peer: Peer, attempt: Attempt, *, gives_up: bool = False) -> None:
        """Let a peer vote on an attempt: for its result, for that of the majority, or for none."""
        result = attempt.tally.majority or attempt.result
        if attempt.has_voted or not result:
            return
        if gives_up or peer.live.refusal(attempt.proposal, result):
            is_member = peer.number in attempt.members
            result = b""
            if peer.live.refusal(attempt.proposal, b"") or not (is_member or peer.live.is_promised):
                return
        peer.live.promise(attempt.proposal, result)
        attempt.has_voted = True
        vote = self.sign(peer, attempt.proposal, result)
        attempt.tally.add(vote)
        for number in attempt.members:
            if number != peer.number:
                self.send_vote(peer, self.peers[number], attempt, vote)
        self.settle(peer, attempt)

    def sign(self, peer: Peer, proposal: Proposal, result: bytes) -> Vote:
        """Let a peer sign a vote, which any peer may learn."""
        signature = peer.signer.sign(vote_statement(proposal.digest(), result))
        vote = Vote(voter=peer.signer.peer_id, result=result, signature=signature)
        self.ledger.voted(proposal, vote)
        return vote

    def send_vote(self, peer: Peer, to: Peer, attempt: Attempt, vote: Vote) -> None:
        """Let a peer send a vote, its own or another one that it knows."""
        self.send(peer, to, lambda there: self.hear(there, attempt.proposal, vote))

    def hear(self, peer: Peer, proposal: Proposal, vote: Vote) -> None:
        """Let a vote arrive."""
        attempt = peer.attempts.get(proposal.digest())
        if attempt is None:
            return
        if vote.voter == self.ledger.liar and peer is not self.liar:
            self.ledger.seen.add((proposal.digest(), vote.result))
        if attempt.tally.add(vote):
            self.settle(peer, attempt)

    def settle(self, peer: Peer, attempt: Attempt) -> None:
        """Let a peer act on the votes that it knows."""
        certificate = attempt.tally.certificate
        if certificate is not None:
            if attempt.result and self._holds_bytes(peer, attempt, certificate):
                self.extend(peer, certificate)
        elif attempt.has_voted and attempt.tally.is_dead():
            peer.live.release(attempt.proposal)

    def _holds_bytes(self, peer: Peer, attempt: Attempt, certificate: Certificate) -> bool:
        """Return whether a peer has the certified result, or can fetch it from a contributor."""
        donors = (self.peers[self.numbers[voter]] for voter in certificate.votes if voter in self.numbers)
        return attempt.result == certificate.result or any(
            donor.lineage is not None and donor is not peer and self.reaches(peer, donor) for donor in donors
        )

    def extend(self, peer: Peer, certificate: Certificate) -> None:
        """Let a peer take the certificate of a round that it was in."""
        head, own = certificate.proposal.head, peer.signer.peer_id
        if peer is not self.liar:
            certificate.check(self.ledger.electors[head], peer.live.register)
            if certificate.proposal.contributors == (own,) and not certificate.proposal.is_break:
                rivals = self.ledger.certified.get(head, {}).keys() - {certificate.head}
                if rivals and self.liar is None:
                    raise BrokenPromiseError(f"{peer.number} continues alone while a quorum exists elsewhere")
        peer.live.extend(certificate)
        self._moved(peer)
        self.ledger.electors[certificate.head] = certificate.electors
        self.counts["breaks" if certificate.proposal.is_break else "commits"] += 1
        self.counts["commits with peers that are not electors yet"] += bool(peer.live.register.known)

    def _moved(self, peer: Peer) -> None:
        peer.attempts.clear()
        peer.wants_break = False

    def alone(self, peer: Peer) -> None:
        """Let a peer commit a round alone, if it may."""
        is_break = not peer.live.has_quorum(())
        if is_break and not peer.wants_break:
            return
        made = peer.live.alone(
            epoch=peer.live.epoch + 1,
            kind=RoundKind.EPOCH,
            group_id=self.group_id(),
            is_break=is_break,
            sign=peer.signer.sign,
        )
        (signature,) = made.votes.values()
        vote = Vote(voter=peer.signer.peer_id, result=made.result, signature=signature)
        for other, farewell in made.goodbyes.items():
            assert self.ledger.goodbyes[made.proposal.head][other] == farewell
        self.ledger.voted(made.proposal, vote)
        self.extend(peer, made)

    def ask(self, peer: Peer, attempt: Attempt, elector: Peer) -> None:
        """Ask an elector outside of the group for its vote."""
        votes = list(attempt.tally.votes.values())
        members = tuple({*attempt.members, elector.number})

        def endorse(there: Peer) -> None:
            if there.live.head != attempt.proposal.head:
                return
            shown = self._follow(there, attempt.proposal, members, b"")
            if shown is None:
                return
            for vote in votes:
                self.hear(there, attempt.proposal, vote)
            if there.live.head == attempt.proposal.head and shown.tally.majority:
                self.vote(there, shown)

        self.send(peer, elector, endorse)

    def compare(self, peer: Peer, other: Peer) -> None:
        """Let a peer ask another one for its history."""
        heads = peer.live.heads()
        if len(heads) > 12:
            raise BrokenPromiseError(f"{len(heads)} heads are sent")

        def answer(there: Peer) -> None:
            chain = there.live.chain(heads)
            if there is self.liar and there.checkpoints and self.chance.happens(0.3):
                chain = self.chance.choice(there.checkpoints)
            if there is self.liar and chain.certificates and self.chance.happens(0.3):
                chain = replace(chain, certificates=chain.certificates[: self.chance.below(4) - 4])
            self.send(there, peer, lambda back: self.judge(back, chain))

        self.send(peer, other, answer)

    def judge(self, peer: Peer, chain: Chain) -> None:
        """Let a peer decide whether it follows another history, and fetch the state if so."""
        if self.chance.happens(0.02):
            chain = decode_chain(encode_chain(chain))
        relation = peer.live.relation(chain)
        self.counts[f"histories: {relation.name}"] += 1
        if relation is Relation.UNRELATED and not peer.live.has_begun:
            chain.check(RUN)
        elif relation not in (Relation.AHEAD, Relation.WINS):
            return
        peer.live.adopt(chain)
        self._moved(peer)
        if peer.live.head not in self.ledger.electors:
            raise BrokenPromiseError(f"{peer.number} follows certificates that were never made")

    def look(self, peer: Peer, among: Collection[Peer] | None = None) -> None:
        """Let a peer check for a quorum."""
        present = [other.signer.peer_id for other in self.peers_at_head(peer, among) if not other.is_locked]
        if peer.live.has_quorum(present):
            peer.live.found_quorum()
            peer.wants_break = False
        else:
            peer.wants_break = peer.live.may_break(self.now_s, EPOCH_S)

    def start(self, peer: Peer, donor: Peer | None) -> None:
        """Start the process of a peer, from a checkpoint, or with the history of another peer."""
        chain = donor.live.chain() if donor is not None else self.chance.choice(peer.checkpoints)
        peer.lineage = Lineage(RUN, peer.signer.peer_id, self.founding)
        chain.check(RUN)
        peer.live.adopt(chain)
        self._moved(peer)
        self.counts["starts"] += 1

    def stop(self, peer: Peer) -> None:
        """End the process of a peer."""
        peer.lineage = None
        self._moved(peer)

    def leave(self, peer: Peer) -> None:
        """Let a peer say goodbye if it may, and end its process."""
        if peer.live.may_say_goodbye():
            head, own = peer.live.head, peer.signer.peer_id
            signature = peer.signer.sign(goodbye_statement(RUN, head))
            self.ledger.left(own, head, signature)
            for other in self.running():
                self.send(peer, other, lambda there: self.hear_goodbye(there, own, head, signature))
            self.counts["goodbyes"] += 1
        if peer is not self.liar:
            self.stop(peer)

    def hear_goodbye(self, peer: Peer, leaver: PeerId, head: bytes, signature: bytes) -> None:
        """Let a goodbye arrive."""
        peer.live.take_goodbye(leaver, signature)
        if peer.live.head != head:
            return
        for attempt in list(peer.attempts.values()):
            if attempt.tally.add_goodbye(leaver, signature):
                self.settle(peer, attempt)

    # ---- the network

    def send(self, one: Peer, other: Peer, effect: Callable[[Peer], None]) -> None:
        """Send a message from one peer to another, which has this effect when it arrives."""
        self.messages.append((one.number, other.number, effect))

    def deliver(self, index: int) -> None:
        """Let a message arrive, if the link is up and the receiver runs."""
        self.messages[index], self.messages[-1] = self.messages[-1], self.messages[index]
        one, other, effect = self.messages.pop()
        if (one, other) not in self.cuts and self.peers[other].lineage is not None:
            try:
                effect(self.peers[other])
            except PeerError as error:
                if self.liar is None:
                    raise BrokenPromiseError(f"an honest message was refused: {error}") from error


def _digest(text: str) -> bytes:
    return blake3(text.encode()).digest()


def check_bounds(play: Play) -> None:
    """Raise BrokenPromiseError if a collection of a peer exceeds its limit."""
    for peer in play.running():
        if len(peer.live.chain().certificates) > CERTIFICATES_MAX or len(peer.attempts) > ATTEMPTS_MAX:
            raise BrokenPromiseError("a collection of a peer exceeds its limit")
        for attempt in peer.attempts.values():
            if len(attempt.tally.votes) + len(attempt.tally.liars) > len(play.peers):
                raise BrokenPromiseError("a tally keeps more votes than there are voters")
