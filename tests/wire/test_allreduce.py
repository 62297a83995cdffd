"""Rounds over real sockets: exact, identical on all members, and what happens when a member misbehaves."""

from __future__ import annotations

import asyncio
import time

import pytest
import torch

from averaging.allreduce.config import EXCHANGE, RoundConfig
from averaging.allreduce.logic.versions import digest_payload, digest_round
from averaging.matchmaking.logic.group import Group
from averaging.reduction.framing import pack, unpack
from averaging.reduction.partition import Plan
from swarm.compression import find
from swarm.net.rpc import Stream
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


@pytest.mark.parametrize("cores", [2, 8])
@pytest.mark.parametrize("codec", ["float32", "float16", "bfloat16"])
def test_all_members_hold_the_exact_average(codec: str, cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On few cores tensor work is done on the event loop, otherwise in the pool."""
    monkeypatch.setattr("averaging.allreduce.offload.usable_cores", lambda: cores)

    async def main() -> None:
        async with peers(4) as members:
            for numel in (0, 1, 3, 1024, 100_003):
                config = RoundConfig(chunk_bytes=16 << 10)
                group = make_group(
                    members, codec=codec, weights=[1.0, 2.5, 0.0, 7.0], bandwidths=[1.0, 3.0, 2.0, 0.5]
                )
                vectors = vectors_of(4, numel)
                before = [vector.clone() for vector in vectors]
                outcomes = await run_round(members, group, vectors, config=config)
                expected = oracle(group, vectors, config.chunk_bytes)
                for outcome in outcomes:
                    assert not outcome.failed, outcome.reason
                    assert outcome.reason is None
                    assert outcome.vector is not None
                    assert torch.equal(outcome.vector, expected)
                    assert outcome.digest == outcomes[0].digest
                    assert len(outcome.digest) == 64
                    assert outcome.left_out == {}
                    if numel:
                        assert outcome.contributions == {
                            members[place].contact.peer_id: 1.0 for place in (0, 1, 3)
                        }
                assert all(torch.equal(vector, was) for vector, was in zip(vectors, before, strict=True))

    run_on_loop(main())


def test_clients_and_auxiliary_peers_take_part_without_reducing() -> None:
    """A client peer that nobody can dial, an auxiliary one, one of weight 0: five members, three of them
    reduce.
    """

    async def main() -> None:
        async with peers(5) as members:
            group = make_group(
                members,
                weights=[1.0, 2.0, 0.0, 0.0, 3.0],
                bandwidths=[1.0, 0.0, 1.0, 2.0, 0.0],
                auxiliary=[3],
                codec="float16",
            )
            vectors = vectors_of(5, 50_000)
            outcomes = await run_round(members, group, vectors, config=SMALL)
            expected = oracle(group, vectors, SMALL.chunk_bytes)
            assert [outcome.reason for outcome in outcomes] == [None] * 5
            for place in (0, 1, 2, 4):
                vector = outcomes[place].vector
                assert vector is not None
                assert torch.equal(vector, expected)
            assert outcomes[3].vector is None
            assert outcomes[3].digest == ""

    run_on_loop(main())


def test_a_group_of_one_averages_with_itself() -> None:
    async def main() -> None:
        async with peers(1) as members:
            (vector,) = vectors_of(1, 5000)
            (outcome,) = await run_round(
                members, make_group(members, bandwidths=[0.0], codec="float16"), [vector]
            )
            assert outcome.vector is not None
            assert torch.equal(outcome.vector, vector.half().float())

    run_on_loop(main())


def test_rounds_side_by_side_and_one_after_another() -> None:
    async def main() -> None:
        async with peers(3) as members:
            for _ in range(2):
                groups = [make_group(members, codec=codec) for codec in ("float32", "bfloat16")]
                inputs = [vectors_of(3, 70_000, seed) for seed in (1, 2)]
                async with asyncio.TaskGroup() as tasks:
                    both = [
                        tasks.create_task(run_round(members, group, vectors, config=SMALL))
                        for group, vectors in zip(groups, inputs, strict=True)
                    ]
                for group, vectors, task in zip(groups, inputs, both, strict=True):
                    expected = oracle(group, vectors, SMALL.chunk_bytes)
                    assert all(
                        outcome.vector is not None and torch.equal(outcome.vector, expected)
                        for outcome in task.result()
                    )

    run_on_loop(main())


def test_a_slower_member_is_waited_for() -> None:
    """Streams and votes that come before a member knows of the round wait for it."""

    async def main() -> None:
        async with peers(3) as members:
            group = make_group(members)
            vectors = vectors_of(3, 30_000)
            async with asyncio.TaskGroup() as tasks:
                early = [
                    tasks.create_task(peer.allreduce.run(group, vector, deadline_s=time.monotonic() + 20))
                    for peer, vector in zip(members[:2], vectors[:2], strict=True)
                ]
                while members[2].allreduce.waiting < 2:  # noqa: ASYNC110 - the service has no event for it
                    await asyncio.sleep(0.005)
                late = await members[2].allreduce.run(group, vectors[2], deadline_s=time.monotonic() + 20)
            assert [task.result().reason for task in early] == [None, None]
            assert late.digest == early[0].result().digest

    run_on_loop(main())


def test_a_member_that_never_comes() -> None:
    async def main() -> None:
        async with peers(3) as members:
            group = make_group(members)
            outcomes = await run_round(members[:2], group, vectors_of(2, 30_000), timeout_s=0.4)
            for outcome in outcomes:
                assert outcome.failed
                assert outcome.vector is None
                assert outcome.reason is not None
                assert "deadline" in outcome.reason
                assert str(members[2].contact.peer_id) in outcome.reason

    run_on_loop(main())


@pytest.mark.parametrize("victim", [0, 1, 3])
def test_a_member_dies_in_the_middle(victim: int) -> None:
    """The survivors take its shard over, fast, and commit the exact average of those who contributed to each
    chunk.
    """

    async def main() -> None:
        async with peers(4) as members:
            group = make_group(members)
            vectors = vectors_of(4, 400_000)
            before = [vector.clone() for vector in vectors]
            dead = members[victim]
            received = 0
            original = dead.handlers.find(EXCHANGE.name)
            dead.handlers.remove(EXCHANGE.name)
            enough = asyncio.Event()

            async def stalling(stream: Stream) -> None:
                nonlocal received
                while await stream.receive() is not None:
                    received += 1
                    if received > 5:
                        enough.set()

            dead.handlers.stream(EXCHANGE, stalling)
            assert original is not None
            async with asyncio.TaskGroup() as tasks:
                running = [
                    tasks.create_task(
                        peer.allreduce.run(group, vector, deadline_s=time.monotonic() + 20, config=SMALL)
                    )
                    for peer, vector in zip(members, vectors, strict=True)
                ]
                await enough.wait()
                await dead.kill()
                killed_s = time.monotonic()
                survivors = [await task for place, task in enumerate(running) if place != victim]
                assert time.monotonic() - killed_s < 5
                running[victim].cancel()
            whole = oracle(group, vectors, SMALL.chunk_bytes)
            for outcome in survivors:
                assert (outcome.reason, outcome.digest) == (None, survivors[0].digest)
                # "died", or "gave up" if its other half could say so
                assert "while reducing" in outcome.left_out[dead.contact.peer_id]
                assert outcome.vector is not None
                assert torch.equal(outcome.vector, survivors[0].vector)
                assert all(
                    outcome.contributions[members[place].contact.peer_id] == 1.0
                    for place in range(4)
                    if place != victim
                )
                assert survivors[0].contributions.get(dead.contact.peer_id, 0.0) < 1.0
                without = oracle(group, vectors, SMALL.chunk_bytes, without=[victim])
                for chunk in plan_of(group, 400_000, SMALL.chunk_bytes).chunks:
                    found, span = outcome.vector[chunk.start : chunk.stop], slice(chunk.start, chunk.stop)
                    assert torch.equal(found, without[span]) or (
                        chunk.reducer != victim and torch.equal(found, whole[span])
                    )
            assert all(torch.equal(vector, was) for vector, was in zip(vectors, before, strict=True))

    run_on_loop(main())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e6])
def test_a_vector_that_cannot_be_sent_is_left_out(value: float) -> None:
    """NaN, infinity, and what float16 cannot carry: the member is told, contributes nothing from there on,
    and has the others' average.
    """

    async def main() -> None:
        async with peers(3) as members:
            group = make_group(members, codec="float16")
            vectors = vectors_of(3, 40_000)
            vectors[1][7] = value
            outcomes = await run_round(members, group, vectors, config=SMALL)
            own = members[1].contact.peer_id
            for outcome in outcomes:
                assert outcome.reason is None
                assert outcome.digest == outcomes[0].digest
                assert "element 7 of its vector" in outcome.left_out[own]
                assert outcome.contributions.get(own, 0.0) < 1.0
                assert outcome.contributions[members[0].contact.peer_id] == 1.0
            vector = outcomes[0].vector
            assert vector is not None
            assert torch.equal(vector[:1024], oracle(group, vectors, SMALL.chunk_bytes, without=[1])[:1024])

    run_on_loop(main())


def test_garbage_is_refused_and_its_sender_left_out() -> None:
    """A client that sends nonsense: the others average without it, and it is told why."""

    async def main() -> None:
        async with peers(4) as members:
            numel = 60_000
            for nonsense in ("wrong chunk", "wrong size", "twice", "not a header", "nan", "opens again"):
                group = make_group(members, bandwidths=[1.0, 1.0, 1.0, 0.0])
                plan = plan_of(group, numel, SMALL.chunk_bytes)
                vectors = vectors_of(4, numel)
                async with asyncio.TaskGroup() as tasks:
                    honest = tasks.create_task(run_round(members[:3], group, vectors[:3], config=SMALL))
                    digest = tasks.create_task(_misbehave(members[3], group, plan, nonsense))
                expected = oracle(group, vectors, SMALL.chunk_bytes, without=[3])
                for outcome in honest.result():
                    assert outcome.reason is None, (nonsense, outcome.reason)
                    assert outcome.vector is not None
                    assert torch.equal(outcome.vector, expected), nonsense
                    assert members[3].contact.peer_id in outcome.left_out
                    assert outcome.digest == digest.result()

    run_on_loop(main())


async def _misbehave(peer: RoundPeer, group: Group, plan: Plan, nonsense: str) -> str:
    """A client member that sends one bad message to each reducer, takes the averages, and votes for what it
    got.
    """
    codec = find(group.codec)
    opening = ExchangeOpen(
        group_id=group.group_id,
        codec=codec.wire_id,
        codec_version=codec.version,
        plan_digest=plan.digest(codec),
    )
    got: dict[int, tuple[bytes, bytes]] = {}

    async def one(place: int) -> None:
        chunk = plan.shard(place)[0]
        size = codec.encoded_bytes(chunk.numel)
        nan = torch.full((chunk.numel,), float("nan")).numpy().tobytes()

        def contribution(index: int, payload: bytes) -> bytes:
            return pack(ExchangeHeader(contribution=ExchangeContribution(chunk=index)), payload)

        bad = {
            "wrong chunk": [contribution(chunk.index + 1, bytes(size))],
            "wrong size": [contribution(chunk.index, bytes(size - 4))],
            "twice": [contribution(chunk.index, nan), contribution(chunk.index, nan)],
            "not a header": [b"\xff\xff\xff\xff and more"],
            "nan": [contribution(chunk.index, nan)],
            "opens again": [pack(ExchangeHeader(open=opening))],
        }[nonsense]
        refusals = averages = 0
        async with peer.channels.open_stream(
            group.members[place].contact, EXCHANGE, timeout_s=20, connection=1
        ) as stream:
            for message in [pack(ExchangeHeader(open=opening)), *bad]:
                await stream.send(message)
            await stream.finish()
            while (received := await stream.receive()) is not None:
                header, payload = unpack(received)
                refusals += header.HasField("refusal")
                if header.HasField("average"):
                    averages += 1
                    got[header.average.chunk] = (digest_payload(payload), header.average.contributors)
        assert averages == len(plan.shard(place))
        assert refusals <= 1

    async with asyncio.TaskGroup() as tasks:
        for place in plan.reducers:
            tasks.create_task(one(place))
    digest = digest_round(got[index] for index in range(len(plan.chunks)))
    await vote_for(peer, group, digest)
    return digest.hex()
