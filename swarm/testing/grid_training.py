"""A simulated swarm, larger than a group, that trains: matchmaking, seats and requests for certificates are
real, a model is a few numbers.

Every peer has its own copy of the model and draws noisy gradients of one quadratic loss. An epoch averages
the gradients through the cells of the grid, then among the electors; every few epochs the models are averaged
in the same way. `train` returns the distances between the models, and each peer's messages.
"""

from __future__ import annotations

import asyncio
import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from blake3 import blake3

from averaging.history.certificate import Certificate, Proposal, RoundKind, genesis
from averaging.history.chain import Chain
from averaging.history.electors import electors_after
from averaging.history.encoding import encode_chain
from averaging.matchmaking.logic.group import Group
from averaging.optim.exchange import HISTORY
from averaging.optim.seats import SwarmSize
from swarm.core.errors import SwarmError
from swarm.core.ids import Contact, PeerId
from swarm.testing.group_swarm import SimulatedVolunteer, Swarm
from swarm.testing.network import LinkConfig
from swarm.testing.virtual_loop import run_virtual
from swarm.wire import state_pb2

_ROUND_S = 0.2  # of a round after its group has formed
_NUMBERS = 4  # of a model
# learning rate; noise of a gradient, as large as the initial distance to the optimum
_RATE, _NOISE = 0.3, 1.0
_ASK_INTERVAL_S = 0.3  # as in `averaging.optim.grid_round`
_ATTEMPT_S = 0.2  # between two attempts to find the electors' group
_WINDOW_S = 20.0
_PART = 32  # peers of a large swarm that know of one another, as in progress shards

Values = tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingFigures:
    """The costs of a simulated training, and the distances between the models."""

    peers: int
    group_size: int
    rounds: int  # of an epoch, through the cells
    electors: int  # at the end
    messages: tuple[float, ...]  # requests and replies that a peer sends in an epoch, on average
    messages_most: tuple[int, ...]  # that the busiest peer sends
    bytes_sent: tuple[float, ...]  # per peer and epoch: protobuf, without the averaged values, TLS and TCP
    epoch_s: tuple[float, ...]  # virtual time of an epoch's averaging
    # largest relative distance of a model from the electors' model: before and after each state round
    before: tuple[float, ...]
    after: tuple[float, ...]
    left: float  # distance to the optimum at the end, as a share of that at the beginning
    rounds_missed: int  # rounds of a peer's cell that ran without the peer
    downloads: int  # peers that missed the first round of an epoch, and took the electors' model after it


@dataclass
class _Trainer:
    """One peer that trains."""

    volunteer: SimulatedVolunteer
    model: Values
    size: SwarmSize
    certificate: Certificate | None = None  # the newest that it knows
    met: dict[PeerId, Contact] = field(default_factory=dict)

    @property
    def peer_id(self) -> PeerId:
        return self.volunteer.peer.peer_id


