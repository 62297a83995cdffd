"""The cut of the vector: it covers everything once, in order, whatever the sizes and shares."""

from __future__ import annotations

import itertools
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from averaging.reduction import partition
from averaging.reduction.partition import (
    ALIGNMENT_ELEMENTS,
    CHUNK_BYTES_SMALL,
    CHUNK_ELEMENTS_MAX,
    chunk_bytes_for,
    cut_shards,
    plan_chunks,
)
from swarm.compression import find
from swarm.core.errors import UsageError

numels = st.one_of(
    st.integers(0, 20), st.integers(0, 5_000_000), st.sampled_from([1023, 1024, 1025, 4096, 1 << 20])
)
share_lists = st.lists(st.one_of(st.just(0.0), st.floats(1e-3, 1e12)), min_size=1, max_size=20).filter(any)


@given(numels, share_lists, st.sampled_from(["float32", "float16"]), st.integers(1024, 1 << 20))
@settings(max_examples=200, deadline=None)
def test_chunks_cover_the_vector_exactly(
    numel: int, shares: list[float], codec: str, chunk_bytes: int
) -> None:
    plan = plan_chunks(numel, shares, find(codec), chunk_bytes)
    assert plan.numel == numel
    assert [chunk.index for chunk in plan.chunks] == list(range(len(plan.chunks)))
    edges = [0, *(chunk.stop for chunk in plan.chunks)]
    assert [chunk.start for chunk in plan.chunks] == edges[:-1]
    assert edges[-1] == numel
    assert all(chunk.numel > 0 for chunk in plan.chunks)
    assert all(chunk.start % ALIGNMENT_ELEMENTS == 0 for chunk in plan.chunks)
    assert [chunk.reducer for chunk in plan.chunks] == sorted(chunk.reducer for chunk in plan.chunks)
    assert all(shares[chunk.reducer] > 0 for chunk in plan.chunks)
    size_max = max(chunk_bytes, find(codec).encoded_bytes(ALIGNMENT_ELEMENTS))
    assert all(find(codec).encoded_bytes(chunk.numel) <= size_max for chunk in plan.chunks)
    assert [chunk for place in plan.reducers for chunk in plan.shard(place)] == list(plan.chunks)


@given(numels, share_lists)
@settings(max_examples=200, deadline=None)
def test_shard_sizes_are_proportional_to_shares(numel: int, shares: list[float]) -> None:
    cut = cut_shards(numel, shares)
    assert [start for start, _ in cut] == [0, *(stop for _, stop in cut)][:-1]
    assert cut[-1][1] == numel
    total = sum(shares)
    for (start, stop), share in zip(cut, shares, strict=True):
        assert abs((stop - start) - numel * share / total) <= ALIGNMENT_ELEMENTS + 1e-6 * numel
        assert share > 0 or start == stop


@given(numels, share_lists)
@settings(max_examples=200, deadline=None)
def test_edges_of_shards_are_the_exact_ones_rounded(numel: int, shares: list[float]) -> None:
    exact = [Fraction(share) for share in shares]
    edges = [0]
    for cumulated in itertools.accumulate(exact):
        aligned = round(cumulated / sum(exact) * numel / ALIGNMENT_ELEMENTS) * ALIGNMENT_ELEMENTS
        edges.append(numel if cumulated == sum(exact) else min(max(aligned, edges[-1]), numel))
    assert cut_shards(numel, shares) == list(itertools.pairwise(edges))


def test_chunks_of_a_shard_are_of_one_size() -> None:
    plan = plan_chunks(16_000_000, [1.0] * 4, find("float32"), 1 << 20)
    sizes = [chunk.numel for chunk in plan.chunks]
    assert len(plan.chunks) == 64
    assert max(sizes) - min(sizes) <= 2 * ALIGNMENT_ELEMENTS


def test_a_tiny_vector_has_one_chunk() -> None:
    assert len(plan_chunks(3, [1.0] * 8, find("float32"), 1 << 20).chunks) == 1


