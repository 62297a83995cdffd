"""Rounds between simulated peers, in which everything follows from a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from averaging.allreduce.allreduce import AllReduce
from averaging.allreduce.config import RoundConfig
from averaging.allreduce.outcome import RoundOutcome
from averaging.matchmaking.logic.group import Group, Member
from swarm.testing.network import LinkConfig, SimulatedNetwork, SimulatedPeer
from swarm.testing.rounds import all_reduce_of

DEADLINE_S = 30.0
CONFIG = RoundConfig(chunk_bytes=4096)


@dataclass
class Scenario:
    """A swarm, a group in it, and a vector for everybody."""

    network: SimulatedNetwork
    peers: list[SimulatedPeer]
    services: list[AllReduce]
    group: Group
    vectors: list[torch.Tensor]
    before: list[torch.Tensor]

    async def run(self, place: int) -> RoundOutcome:
        service, vector = self.services[place], self.vectors[place]
        return await service.run(
            self.group, vector, deadline_s=self.peers[place].clock.monotonic_s() + DEADLINE_S, config=CONFIG
        )

    def close(self) -> None:
        for service in self.services:
            service.close()


def scenario(seed: int) -> Scenario:
    rng = random.Random(seed)
    network = SimulatedNetwork(
        seed, LinkConfig(delay_s=rng.choice([0.001, 0.02, 0.1]), bandwidth=rng.choice([0.0, 1e5, 1e6]))
    )
    count = rng.randint(2, 6)
    clients = [place > 1 and rng.random() < 0.25 for place in range(count)]
    peers = [network.peer(dialable=not client) for client in clients]
    services = [all_reduce_of(peer) for peer in peers]
    weights = [1.0] + [rng.choice([0.0, 1.0, 1.0, 3.5]) for _ in range(count - 1)]
    members = [
        Member(contact=peer.contact, weight=weight, bandwidth=0.0 if client else rng.choice([1.0, 1.0, 2.0]))
        for peer, weight, client in zip(peers, weights, clients, strict=True)
    ]
    codec = rng.choice(["float32", "float16", "bfloat16"])
    group = Group(group_id=rng.randbytes(32), members=tuple(members), codec=codec, gathered=(b"",) * count)
    generator = torch.Generator().manual_seed(seed)
    numel = rng.choice([0, 10, 5000, 20_000])
    vectors = [torch.randn(numel, generator=generator) for _ in peers]
    return Scenario(network, peers, services, group, vectors, [vector.clone() for vector in vectors])


def check(outcomes: dict[int, RoundOutcome], given: Scenario, victim: int | None) -> None:
    """Check the properties of every round: no input vector is changed, all members that commit hold the same,
    and failed ones report why.
    """
    assert all(torch.equal(vector, was) for vector, was in zip(given.vectors, given.before, strict=True))
    committed = [outcome for outcome in outcomes.values() if not outcome.failed]
    failed = [outcome for outcome in outcomes.values() if outcome.failed]
    for outcome in committed:
        assert outcome.vector is not None
        assert committed[0].vector is not None
        assert torch.equal(outcome.vector, committed[0].vector)
        assert outcome.digest == committed[0].digest
    for outcome in failed:
        assert outcome.reason
        assert outcome.vector is None
        assert victim is not None, outcome.reason
    assert not (committed and failed), "some commit what others do not"
    assert not given.network.errors
