"""Breadth-first exploration of all orders of the votes of one round.

A few electors stand at one head. Attempts at the next round are given, with their contributors. In any order
a peer votes for its result or for none, an elector outside of an attempt endorses it or declines, statements
arrive or are lost (a statement that was sent may arrive at any later time, or never), peers release their
promises, say goodbye, and restart from this head or from an older one. Every peer decides with its real
`Lineage` and `Tally`.

The network is as hostile as possible: some peer may collect all statements that were sent. If two attempts
can both be certified from these statements, this is a fork.
"""

from __future__ import annotations

import copy
import itertools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Final

from blake3 import blake3

from averaging.history.certificate import (
    Certificate,
    RoundKind,
    Vote,
    goodbye_statement,
    is_majority,
    vote_statement,
)
from averaging.history.chain import Chain, Relation
from averaging.history.electors import is_quorum
from averaging.history.lineage import Lineage
from averaging.history.tally import Tally
from swarm.core.ids import PeerId
from swarm.testing.identities import StandInIdentity

RUN: Final = "model"
NONE: Final = -1  # number of the result of a vote for none
GOODBYE: Final = -1  # instead of the number of an attempt: the peer leaves
_OTHER_EPOCH: Final = 9  # of a state on another line


class ForkError(AssertionError):
    """Two attempts at one head can both be certified. The message lists the steps that led there."""


@dataclass(frozen=True, order=True)
class SignedStatement:
    """A statement that a peer has signed."""

    peer: int
    attempt: int  # or GOODBYE
    result: int = NONE

    def __str__(self) -> str:
        if self.attempt == GOODBYE:
            return f"goodbye of {self.peer}"
        return (
            f"vote of {self.peer} in attempt {self.attempt} for {'none' if self.result < 0 else self.result}"
        )


@dataclass(frozen=True)
class Setting:
    """The round that is explored. Peers are numbered; the lower, the more senior."""

    electors: int
    attempts: tuple[tuple[int, ...], ...]  # contributors of each attempt; higher numbers are newcomers
    restarts: int = 0
    goodbyes: tuple[int, ...] = ()  # electors that may leave
    liar: int | None = None  # a peer that has sent every possible vote before the others begin
    splits: bool = False  # members of one attempt may hold two different results, because a reducer has lied
    states_max: int = 3_000_000

    @property
    def peers(self) -> int:
        return max(self.electors, 1 + max(itertools.chain(*self.attempts)))


@dataclass(frozen=True)
class LocalState:
    """One peer at one moment."""

    lineage: Lineage  # never changed: a step makes a copy
    known: int = 0  # statements that arrived, and its own, as bits
    done: frozenset[int] = frozenset()  # attempts in which it voted, in this process
    lost: frozenset[int] = frozenset()  # attempts that it may have taken part in before it restarted
    gone: bool = False


@dataclass
class ExplorationReport:
    """Counts of the explored states, and the forks."""

    states: int = 0
    steps: int = 0
    certified: int = 0  # states in which the round can be certified
    forks: list[str] = field(default_factory=list)  # with a liar: the shortest steps to each kind of fork


Step = tuple[str, int, int]  # what, attempt, result
State = tuple[tuple[int, ...], int, int]  # states of the peers, statements sent as bits, restarts left


