"""A peer of the model check of rounds: the real `RoundMachine` and `Lineage`, driven without a network.

A peer's situation is a value, `Situation`. An input (a message, a timeout, a restart) produces a new
situation and messages. Machines are rebuilt from their inputs, so nothing is ever copied. Situations in which
a peer decides alike share one number, and the effect of an input on them is computed once.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Final

from blake3 import blake3

from averaging.allreduce.logic import effects as do
from averaging.allreduce.logic import events as on
from averaging.allreduce.logic.machine import RoundMachine
from averaging.allreduce.logic.setup import RoundSetup
from averaging.allreduce.logic.values import CallFailure, Inventory, InventoryQuestion, RoundState, Statement
from averaging.allreduce.logic.versions import Version, encode_places
from averaging.history.certificate import Proposal, Vote, vote_statement
from averaging.history.chain import Chain, Relation
from averaging.history.electors import Register
from averaging.history.lineage import Lineage
from averaging.history.tally import is_supported
from averaging.matchmaking.logic.group import Group, Member
from averaging.reduction.partition import plan_chunks
from swarm.compression import find
from swarm.core.errors import PeerError
from swarm.core.ids import Address, Contact, PeerId
from swarm.testing.identities import StandInIdentity
from swarm.testing.round_marks import mark_of, text_of

RUN: Final = "model"
CODEC: Final = find("float32")
NUMEL: Final = 1024  # elements of a chunk, of which every member reduces one
CHUNK_BYTES: Final = 4 * NUMEL
ROUND_S: Final = 30.0
TICK_S: Final = 2.5  # longer than all waits of a round before it votes
TICKS_MAX: Final = 1  # before the deadline
_LIVE_MAX: Final = 2000
QUESTIONS: Final = 100  # numbers of questions for inventories, of each member


class InvalidCommitError(AssertionError):
    """A peer has committed with a certificate that no other peer accepts."""


@dataclass(frozen=True, eq=False)
class GroupAttempt:
    """A group that may try a round on one head."""

    number: int
    group: Group
    proposal: Proposal
    electors: tuple[PeerId, ...]  # of the head
    register: Register  # of the head
    members: tuple[int, ...]  # peers, in group order

    def place(self, peer: int) -> int:
        """Return the place of a peer in the group."""
        return self.members.index(peer)


@dataclass(frozen=True)
class Message:
    """A message in transit from one peer to another, or one that a peer waits for."""

    kind: str  # a call by the name of its effect, the answer to one, or a part of a stream
    sender: int
    receiver: int
    attempt: int
    body: Any = field(compare=False)
    text: str = ""  # of the body; equal texts, equal messages

    def __str__(self) -> str:
        return f"{self.kind} {self.sender} to {self.receiver} in attempt {self.attempt}"


@dataclass(frozen=True)
class Round:
    """A round of one peer: the inputs of its machine, with their times."""

    attempt: GroupAttempt
    log: tuple[tuple[float, on.Event | None], ...] = ()  # None: a tick
    now_s: float = 0.0
    finish: do.Finish | None = None
    opened: tuple[int, ...] = ()  # places whose streams wait for our averages
    mark: Any = None  # equal marks, machines that decide alike


@dataclass(frozen=True)
class Situation:
    """The immutable state of one peer's process."""

    lineage: Lineage
    rounds: tuple[Round, ...] = ()

    @property
    def running(self) -> Round | None:
        """Return the round that has not ended."""
        return next((one for one in self.rounds if one.finish is None), None)

    def round_of(self, attempt: int) -> Round | None:
        """Return the round of this attempt, if this process has begun it."""
        return next((one for one in self.rounds if one.attempt.number == attempt), None)

    def unresolved(self) -> list[Round]:
        """Return the rounds on this head whose result this peer does not know but needs."""
        return [
            one
            for one in self.rounds
            if one.finish is not None
            and one.finish.unresolved
            and one.attempt.proposal.head == self.lineage.head
            and self.lineage.is_promised
        ]


@dataclass(frozen=True)
class TurnResult:
    """The effect of an input on a peer."""

    local: Situation
    sent: tuple[Message, ...] = ()
    signed: tuple[tuple[int, Vote], ...] = ()  # attempt, and the vote that was signed


@functools.cache
def _setup_of(attempt: GroupAttempt, own: int) -> RoundSetup:
    members = len(attempt.members)
    return RoundSetup(
        group=attempt.group,
        own=attempt.place(own),
        plan=plan_chunks(NUMEL * members, [1.0] * members, CODEC, CHUNK_BYTES),
        codec=CODEC,
        weights=(1.0,) * members,
        proposal=attempt.proposal,
        electors=attempt.electors,
        register=attempt.register,
        goodbyes={},
        audited=False,
        min_fraction=1.0,
        begun_s=0.0,
        deadline_s=ROUND_S,
    )


