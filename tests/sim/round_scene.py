"""A round between simulated peers, whose members know the history of a run."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import torch

from averaging.allreduce.config import RoundConfig
from averaging.allreduce.outcome import RoundOutcome
from averaging.history.certificate import (
    Proposal,
    RoundKind,
    genesis,
)
from averaging.history.round_lineage import RoundLineage
from averaging.matchmaking.logic.group import Group, Member
from swarm.core.ids import Contact, PeerId
from swarm.testing.network import LinkConfig, SimulatedNetwork
from swarm.testing.rounds import all_reduce_of

DEADLINE_S = 20.0
CONFIG = RoundConfig(chunk_bytes=4096)


@dataclass
class Scene:
    """A group of peers, and what each of them knows of the history of its run."""

    seed: int
    weights: Sequence[float]
    auxiliary: Sequence[int] = ()
    histories: dict[int, RoundLineage] = field(default_factory=dict)  # by place

    def __post_init__(self) -> None:
        rng = random.Random(self.seed)
        self.network = SimulatedNetwork(self.seed, LinkConfig(delay_s=rng.choice([0.005, 0.03])))
        self.peers = [self.network.peer() for _ in self.weights]
        self.services = [all_reduce_of(peer) for peer in self.peers]
        members = tuple(
            Member(contact=peer.contact, weight=weight, bandwidth=1.0, auxiliary=place in self.auxiliary)
            for place, (peer, weight) in enumerate(zip(self.peers, self.weights, strict=True))
        )
        self.group = Group(
            group_id=rng.randbytes(32), members=members, codec="float32", gathered=(b"",) * len(members)
        )
        generator = torch.Generator().manual_seed(self.seed)
        self.vectors = [torch.randn(10_000, generator=generator) for _ in self.peers]

    async def run(self, place: int, deadline_s: float = DEADLINE_S) -> RoundOutcome:
        return await self.services[place].run(
            self.group,
            self.vectors[place],
            deadline_s=self.peers[place].clock.monotonic_s() + deadline_s,
            config=CONFIG,
            history=self.histories.get(place),
        )

    async def conduct(self, during: Callable[[], object] = lambda: None) -> list[RoundOutcome]:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(self.run(place)) for place in range(len(self.peers))]
            during()
        return [task.result() for task in running]

    async def close(self) -> None:
        for service in self.services:
            service.close()
        await self.network.close()
        assert not self.network.errors


def lineage(
    electors: Sequence[PeerId],
    contacts: dict[PeerId, Contact],
    may_vote: Callable[[Proposal, bytes], str] = lambda proposal, result: "",
) -> RoundLineage:
    async def find_contact(peer: PeerId) -> Contact | None:
        return contacts.get(peer)

    async def may_begin(contributors: Sequence[PeerId], members: Collection[PeerId]) -> str:
        return ""

    return RoundLineage(
        run="a run",
        head=genesis("a run"),
        epoch=1,
        kind=RoundKind.EPOCH,
        electors=tuple(electors),
        goodbyes={},
        may_begin=may_begin,
        ended=lambda: None,
        may_vote=may_vote,
        release=lambda proposal: None,
        leave=lambda proposal: False,
        find_contact=find_contact,
    )
