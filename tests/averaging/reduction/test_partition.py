"""The cut of the vector: it covers everything once, in order, whatever the sizes and shares."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from averaging.reduction import partition
from averaging.reduction.partition import (
    ALIGNMENT_ELEMENTS,
    PART_BYTES_SMALL,
    PART_ELEMENTS_MAX,
    part_bytes_for,
    plan_parts,
    spans,
)
from swarm.compression import find
from swarm.core.errors import UsageError

numels = st.one_of(
    st.integers(0, 20), st.integers(0, 5_000_000), st.sampled_from([1023, 1024, 1025, 4096, 1 << 20])
)
share_lists = st.lists(st.one_of(st.just(0.0), st.floats(1e-3, 1e12)), min_size=1, max_size=20).filter(any)


@given(numels, share_lists, st.sampled_from(["float32", "float16"]), st.integers(1024, 1 << 20))
@settings(max_examples=200, deadline=None)
def test_covers_exactly(numel: int, shares: list[float], codec: str, part_bytes: int) -> None:
    plan = plan_parts(numel, shares, find(codec), part_bytes)
    assert plan.numel == numel
    assert [part.index for part in plan.parts] == list(range(len(plan.parts)))
    edges = [0, *(part.stop for part in plan.parts)]
    assert [part.start for part in plan.parts] == edges[:-1]
    assert edges[-1] == numel
    assert all(part.numel > 0 for part in plan.parts)
    assert all(part.start % ALIGNMENT_ELEMENTS == 0 for part in plan.parts)
    assert [part.reducer for part in plan.parts] == sorted(part.reducer for part in plan.parts)
    assert all(shares[part.reducer] > 0 for part in plan.parts)
    size_max = max(part_bytes, find(codec).encoded_bytes(ALIGNMENT_ELEMENTS))
    assert all(find(codec).encoded_bytes(part.numel) <= size_max for part in plan.parts)
    assert [part for place in plan.reducers for part in plan.of_reducer(place)] == list(plan.parts)


@given(numels, share_lists)
@settings(max_examples=200, deadline=None)
def test_spans_follow_shares(numel: int, shares: list[float]) -> None:
    cut = spans(numel, shares)
    assert [start for start, _ in cut] == [0, *(stop for _, stop in cut)][:-1]
    assert cut[-1][1] == numel
    total = sum(shares)
    for (start, stop), share in zip(cut, shares, strict=True):
        assert abs((stop - start) - numel * share / total) <= ALIGNMENT_ELEMENTS + 1e-6 * numel
        assert share > 0 or start == stop


def test_parts_of_a_span_are_of_one_size() -> None:
    plan = plan_parts(16_000_000, [1.0] * 4, find("float32"), 1 << 20)
    sizes = [part.numel for part in plan.parts]
    assert len(plan.parts) == 64
    assert max(sizes) - min(sizes) <= 2 * ALIGNMENT_ELEMENTS


def test_a_tiny_vector_has_one_part() -> None:
    assert len(plan_parts(3, [1.0] * 8, find("float32"), 1 << 20).parts) == 1


def test_same_on_all_members_and_different_otherwise() -> None:
    codec = find("float32")
    one = plan_parts(100_000, [0.1, 0.2, 0.7], codec, 1 << 14)
    assert one == plan_parts(100_000, [0.1, 0.2, 0.7], codec, 1 << 14)
    digests = {
        one.digest(codec),
        one.digest(find("float16")),
        plan_parts(100_001, [0.1, 0.2, 0.7], codec, 1 << 14).digest(codec),
        plan_parts(100_000, [0.1, 0.7, 0.2], codec, 1 << 14).digest(codec),
        plan_parts(100_000, [0.1, 0.2, 0.7], codec, 1 << 15).digest(codec),
    }
    assert len(digests) == 5


def test_the_same_cut_among_others_is_another_plan() -> None:
    codec = find("float32")
    two, three = (plan_parts(5000, [1.0, *[0.0] * idle], codec, 1 << 14) for idle in (1, 2))
    assert two.parts == three.parts
    assert two.digest(codec) != three.digest(codec)


def test_refuses() -> None:
    for shares in ([0.0, 0.0], []):
        with pytest.raises(UsageError, match="nobody in this group can reduce"):
            spans(10, shares)
    for shares in ([1.0, -1.0], [2.0, -1.0]):
        with pytest.raises(UsageError, match="nobody"):
            spans(10, shares)
    with pytest.raises(UsageError, match="too many parts"):
        plan_parts(1 << 60, [1.0], find("float32"), 1024)
    assert spans(0, [0.0, 0.0]) == [(0, 0), (0, 0)]


def test_there_are_never_more_parts_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition, "PARTS_MAX", 4)
    codec, least = find("float32"), 4 * ALIGNMENT_ELEMENTS  # bytes of the smallest parts
    assert len(plan_parts(2 * ALIGNMENT_ELEMENTS, [1.0, 1.0], codec, least).parts) == 2
    with pytest.raises(UsageError, match="too many parts"):
        plan_parts(2 * ALIGNMENT_ELEMENTS + 1, [1.0, 1.0], codec, least)


def test_equal_shares_are_equal() -> None:
    sizes = {stop - start for start, stop in spans(1024 * 40, [0.3] * 10)}
    assert sizes == {4096}
    assert all(
        earlier[1] == later[0] for earlier, later in itertools.pairwise(spans(99_999, [3.0, 1.0, 2.0]))
    )


@pytest.mark.parametrize("codec", ["topk", "sign", "float32"])
def test_parts_need_bounded_working_space(codec: str) -> None:
    plan = plan_parts(100_000_000, [1.0, 2.0], find(codec), 1 << 20)
    assert max(part.numel for part in plan.parts) <= PART_ELEMENTS_MAX
    assert max(find(codec).encoded_bytes(part.numel) for part in plan.parts) <= 1 << 20


def test_parts_are_small_where_a_link_is_slow() -> None:
    assert part_bytes_for([125e6, 125e6], 1 << 20) == 1 << 20
    # a member that does not reduce has announced no speed
    assert part_bytes_for([125e6, 0.0], 1 << 20) == 1 << 20
    assert PART_BYTES_SMALL < part_bytes_for([125e6, 12.5e6], 1 << 20) < 1 << 20
    assert part_bytes_for([125e6, 1.0], 1 << 20) == PART_BYTES_SMALL
    assert part_bytes_for([1.0], 4096) == 4096