def test_digests_are_equal_for_equal_plans_only() -> None:
    codec = find("float32")
    one = plan_chunks(100_000, [0.1, 0.2, 0.7], codec, 1 << 14)
    assert one == plan_chunks(100_000, [0.1, 0.2, 0.7], codec, 1 << 14)
    digests = {
        one.digest(codec),
        one.digest(find("float16")),
        plan_chunks(100_001, [0.1, 0.2, 0.7], codec, 1 << 14).digest(codec),
        plan_chunks(100_000, [0.1, 0.7, 0.2], codec, 1 << 14).digest(codec),
        plan_chunks(100_000, [0.1, 0.2, 0.7], codec, 1 << 15).digest(codec),
    }
    assert len(digests) == 5


def test_the_same_cut_among_others_is_another_plan() -> None:
    codec = find("float32")
    two, three = (plan_chunks(5000, [1.0, *[0.0] * idle], codec, 1 << 14) for idle in (1, 2))
    assert two.chunks == three.chunks
    assert two.digest(codec) != three.digest(codec)


def test_a_cut_without_reducers_or_with_too_many_chunks_is_refused() -> None:
    for shares in ([0.0, 0.0], []):
        with pytest.raises(UsageError, match="nobody in this group can reduce"):
            cut_shards(10, shares)
    for shares in ([1.0, -1.0], [2.0, -1.0]):
        with pytest.raises(UsageError, match="nobody"):
            cut_shards(10, shares)
    with pytest.raises(UsageError, match="too many chunks"):
        plan_chunks(1 << 60, [1.0], find("float32"), 1024)
    assert cut_shards(0, [0.0, 0.0]) == [(0, 0), (0, 0)]


def test_there_are_never_more_chunks_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition, "CHUNKS_MAX", 4)
    codec, least = find("float32"), 4 * ALIGNMENT_ELEMENTS  # bytes of the smallest chunks
    assert len(plan_chunks(2 * ALIGNMENT_ELEMENTS, [1.0, 1.0], codec, least).chunks) == 2
    with pytest.raises(UsageError, match="too many chunks"):
        plan_chunks(2 * ALIGNMENT_ELEMENTS + 1, [1.0, 1.0], codec, least)


def test_equal_shares_give_equal_shards_without_gaps() -> None:
    sizes = {stop - start for start, stop in cut_shards(1024 * 40, [0.3] * 10)}
    assert sizes == {4096}
    assert all(
        earlier[1] == later[0] for earlier, later in itertools.pairwise(cut_shards(99_999, [3.0, 1.0, 2.0]))
    )


@pytest.mark.parametrize("codec", ["topk", "sign", "float32"])
def test_chunks_need_bounded_working_space(codec: str) -> None:
    plan = plan_chunks(100_000_000, [1.0, 2.0], find(codec), 1 << 20)
    assert max(chunk.numel for chunk in plan.chunks) <= CHUNK_ELEMENTS_MAX
    assert max(find(codec).encoded_bytes(chunk.numel) for chunk in plan.chunks) <= 1 << 20


def test_chunks_are_small_where_a_link_is_slow() -> None:
    mib = 1 << 20
    assert chunk_bytes_for([125e6, 125e6], 64 * mib, mib) == mib
    # a member that does not reduce has announced no speed
    assert chunk_bytes_for([125e6, 0.0], 64 * mib, mib) == mib
    assert chunk_bytes_for([125e6, 40e6], mib, mib) == 800_000
    # 100 Mbit/s: 3 ms of it, and in a large vector a 16th of a shard, at most 20 ms
    assert chunk_bytes_for([125e6, 12.5e6], mib, mib) == 37_500
    assert chunk_bytes_for([125e6, 12.5e6], 4 * mib, mib) == 4 * mib // 2 // 16
    assert chunk_bytes_for([125e6, 12.5e6], 64 * mib, mib) == 250_000
    assert chunk_bytes_for([125e6, 1.0], mib, mib) == CHUNK_BYTES_SMALL
    assert chunk_bytes_for([1.0], 64 * mib, 4096) == 4096