# machines of recently continued rounds, by the round's identity; others are rebuilt
_live: OrderedDict[int, tuple[Round, RoundMachine]] = OrderedDict()


def _keep(one: Round, machine: RoundMachine) -> None:
    _live[id(one)] = one, machine
    if len(_live) > _LIVE_MAX:
        _live.popitem(last=False)


def same_rounds(known: Situation, made: Situation) -> None:
    """Keep the machines of a situation for an equal one that was known before."""
    for old, new in zip(known.rounds, made.rounds, strict=True):
        if old is not new and id(new) in _live:
            _keep(old, _live.pop(id(new))[1])


def reading(one: Round, own: int) -> RoundMachine:
    """Return the machine of a round, which must not be changed."""
    machine = _take(one, own)
    _keep(one, machine)
    return machine


def _take(one: Round, own: int) -> RoundMachine:
    """Return the machine of a round with all its inputs applied, to continue with it."""
    if id(one) in _live:
        return _live.pop(id(one))[1]
    machine = RoundMachine(_setup_of(one.attempt, own))
    machine.begin()
    for now_s, event in one.log:
        if event is None:
            machine.tick(now_s)
        else:
            with contextlib.suppress(PeerError):
                machine.step(event, now_s)
    return machine


def group_of(name: str, ids: Iterable[PeerId]) -> Group:
    """Return a group of peers that all can be dialed."""
    peers = list(ids)
    return Group(
        group_id=digest(name),
        members=tuple(
            Member(contact=Contact(peer, (Address("10.0.0.1", 4000 + place),)), weight=1.0, bandwidth=1.0)
            for place, peer in enumerate(peers)
        ),
        codec=CODEC.name,
        gathered=(b"",) * len(peers),
    )


def average(chunk: int, contributors: bytes, version: int = 0) -> bytes:
    """Return the digest of the average of these members' values. `version`: 1 for that of a liar."""
    return digest(f"chunk {chunk} of {contributors.hex()} {version}")


def digest(text: str) -> bytes:
    """Return 32 bytes that stand for a text."""
    return blake3(text.encode()).digest()


