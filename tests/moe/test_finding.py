"""Patterns of names for finding experts, against brute force."""

from __future__ import annotations

import itertools

import pytest

from moe.protocol.finding import ExpertPattern
from moe.protocol.names import ExpertUid
from swarm.core.errors import UsageError

NAMES = [
    ExpertUid(block, coordinates)
    for block in ("ffn", "other")
    for depth in (1, 2, 3)
    for coordinates in itertools.product(range(3), repeat=depth)
]


@pytest.mark.parametrize(
    ("pattern", "wanted"),
    [
        ("ffn.*", lambda one: one.block == "ffn"),
        ("ffn.1", lambda one: one == ExpertUid("ffn", (1,))),
        ("ffn.1.*", lambda one: one.block == "ffn" and len(one.coordinates) > 1 and one.coordinates[0] == 1),
        (
            "ffn.[0:2]",
            lambda one: one.block == "ffn" and len(one.coordinates) == 1 and one.coordinates[0] < 2,
        ),
        (
            "ffn.[0:2].*",
            lambda one: one.block == "ffn" and len(one.coordinates) > 1 and one.coordinates[0] < 2,
        ),
        (
            "ffn.*.[1:3]",
            lambda one: one.block == "ffn" and len(one.coordinates) == 2 and one.coordinates[1] > 0,
        ),
        (
            "ffn.*.2.*",
            lambda one: one.block == "ffn" and len(one.coordinates) > 2 and one.coordinates[1] == 2,
        ),
    ],
)
def test_a_pattern_stands_for_the_same_names_as_brute_force(pattern: str, wanted: object) -> None:
    assert callable(wanted)
    parsed = ExpertPattern.parse(pattern)
    expected = [one for one in NAMES if wanted(one)]
    assert expected
    assert [one for one in NAMES if one in parsed] == expected
    assert all(parsed.has_prefix(prefix) for one in expected for prefix in one.prefixes)
    hopeless = {prefix for one in NAMES for prefix in one.prefixes if not parsed.has_prefix(prefix)}
    assert not any(prefix in hopeless for one in expected for prefix in one.prefixes)
    assert ExpertUid("other", ()) in hopeless


@pytest.mark.parametrize(
    "text", ["", "ffn", "*", "*.1", "ffn.x", "ffn.[2:1]", "ffn..*", "ffn.-1", "ffn" + ".*" * 10]
)
def test_a_malformed_pattern_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        ExpertPattern.parse(text)
