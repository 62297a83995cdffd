"""The stream from a member to a reducer, over real sockets: its contributions come in order, and there is one
only.
"""

from __future__ import annotations

import asyncio
import contextlib

import pytest
import torch

from averaging.allreduce.config import EXCHANGE
from averaging.allreduce.logic.versions import digest_payload, digest_round
from averaging.matchmaking.logic.group import Group
from averaging.reduction.framing import pack, unpack
from averaging.reduction.partition import Plan
from swarm.compression import find
from swarm.core.errors import PeerError
from swarm.wire.reduce_pb2 import ExchangeContribution, ExchangeHeader, ExchangeOpen
from tests.wire.event_loop import run_on_loop
from tests.wire.round_peers import (
    SMALL,
    RoundPeer,
    make_group,
    oracle,
    peers,
    plan_of,
    run_round,
    vectors_of,
    vote_for,
)


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        ([0, 1, 2, 3, 4], ""),
        ([2, 0, 1, 3, 4], "a contribution to chunk {2} where chunk {0} was to come"),
        ([0, 1, 3, 4], "a contribution to chunk {3} where chunk {2} was to come"),
        ([0, 1, 2, 3, 4, 4], ""),  # what is sent beyond the last chunk is not read
        ([0, 1, 2, 3], "1 of 5 chunks unsent"),
    ],
)
def test_a_sender_is_left_out_unless_its_chunks_come_in_order_and_complete(
    sent: list[int], words: str
) -> None:
    """A client sends the contributions at `sent` to each reducer, and takes the averages on the
    same stream.
    """

    async def main() -> None:
        async with peers(4) as members:
            numel = 3 * 5 * 4096
            group = make_group(members, bandwidths=[1.0, 1.0, 1.0, 0.0])
            plan = plan_of(group, numel, SMALL.chunk_bytes)
            assert [len(plan.shard(place)) for place in plan.reducers] == [5, 5, 5]
            vectors = vectors_of(4, numel)
            async with asyncio.TaskGroup() as tasks:
                honest = tasks.create_task(run_round(members[:3], group, vectors[:3], config=SMALL))
                digest = tasks.create_task(_send_in_this_order(members[3], group, plan, vectors[3], sent))
            client = members[3].contact.peer_id
            for place, outcome in enumerate(honest.result()):
                assert outcome.reason is None
                assert outcome.digest == digest.result()
                if words:
                    indices = [chunk.index for chunk in plan.shard(place)]
                    assert words.format(*indices) in outcome.left_out[client]
                else:
                    assert outcome.vector is not None
                    assert torch.equal(outcome.vector, oracle(group, vectors, SMALL.chunk_bytes))
                    assert not outcome.left_out

    run_on_loop(main())


async def _send_in_this_order(
    peer: RoundPeer, group: Group, plan: Plan, vector: torch.Tensor, sent: list[int]
) -> str:
    """Take chunk as a client that sends every reducer the contributions at the indices `sent` of its shard;
    return the digest of the averages that came back.
    """
    codec = find(group.codec)
    got: dict[int, tuple[bytes, bytes]] = {}

    async def exchange(place: int) -> None:
        opening = ExchangeOpen(
            group_id=group.group_id,
            codec=codec.wire_id,
            codec_version=codec.version,
            plan_digest=plan.digest(codec),
        )
        chunks = plan.shard(place)
        async with peer.channels.open_stream(
            group.members[place].contact, EXCHANGE, timeout_s=20, connection=1
        ) as stream:
            await stream.send(pack(ExchangeHeader(open=opening)))
            for nth in sent:
                values = vector[chunks[nth].start : chunks[nth].stop].numpy().tobytes()
                await stream.send(
                    pack(ExchangeHeader(contribution=ExchangeContribution(chunk=chunks[nth].index)), values)
                )
            await stream.finish()
            while (received := await stream.receive()) is not None:
                header, payload = unpack(received)
                if header.HasField("average"):
                    assert header.average.chunk in [chunk.index for chunk in chunks]
                    got[header.average.chunk] = (digest_payload(payload), header.average.contributors)

    async with asyncio.TaskGroup() as tasks:
        for place in plan.reducers:
            tasks.create_task(exchange(place))
    digest = digest_round(got[index] for index in range(len(plan.chunks)))
    await vote_for(peer, group, digest)
    return digest.hex()


def test_a_second_stream_of_a_member_in_one_round_is_refused() -> None:
    async def main() -> None:
        async with peers(3) as members:
            group = make_group(members, bandwidths=[1.0, 1.0, 0.0])
            codec, numel = find(group.codec), 20_000
            opening = ExchangeOpen(
                group_id=group.group_id,
                codec=codec.wire_id,
                codec_version=codec.version,
                plan_digest=plan_of(group, numel, SMALL.chunk_bytes).digest(codec),
            )
            async with asyncio.TaskGroup() as tasks:
                running = tasks.create_task(run_round(members[:2], group, vectors_of(2, numel), config=SMALL))
                async with contextlib.AsyncExitStack() as stack:
                    for _ in range(2):
                        stream = await stack.enter_async_context(
                            members[2].channels.open_stream(
                                members[0].contact, EXCHANGE, timeout_s=20, connection=1
                            )
                        )
                        await stream.send(pack(ExchangeHeader(open=opening)))
                    with pytest.raises(PeerError, match="a second stream"):
                        await stream.receive()
                running.cancel()

    with contextlib.suppress(asyncio.CancelledError):
        run_on_loop(main())