class Turn:
    """The work of one peer because of one input: it drives the machine as `RoundDriver` does."""

    def __init__(
        self, peer: int, signer: StandInIdentity, local: Situation, attempt: int, *, marks: bool
    ) -> None:
        """`marks`: rounds get marks by which equal ones are found."""
        found = local.round_of(attempt)
        assert found is not None
        self.peer, self.signer, self.local, self._marks = peer, signer, local, marks
        self.round, self.lineage = found, local.lineage
        self.machine = _take(found, peer)
        self.own = found.attempt.place(peer)
        self._log = list(found.log)
        self._opened = set(found.opened)
        self._now_s = found.now_s
        self._sent: list[Message] = []
        self._signed: list[tuple[int, Vote]] = []
        self._events: deque[on.Event] = deque()

    # ---- inputs

    def begin(self) -> None:
        """Begin the round."""
        fresh = RoundMachine(self.machine.setup)
        for effect in fresh.begin():
            self._perform(effect)
        self.feed(on.MemoryPrepared())

    def tick(self) -> None:
        """Let time pass: after `TICKS_MAX` times the round's deadline has come."""
        ticks = round(self._now_s / TICK_S)
        self._now_s = TICK_S * (ticks + 1) if ticks < TICKS_MAX else ROUND_S
        self._log.append((self._now_s, None))
        for effect in self.machine.tick(self._now_s):
            self._perform(effect)
        self._drain()

    def feed(self, event: on.Event) -> None:
        """Pass an event to the machine, and perform its effects."""
        self._events.append(event)
        self._drain()

    def _drain(self) -> None:
        while self._events:
            event = self._events.popleft()
            was_running = self.machine.finished is None
            self._log.append((self._now_s, event))
            try:
                effects = self.machine.step(event, self._now_s)
            except PeerError:  # a liar's message, which is refused
                effects = []
            for effect in effects:
                self._perform(effect)
            if was_running and self.machine.finished is not None:
                for effect in self.machine.farewell():
                    self._perform(effect)

    def stream(self, place: int) -> None:
        """Take another member's values, and remember to give it our averages."""
        self._opened.add(place)
        self.feed(on.SenderOpened(place))
        self.feed(on.ContributionArrived(place, self.own, CHUNK_BYTES))
        version = self.machine.assembly.held.get(self.own)
        if version is not None:
            self._give(place, version.contributors)

    def average(self, reducer: int, contributors: bytes, made: bytes) -> None:
        """Take a reducer's average, unless the stream is closed."""
        if self.machine.finished is None and reducer not in self.machine.repairs.lost:
            self.feed(on.AverageArrived(reducer, reducer, contributors, b"", CHUNK_BYTES))
            self.feed(on.AverageChecked(reducer, made))

    def asked_votes(self, place: int, statement: Statement) -> None:
        """Take a member's question for our votes; it replaces an earlier one."""
        self.feed(on.CallEnded(place))
        self.feed(on.VotesAsked(place, place, statement))

    def asked_inventory(self, place: int, asked: do.AskInventory) -> None:
        """Take a member's question for what we hold."""
        reducer = asked.question.reducer
        which = 2 * (0 if reducer is None else reducer + 1) + asked.question.wait
        call = QUESTIONS * place + which
        self.feed(on.InventoryAsked(call, place, asked.question))

    def unanswered(self, call: do.Ping) -> None:
        """Let a probe fail, and the second one that follows it."""
        for _ in range(2):
            self.feed(on.CallFailed(call, CallFailure.BROKEN, "it is cut off"))
        peer = self._peer_at(call.place)
        self._sent = [one for one in self._sent if (one.kind, one.receiver) != ("ping", peer)]

    # ---- effects

    def _perform(self, effect: do.Effect) -> None:
        match effect:
            case do.Sign():
                self._sign(effect.result)
            case do.Reduce():
                self._reduce(effect)
            case do.OpenStream():
                self._send("stream", effect.reducer, None)
            case do.Ping() if effect.probe:
                self._send("ping", effect.place, effect)
            case do.AskVotes() | do.AskInventory() | do.FetchChunk() | do.FetchContribution():
                self._send(type(effect).__name__, effect.place, effect)
            case do.Endorse():
                self._sent.append(self._message("Endorse", self._elector(effect.elector), effect))
            case do.AnswerVotes():
                self._send("told", effect.call, effect.statement)
            case do.AnswerInventory():
                place, which = divmod(effect.call, QUESTIONS)
                reducer, waits = divmod(which, 2)
                asked = InventoryQuestion(reducer - 1 if reducer else None, wait=bool(waits))
                inventory = Inventory(self._held(asked), effect.sealed, effect.wanted)
                self._send("inventory", place, (asked, inventory))
            case do.CancelCalls():
                self._sent = [one for one in self._sent if one.receiver != self._peer_at(effect.place)]
                self._sent.append(self._message("cancel", self._peer_at(effect.place), None))
            case _:  # heartbeats, streams that end, the end of the round
                pass

    def _sign(self, result: bytes) -> None:
        proposal = self.round.attempt.proposal
        refusal = self.lineage.refusal(proposal, result)
        if refusal:
            self._events.append(on.SigningRefused(refusal))
            return
        self.lineage = copy.copy(self.lineage)
        self.lineage.promise(proposal, result)
        vote = vote_of(self.signer, proposal, result)
        self._signed.append((self.round.attempt.number, vote))
        self._events.append(on.VoteSigned(vote))

    def _reduce(self, effect: do.Reduce) -> None:
        places = {*effect.places, self.own} if effect.own else {*effect.places}
        contributors = encode_places(places, len(self.round.attempt.members))
        self._events.append(
            on.ChunkReduced(effect.chunk, contributors, average(effect.chunk, contributors), b"")
        )
        if effect.chunk == self.own:
            for place in sorted(self._opened):
                self._give(place, contributors)

    def _give(self, place: int, contributors: bytes) -> None:
        self._send("average", place, (contributors, average(self.own, contributors)))

    def _send(self, kind: str, place: int, body: Any) -> None:
        self._sent.append(self._message(kind, self._peer_at(place), body))

    def _held(self, asked: InventoryQuestion) -> dict[int, Version]:
        plan = self.machine.setup.plan
        return {
            chunk: version
            for chunk, version in self.machine.assembly.held.items()
            if asked.reducer in (None, plan.chunks[chunk].reducer)
        }

    def _peer_at(self, place: int) -> int:
        return self.round.attempt.members[place]

    def _elector(self, elector: PeerId) -> int:
        return NUMBERS[elector]

    def _message(self, kind: str, receiver: int, body: Any) -> Message:
        number = self.round.attempt.number
        return Message(kind, self.peer, receiver, number, body, text_of(body))

    # ---- the end of the turn

    def end(self) -> TurnResult:
        """Return the resulting situation: a round that has ended extends the history, or releases the
        vote.
        """
        finish = self.machine.finished
        was_running = self.round.finish is None
        ended = replace(
            self.round,
            log=tuple(self._log),
            now_s=self._now_s,
            finish=finish,
            opened=tuple(sorted(self._opened)),
            mark=mark_of(self.machine) if self._marks else None,
        )
        _keep(ended, self.machine)
        lineage = self.lineage
        if finish is not None and was_running and lineage.head == ended.attempt.proposal.head:
            if finish.failure is None:
                assert finish.certificate is not None
                try:
                    finish.certificate.check(lineage.electors, lineage.register)
                except PeerError as error:
                    raise InvalidCommitError(f"{self.peer} commits with {error}") from None
                lineage = _copied(lineage)
                lineage.extend(finish.certificate)
            else:
                lineage = copy.copy(lineage)
                if finish.unresolved:
                    lineage.leave(ended.attempt.proposal)
                else:
                    lineage.release(ended.attempt.proposal)
        rounds = tuple(ended if one is self.round else one for one in self.local.rounds)
        return TurnResult(Situation(lineage, rounds), tuple(self._sent), tuple(self._signed))