class GridTraining:
    """The swarm. One value at a time is averaged: all gradients, or all models."""

    def __init__(self, peers: int, group_size: int, seed: int, link: LinkConfig | None = None) -> None:
        self.swarm = Swarm(seed, link)
        self.rng = random.Random(seed)
        self.group_size, self.rounds_missed, self.downloads = group_size, 0, 0
        self.head = Chain(head=genesis("r"), electors=(), certificates=())
        self.start = tuple(self.rng.gauss(0.0, 1.0) for _ in range(_NUMBERS))
        self.trainers = [self._add() for _ in range(peers)]
        self._by_id = {one.peer_id: one for one in self.trainers}
        ids = sorted(self._by_id)
        parts = [ids[start :: max(peers // _PART, 1)] for start in range(max(peers // _PART, 1))]
        for part in parts if peers > 2 * _PART else [ids]:
            for peer in part:
                self._by_id[peer].size.update(peers, [other for other in part if other != peer])
        # groups that formed, with the values of their members, and the averages
        self._groups: dict[bytes, dict[PeerId, tuple[Values, float]]] = {}

    def _add(self) -> _Trainer:
        volunteer = self.swarm.add(target_group_size=self.group_size)
        size = SwarmSize(volunteer.peer.peer_id, self.group_size)
        trainer = _Trainer(volunteer, self.start, size)

        async def answer(caller: PeerId, request: state_pb2.HistoryRequest) -> state_pb2.HistoryReply:
            known = trainer.certificate
            chain = Chain(
                head=self.head.head, electors=(), certificates=(known,) if known is not None else ()
            )
            return state_pb2.HistoryReply(chain=encode_chain(chain) if known is not None else b"")

        volunteer.peer.handlers.unary(HISTORY, answer)
        return trainer

    @property
    def rounds(self) -> int:
        """Return how many rounds an epoch has."""
        return self.trainers[0].size.rounds(self.head)

    async def average(self, name: str, values: Sequence[tuple[Values, float]]) -> list[Values | None]:
        """Average weighted values through the cells, then among the electors. Return what each peer has; None
        for one that missed the first round.
        """
        for one in self.trainers:
            one.certificate = None
            one.met.clear()
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(self._average(one, name, value, weight))
                for one, (value, weight) in zip(self.trainers, values, strict=True)
            ]
        certificate = next(one.certificate for one in self.trainers if one.certificate is not None)
        self.head = Chain(
            head=certificate.head,
            electors=certificate.electors,
            certificates=(),
            root_grid_rounds=certificate.proposal.grid_rounds,
            root_register=certificate.register,
        )
        return [one.result() for one in running]

    async def _average(self, trainer: _Trainer, name: str, value: Values, weight: float) -> Values | None:
        await asyncio.sleep(0.02 * self.rng.random())
        for number in range(1, self.rounds + 1):
            group = await self._meet(trainer, f"{name} {number}/{self.rounds}", value, weight)
            if group is None:
                self.rounds_missed += 1
                # as in `GridRound`: the peer's values are not averaged, and it applies nothing
                if number == 1:
                    await self._ask(trainer)
                    return None
            else:
                value, weight = self._mean(group, holders=len(group.members))
                trainer.met |= {one.peer_id: one.contact for one in group.members}
        trainer.met.pop(trainer.peer_id, None)
        async with asyncio.TaskGroup() as tasks:
            asking = tasks.create_task(self._ask(trainer))
            decided = await self._decide(trainer, f"{name} electors", (value, weight), asking)
        return decided or value

    async def _decide(
        self, trainer: _Trainer, key: str, value: tuple[Values, float], asking: asyncio.Task[None]
    ) -> Values | None:
        """Take part in the electors' round if this peer has a seat there, until the certificate is known."""
        while (seats := trainer.size.seats(self.head, is_break=False)) and trainer.certificate is None:
            async with asyncio.TaskGroup() as tasks:
                meeting = tasks.create_task(self._meet(trainer, key, *value, electors=seats))
                await asyncio.wait([meeting, asking], return_when=asyncio.FIRST_COMPLETED)
                meeting.cancel()
            group = meeting.result() if not meeting.cancelled() else None
            if group is not None and self._is_quorum(group):
                trainer.certificate = self._certify(group)
                return self._mean(group, holders=1)[0]
            await asyncio.sleep(_ATTEMPT_S)
        return None

    def _is_quorum(self, group: Group) -> bool:
        return 2 * len({*self.head.electors} & {*group.peer_ids}) > len(self.head.electors) or not (
            self.head.electors
        )

    async def _ask(self, trainer: _Trainer) -> None:
        """Ask the met peers in turn for the electors' certificate."""
        while trainer.certificate is None:
            await asyncio.sleep(_ASK_INTERVAL_S * (0.5 + self.rng.random()))
            # occasionally a peer from the progress records that it has not met, because peers that met only
            # one another may all miss the certificate
            others = [one.volunteer.peer.contact for one in self.trainers if one is not trainer]
            contact = self.rng.choice([*trainer.met.values(), self.rng.choice(others)])
            request = state_pb2.HistoryRequest(run="r", heads=[self.head.head])
            try:
                reply = await trainer.volunteer.peer.caller.call(contact, HISTORY, request, timeout_s=2.0)
            except SwarmError:
                continue
            if reply.chain and trainer.certificate is None:
                trainer.certificate = self._by_id[contact.peer_id].certificate

    async def _meet(
        self, trainer: _Trainer, key: str, value: Values, weight: float, electors: int = 0
    ) -> Group | None:
        """Find a group and run its round."""
        found = await trainer.volunteer.find(key=key, window_s=_WINDOW_S, weight=weight, electors=electors)
        if not isinstance(found, Group):
            return None
        self._groups.setdefault(found.group_id, {})[trainer.peer_id] = value, weight
        committed = False
        try:
            await asyncio.sleep(_ROUND_S)
            committed = True
        finally:
            trainer.volunteer.service.round_over(committed=committed)
        return found

    def _mean(self, group: Group, *, holders: int) -> tuple[Values, float]:
        brought = list(self._groups[group.group_id].values())
        whole = sum(weight for _, weight in brought)
        mean = tuple(
            math.fsum(value[place] * weight for value, weight in brought) / whole for place in range(_NUMBERS)
        )
        return mean, whole / holders

    def _certify(self, group: Group) -> Certificate:
        """Return a certificate of the size of a real one: its signatures are not checked here."""
        electors, register = electors_after(self.head.electors, self.head.root_register, group.peer_ids)
        proposal = Proposal(
            run="r",
            head=self.head.head,
            epoch=0,
            kind=RoundKind.EPOCH,
            group_id=group.group_id,
            contributors=group.peer_ids,
            electors=electors,
            register=register,
            grid_rounds=self.trainers[0].size.rounds_wanted,
        )
        votes = dict.fromkeys(group.peer_ids, bytes(64))
        return Certificate(
            proposal=proposal, result=blake3(proposal.digest()).digest(), votes=votes, goodbyes={}
        )

    def set_models(self, models: Sequence[Values | None]) -> None:
        """Give each peer its next model. One without any downloads that of an elector."""
        for one, model in zip(self.trainers, models, strict=True):
            one.model = model or one.model
        canonical = self._by_id[self.head.electors[0]]
        for one, model in zip(self.trainers, models, strict=True):
            if model is None:
                one.model = canonical.model
                self.downloads += 1

    def deviation(self) -> float:
        """Return the largest distance of a model from that of the first elector, relative to the distance
        between the start and the optimum.
        """
        canonical = self._by_id[self.head.electors[0]].model
        return max(math.dist(one.model, canonical) for one in self.trainers) / math.hypot(*self.start)


def _step(model: Values, gradient: Values) -> Values:
    return tuple(x - _RATE * g for x, g in zip(model, gradient, strict=True))


def train(
    peers: int,
    group_size: int,
    *,
    epochs: int = 6,
    state_every: int = 3,
    seed: int = 1,
    link: LinkConfig | None = None,
) -> TrainingFigures:
    """Train for some epochs and measure each."""

    async def scenario() -> TrainingFigures:
        training = GridTraining(peers, group_size, seed, link)
        members = [one.volunteer.peer for one in training.trainers]
        costs: list[tuple[float, int, float, float]] = []
        before, after = [], []
        for epoch in range(1, epochs + 1):
            loop, sent = asyncio.get_running_loop(), [(one.messages_sent, one.bytes_sent) for one in members]
            began_s = loop.time()
            gradients = [
                (
                    tuple(x + _NOISE * training.rng.gauss(0.0, 1.0) for x in one.model),
                    float(training.rng.randint(1, 20)),
                )
                for one in training.trainers
            ]
            averages = await training.average(f"epoch {epoch}", gradients)
            models = [
                None if gradient is None else _step(one.model, gradient)
                for one, gradient in zip(training.trainers, averages, strict=True)
            ]
            training.set_models(models)
            messages = [one.messages_sent - was for one, (was, _) in zip(members, sent, strict=True)]
            size = sum(one.bytes_sent - was for one, (_, was) in zip(members, sent, strict=True))
            costs.append((statistics.fmean(messages), max(messages), size / peers, loop.time() - began_s))
            if epoch % state_every == 0:
                before.append(training.deviation())
                training.set_models(
                    await training.average(f"state {epoch}", [(o.model, 1.0) for o in training.trainers])
                )
                after.append(training.deviation())
            await asyncio.sleep(1.0)  # the peers compute
        await training.swarm.close()
        mean = [statistics.fmean(one.model[place] for one in training.trainers) for place in range(_NUMBERS)]
        each, most, sizes, times = zip(*costs, strict=True)
        return TrainingFigures(
            peers=peers,
            group_size=group_size,
            rounds=training.rounds,
            electors=len(training.head.electors),
            messages=each,
            messages_most=most,
            bytes_sent=sizes,
            epoch_s=times,
            before=tuple(before),
            after=tuple(after),
            left=math.hypot(*mean) / math.hypot(*training.start),
            rounds_missed=training.rounds_missed,
            downloads=training.downloads,
        )

    return run_virtual(scenario())
