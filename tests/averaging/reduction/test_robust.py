"""Robust aggregation against brute force: every rule, its properties, clipping, and what cannot
be averaged.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from averaging.reduction.partition import Chunk
from averaging.reduction.reduce import Contribution, blocks
from averaging.reduction.robust import (
    CLIP_ITERATIONS,
    MEAN,
    RULES,
    Aggregation,
    Prepared,
    Rows,
    clip_scales,
    network,
    prepare,
    trimmed,
)
from swarm.compression import find
from swarm.compression.plain import PlainCodec
from swarm.core.errors import UsageError

Array = npt.NDArray[np.float32]
ROBUST = [rule for rule in RULES if rule != "mean"]
FLOAT32_MAX = float(np.finfo(np.float32).max)


def contributions(
    vectors: Sequence[Array], codec: PlainCodec, weights: Sequence[float] | None = None
) -> list[Contribution]:
    """The first is the reducer's own: a tensor as it is, the others as they travel."""
    made = []
    for place, vector in enumerate(vectors):
        values = torch.from_numpy(vector.copy())
        scratch = torch.empty(codec.encoded_bytes(len(vector)), dtype=torch.uint8)
        made.append(
            Contribution(
                place,
                weights[place] if weights else 1.0,
                bytes(codec.encode(values, scratch)) if len(vector) and place else values,
            )
        )
    return made


def aggregate(
    aggregation: Aggregation,
    vectors: Sequence[Array],
    codec_name: str = "float32",
    block: int = 1 << 15,
    weights: Sequence[float] | None = None,
) -> tuple[Array, Prepared]:
    found = find(codec_name)
    assert isinstance(found, PlainCodec)
    codec = replace(found, block=block)
    numel = len(vectors[0])
    cut = blocks(Chunk(0, 0, 0, numel), codec) if numel else []
    total, scratch = torch.empty(numel), torch.empty(numel)
    prepared = prepare(aggregation, contributions(vectors, codec, weights), codec, cut, total, Rows())
    for one in cut if not prepared.spoiled else []:
        prepared.rule.compute(one, total[one.start : one.stop], scratch[: one.stop - one.start])
    return total.numpy(), prepared


def by_brute_force(aggregation: Aggregation, vectors: Sequence[Array]) -> npt.NDArray[np.float64]:
    """In float64, with sorts, and centered clipping as the paper has it."""
    x = np.stack(vectors).astype(np.float64)
    if aggregation.clip_to_median is not None:
        lengths = np.linalg.norm(x, axis=1)
        longest = aggregation.clip_to_median * np.median(lengths)
        if longest > 0:
            x *= np.minimum(1.0, longest / np.maximum(lengths, 1e-300))[:, None]
    if aggregation.rule == "mean":
        return np.asarray(x.mean(axis=0))
    if aggregation.rule in ("median", "median_of_three"):
        return np.asarray(np.median(x, axis=0))
    if aggregation.rule == "trimmed_mean":
        cut_off = trimmed(aggregation.trim, len(x))
        return np.asarray(np.sort(x, axis=0)[cut_off : len(x) - cut_off].mean(axis=0))
    v = np.median(x, axis=0)
    radius = aggregation.radius * np.sort(np.linalg.norm(x - v, axis=1))[(len(x) - 1) // 2]
    for _ in range(CLIP_ITERATIONS):
        apart = np.linalg.norm(x - v, axis=1)
        v = v + ((x - v) * np.minimum(1.0, radius / np.maximum(apart, 1e-300))[:, None]).mean(axis=0)
    return np.asarray(v)


def draw(seed: int, members: int, numel: int, spread: float = 1.0) -> list[Array]:
    generator = np.random.default_rng(seed)
    return [(1.0 + spread * generator.standard_normal(numel)).astype(np.float32) for _ in range(members)]


# ---- against brute force


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("members", [1, 2, 3, 4, 5, 7, 8, 13])
@pytest.mark.parametrize("clip", [None, 1.5])
def test_every_rule_matches_brute_force(rule: str, members: int, clip: float | None) -> None:
    aggregation = Aggregation(rule=rule, clip_to_median=clip)
    vectors = draw(members, members, 70_001)
    vectors[-1] *= np.float32(1e6 if members > 2 else 3.0)  # one is far away
    found, _ = aggregate(aggregation, vectors)
    expected = by_brute_force(aggregation, vectors)
    scale = np.abs(expected).max()
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-6 * scale)


