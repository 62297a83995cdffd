"""The tensor work of a round: equal bytes for chunks of one or many blocks, and values that cannot be sent or
averaged.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from averaging.allreduce.kernels import Arrived, Averaged, ReductionKernels, Spoiled
from averaging.allreduce.logic.versions import Version, digest_payload, encode_places
from averaging.reduction.averages import Averages, ResultBuffer
from averaging.reduction.feedback import Feedback
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


# ---- error feedback


def fed(codec: str, vector: torch.Tensor) -> tuple[ReductionKernels, Feedback]:
    found = kernels(codec, vector)
    feedback = Feedback(NUMEL, find(codec))
    found.begin_feedback = feedback.begin
    found.prepare(receives=True)
    return found, feedback


def test_a_member_that_finds_nan_delivers_a_residual_or_keeps_it_and_not_both() -> None:
    """One of its two chunks was averaged before NaN was found in the other."""
    chance = torch.Generator().manual_seed(3)
    first, feedback = fed("float16", torch.randn(NUMEL, generator=chance) * 1.001)
    one, two = first.plan.chunks
    everybody, others = encode_places((0, 1), 2), encode_places((1,), 2)
    for chunk in (one, two):
        assert isinstance(first.encode([chunk])[0], bytes)
    first.conclude({chunk.index: Version(0, everybody, b"") for chunk in (one, two)})
    before = feedback.state_dict()["sender"].clone()
    assert float(before.abs().min()) == 0.0 < float(before.abs().max())

    vector = torch.randn(NUMEL, generator=chance)
    vector[two.stop - 1] = float("nan")
    work = kernels("float16", vector)
    work.begin_feedback = feedback.begin
    work.prepare(receives=True)
    (message,) = work.encode([one])
    assert isinstance(message, bytes)
    (element,) = work.encode([two])
    assert element == two.stop - 1
    work.exclude_self(int(element))
    work.conclude({one.index: Version(0, everybody, b""), two.index: Version(0, others, b"")})
    after = feedback.state_dict()["sender"]
    sent = torch.frombuffer(bytearray(unpack(message)[1]), dtype=torch.float16).float()
    delivered = slice(one.start, one.stop)
    assert torch.equal(after[delivered], vector[delivered] + before[delivered] - sent)
    assert torch.equal(after[two.start : two.stop], before[two.start : two.stop])


def test_the_compression_error_of_a_successor_goes_into_the_next_round() -> None:
    """The lost reducer would have corrected its next average; its successor sends the error instead."""
    chance = torch.Generator().manual_seed(4)
    work, feedback = fed("float16", torch.randn(NUMEL, generator=chance))
    lost = work.plan.chunks[1]  # of the member at place 1
    theirs = torch.randn(lost.numel, generator=chance)
    payload = bytes(work.codec.encode(theirs, torch.empty(2 * lost.numel, dtype=torch.uint8)))
    (done,) = work.reduce([ReductionJob(lost, [Contribution(1, 1.0, payload)], own=True)])
    assert isinstance(done, Averaged)
    work.conclude({lost.index: Version(1, done.contributors, done.digest)})
    exact = work.vector.read(lost.start, lost.stop) + theirs.half().float()
    average = torch.frombuffer(bytearray(unpack(done.message)[1]), dtype=torch.float16).float()
    residual = feedback.state_dict()["sender"][lost.start : lost.stop]
    assert torch.equal(residual, 2.0 * (exact / 2.0 - average))
    assert float(residual.abs().max()) > 0.0
