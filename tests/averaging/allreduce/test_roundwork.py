"""The tensor work of a round: the same bytes whether a chunk is one block or many, and what cannot be sent or
averaged.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from averaging.allreduce.commit import digest_payload
from averaging.allreduce.work import Arrived, Averaged, ReductionKernels, Spoiled
from averaging.reduction.averages import Averages, ResultBuffer
from averaging.reduction.framing import unpack
from averaging.reduction.partition import Plan, plan_chunks
from averaging.reduction.reduce import Contribution, ReductionJob
from averaging.reduction.vector import FlatVector
from swarm.compression import find
from swarm.compression.plain import PlainCodec

NUMEL = 20_000


def kernels(
    codec_name: str, vector: torch.Tensor, block: int = 1 << 15, cut: int = NUMEL
) -> ReductionKernels:
    """`cut`: the vector lies in tensors of these numbers of elements."""
    found = find(codec_name)
    assert isinstance(found, PlainCodec)
    codec = replace(found, block=block)
    plan: Plan = plan_chunks(NUMEL, [1.0, 1.0], codec, 1 << 20)
    return ReductionKernels(
        plan,
        codec,
        0,
        FlatVector(vector.split(cut)),
        Averages(plan, codec, ResultBuffer()),
        weights=(1.0, 1.0),
    )


@pytest.mark.parametrize("codec", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("block", [1024, 4096, 1 << 18])
@pytest.mark.parametrize("cut", [77, 3000, NUMEL])
def test_blocks_and_borders_of_tensors_do_not_change_the_bytes(codec: str, block: int, cut: int) -> None:
    generator = torch.Generator().manual_seed(5)
    ours, theirs = (torch.randn(NUMEL, generator=generator) for _ in range(2))
    one, other = kernels(codec, ours, block, cut), kernels(codec, theirs, block, cut)
    mine, _ = one.plan.chunks
    (message,) = other.encode([mine])
    assert isinstance(message, bytes)
    header, payload = unpack(message)
    assert header.contribution.chunk == mine.index
    dtype = getattr(torch, codec)
    sent = theirs[mine.start : mine.stop].to(dtype)
    assert bytes(payload) == sent.view(torch.uint8).numpy().tobytes()

    (done,) = one.reduce(
        [ReductionJob(mine, [Contribution(0, 0.5, one.own_values(mine)), Contribution(1, 1.0, payload)])]
    )
    assert isinstance(done, Averaged)
    expected = ((ours[mine.start : mine.stop] * 0.5 + sent.float()) / 1.5).to(dtype)
    assert bytes(one.averages.payload(mine).numpy()) == expected.view(torch.uint8).numpy().tobytes()
    header, payload = unpack(done.message)
    assert header.average.contributors == done.contributors == b"\x03"
    assert bytes(payload) == bytes(one.averages.payload(mine).numpy())
    assert digest_payload(payload) == done.digest
    assert other.settle([Arrived(mine, payload, done.contributors)]) == [done.digest]
    assert torch.equal(other.averages.decoded()[mine.start : mine.stop], expected.float())


@pytest.mark.parametrize("codec", ["float32", "float16"])
def test_a_value_that_cannot_be_sent_ends_the_batch(codec: str) -> None:
    vector = torch.zeros(NUMEL)
    work = kernels(codec, vector)
    first, second = work.plan.chunks
    vector[second.start + 3] = float("nan")
    messages = work.encode([first, second, first])
    assert len(messages) == 2
    assert isinstance(messages[0], bytes)
    assert messages[1] == second.start + 3
    work.exclude_self_for(second)
    assert str(work.excluded_reason).startswith(f"element {second.start + 3} of its vector is nan")


def test_members_that_spoil_an_average_are_named() -> None:
    vector = torch.zeros(NUMEL)
    work = kernels("float32", vector)
    chunk = work.plan.chunks[0]
    fine = bytes(4 * chunk.numel)
    nan = torch.full((chunk.numel,), float("nan")).numpy().tobytes()
    own = vector[chunk.start : chunk.stop]
    (done,) = work.reduce([ReductionJob(chunk, [Contribution(0, 1.0, own), Contribution(1, 1.0, nan)])])
    assert done == Spoiled(chunk, (1,))
    assert (
        work.flaw(chunk, [Contribution(0, 1.0, own), Contribution(1, 1.0, nan)], 1)
        == "element 0 is NaN or infinity"
    )
    own[-1] = float("inf")
    (done,) = work.reduce([ReductionJob(chunk, [Contribution(0, 1.0, own), Contribution(1, 1.0, fine)])])
    assert done == Spoiled(chunk, (0,))
    assert work.settle([Arrived(chunk, memoryview(nan), b"\x03")]) == [None]


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("codec", ["float32", "float16"])
def test_the_default_dtype_changes_no_byte(codec: str, default: torch.dtype) -> None:
    ours = torch.randn(NUMEL, generator=torch.Generator().manual_seed(5))

    def everything() -> list[object]:
        work = kernels(codec, ours, cut=777)  # chunks reach over tensors' borders
        mine, theirs = work.plan.chunks
        sent = work.encode([theirs])
        (done,) = work.reduce(
            [
                ReductionJob(
                    mine, [Contribution(1, 1.0, bytes(work.codec.encoded_bytes(mine.numel)))], own=True
                )
            ]
        )
        assert isinstance(done, Averaged)
        message = sent[0]
        assert isinstance(message, bytes)
        work.averages.keep(theirs, unpack(message)[1])
        target = FlatVector(torch.zeros(NUMEL, dtype=torch.float32).split(999))
        work.averages.subtract(target)
        found = [piece.tolist() for _, piece in target.pieces(0, NUMEL)]
        return [sent, done.digest, work.averages.decoded().tolist(), found]

    expected = everything()
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        assert everything() == expected
    finally:
        torch.set_default_dtype(before)