@pytest.mark.parametrize("rule", ROBUST)
@pytest.mark.parametrize("codec", ["float16", "bfloat16"])
def test_rules_use_the_decoded_values(rule: str, codec: str) -> None:
    vectors = draw(3, 5, 9000)
    dtype = getattr(torch, codec)
    sent = [vectors[0], *(torch.from_numpy(vector).to(dtype).float().numpy() for vector in vectors[1:])]
    found, _ = aggregate(Aggregation(rule=rule), vectors, codec)
    again, _ = aggregate(Aggregation(rule=rule), sent)
    np.testing.assert_array_equal(found, again)


@pytest.mark.parametrize("rule", RULES)
def test_the_size_of_blocks_does_not_change_the_result(rule: str) -> None:
    """Machines cut chunks into blocks of their own size, at multiples of 32,768: an auditor's must not
    matter.
    """
    vectors = draw(4, 5, 300_000)
    vectors[2] *= np.float32(100.0)
    aggregation = Aggregation(rule=rule, clip_to_median=3.0)
    results = [aggregate(aggregation, vectors, block=block)[0] for block in (1 << 15, 1 << 17, 1 << 18)]
    assert results[0].tobytes() == results[1].tobytes() == results[2].tobytes()


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_centered_clipping_beyond_the_squares_of_float32(scale: float) -> None:
    vectors = [vector * np.float32(scale) for vector in draw(5, 6, 1000)]
    vectors[3] *= np.float32(1e4)
    aggregation = Aggregation(rule="centered_clip")
    found, _ = aggregate(aggregation, vectors)
    np.testing.assert_allclose(found / scale, by_brute_force(aggregation, vectors) / scale, rtol=1e-4)
    found, prepared = aggregate(Aggregation(clip_to_median=2.0), vectors)
    assert prepared.clipped == (3,)
    np.testing.assert_allclose(
        found / scale, by_brute_force(Aggregation(clip_to_median=2.0), vectors) / scale, rtol=1e-4
    )


