"""The tables of the model check of rounds: a number for every situation, message and vote, so that states are
small values that can be compared.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from averaging.history.certificate import Certificate, RoundKind
from averaging.history.chain import Chain
from averaging.history.lineage import Lineage
from swarm.testing.round_marks import fingerprint
from swarm.testing.round_peers import (
    RUN,
    GroupAttempt,
    Message,
    Situation,
    group_of,
    same_rounds,
    signer_of,
    vote_of,
)


@dataclass(frozen=True)
class RoundSetting:
    """The peers and faults that are explored. Peers are numbered, the most senior first; all are electors."""

    peers: int = 3
    groups: tuple[tuple[int, ...], ...] = ((0, 1, 2), (0, 1, 2))  # that may form on every head
    heads: int = 2
    # messages and streams that are lost, and times when somebody waits no longer for what would still come
    faults: int = 0
    restarts: int = 0
    liar: int | None = None
    states_max: int = 2_000_000


class State(NamedTuple):
    """All peers, and what is under way."""

    places: tuple[int, ...]  # number of each peer's situation
    messages: frozenset[int] = frozenset()
    signed: int = 0  # votes, as bits
    heard: int = 0  # votes of the liar that an honest peer has, as bits
    joined: frozenset[tuple[int, int]] = frozenset()  # attempt and peer
    faults: int = 0
    restarts: int = 0


class RoundTables:
    """The numbers of one setting."""

    def __init__(self, setting: RoundSetting, *, merges: bool = True) -> None:
        """`merges`: situations in which a peer decides alike have one number. A random walk, which hardly
        ever comes to the same one again, is four times as fast without.
        """
        self.setting, self.merges = setting, merges
        self.signers = [signer_of(number) for number in range(setting.peers)]
        self.ids = tuple(signer.peer_id for signer in self.signers)
        self.attempts: list[GroupAttempt] = []
        self.locals: list[Situation] = []
        self.messages: list[Message] = []
        self.message_ids: dict[Message, int] = {}
        self.votes: dict[tuple[int, bytes, int], int] = {}  # bits, by attempt, result and peer
        self._numbers: dict[tuple[bytes, str], int] = {}  # attempts by head and name
        self._places: dict[tuple[Any, ...], int] = {}
        self.past = self._history()

    def _history(self) -> list[Chain]:
        """Return the chains of the first two certificates: a checkpoint may be as old as the first."""
        lineage, chains = Lineage(RUN, self.ids[0]), []
        for epoch in (1, 2):
            proposal = lineage.propose(
                epoch=epoch,
                kind=RoundKind.EPOCH,
                group_id=group_of(f"past {epoch}", self.ids).group_id,
                contributors=self.ids,
                is_break=False,
            )
            made = {one.peer_id: vote_of(one, proposal, proposal.digest()) for one in self.signers}
            lineage.extend(
                Certificate(
                    proposal=proposal,
                    result=proposal.digest(),
                    votes={peer: vote.signature for peer, vote in made.items()},
                    goodbyes={},
                )
            )
            chains.append(lineage.chain())
        return chains

    @property
    def honest(self) -> list[int]:
        """Return the peers that do not lie."""
        return [peer for peer in range(self.setting.peers) if peer != self.setting.liar]

    def start(self) -> State:
        """Return the state in which nothing has happened: all peers have taken part in both rounds."""
        places = []
        for peer in range(self.setting.peers):
            lineage = Lineage(RUN, self.ids[peer])
            for certificate in self.past[-1].certificates:
                lineage.extend(certificate)
            places.append(self.place(peer, Situation(lineage)))
        return State(tuple(places), faults=self.setting.faults, restarts=self.setting.restarts)

    # ---- numbers for what is equal

    def local(self, state: State, peer: int) -> Situation:
        """Return a peer's situation."""
        return self.locals[state.places[peer]]

    def place(self, peer: int, local: Situation) -> int:
        """Return the number of a peer's situation."""
        if not self.merges:
            self.locals.append(local)
            return len(self.locals) - 1
        key = fingerprint(peer, local)
        if key not in self._places:
            self._places[key] = len(self.locals)
            self.locals.append(local)
        same_rounds(self.locals[self._places[key]], local)
        return self._places[key]

    def message(self, message: Message) -> int:
        """Return the number of a message."""
        if message not in self.message_ids:
            self.message_ids[message] = len(self.messages)
            self.messages.append(message)
        return self.message_ids[message]

    def vote(self, attempt: int, result: bytes, peer: int) -> int:
        """Return the bit of a peer's vote."""
        return self.votes.setdefault((attempt, result, peer), 1 << len(self.votes))

    def attempt(
        self, lineage: Lineage, name: str, members: tuple[int, ...], *, is_break: bool
    ) -> GroupAttempt:
        """Return the attempt of a group at this peer's head."""
        key = (lineage.head, name)
        if key not in self._numbers:
            group = group_of(f"{lineage.head.hex()} {name}", [self.ids[peer] for peer in members])
            proposal = lineage.propose(
                epoch=lineage.epoch + 1,
                kind=RoundKind.EPOCH,
                group_id=group.group_id,
                contributors=group.peer_ids,
                is_break=is_break,
            )
            self._numbers[key] = len(self.attempts)
            self.attempts.append(
                GroupAttempt(len(self.attempts), group, proposal, lineage.electors, lineage.register, members)
            )
        return self.attempts[self._numbers[key]]
