"""Calls that a round refuses before it moves any values: strangers, mismatches, wrong arguments. On the
simulated network.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
import torch

from averaging.allreduce.allreduce import AllReduce
from averaging.allreduce.config import EXCHANGE, VOTE, RoundConfig
from averaging.matchmaking.logic.group import Group, Member
from averaging.reduction.framing import pack
from averaging.reduction.partition import plan_chunks
from swarm.compression import find
from swarm.core.errors import PeerError, UsageError
from swarm.testing.network import SimulatedNetwork, SimulatedPeer
from swarm.testing.rounds import all_reduce_of
from swarm.testing.virtual_loop import run_virtual
from swarm.wire.reduce_pb2 import (
    ExchangeContribution,
    ExchangeHeader,
    ExchangeOpen,
    Intent,
    Statement,
    Vote,
    VoteRequest,
)


def service(peer: SimulatedPeer) -> AllReduce:
    return all_reduce_of(peer)


def make_group(
    peers: Sequence[SimulatedPeer],
    *,
    codec: str = "float32",
    weights: Sequence[float] = (1.0, 1.0),
    bandwidths: Sequence[float] = (1.0, 1.0),
) -> Group:
    members = [
        Member(contact=peer.contact, weight=weight, bandwidth=bandwidth)
        for peer, weight, bandwidth in zip(peers, weights, bandwidths, strict=True)
    ]
    return Group(
        group_id=bytes(range(32)), members=tuple(members), codec=codec, gathered=(b"",) * len(members)
    )


def test_strangers_and_mismatches_are_refused() -> None:
    async def main() -> None:
        network = SimulatedNetwork(0)
        peers = [network.peer() for _ in range(3)]
        services = [service(peer) for peer in peers]
        group = make_group(peers[:2])
        codec = find("float32")
        digest = plan_chunks(5000, [1.0, 1.0], codec, RoundConfig().chunk_bytes).digest(codec)

        async def refusal(peer: SimulatedPeer, header: ExchangeHeader) -> str:
            with pytest.raises(PeerError) as caught:  # noqa: PT012
                async with peer.caller.open_stream(
                    peers[0].contact, EXCHANGE, timeout_s=20, connection=1
                ) as stream:
                    await stream.send(pack(header))
                    await stream.receive()
            return str(caught.value)

        def opening(**changes: object) -> ExchangeHeader:
            message = ExchangeOpen(
                group_id=group.group_id, codec=codec.wire_id, codec_version=codec.version, plan_digest=digest
            )
            for name, value in changes.items():
                setattr(message, name, value)
            return ExchangeHeader(open=message)

        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(
                services[0].run(group, torch.zeros(5000), deadline_s=peers[0].clock.monotonic_s() + 60)
            )
            await asyncio.sleep(0)
            assert "not a member" in await refusal(peers[2], opening())
            assert "not this round's" in await refusal(peers[1], opening(codec=2))
            assert "not this round's" in await refusal(peers[1], opening(codec_version=9))
            assert "differs" in await refusal(peers[1], opening(plan_digest=b"x" * 32))
            assert "32 bytes" in await refusal(peers[1], opening(group_id=b"short"))
            assert "begins with an opening" in await refusal(
                peers[1], ExchangeHeader(contribution=ExchangeContribution(chunk=0))
            )
            # after a wait
            assert "in no round of that name" in await refusal(peers[1], opening(group_id=b"n" * 32))
            await refused_statements(peers, group)
            assert services[0].waiting == 0
            running.cancel()
        services[0].close()
        await network.close()

    run_virtual(main())


async def refused_statements(peers: Sequence[SimulatedPeer], group: Group) -> None:
    """Tell the first peer invalid things about the end of a round of the first two."""
    keys = [peer.peer_id.public_key for peer in peers]
    signature = bytes(64)
    for stranger, statement, message in [
        (peers[2], Statement(), "not a member"),
        (
            peers[1],
            Statement(votes=[Vote(voter=keys[0], result=b"x" * 32, signature=signature)]),
            "did not sign",
        ),
        (
            peers[1],
            Statement(votes=[Vote(voter=keys[2], result=b"x" * 32, signature=signature)]),
            "neither a contributor nor an elector",
        ),
        (
            peers[1],
            Statement(votes=[Vote(voter=keys[1], result=b"x", signature=signature)]),
            "32 bytes",
        ),
        (peers[1], Statement(votes=[Vote(voter=b"x")]), "32 bytes"),
        (peers[1], Statement(intents=[Intent(place=2, result=bytes(32))]), "place 2 in a group of 2"),
        (peers[1], Statement(intents=[Intent(place=1, result=b"x")]), "32 bytes"),
    ]:
        request = VoteRequest(group_id=group.group_id, statement=statement)
        with pytest.raises(PeerError, match=message):
            await stranger.caller.call(peers[0].contact, VOTE, request, timeout_s=5)


def test_too_many_calls_wait_for_rounds_that_never_begin() -> None:
    async def main() -> None:
        network = SimulatedNetwork(0)
        one, other = network.peer(), network.peer()
        service(one)
        refused: list[str] = []

        async def ask(nth: int) -> None:
            request = VoteRequest(group_id=bytes([nth]) * 32)
            try:
                await other.caller.call(one.contact, VOTE, request, timeout_s=20)
            except PeerError as error:
                refused.append(str(error))

        async with asyncio.TaskGroup() as tasks:
            for nth in range(20):
                tasks.create_task(ask(nth))
        assert sum("too many calls wait" in text for text in refused) == 12
        assert sum("did not begin one within 5 s" in text for text in refused) == 8
        await network.close()

    run_virtual(main())


def test_wrong_arguments_of_a_round_raise_usage_errors() -> None:
    async def main() -> None:
        network = SimulatedNetwork(0)
        peers = [network.peer() for _ in range(2)]
        run = service(peers[0]).run
        group, vector, deadline_s = make_group(peers), torch.zeros(4), peers[0].clock.monotonic_s() + 5
        for given, wrong, message in [
            (group, torch.zeros(4, dtype=torch.float64), "float32"),
            (group, torch.zeros(2, 2), "float32"),
            (group, torch.zeros(8)[::2], "contiguous"),
            (make_group(peers, weights=(0.0, 0.0)), vector, "all weights are 0"),
            (make_group(peers, bandwidths=(0.0, 0.0)), vector, "nobody in this group can reduce"),
            (make_group(peers, codec="zip"), vector, "no codec 'zip'"),
            (make_group([peers[1], network.peer()]), vector, "not a member"),
        ]:
            with pytest.raises(UsageError, match=message):
                await run(given, wrong, deadline_s=deadline_s)
        outcome = await run(group, vector, deadline_s=deadline_s)
        assert outcome.failed  # the other one never came
        with pytest.raises(UsageError, match="has run already"):
            await run(group, vector, deadline_s=deadline_s)
        await network.close()

    run_virtual(main())