def test_the_network_sorts_without_unneeded_comparisons() -> None:
    """Zeros and ones in every arrangement prove it for all values (Knuth's 0-1 principle)."""
    for count in range(1, 10):
        for first, end in {(0, count), ((count - 1) // 2, count // 2 + 1), (count // 4, count - count // 4)}:
            for values in itertools.product((0, 1), repeat=count):
                rows: list[float] = list(values)
                for i, j, smaller, larger in network(count, first, end):
                    low, high = min(rows[i], rows[j]), max(rows[i], rows[j])
                    rows[i], rows[j] = low if smaller else math.nan, high if larger else math.nan
                assert rows[first:end] == sorted(values)[first:end]
    assert len(network(8, 0, 8)) == 19
    assert sum(smaller + larger for _, _, smaller, larger in network(9, 4, 5)) < 2 * len(network(9, 0, 9))


# ---- properties

FLOATS = st.floats(-(2.0**100), 2.0**100, width=32)


@given(
    st.sampled_from(ROBUST),
    st.integers(1, 9).flatmap(
        lambda n: st.lists(st.lists(FLOATS, min_size=3, max_size=3), min_size=n, max_size=n)
    ),
    st.randoms(),
)
@settings(max_examples=150, deadline=None)
def test_the_order_of_members_does_not_matter(rule: str, rows: list[list[float]], rng: object) -> None:
    vectors = [np.array(row, np.float32) for row in rows]
    shuffled = list(vectors)
    rng.shuffle(shuffled)  # type: ignore[attr-defined]
    one, other = aggregate(Aggregation(rule=rule), vectors)[0], aggregate(Aggregation(rule=rule), shuffled)[0]
    if rule == "centered_clip":
        scale = float(np.abs(np.stack(vectors)).max())
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-5 * scale)
    else:
        assert one.tobytes() == other.tobytes()


@given(
    st.sampled_from(ROBUST),
    st.integers(1, 12),
    st.lists(st.floats(-FLOAT32_MAX / 16, FLOAT32_MAX / 16, width=32), min_size=1, max_size=5),
)
@settings(max_examples=150, deadline=None)
def test_equal_contributions_give_exactly_their_values(rule: str, members: int, row: list[float]) -> None:
    vector = np.array(row, np.float32)
    found, _ = aggregate(Aggregation(rule=rule), [vector] * members)
    np.testing.assert_array_equal(found, vector)


@given(st.integers(3, 11), st.data())
@settings(max_examples=150, deadline=None)
def test_dishonest_members_cannot_move_the_result_out_of_the_honest_range(
    members: int, data: st.DataObject
) -> None:
    rule = data.draw(st.sampled_from(["median", "trimmed_mean"]))
    aggregation = Aggregation(rule=rule)
    liars = data.draw(
        st.integers(0, (members - 1) // 2 if rule == "median" else trimmed(aggregation.trim, members))
    )
    honest = [
        np.array(data.draw(st.lists(st.floats(-10, 10, width=32), min_size=4, max_size=4)), np.float32)
        for _ in range(members - liars)
    ]
    hostile = [
        np.array(
            data.draw(st.lists(st.floats(-(2.0**124), 2.0**124, width=32), min_size=4, max_size=4)),
            np.float32,
        )
        for _ in range(liars)
    ]
    vectors = data.draw(st.permutations([*honest, *hostile]))
    found, _ = aggregate(aggregation, vectors)
    assert (found >= np.min(honest, axis=0)).all()
    assert (found <= np.max(honest, axis=0)).all()


@pytest.mark.parametrize("liars", [1, 2, 3])
@pytest.mark.parametrize("far", [1e2, 1e8, 1e18])
def test_dishonest_members_move_centered_clipping_by_a_limited_distance(liars: int, far: float) -> None:
    aggregation = Aggregation(rule="centered_clip")
    honest = draw(8, 8 - liars, 2000, spread=0.1)
    lies = [np.full(2000, far, np.float32)] * liars
    found, _ = aggregate(aggregation, [*honest, *lies])
    middle = np.median(np.stack([*honest, *lies]).astype(np.float64), axis=0)
    radius = max(np.linalg.norm(vector - middle) for vector in honest)
    assert np.linalg.norm(found - middle) <= CLIP_ITERATIONS * radius * 1.001
    centre = np.mean(np.stack(honest).astype(np.float64), axis=0)
    assert np.linalg.norm(found - centre) < 6 * radius
    # what the mean would have done
    assert np.linalg.norm(np.mean([*honest, *lies], axis=0, dtype=np.float64) - centre) > far


def test_the_trim_is_a_share_and_at_least_one() -> None:
    assert [trimmed(0.25, members) for members in range(1, 13)] == [0, 0, 1, 1, 1, 1, 1, 2, 2, 2, 2, 3]
    assert [trimmed(0.1, members) for members in (3, 10, 19, 20, 30)] == [1, 1, 1, 2, 3]
    assert [trimmed(0.49, members) for members in (3, 4, 5, 100)] == [1, 1, 2, 49]


# ---- weights


def test_claimed_weights_change_no_robust_rule() -> None:
    vectors = draw(6, 5, 100)
    claims = [1e-6, 1e-6, 1e-6, 1e-6, 1.0]
    for rule in RULES:
        same = np.array_equal(
            aggregate(Aggregation(rule=rule), vectors)[0],
            aggregate(Aggregation(rule=rule), vectors, weights=claims)[0],
        )
        assert same == (rule != "mean")
    weighted, _ = aggregate(Aggregation(clip_to_median=50.0), vectors, weights=claims)
    # nobody is clipped: the same bits
    np.testing.assert_array_equal(weighted, aggregate(MEAN, vectors, weights=claims)[0])


# ---- clipping


def test_clipping_is_exact() -> None:
    vectors = draw(7, 5, 40_000)
    lengths = [float(np.linalg.norm(vector.astype(np.float64))) for vector in vectors]
    vectors[1] *= np.float32(1000.0)
    vectors[4][:] = 0.0
    found, prepared = aggregate(Aggregation(clip_to_median=10.0), vectors)
    assert prepared.clipped == (1,)
    middle = float(np.median([lengths[0], lengths[1] * 1000.0, lengths[2], lengths[3], 0.0]))
    shortened = vectors[1].astype(np.float64) * (10.0 * middle / (lengths[1] * 1000.0))
    np.testing.assert_allclose(
        found,
        np.mean([vectors[0], shortened, vectors[2], vectors[3], vectors[4]], axis=0),
        rtol=1e-4,
        atol=1e-5,
    )
    exactly = clip_scales([1.0, 2.0, 3.0, 40.0], 10.0)
    assert exactly == [1.0, 1.0, 1.0, 25.0 / 40.0]
    assert clip_scales([1.0, 1.0, 10.0], 10.0) == [1.0, 1.0, 1.0]  # at the limit is within it
    assert clip_scales([0.0, 0.0, 7.0], 10.0) == [1.0, 1.0, 1.0]  # most contribute nothing: nobody is clipped
    assert clip_scales([1.0, 1000.0], 10.0) == [1.0, 1.0]  # nobody can tell which of two is the odd one
    assert clip_scales([5.0], 1.0) == [1.0]


# ---- what is no number


@pytest.mark.parametrize("rule", ROBUST)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 2])
def test_robust_rules_report_nan_and_infinity(rule: str, value: float, place: int) -> None:
    vectors = draw(9, 5, 1000)
    vectors[place][700] = value
    for aggregation in (Aggregation(rule=rule), Aggregation(clip_to_median=10.0)):
        assert aggregate(aggregation, vectors)[1].spoiled == (place,)


