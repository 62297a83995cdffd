"""Names of experts and patterns of names, valid and invalid."""

from __future__ import annotations

import pytest

from moe.protocol.names import ExpertGrid, ExpertUid
from swarm.core.errors import UsageError


def test_a_name_is_parsed_and_lists_its_prefixes() -> None:
    uid = ExpertUid.parse("ffn.3.17")
    assert (uid.block, uid.coordinates, str(uid)) == ("ffn", (3, 17), "ffn.3.17")
    assert list(map(str, uid.prefixes)) == ["ffn", "ffn.3"]
    assert str(uid.prefix) == "ffn.3"
    assert str(uid.prefix.child(4)) == "ffn.3.4"


@pytest.mark.parametrize(
    "text",
    [
        "ffn",
        "",
        "ffn.",
        ".3",
        "ffn.-1",
        "ffn.03",
        "ffn.4096",
        "ffn.1e3",
        "3.ffn",
        "ffn 3",
        "ffn.٣",
        "a" * 49 + ".0",
        "x" + ".1" * 9,
    ],
)
def test_invalid_names_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        ExpertUid.parse(text)


def test_a_pattern_lists_its_names() -> None:
    grid = ExpertGrid.parse("ffn.[1:3].7.[0:2]")
    assert list(map(str, grid.names())) == ["ffn.1.7.0", "ffn.1.7.1", "ffn.2.7.0", "ffn.2.7.1"]
    assert (grid.shape, grid.count, str(grid)) == ((2, 1, 2), 4, "ffn.[1:3].7.[0:2]")
    assert all(uid in grid for uid in grid.names())
    assert ExpertUid.parse("ffn.3.7.0") not in grid
    assert ExpertUid.parse("ffn.1.7") not in grid


@pytest.mark.parametrize(
    "text",
    ["ffn", "ffn.[0:0]", "ffn.[4:2]", "ffn.[0:4097]", "ffn.[a:b]", "ffn.[0:4", "ffn.[]", "ffn.[0:2].x"],
)
def test_invalid_patterns_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        ExpertGrid.parse(text)


def test_a_large_grid_is_counted_but_not_listed() -> None:
    grid = ExpertGrid.parse("ffn.[0:4096].[0:4096].[0:4096]")
    assert grid.count == 4096**3
    with pytest.raises(UsageError, match="at most"):
        grid.names()
