"""Hostile members: their faults in a simulated training (`swarm.testing.training_attacks`)."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

from averaging.allreduce import wire
from averaging.allreduce.config import EXCHANGE, HEARTBEAT, METHODS
from averaging.allreduce.driver import RoundDriver
from averaging.allreduce.kernels import Averaged, Spoiled
from averaging.allreduce.logic.effects import AskVotes
from averaging.allreduce.logic.values import RoundState, Statement
from averaging.allreduce.outcome import RoundOutcome
from averaging.history.certificate import Vote, vote_statement
from averaging.matchmaking.logic.group import Group, Member
from averaging.matchmaking.service.matchmaking_service import GroupService
from averaging.optim.progress.logic.reports import SAMPLES_MAX
from averaging.reduction.framing import pack, unpack
from averaging.reduction.reduce import ReductionJob
from averaging.service import AveragingService
from swarm.core.ids import PeerId
from swarm.testing.network import SimulatedPeer
from swarm.testing.training_swarm import TrainingPeer
from swarm.wire.reduce_pb2 import HeartbeatReply, HeartbeatRequest

SabotageKind = Literal[
    "none",
    "votes none",
    "stalls",
    "joins and never begins",
    "leads and never begins",
    "votes twice",
    "votes for something else",
    "withholds its votes",
    "leaves a member out of its averages",
    "gives a member other averages",
    "claims every sample",
    "leads without a member",
    "waits forever",
]
SABOTAGE_KINDS: tuple[SabotageKind, ...] = get_args(SabotageKind)

_FOREVER_S = 1e6
_HELD_S = 60.0  # a round of a member that stalls ends for itself


class Saboteur:
    """Makes a process of the swarm hostile."""

    def __init__(self, one: TrainingPeer, sabotage: SabotageKind, victim: PeerId) -> None:
        """`victim`: the honest peer that attacks on a single member target."""
        self._one, self._kind, self._victim = one, sabotage, victim
        kind: Any = AveragingService
        self._service: AveragingService = one.node.service(kind)

    def begin(self) -> None:
        """Begin the attack."""
        all_reduce: Any = self._service.all_reduce
        by_name: dict[SabotageKind, Callable[[RoundDriver], None]] = {
            "votes none": _vote_none,
            "votes twice": _vote_twice,
            "votes for something else": _vote_otherwise,
            "withholds its votes": _withhold_votes,
            "leaves a member out of its averages": functools.partial(_leave_out, victim=self._victim),
            "gives a member other averages": functools.partial(_give_others, victim=self._victim),
            "waits forever": _wait_forever,
        }
        if (begin_sabotage := by_name.get(self._kind)) is not None:
            if "averages" in self._kind:
                self._reduce_everything()
            begin = all_reduce._begin

            def sabotaged(*arguments: Any) -> RoundDriver:
                driver: RoundDriver = begin(*arguments)
                begin_sabotage(driver)
                return driver

            all_reduce._begin = sabotaged
        elif self._kind == "stalls":
            go_silent(self._one.peer)
            all_reduce.run = functools.partial(_hold, reason="this member stalls")
        elif self._kind == "joins and never begins":
            # it knows nothing of the round for as long as the others may wait for it
            all_reduce.run = functools.partial(_hold, reason="this member never begins")
        elif self._kind == "claims every sample":
            assert self._one.optimizer is not None
            _claim_every_sample(self._one.optimizer)
        else:
            for service in self._service.exchange._services.values():
                if self._kind == "leads and never begins":
                    _hold_followers(service)
                else:
                    _lead_without(service, self._victim)

    def _reduce_everything(self) -> None:
        """Claim a bandwidth with which this member reduces the whole vector."""
        optimizer: Any = self._one.optimizer
        averager = optimizer._averager._epoch_averager
        averager.config = replace(averager.config, bandwidth=1e12)


async def _hold(group: Group, *arguments: Any, reason: str, deadline_s: float, **others: Any) -> RoundOutcome:
    """Do nothing until the deadline of the round."""
    await asyncio.sleep(min(max(deadline_s - asyncio.get_running_loop().time(), 0.0), _HELD_S))
    return RoundOutcome.broken(reason)


def go_silent(peer: SimulatedPeer) -> None:
    """Let a peer claim to be in every round, and answer nothing else there."""

    async def alive(caller: PeerId, request: HeartbeatRequest) -> HeartbeatReply:
        return wire.state_to_wire(RoundState.RUNNING, "")

    async def silence(*arguments: Any) -> Any:
        await asyncio.sleep(_FOREVER_S)

    for method in METHODS:
        peer.handlers.remove(method.name)
    peer.handlers.stream(EXCHANGE, silence)
    peer.handlers.unary(HEARTBEAT, alive)
    unary: list[Any] = [method for method in METHODS if method not in (EXCHANGE, HEARTBEAT)]
    for method in unary:
        peer.handlers.unary(method, silence)


def _vote_none(driver: RoundDriver) -> None:
    vote = driver.voter.vote

    def none(result: bytes) -> Vote | str:
        return vote(b"")

    driver.voter.vote = none  # type: ignore[method-assign]


def _vote_otherwise(driver: RoundDriver) -> None:
    vote = driver.voter.vote

    def other(result: bytes) -> Vote | str:
        return vote(result and bytes(len(result)))

    driver.voter.vote = other  # type: ignore[method-assign]


def _vote_twice(driver: RoundDriver) -> None:
    """Send every second member a vote for another result."""
    setup, voter = driver.machine.setup, driver.voter
    calls: Any = driver._calls
    perform, answer = calls.perform, driver.answer_votes

    def forged(place: int, statement: Statement) -> Statement:
        own = setup.peer_id(setup.own)
        if place % 2 or not any(vote.voter == own for vote in statement.votes):
            return statement
        other = bytes(32)
        signature = voter._signer.sign(vote_statement(setup.proposal.digest(), other))
        lie = Vote(voter=own, result=other, signature=signature)
        return replace(statement, votes=(*(v for v in statement.votes if v.voter != own), lie))

    def tell(effect: object) -> None:
        if isinstance(effect, AskVotes):
            effect = replace(effect, statement=forged(effect.place, effect.statement))
        perform(effect)

    async def reply(place: int, statement: Statement) -> Statement:
        return forged(place, await answer(place, statement))

    calls.perform, driver.answer_votes = tell, reply  # type: ignore[method-assign]


def _withhold_votes(driver: RoundDriver) -> None:
    """Collect all votes without sending its own, so that only this member has the certificate."""
    calls: Any = driver._calls
    perform, answer, own = calls.perform, driver.answer_votes, driver.machine.setup.own
    own_id = driver.machine.setup.peer_id(own)

    def without_own(statement: Statement) -> Statement:
        intents = {place: intent for place, intent in statement.intents.items() if place != own}
        votes = tuple(vote for vote in statement.votes if vote.voter != own_id)
        return replace(statement, votes=votes, intents=intents)

    def tell(effect: object) -> None:
        if isinstance(effect, AskVotes):
            effect = replace(effect, statement=without_own(effect.statement))
        perform(effect)

    async def reply(place: int, statement: Statement) -> Statement:
        return without_own(await answer(place, statement))

    calls.perform, driver.answer_votes = tell, reply  # type: ignore[method-assign]


def _leave_out(driver: RoundDriver, victim: PeerId) -> None:
    """Claim that the victim's values are invalid, and average those of the others."""
    kernels, reduce = driver.kernels, driver.kernels.reduce

    def without_victim(jobs: Sequence[ReductionJob]) -> list[Averaged | Spoiled]:
        done: list[Averaged | Spoiled] = []
        for job in jobs:
            places = [one.place for one in job.contributions]
            bad = [place for place in places if driver.machine.setup.peer_id(place) == victim]
            done += [Spoiled(job.chunk, tuple(bad))] if bad else reduce([job])
        return done

    kernels.reduce = without_victim  # type: ignore[method-assign]