class VoteStates:
    """Explores one setting."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.signers = [StandInIdentity(number) for number in range(setting.peers)]
        self.ids = [signer.peer_id for signer in self.signers]
        self.electors = tuple(self.ids[: setting.electors])
        self._prepare()
        results = (0, 1) if setting.splits else (0,)
        self.statements = [
            SignedStatement(peer, attempt, result)
            for peer in range(setting.peers)
            for attempt in range(len(setting.attempts))
            for result in (NONE, *results)
            if peer < setting.electors or peer in setting.attempts[attempt]
        ]
        if setting.goodbyes:
            self.statements += [SignedStatement(peer, GOODBYE) for peer in setting.goodbyes]
        self.bits = {statement: 1 << index for index, statement in enumerate(self.statements)}
        self.results = results
        self._bits_of = [
            sum(bit for one, bit in self.bits.items() if one.attempt in (attempt, GOODBYE))
            for attempt in range(len(setting.attempts))
        ]
        self._locals: list[LocalState] = []
        self._places: dict[tuple[object, ...], int] = {}
        self._moves: dict[tuple[int, int], list[tuple[Step, int, int]]] = {}
        self._tallies: dict[tuple[int, int], Tally] = {}
        self._arrivals: dict[tuple[int, int, int], int] = {}
        self._certifiable: dict[int, list[tuple[int, int, int]]] = {}

    def _prepare(self) -> None:
        """Make the history up to the head: two certificates of all electors."""
        lineage = Lineage(RUN, self.ids[0])
        chains: list[Chain] = [lineage.chain()]
        for epoch in (1, 2):
            proposal = lineage.propose(
                epoch=epoch,
                kind=RoundKind.EPOCH,
                group_id=_digest(f"round {epoch}"),
                contributors=self.electors,
                is_break=False,
            )
            result, votes = _digest(f"result {epoch}"), {}
            for signer in self.signers[: self.setting.electors]:
                votes[signer.peer_id] = signer.sign(vote_statement(proposal.digest(), result))
            lineage.extend(Certificate(proposal=proposal, result=result, votes=votes, goodbyes={}))
            chains.append(lineage.chain())
        self.old, self.chain = chains[1:]
        self.proposals = [
            lineage.propose(
                epoch=3,
                kind=RoundKind.EPOCH,
                group_id=_digest(f"attempt {index}"),
                contributors=[self.ids[peer] for peer in contributors],
                is_break=False,
            )
            for index, contributors in enumerate(self.setting.attempts)
        ]

    # ---- one peer

    def result(self, attempt: int, result: int) -> bytes:
        """Return the digest of a result of an attempt; empty for none."""
        return b"" if result == NONE else _digest(f"result of {attempt}: {result}")

    def vote(self, statement: SignedStatement) -> Vote:
        """Return a statement as the vote that its peer signed."""
        result = self.result(statement.attempt, statement.result)
        signed = vote_statement(self.proposals[statement.attempt].digest(), result)
        signer = self.signers[statement.peer]
        return Vote(voter=signer.peer_id, result=result, signature=signer.sign(signed))

    def tally(self, attempt: int, known: int) -> Tally:
        """Return the tally of a peer that knows these statements."""
        relevant = known & self._relevant(attempt)
        if (attempt, relevant) not in self._tallies:
            tally = Tally(self.proposals[attempt], self.electors)
            for statement, bit in self.bits.items():
                if not relevant & bit:
                    continue
                if statement.attempt == GOODBYE:
                    signer = self.signers[statement.peer]
                    tally.add_goodbye(
                        signer.peer_id, signer.sign(goodbye_statement(RUN, self.chain.last_head))
                    )
                else:
                    tally.add(self.vote(statement))
            self._tallies[attempt, relevant] = tally
        return self._tallies[attempt, relevant]

    def _relevant(self, attempt: int) -> int:
        return self._bits_of[attempt]

    def _useful(self, peer: int, local: LocalState) -> int:
        """Return the statements that can influence this peer's decisions: those of the attempt to which it is
        bound, and the votes that would make it endorse one. Others may arrive later without loss of
        generality.
        """
        if local.gone or local.lineage.head != self.chain.last_head:
            return 0
        useful = 0
        for attempt, contributors in enumerate(self.setting.attempts):
            if attempt in local.done:
                if local.lineage.is_promised and self._is_open(local.lineage, attempt):
                    useful |= self._bits_of[attempt]
            elif peer not in contributors and peer < self.setting.electors:
                useful |= sum(
                    bit
                    for one, bit in self.bits.items()
                    if one.attempt == attempt and one.peer in contributors and one.result != NONE
                )
        return useful

    def _is_open(self, lineage: Lineage, attempt: int) -> bool:
        """Return whether this peer may vote for a result of this attempt, now or again."""
        proposal = self.proposals[attempt]
        return any(not lineage.refusal(proposal, self.result(attempt, result)) for result in self.results)

    def place(self, peer: int, local: LocalState) -> int:
        """Return the number of this local state. Peers that decide alike are in equal states."""
        local = replace(local, known=local.known & self._useful(peer, local))
        lineage = local.lineage
        decisions = tuple(
            lineage.refusal(proposal, self.result(attempt, result))
            for attempt, proposal in enumerate(self.proposals)
            for result in (NONE, *self.results)
        )
        key = (
            peer,
            lineage.head,
            decisions,
            lineage.abstains,
            lineage.is_promised,
            lineage.may_say_goodbye(),
            local.known,
            local.done,
            local.lost,
            local.gone,
        )
        if key not in self._places:
            self._places[key] = len(self._locals)
            self._locals.append(local)
        return self._places[key]

    def moves(self, peer: int, place: int) -> list[tuple[Step, int, int]]:
        """Return the steps of a peer that need no message: action, resulting state, sent statements."""
        if (peer, place) not in self._moves:
            found = []
            for step, local, sent in self._steps(peer, self._locals[place]):
                found.append((step, self.place(peer, local), sent))
            self._moves[peer, place] = found
        return self._moves[peer, place]

    def _steps(self, peer: int, local: LocalState) -> Iterator[tuple[Step, LocalState, int]]:
        if local.gone:
            return
        if local.lineage.head == self.chain.last_head:
            for attempt, contributors in enumerate(self.setting.attempts):
                if attempt in local.done or attempt in local.lost:
                    continue
                if peer in contributors:
                    yield from self._votes(peer, local, attempt, self.results)
                elif peer < self.setting.electors and (result := self._majority(local, attempt)) is not None:
                    yield from self._votes(peer, local, attempt, (result,))
            if peer in self.setting.goodbyes and local.lineage.may_say_goodbye():
                bit = self.bits[SignedStatement(peer, GOODBYE)]
                yield ("says goodbye", 0, 0), replace(local, gone=True, known=local.known | bit), bit
        elif (caught_up := self._caught_up(local)) is not None:
            yield ("adopts the head", 0, 0), caught_up, 0
            if local.lineage.head == self.old.last_head:
                yield ("continues with a break", 0, 0), self._broken(peer, local), 0

    def _votes(
        self, peer: int, local: LocalState, attempt: int, results: tuple[int, ...]
    ) -> Iterator[tuple[Step, LocalState, int]]:
        proposal = self.proposals[attempt]
        done = local.done | {attempt}
        for result in results:
            digest = self.result(attempt, result)
            if local.lineage.refusal(proposal, digest):
                continue
            lineage = copy.copy(local.lineage)
            lineage.promise(proposal, digest)
            bit = self.bits[SignedStatement(peer, attempt, result)]
            yield ("votes", attempt, result), self._released(local, lineage, local.known | bit, done), bit
        is_outside = peer not in self.setting.attempts[attempt]
        if not local.lineage.refusal(proposal, b"") and (local.lineage.is_promised or not is_outside):
            lineage = copy.copy(local.lineage)
            lineage.promise(proposal, b"")
            bit = self.bits[SignedStatement(peer, attempt, NONE)]
            yield ("votes", attempt, NONE), self._released(local, lineage, local.known | bit, done), bit

    def _majority(self, local: LocalState, attempt: int) -> int | None:
        majority = self.tally(attempt, local.known).majority
        return next((one for one in self.results if self.result(attempt, one) == majority), None)

    def _released(self, local: LocalState, lineage: Lineage, known: int, done: frozenset[int]) -> LocalState:
        """Release every promise as soon as possible, which allows a peer the most."""
        for attempt in range(len(self.proposals)):
            tally = self.tally(attempt, known)
            if tally.votes and tally.is_dead():
                lineage.release(tally.proposal)
        return replace(local, lineage=lineage, known=known, done=done)

    def _caught_up(self, local: LocalState) -> LocalState | None:
        lineage = copy.deepcopy(local.lineage)
        if lineage.relation(self.chain) not in (Relation.AHEAD, Relation.WINS):
            return None
        lineage.adopt(self.chain)
        return replace(local, lineage=lineage)

    def _broken(self, peer: int, local: LocalState) -> LocalState:
        lineage = copy.deepcopy(local.lineage)
        lineage.extend(
            lineage.alone(
                epoch=_OTHER_EPOCH,
                kind=RoundKind.EPOCH,
                group_id=_digest(f"break of {peer}"),
                is_break=True,
                sign=self.signers[peer].sign,
            )
        )
        return replace(local, lineage=lineage)

    def arrived(self, peer: int, place: int, bit: int) -> int:
        """Return the state of a peer after a statement has arrived."""
        local = self._locals[place]
        lineage = copy.copy(local.lineage)
        return self.place(peer, self._released(local, lineage, local.known | bit, local.done))

    def restarted(self, peer: int, place: int, chain: Chain) -> int:
        """Return the state of a peer that lost everything except a checkpoint and its identity."""
        local = self._locals[place]
        lineage = Lineage(RUN, self.ids[peer])
        lineage.adopt(chain)
        touched = {
            attempt
            for attempt, contributors in enumerate(self.setting.attempts)
            if attempt in local.done or (local.known & self._relevant(attempt) and peer in contributors)
        }
        return self.place(peer, LocalState(lineage, lost=local.lost | touched))

    # ---- all of them

    def certifiable(self, sent: int) -> list[tuple[int, int, int]]:
        """Return what can be certified from these statements: attempt, result, signers as bits of peers."""
        if sent not in self._certifiable:
            gone = [
                peer for peer in self.setting.goodbyes if sent & self.bits[SignedStatement(peer, GOODBYE)]
            ]
            found = []
            for attempt, result in itertools.product(range(len(self.proposals)), self.results):
                voters = {
                    peer
                    for peer in range(self.setting.peers)
                    if sent & self.bits.get(SignedStatement(peer, attempt, result), 0)
                }
                if self._is_valid(attempt, {self.ids[peer] for peer in voters}, gone):
                    found.append((attempt, result, sum(1 << peer for peer in voters)))
            self._certifiable[sent] = found
        return self._certifiable[sent]

    def _is_valid(self, attempt: int, voters: set[PeerId], gone: list[int]) -> bool:
        if not is_majority(self.proposals[attempt].deciders, voters):
            return False
        return any(
            is_quorum(self.electors, voters, {self.ids[peer] for peer in known})
            for count in range(len(gone) + 1)
            for known in itertools.combinations(gone, count)
        )

    def explore(self) -> ExplorationReport:
        """Visit every state. Raise ForkError when two attempts can be certified, unless there is a liar; then
        the forks are listed.
        """
        setting, report = self.setting, ExplorationReport()
        sent = 0
        for statement, bit in self.bits.items():
            if statement.peer == setting.liar:
                sent |= bit
        places = []
        for peer in range(setting.peers):
            places.append(self.place(peer, LocalState(self._alive(peer))))
        start = (tuple(places), sent, setting.restarts)
        before: dict[State, tuple[State, str] | None] = {start: None}
        waiting = deque([start])
        kinds: set[object] = set()
        while waiting:
            state = waiting.popleft()
            report.states += 1
            found = self.certifiable(state[1])
            report.certified += bool(found)
            if len(found) > 1:
                story = self._story(before, state, found)
                if setting.liar is None:
                    raise ForkError(story)
                if (kind := tuple(one[:2] for one in found)) not in kinds:
                    kinds.add(kind)
                    report.forks.append(story)
                continue  # what follows from a fork is no news
            for text, after in self._after(state):
                report.steps += 1
                if after not in before:
                    before[after] = state, text
                    waiting.append(after)
            if len(before) > setting.states_max:
                raise RuntimeError(f"more than {setting.states_max} states")
        return report

    def _alive(self, peer: int) -> Lineage:
        """Return the lineage of a peer that took part in all rounds so far."""
        lineage = Lineage(RUN, self.ids[peer])
        for certificate in self.chain.certificates:
            lineage.extend(certificate)
        return lineage

    def _after(self, state: State) -> Iterator[tuple[str, State]]:
        places, sent, restarts = state
        for peer, place in enumerate(places):
            if peer == self.setting.liar:
                continue

            def at(new: int, peer: int = peer) -> tuple[int, ...]:
                return (*places[:peer], new, *places[peer + 1 :])

            for (what, attempt, result), new, bits in self.moves(peer, place):
                yield f"{peer} {what} {attempt} {result}", (at(new), sent | bits, restarts)
            local = self._locals[place]
            if local.gone:
                continue
            if local.lineage.head == self.chain.last_head:
                missing = sent & ~local.known & self._useful(peer, local)
                while missing:
                    bit = missing & -missing
                    missing ^= bit
                    if (new := self._arrival(peer, place, bit)) != place:
                        text = f"{self.statements[bit.bit_length() - 1]} arrives at {peer}"
                        yield text, (at(new), sent, restarts)
            if restarts:
                for chain in (self.chain, self.old):
                    text = f"{peer} restarts at epoch {chain.epoch}"
                    yield text, (at(self.restarted(peer, place, chain)), sent, restarts - 1)

    def _arrival(self, peer: int, place: int, bit: int) -> int:
        key = (peer, place, bit)
        if key not in self._arrivals:
            self._arrivals[key] = self.arrived(peer, place, bit)
        return self._arrivals[key]

    def _story(
        self,
        before: dict[State, tuple[State, str] | None],
        state: State,
        found: list[tuple[int, int, int]],
    ) -> str:
        lines = [f"certified: attempt {attempt}, result {result}" for attempt, result, _ in found]
        at: State | None = state
        while at is not None:
            came = before[at]
            if came is None:
                break
            at = came[0]
            lines.append(came[1])
        return f"{self.setting}\n" + "\n".join(reversed(lines))


def _digest(text: str) -> bytes:
    return blake3(text.encode()).digest()
