"""The loop over rounds: speeds are measured, announced, and shares follow them; unequal links end up
balanced, equal ones stay so.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from averaging.reduction.balance import ReducerLoad, shares
from averaging.reduction.speed import Speed

MESSAGE_BYTES = 256 << 10
BUFFER_BYTES = 1 << 20  # that a peer's transport takes before the link has carried it


def one_round(
    speeds: Sequence[Speed], ups: Sequence[float], vector_bytes: int, start_s: float, buffers: Sequence[int]
) -> list[float]:
    """The shares of a round. Every peer measures its own link: messages go into a buffer, one after the
    other, and the link empties it.
    """
    found = shares(
        [
            ReducerLoad(up=s.bytes_per_s, down=s.bytes_per_s, contributes=True, receives=True, reduces=True)
            for s in speeds
        ]
    )
    sent = [int((1.0 - share + share * (len(ups) - 1)) * vector_bytes) for share in found]
    took_s = max(size / up for size, up in zip(sent, ups, strict=True)) + 0.2  # distances, votes
    for speed, up, size, buffer in zip(speeds, ups, sent, buffers, strict=True):
        handed, now_s = 0, start_s
        while handed < size:
            message = min(MESSAGE_BYTES, size - handed)
            speed.begin(now_s)
            handed += message
            now_s = max(now_s, start_s + (handed - buffer) / up)
            speed.end(message, now_s)
        speed.round_over()
        speed.committed(size, took_s)
    return found


def time_of(found: Sequence[float], ups: Sequence[float]) -> float:
    """Return the duration of a round with these shares, in transfers of the whole vector."""
    return max((1.0 - share + share * (len(ups) - 1)) / up for share, up in zip(found, ups, strict=True))


@pytest.mark.parametrize("vector_mib", [1, 16])
def test_a_slow_upload_reduces_almost_nothing_and_limits_the_round_only_by_its_own_values(
    vector_mib: int,
) -> None:
    """One of four has 1 Mbit/s up, the others 100."""
    ups = [12.5e6, 12.5e6, 12.5e6, 0.125e6]
    speeds = [Speed() for _ in ups]
    cuts = [
        one_round(speeds, ups, vector_mib << 20, 1000.0 * nth, [BUFFER_BYTES >> 3] * 4) for nth in range(3)
    ]
    assert cuts[0] == pytest.approx([0.25] * 4)  # nothing is known yet
    for cut in cuts[1:]:
        assert cut[3] < 0.01
        assert time_of(cut, ups) < 1.01 / 0.125e6  # to send one's own values is the least
    assert time_of(cuts[0], ups) > 1.45 * time_of(cuts[1], ups)


@pytest.mark.parametrize(
    "ups", [(12.5e6, 12.5e6, 2.5e6), (12.5e6, 5e6, 5e6, 1e6), (2.5e6,) * 7 + (12.5e6,)], ids=str
)
def test_unequal_links_are_balanced_within_a_few_rounds(ups: tuple[float, ...]) -> None:
    speeds = [Speed() for _ in ups]
    for nth in range(6):
        cut = one_round(speeds, ups, 16 << 20, 1000.0 * nth, [BUFFER_BYTES] * len(ups))
    best = shares([ReducerLoad(up=up, down=up, contributes=True, receives=True, reduces=True) for up in ups])
    assert time_of(cut, ups) < 1.15 * time_of(best, ups)
    assert time_of(cut, ups) < time_of([1 / len(ups)] * len(ups), ups)


@pytest.mark.parametrize("seed", range(40))
def test_equal_links_stay_balanced_although_buffers_distort_the_measurement(seed: int) -> None:
    """Bytes that a transport accepted at once make a link look up to twice as fast as it is, and differently
    in every round.
    """
    rng = random.Random(seed)
    speeds, ups = [Speed() for _ in range(4)], [12.5e6] * 4
    for nth in range(12):
        buffers = [int(rng.uniform(0.0, 0.45) * (25 << 20)) for _ in ups]
        cut = one_round(speeds, ups, 16 << 20, 1000.0 * nth, buffers)
        assert time_of(cut, ups) <= 1.2 * time_of([0.25] * 4, ups)
