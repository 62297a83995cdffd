"""The reducer: the same bytes whatever the order of arrival, and nothing accepted that was not due."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from averaging.reduction.partition import plan_chunks
from averaging.reduction.reduce import Block, Contribution, Mean, Reduction, blocks, relative_weights
from swarm.compression import Codec, find
from swarm.core.errors import PeerError

CODEC = find("float32")
CHUNK_BYTES = 1 << 14


def average(
    contributions: Sequence[Contribution], codec: Codec, total: torch.Tensor, scratch: torch.Tensor
) -> None:
    """The mean of a chunk that is one block."""
    Mean(contributions, codec).compute(
        Block(0, total.numel(), 0, codec.encoded_bytes(total.numel())), total, scratch
    )


def payload(values: torch.Tensor, codec: str = "float32") -> bytes:
    found = find(codec)
    return bytes(found.encode(values, torch.empty(found.encoded_bytes(values.numel()), dtype=torch.uint8)))


@given(
    st.integers(0, 2**32),
    st.integers(2, 6),
    st.sampled_from(["float32", "float16", "bfloat16"]),
    st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_any_order_of_arrival_gives_the_same_bytes(
    seed: int, members: int, codec_name: str, with_loss: bool
) -> None:
    """Members at places 1.. send to the reducer at place 0; one of them may be left out at a
    random moment.
    """
    codec = find(codec_name)
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    numel = rng.choice([1, 100, 5000, 30_000])
    vectors = [torch.randn(numel, generator=generator) for _ in range(members)]
    weights = relative_weights([rng.choice([1.0, 0.3, 17.0]) for _ in range(members)])
    plan = plan_chunks(numel, [1.0] + [0.0] * (members - 1), codec, CHUNK_BYTES)
    reduction = Reduction(plan.chunks, range(1, members), codec)
    queues = {place: list(plan.chunks) for place in range(1, members)}
    lost = rng.randrange(1, members) if with_loss else None
    results: dict[int, torch.Tensor] = {}
    inside: dict[int, list[int]] = {}

    def reduce(ready: list[int]) -> None:
        for index in ready:
            chunk = plan.chunks[index]
            inside[index] = list(reduction.take(index))
            given = [Contribution(0, weights[0], vectors[0][chunk.start : chunk.stop])]
            for place in inside[index]:
                raw = payload(vectors[place][chunk.start : chunk.stop], codec_name)
                given.append(Contribution(place, weights[place], raw))
            results[index] = torch.empty(chunk.numel)
            average(given, codec, results[index], torch.empty(chunk.numel))

    reduce(reduction.ready_at_start())
    while any(queues.values()):
        place = rng.choice([place for place, queue in queues.items() if queue])
        if place == lost and rng.random() < 0.3:
            queues[place].clear()
            reduce(reduction.leave_out(place, "it died"))
            continue
        chunk = queues[place].pop(0)
        reduce(reduction.accept(place, chunk.index, codec.encoded_bytes(chunk.numel)))
        assert reduction.ahead(place) <= len(plan.chunks)
    assert sorted(results) == [chunk.index for chunk in plan.chunks]
    for chunk in plan.chunks:
        expected = torch.empty(chunk.numel)
        places = [0, *inside[chunk.index]]
        slices = {place: vectors[place][chunk.start : chunk.stop] for place in places}
        given = [
            Contribution(
                place, weights[place], payload(slices[place], codec_name) if place else slices[place]
            )
            for place in places
        ]
        average(given, codec, expected, torch.empty(chunk.numel))
        assert torch.equal(results[chunk.index], expected)
        assert all(place in places for place in range(members) if place != lost)


def test_the_arithmetic_is_float32_in_group_order() -> None:
    values = [np.float32(1e8), np.float32(1.0), np.float32(-1e8), np.float32(0.25)]
    weights = relative_weights([2.0, 4.0, 4.0, 1.0])
    given = [Contribution(place, weights[place], torch.tensor([value])) for place, value in enumerate(values)]
    total = torch.empty(1)
    average(given, CODEC, total, torch.empty(1))
    expected = np.float32(0)
    for weight, value in zip(weights, values, strict=True):
        expected = np.float32(expected + np.float32(np.float32(weight) * value))
    assert total[0].item() == float(np.float32(expected / np.float32(sum(weights))))


@pytest.mark.parametrize("weights", [[1.0], [3.0], [1.0, 1.0, 1.0], [5.0, 5.0], [1.0, 0.0, 2.0], [1e12, 1.0]])
def test_the_reduced_chunk_is_close_to_the_exact_mean(weights: list[float]) -> None:
    generator = torch.Generator().manual_seed(1)
    vectors = [torch.randn(10_000, generator=generator) for _ in weights]
    relative = relative_weights(weights)
    inputs = [
        Contribution(place, relative[place], vector)
        for place, vector in enumerate(vectors)
        if relative[place]
    ]
    total = torch.empty(10_000)
    average(inputs, CODEC, total, torch.empty(10_000))
    exact = sum(weight * vector.double() for weight, vector in zip(weights, vectors, strict=True)) / sum(
        weights
    )
    assert torch.allclose(total.double(), torch.as_tensor(exact), atol=1e-6, rtol=1e-6)


def test_reducing_does_not_change_its_inputs() -> None:
    vectors = [torch.full((100,), float(value)) for value in (1, 2, 3)]
    raw = payload(vectors[1])
    for inputs in (
        [Contribution(0, 1.0, vectors[0]), Contribution(1, 1.0, raw), Contribution(2, 0.5, vectors[2])],
        [Contribution(0, 1.0, vectors[0])],
    ):
        average(inputs, CODEC, torch.empty(100), torch.empty(100))
    assert [float(vector[0]) for vector in vectors] == [1.0, 2.0, 3.0]
    assert raw == payload(torch.full((100,), 2.0))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_senders_of_nan_and_infinity_are_found(bad: float) -> None:
    poisoned = torch.ones(100)
    poisoned[42] = bad
    for name in ("float32", "float16"):
        codec = find(name)
        mean = Mean(
            [
                Contribution(0, 1.0, torch.ones(100)),
                Contribution(3, 1.0, payload(poisoned, name)),
                Contribution(4, 0.5, payload(torch.ones(100), name)),
                Contribution(5, 0.5, poisoned),
            ],
            codec,
        )
        total = torch.empty(100)
        mean.compute(Block(0, 100, 0, codec.encoded_bytes(100)), total, torch.empty(100))
        assert not codec.is_finite(payload(total, name))
        assert mean.spoilers() == (3, 5)


def test_an_overflow_of_the_sum_blames_no_contributor() -> None:
    huge = torch.full((4,), 3e38)
    total = torch.empty(4)
    mean = Mean([Contribution(0, 1.0, huge), Contribution(1, 1.0, huge)], CODEC)
    mean.compute(Block(0, 4, 0, 16), total, torch.empty(4))
    assert not CODEC.is_finite(payload(total))
    assert mean.spoilers() == ()


def test_a_mean_of_largest_values_can_be_encoded() -> None:
    codec = find("float16")
    largest = torch.full((64,), codec.magnitude_max)
    for weights in ([1.0, 0.7, 0.13, 0.377], [1.0, 1e-3, 0.999], [0.3, 0.1]):
        total = torch.empty(64)
        inputs = [
            Contribution(place, weight, payload(largest, "float16"))
            for place, weight in enumerate(relative_weights(weights))
        ]
        average(inputs, codec, total, torch.empty(64))
        assert torch.equal(total.half(), largest.half())


def test_weights_are_scaled_to_a_largest_of_one() -> None:
    assert relative_weights([32.0, 32.0]) == (1.0, 1.0)
    assert relative_weights([1.0, 0.0, 2.0]) == (0.5, 0.0, 1.0)
    assert relative_weights([0.0, 0.0]) == (0.0, 0.0)
    assert relative_weights([]) == ()


def test_only_due_contributions_are_accepted() -> None:
    plan = plan_chunks(30_000, [1.0, 0.0, 0.0, 0.0], CODEC, CHUNK_BYTES)
    first, second = plan.chunks[:2]
    reduction = Reduction(plan.chunks, [1, 2], CODEC)

    def size(chunk: int) -> int:
        return CODEC.encoded_bytes(plan.chunks[chunk].numel)

    for sender, chunk, size_bytes, message in [
        (3, 0, size(0), "contributes nothing"),
        (0, 0, size(0), "contributes nothing"),
        (1, 99, size(0), "chunk 99, which is not reduced here"),
        (1, 0, size(0) - 4, "takes"),
        (1, 0, 0, "with 0 bytes"),
    ]:
        with pytest.raises(PeerError, match=message):
            reduction.accept(sender, chunk, size_bytes)
    assert reduction.accept(1, first.index, size(0)) == []
    with pytest.raises(PeerError, match="chunk 0, which is not reduced here or came before"):
        reduction.accept(1, first.index, size(0))
    assert reduction.ahead(1) == 1
    assert reduction.remaining(2) == len(plan.chunks)
    assert reduction.leave_out(2, "it sent garbage") == [first.index]
    assert reduction.leave_out(2, "again") == []
    assert reduction.left_out == {2: "it sent garbage"}
    with pytest.raises(PeerError, match="after being left out: it sent garbage"):
        reduction.accept(2, first.index, size(0))
    assert reduction.remaining(2) == 0
    assert reduction.take(first.index) == (1,)
    assert reduction.ahead(1) == 0
    assert reduction.accept(1, second.index, size(1)) == [second.index]


def test_all_chunks_are_ready_when_nobody_else_contributes() -> None:
    plan = plan_chunks(3000, [1.0], CODEC, CHUNK_BYTES)
    reduction = Reduction(plan.chunks, [], CODEC)
    assert reduction.ready_at_start() == [0]
    assert reduction.take(0) == ()


def test_blocks_cover_a_chunk() -> None:
    for codec in map(find, ("float32", "float16")):
        for chunk in plan_chunks(1_000_000, [1.0, 3.0], codec, 1 << 20).chunks:
            cut = blocks(chunk, codec)
            assert cut[0].start == cut[0].first_byte == 0
            assert (cut[-1].stop, cut[-1].end_byte) == (chunk.numel, codec.encoded_bytes(chunk.numel))
            assert all(
                one.stop == other.start and one.end_byte == other.first_byte
                for one, other in itertools.pairwise(cut)
            )
            assert all(block.stop - block.start <= codec.block_elements for block in cut)