def _give_others(driver: RoundDriver, victim: PeerId) -> None:
    """Send the victim different averages than the others."""
    send = driver.send

    async def lie(stream: Any, message: bytes) -> None:
        header, payload = unpack(message)
        if header.HasField("average") and stream.peer_id == victim:
            message = pack(header, bytes(len(payload)))
        await send(stream, message)

    driver.send = lie  # type: ignore[method-assign]


def _wait_forever(driver: RoundDriver) -> None:
    """Reduce without sending averages, and report to all members every other second that a member is missing.
    Reports have long reasons, so that more bytes arrive than an average needs.
    """
    send, shard = driver.send, driver.machine.shard

    async def send_with_reports(stream: Any, message: bytes) -> None:
        header, _ = unpack(message)
        if header.HasField("waiting"):
            await send(stream, wire.left_out(header.waiting.place, "its values are late" * 1000))
        await send(stream, message)

    driver.give = lambda message: None  # type: ignore[method-assign]
    shard.waited_for = lambda own: [driver.machine.setup.own]  # type: ignore[method-assign]
    driver.send = send_with_reports  # type: ignore[method-assign]


def _claim_every_sample(optimizer: Any) -> None:
    """Claim all samples of each epoch, at an impossible rate."""
    progress = optimizer._tracker._progress
    kind = type(progress)
    honest = kind.own_report.fget

    class Boaster(kind):  # type: ignore[misc, valid-type]
        @property
        def own_report(self) -> Any:
            return replace(honest(self), samples=SAMPLES_MAX, rate=1e6)

    progress.__class__ = Boaster


def _lead_without(service: GroupService, victim: PeerId) -> None:
    """Lead every group, and refuse the victim in each."""
    machine: Any = service.machine
    start, join = machine.start, machine.on_join

    def first(request: Any, member: Member, now_s: float) -> None:
        start(replace(request, rank_deadline_s=request.rank_deadline_s - 30.0), member, now_s)

    def refuse(request: Any, now_s: float) -> Any:
        if request.query.contact.peer_id == victim:
            return machine.status_for(request.query, now_s)
        return join(request, now_s)

    machine.start, machine.on_join = first, refuse


def _hold_followers(service: GroupService) -> None:
    machine: Any = service.machine
    start = machine.start

    def first(request: Any, member: Member, now_s: float) -> None:
        start(replace(request, rank_deadline_s=request.rank_deadline_s - 30.0), member, now_s)

    machine.start, machine._lead_or_follow = first, lambda search, now_s: None
