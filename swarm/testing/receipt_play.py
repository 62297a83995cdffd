"""A run whose members keep receipts, some of which collude: they claim more samples than they computed, and
sign totals that nobody else has. Members restart, leave and join late.

Every peer has its real `Lineage` and `ReceiptBook`; a round is its contributors, and calls are functions that
may be lost.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final

from averaging.history.certificate import Certificate, RoundKind
from averaging.history.lineage import Lineage
from averaging.history.receipts import (
    Credit,
    Receipt,
    ReceiptBook,
    decode_receipt,
    encode_receipt,
    receipt_statement,
)
from swarm.core.errors import PeerError
from swarm.core.identity import Signer
from swarm.core.ids import PeerId
from swarm.core.standing import Founding
from swarm.testing.chance import Chance
from swarm.testing.identities import SeededIdentity

RUN: Final = "receipts"
SAMPLES_MAX: Final = 300  # samples that an honest member computes for one round, at least 100
CLAIM: Final = 1 << 39  # samples that a colluder claims for each round


@dataclass(frozen=True, kw_only=True)
class ReceiptPlayConfig:
    """One simulated run."""

    seed: int
    honest: int = 4
    colluders: int = 2
    later: int = 3  # honest members that join during the run
    rounds: int = 320
    missed: float = 0.1  # share of the rounds that a member misses
    lost: float = 0.2  # share of calls that are lost
    restarts: float = 0.01  # chance that a member restarts after a round, with its disk
    leaves: float = 0.002  # chance that a member leaves and stays away


@dataclass(slots=True)
class ReceiptMember:
    """One member of the run."""

    signer: Signer
    colludes: bool
    lineage: Lineage
    book: ReceiptBook
    given: int = 0  # samples that it computed for rounds
    disk: bytes = b""  # its newest receipt

    @property
    def peer_id(self) -> PeerId:
        return self.signer.peer_id


@dataclass
class ReceiptPlay:
    """The members and their network."""

    config: ReceiptPlayConfig
    members: list[ReceiptMember] = field(default_factory=list)
    left: list[ReceiptMember] = field(default_factory=list)
    largest: dict[PeerId, int] = field(default_factory=dict)  # what each colluder could be credited with
    forged: int = 0  # receipts that honest members refused

    def __post_init__(self) -> None:
        self._chance = Chance("receipts", self.config.seed, self.config.colluders)
        for number in range(self.config.honest + self.config.colluders):
            self._add(number, colludes=number >= self.config.honest)

    def run(self) -> None:
        """Play all rounds."""
        config = self.config
        pause = config.rounds // (config.later + 1)
        for number in range(config.rounds):
            if (
                number % pause == pause - 1
                and len(self.members) < config.honest + config.colluders + config.later
            ):
                self._add(100 + number, colludes=False)
            self._round()
            for member in list(self.members):
                self._exchange(member)
                if not member.colludes and self._chance.happens(config.restarts):
                    self._restart(member)
                elif self._chance.happens(config.leaves) and len(self.honest()) > config.honest:
                    self.members.remove(member)
                    self.left.append(member)
        for _ in range(20):  # no new rounds: every member must receive the newest receipt
            for member in self.members:
                self._exchange(member)

    def honest(self) -> list[ReceiptMember]:
        """Return the present members that do not collude."""
        return [member for member in self.members if not member.colludes]

    def _add(self, number: int, *, colludes: bool) -> None:
        signer = SeededIdentity(f"receipts {self.config.seed} {number}")
        lineage = Lineage(RUN, signer.peer_id, Founding(None, is_invited=True))
        member = ReceiptMember(signer, colludes, lineage, ReceiptBook(signer.peer_id, RUN))
        if self.members:
            chain = self.members[0].lineage.chain()
            if chain.certificates:
                lineage.adopt(chain)
        member.book.follow(lineage.chain())
        self.members.append(member)

    def _restart(self, member: ReceiptMember) -> None:
        """Restart a member's process, which has only its history and its disk."""
        chain = member.lineage.chain()
        member.lineage = Lineage(RUN, member.peer_id, Founding(None, is_invited=True))
        member.lineage.adopt(chain)
        member.book = ReceiptBook(member.peer_id, RUN)
        if member.disk:
            member.book.load(member.disk)
        member.book.follow(member.lineage.chain())

    def _round(self) -> None:
        config = self.config
        here = [member for member in self.members if not self._chance.happens(config.missed)]
        if not any(not member.colludes for member in here):
            return
        lineage = here[0].lineage
        proposal = lineage.propose(
            epoch=lineage.epoch + 1,
            kind=RoundKind.EPOCH,
            group_id=self._chance.randbytes(32),
            contributors=[member.peer_id for member in here],
            is_break=False,
        )
        deciders = [member for member in here if member.peer_id in proposal.deciders]
        is_led = 2 * sum(member.colludes for member in deciders) >= len(deciders)
        if is_led and config.colluders < config.honest:
            return  # a quorum of the electors signs no round in which most of those that decide collude
        claims = []
        for member in here:
            computed = 100 + self._chance.below(SAMPLES_MAX - 99)
            member.given += computed
            claims.append(CLAIM if member.colludes else computed)
            if member.colludes:
                known = self.largest.get(member.peer_id, 0)
                self.largest[member.peer_id] = known + SAMPLES_MAX
        proposal = replace(proposal, samples=tuple(claims))
        made = Certificate(proposal=proposal, result=bytes(32), votes={}, goodbyes={})
        for member in self.members:
            member.lineage.extend(made)
            member.book.follow(member.lineage.chain())

    def _exchange(self, member: ReceiptMember) -> None:
        """Let a member do what it does every few seconds (`averaging.optim.receipts`)."""
        member.book.sign(member.signer.sign)
        if member.colludes:
            self._forge(member)
            return
        for head, signatures in member.book.unsigned.items():
            others = [other for other in self.members if other.peer_id in member.book.collectors(head)]
            if others and not self._chance.happens(self.config.lost):
                other = self._chance.choice(others)
                other.book.add(head, signatures)
                if not other.colludes:
                    member.book.add(head, other.book.signatures(head))
        donor = self._chance.choice(self.members)
        newest = donor.book.newest
        if newest is not None and not self._chance.happens(self.config.lost):
            self._give(newest, member)
        if member.book.newest is not None:
            member.disk = encode_receipt(member.book.newest)

    def _give(self, receipt: Receipt, to: ReceiptMember) -> None:
        try:
            to.book.take(decode_receipt(encode_receipt(receipt)))
        except PeerError:
            self.forged += 1

    def _forge(self, member: ReceiptMember) -> None:
        """Let a colluder send every member totals that only colluders have signed, with more samples for
        themselves.
        """
        totals = member.book.totals
        if totals is None:
            return
        colluders = [one for one in self.members if one.colludes]
        more = dict.fromkeys([one.peer_id for one in colluders], Credit(CLAIM, 1 << 30))
        lie = replace(totals, by_peer={**totals.by_peer, **more})
        head = member.lineage.head
        statement = receipt_statement(RUN, head, lie)
        signatures = {one.peer_id: one.signer.sign(statement) for one in colluders}
        receipt = Receipt(run=RUN, head=head, totals=lie, signatures=signatures)
        for other in self.honest():
            self._give(receipt, other)
            other.book.add(head, signatures)