@pytest.mark.parametrize("rule", RULES)
def test_one_contributor_is_returned_unchanged_and_empty_vectors_stay_empty(rule: str) -> None:
    (vector,) = draw(10, 1, 5)
    for clip in (None, 10.0):
        np.testing.assert_array_equal(
            aggregate(Aggregation(rule=rule, clip_to_median=clip), [vector])[0], vector
        )
        assert not len(
            aggregate(Aggregation(rule=rule, clip_to_median=clip), [np.empty(0, np.float32)] * 3)[0]
        )


# ---- settings


def test_the_compatibility_tag_names_only_settings_that_the_rule_uses() -> None:
    assert len({Aggregation(rule=rule).compatibility_tag for rule in RULES}) == len(RULES)
    # what the rule does not use keeps nobody apart
    assert Aggregation(trim=0.1).compatibility_tag == MEAN.compatibility_tag == "mean"
    assert (
        Aggregation(rule="trimmed_mean", trim=0.1).compatibility_tag
        != Aggregation(rule="trimmed_mean").compatibility_tag
    )
    assert (
        Aggregation(clip_to_median=10).compatibility_tag
        == Aggregation(clip_to_median=10.0).compatibility_tag
        != MEAN.compatibility_tag
    )
    wrong: list[dict[str, object]] = [
        {"rule": "krum"},
        {"trim": 0.5},
        {"trim": 0.0},
        {"radius": 0.0},
        {"clip_to_median": 0.5},
    ]
    for arguments in wrong:
        with pytest.raises(UsageError):
            Aggregation(**arguments)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="there is: mean, trimmed_mean, median, centered_clip"):
        Aggregation(rule="krum")


@pytest.mark.parametrize(
    ("weights", "shares"),
    [((1.0, 3.0), (0.25, 0.75)), ((1.0, 1e30), (0.2, 0.8)), ((100.0, 1.0), (0.8, 0.2))],
    ids=["within", "claims-too-much", "first-claims"],
)
def test_a_pair_counts_by_weights_up_to_a_ratio(
    weights: tuple[float, float], shares: tuple[float, float]
) -> None:
    vectors = draw(1, 2, 1000)
    found, _ = aggregate(Aggregation(rule="median_of_three"), vectors, weights=weights)
    expected = shares[0] * vectors[0].astype(np.float64) + shares[1] * vectors[1]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_from_three_contributors_on_the_median_counts_them_as_equals() -> None:
    vectors = draw(2, 3, 1000)
    found, _ = aggregate(Aggregation(rule="median_of_three"), vectors, weights=[1.0, 1.0, 1e30])
    np.testing.assert_array_equal(found, np.median(np.stack(vectors), axis=0))