NUMBERS: dict[PeerId, int] = {}  # of the peers of all models


def signer_of(peer: int) -> StandInIdentity:
    """Return the identity of a peer."""
    signer = StandInIdentity(peer)
    NUMBERS[signer.peer_id] = peer
    return signer


def vote_of(signer: StandInIdentity, proposal: Proposal, result: bytes) -> Vote:
    """Return a peer's signed vote."""
    statement = vote_statement(proposal.digest(), result)
    return Vote(voter=signer.peer_id, result=result, signature=signer.sign(statement))


def endorse(
    signer: StandInIdentity, local: Situation, attempt: GroupAttempt, asked: do.Endorse
) -> tuple[Situation, Vote | None]:
    """Answer as an elector outside of the group, as `RunHistory.endorse` does."""
    proposal, result = attempt.proposal, asked.result
    running = local.running
    if running is not None and running.attempt.proposal.head == proposal.head:
        return local, None  # its own round would fail
    if not is_supported(proposal, result, asked.votes) or signer.peer_id not in local.lineage.electors:
        return local, None
    lineage = copy.copy(local.lineage)
    if lineage.refusal(proposal, result):
        if not lineage.is_promised or lineage.refusal(proposal, b""):
            return local, None
        result = b""
    lineage.promise(proposal, result, outside=True)
    return replace(local, lineage=lineage), vote_of(signer, proposal, result)


def count_named_votes(
    local: Situation, peer: int, attempt: int, statement: Statement, *, marks: bool
) -> Situation:
    """Count the votes that a member names after a round has ended here, as `resolve` does."""
    found = local.round_of(attempt)
    assert found is not None
    event = on.VotesAnswered(0, statement)  # the place only shows that the member lives
    machine = _take(found, peer)
    try:
        machine.step(event, found.now_s)
    except PeerError:
        return local
    log, mark = (*found.log, (found.now_s, event)), mark_of(machine) if marks else None
    heard = replace(found, log=log, mark=mark)
    _keep(heard, machine)
    lineage = local.lineage
    if machine.votes.tally.is_dead():
        lineage = copy.copy(lineage)
        lineage.release(found.attempt.proposal)
    return Situation(lineage, tuple(heard if one is found else one for one in local.rounds))


def _copied(lineage: Lineage) -> Lineage:
    """Return a copy that shares the certificates, which never change."""
    return copy.deepcopy(lineage, {id(one): one for one in lineage.chain().certificates})


def caught_up(local: Situation, chain: Chain) -> Situation | None:
    """Return the situation of a peer after it compares its history with this one and fetches the state."""
    lineage = _copied(local.lineage)
    if lineage.relation(chain) not in (Relation.AHEAD, Relation.WINS):
        return None
    lineage.adopt(chain)
    return replace(local, lineage=lineage)


def state_of(one: Round | None) -> tuple[RoundState, str]:
    """Return what a member answers to heartbeats."""
    if one is None:
        return RoundState.UNKNOWN, ""
    if one.finish is None:
        return RoundState.RUNNING, ""
    failure = one.finish.failure
    return (RoundState.COMMITTED, "") if failure is None else (RoundState.FAILED, failure)
