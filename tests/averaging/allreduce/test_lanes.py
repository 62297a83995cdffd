"""Lanes of a long link, and parts by the speed of links."""

from __future__ import annotations

import pytest

from averaging.allreduce.lanes import NEAR_S, Lane, RoundTrips
from averaging.reduction.partition import PART_BYTES_SMALL, part_bytes_for


@pytest.mark.parametrize("count", [1, 2, 3, 7])
@pytest.mark.parametrize("parts", [0, 1, 5, 14])
def test_every_part_has_one_lane(count: int, parts: int) -> None:
    lanes = [Lane(number, count) for number in range(count)]
    dealt = [list(lane.of(range(parts))) for lane in lanes]
    assert sorted(part for lane in dealt for part in lane) == list(range(parts))
    for nth in range(parts):
        assert [lane.carries(nth) for lane in lanes] == [nth in lane for lane in dealt]


def test_only_who_is_far_gets_more_than_one() -> None:
    trips = RoundTrips()
    assert trips.lanes("unknown", 4) == 1
    trips.answered("far", 0.05)
    trips.answered("far", 0.5)
    assert trips.lanes("far", 4) == 4
    trips.answered("near", 0.2)  # a busy machine answers late now and then
    trips.answered("near", NEAR_S / 10)
    trips.answered("near", 0.2)
    assert trips.lanes("near", 4) == 1


def test_parts_are_small_where_a_link_is_slow() -> None:
    assert part_bytes_for([125e6, 125e6], 1 << 20) == 1 << 20
    assert part_bytes_for([125e6, 0.0], 1 << 20) == 1 << 20  # who does not reduce has announced no speed
    assert PART_BYTES_SMALL < part_bytes_for([125e6, 12.5e6], 1 << 20) < 1 << 20
    assert part_bytes_for([125e6, 1.0], 1 << 20) == PART_BYTES_SMALL
    assert part_bytes_for([1.0], 4096) == 4096
