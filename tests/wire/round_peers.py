"""Peers that average over real sockets, and the same average computed on one machine."""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from averaging.allreduce.allreduce import AllReduce
from averaging.allreduce.config import VOTE, RoundConfig
from averaging.allreduce.logic.setup import proposal_of
from averaging.allreduce.outcome import RoundOutcome
from averaging.allreduce.voter import Voter
from averaging.allreduce.wire import vote_to_wire
from averaging.history.certificate import Vote
from averaging.matchmaking.logic.group import Group, Member
from averaging.reduction.audit import Notary
from averaging.reduction.balance import shares_of
from averaging.reduction.partition import Plan, plan_chunks
from averaging.reduction.reduce import Block, Contribution, Mean, relative_weights
from swarm.compression import find
from swarm.core.clock import SystemClock
from swarm.core.identity import Identity
from swarm.core.ids import Address, Contact
from swarm.net.channels import Channels
from swarm.net.rpc import Handlers
from swarm.net.server import Server
from swarm.wire.reduce_pb2 import Statement, VoteRequest

SMALL = RoundConfig(chunk_bytes=16 << 10)


class RoundPeer:
    """One node as far as rounds are concerned."""

    def __init__(self, identity: Identity, handlers: Handlers, server: Server, port: int) -> None:
        self.identity = identity
        self.handlers = handlers
        self.server = server
        self.contact = Contact(identity.peer_id, (Address("127.0.0.1", port),))
        self.channels = Channels(identity)
        self.pool = ThreadPoolExecutor(2)
        self.allreduce = AllReduce(
            handlers=handlers,
            channels=self.channels,
            pool=self.pool,
            clock=SystemClock(),
            notary=Notary(identity, random.SystemRandom()),
        )

    @classmethod
    async def start(cls) -> RoundPeer:
        identity, handlers, server = Identity.generate(), Handlers(), Server()
        return cls(identity, handlers, server, await server.start(identity, handlers, "127.0.0.1", 0))

    async def kill(self) -> None:
        """Close every connection at once, as the system does for a killed process."""
        await self.channels.close()
        await self.server.stop(0)

    async def stop(self) -> None:
        self.allreduce.close()
        await self.kill()
        self.pool.shutdown()


@contextlib.asynccontextmanager
async def peers(count: int) -> AsyncIterator[list[RoundPeer]]:
    started = [await RoundPeer.start() for _ in range(count)]
    try:
        yield started
    finally:
        for peer in started:
            await peer.stop()


def make_group(
    members: Sequence[RoundPeer],
    *,
    codec: str = "float32",
    weights: Sequence[float] | None = None,
    bandwidths: Sequence[float] | None = None,
    auxiliary: Sequence[int] = (),
) -> Group:
    """A group of these peers in this order. Who has bandwidth 0 has no address either."""
    weights = weights or [1.0] * len(members)
    bandwidths = bandwidths or [1.0] * len(members)
    described = [
        Member(
            contact=peer.contact if bandwidth else Contact(peer.contact.peer_id),
            weight=weight,
            bandwidth=bandwidth,
            auxiliary=place in auxiliary,
        )
        for place, (peer, weight, bandwidth) in enumerate(zip(members, weights, bandwidths, strict=True))
    ]
    return Group(
        group_id=secrets.token_bytes(32),
        members=tuple(described),
        codec=codec,
        gathered=(b"",) * len(described),
    )


async def run_round(
    members: Sequence[RoundPeer],
    group: Group,
    vectors: Sequence[torch.Tensor],
    *,
    timeout_s: float = 20.0,
    config: RoundConfig | None = None,
) -> list[RoundOutcome]:
    """Everybody runs the round at once."""
    async with asyncio.TaskGroup() as tasks:
        running = [
            tasks.create_task(
                peer.allreduce.run(group, vector, deadline_s=time.monotonic() + timeout_s, config=config)
            )
            for peer, vector in zip(members, vectors, strict=True)
        ]
    return [task.result() for task in running]


def vectors_of(count: int, numel: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(numel, generator=generator) for _ in range(count)]


def plan_of(group: Group, numel: int, chunk_bytes: int) -> Plan:
    codec = find(group.codec)
    return plan_chunks(numel, shares_of(group.members, codec.encoded_bytes(numel)), codec, chunk_bytes)


def oracle(
    group: Group, vectors: Sequence[torch.Tensor], chunk_bytes: int, without: Sequence[int] = ()
) -> torch.Tensor:
    """The same arithmetic on one machine: what a reducer has of others has travelled, its own values have
    not.
    """
    codec = find(group.codec)
    numel = vectors[0].numel()
    result = torch.empty(numel)
    weights = relative_weights([member.weight for member in group.members])
    for chunk in plan_of(group, numel, chunk_bytes).chunks:
        given = []
        scratch = torch.empty(codec.encoded_bytes(chunk.numel), dtype=torch.uint8)
        for place, vector in enumerate(vectors):
            if weights[place] and place not in without:
                values = vector[chunk.start : chunk.stop]
                given.append(
                    Contribution(
                        place,
                        weights[place],
                        values if place == chunk.reducer else bytes(codec.encode(values, scratch)),
                    )
                )
        total = torch.empty(chunk.numel)
        whole = Block(0, chunk.numel, 0, codec.encoded_bytes(chunk.numel))
        Mean(given, codec).compute(whole, total, torch.empty(chunk.numel))
        result[chunk.start : chunk.stop] = codec.decode(
            bytes(codec.encode(total, scratch)), torch.empty(chunk.numel)
        )
    return result


async def vote_for(peer: RoundPeer, group: Group, digest: bytes) -> None:
    """Tell the first three members that this peer votes for the averages with this digest."""
    vote = Voter(peer.identity, proposal_of(group, None), None).vote(digest)
    assert isinstance(vote, Vote)
    request = VoteRequest(group_id=group.group_id, statement=Statement(votes=[vote_to_wire(vote)]))
    async with asyncio.TaskGroup() as tasks:
        for member in group.members[:3]:
            tasks.create_task(peer.channels.call(member.contact, VOTE, request, timeout_s=20))
