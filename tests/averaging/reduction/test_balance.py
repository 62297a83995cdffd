"""Shares of the vector minimise the time of the slowest member, compared with brute force, and are equal on
all members that compute them.
"""

from __future__ import annotations

import itertools
import random

import pytest

from averaging.matchmaking.logic.group import Member
from averaging.reduction.balance import REDUCERS_ALWAYS, SHARD_BYTES_MIN, ReducerLoad, shares, shares_of
from swarm.core.errors import UsageError
from swarm.core.ids import Address, Contact
from swarm.testing.identities import SeededIdentity


def load(
    up: float,
    down: float | None = None,
    *,
    contributes: bool = True,
    receives: bool = True,
    reduces: bool = True,
    is_set: bool = False,
) -> ReducerLoad:
    return ReducerLoad(
        up=up,
        down=up if down is None else down,
        contributes=contributes,
        receives=receives,
        reduces=reduces,
        is_set=is_set,
    )


def slowest(members: list[ReducerLoad], cut: list[float]) -> float:
    """The round's time, added up transfer by transfer."""
    sent, taken = [0.0] * len(members), [0.0] * len(members)
    for reducer, share in enumerate(cut):
        for other, member in enumerate(members):
            if other != reducer and member.contributes:
                sent[other] += share
                taken[reducer] += share
            if other != reducer and member.receives:
                sent[reducer] += share
                taken[other] += share
    return max(max(s / m.up, t / m.down) for m, s, t in zip(members, sent, taken, strict=True))


def cuts(count: int, steps: int) -> list[list[float]]:
    """All shares in multiples of 1/steps."""
    return [
        [(b - a - 1) / steps for a, b in itertools.pairwise((-1, *bars, steps + count - 1))]
        for bars in itertools.combinations(range(steps + count - 1), count - 1)
    ]


def random_members(seed: int, *, is_set: bool = False) -> list[ReducerLoad]:
    rng = random.Random(seed)
    members = []
    for place in range(rng.choice([2, 3, 3, 4, 4])):
        up, down = (rng.choice([1.0, 1.0, 2.0, 5.0, 30.0]) * rng.uniform(1.0, 1.6) for _ in range(2))
        auxiliary = place > 1 and rng.random() < 0.2
        reduces = place == 0 or rng.random() < 0.8
        members.append(
            load(
                up,
                down,
                contributes=not auxiliary,
                receives=not auxiliary,
                reduces=reduces or auxiliary,
                is_set=is_set,
            )
        )
    return members


@pytest.mark.parametrize("is_set", [False, True])
@pytest.mark.parametrize("seed", range(60))
def test_no_cut_on_a_grid_is_faster_than_the_chosen_shares(seed: int, is_set: bool) -> None:
    members = random_members(seed, is_set=is_set)
    found = shares(members)
    assert sum(found) == pytest.approx(1.0)
    assert all(share == 0.0 for share, member in zip(found, members, strict=True) if not member.reduces)
    allowed = [
        cut
        for cut in cuts(len(members), 20)
        if all(member.reduces or not share for share, member in zip(cut, members, strict=True))
    ]
    best = min(slowest(members, cut) for cut in allowed)
    # measured speeds near the median count as the median, which makes a round at most this much slower
    assert slowest(members, found) <= (1.0 if is_set else 1.5) * best + 1e-9


def test_exact_where_speeds_are_far_apart() -> None:
    for speeds in [(1.0, 3.0, 9.0), (1.0, 1.0, 4.0, 4.0), (0.01, 1.0, 1.0, 1.0), (2.0, 20.0, 6.0)]:
        members = [load(speed) for speed in speeds]
        best = min(slowest(members, cut) for cut in cuts(len(members), 48))
        assert slowest(members, shares(members)) <= best + 1e-9, speeds


def test_speeds_that_users_have_set_are_taken_as_they_are() -> None:
    speeds = (0.44, 0.33, 0.22)
    told = [load(speed, is_set=True) for speed in speeds]
    best = min(slowest(told, cut) for cut in cuts(3, 90))
    assert slowest(told, shares(told)) <= best + 1e-9
    measured = [load(speed) for speed in speeds]
    assert slowest(measured, shares(measured)) > 1.1 * best, "as if they were alike"
    mixed = [load(1.0), load(1.2), load(0.5, is_set=True), load(0.9)]
    assert shares(mixed)[2] < shares(mixed)[0] == pytest.approx(shares(mixed)[1])


def test_a_mistaken_measurement_does_not_make_the_mistaken_one_the_bottleneck() -> None:
    """Measured among four equal links of 100 Mbit/s: 17.4 MB/s compared with 10.3, which had halved the speed
    of rounds until the measurements expired.
    """
    assert shares([load(10.3), load(11.1), load(10.3), load(17.4)]) == pytest.approx([0.25] * 4)
    for faster in (2.0, 2.5, 3.0):  # nothing jumps beyond it
        assert shares([load(1.0), load(1.0), load(1.0), load(faster)])[3] < 0.25 * faster
    # a server among homes
    assert shares([load(1.0), load(1.0), load(1.0), load(10.0)])[3] == pytest.approx(1.0)


def test_shares_of_simple_groups_are_as_expected() -> None:
    assert shares([load(7.0)] * 4) == pytest.approx([0.25] * 4)
    # as good as equal
    assert shares([load(1.0), load(1.2), load(0.9), load(1.3)]) == pytest.approx([0.25] * 4)
    assert shares([load(3.0)]) == [1.0]
    # between two it makes no difference to the network
    assert shares([load(1.0), load(3.0)]) == pytest.approx([0.25, 0.75])
    assert shares([load(1.0), load(1.0, reduces=False), load(1.0)]) == pytest.approx([0.5, 0.0, 0.5])
    straggler = shares([load(1.0), load(1.0), load(1.0), load(0.01)])
    assert straggler == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0.0])
    slow_upload = shares([load(0.125, 12.5), load(12.5), load(12.5), load(12.5)])
    assert slow_upload == pytest.approx([0.0, 1 / 3, 1 / 3, 1 / 3])
    helper = load(1.0, contributes=False, receives=False)
    assert shares([helper, load(1.0), load(1.0)])[0] > 0.0
    idle = load(1.0, contributes=False)
    # the helper serves two, each of the others one
    assert shares([helper, idle, idle]) == pytest.approx([0.2, 0.4, 0.4])


def test_shares_of_invalid_speeds_are_refused() -> None:
    for wrong in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(UsageError, match="positive number"):
            shares([load(1.0), load(wrong)])
    with pytest.raises(UsageError, match="nobody in this group can reduce"):
        shares([load(1.0, reduces=False), load(0.0, reduces=False)])


@pytest.mark.parametrize("seed", [6, 11, 15, *range(100, 120)])
def test_shares_of_two_members_of_which_one_contributes_add_up_to_one(seed: int) -> None:
    """Rounding once left both of them without a share."""
    rng = random.Random(seed)
    bandwidth = rng.uniform(1e6, 1e9)
    members = [
        ReducerLoad(up=bandwidth, down=bandwidth, contributes=contributes, receives=True, reduces=True)
        for contributes in (True, False)
    ]
    assert sum(shares(members)) == pytest.approx(1.0)
    assert sum(shares(members[::-1])) == pytest.approx(1.0)


def member(place: int, *, weight: float = 1.0, auxiliary: bool = False, bandwidth: float = 1e8) -> Member:
    contact = Contact(SeededIdentity(place).peer_id, (Address("127.0.0.1", 4000 + place),))
    return Member(contact=contact, weight=weight, bandwidth=bandwidth, auxiliary=auxiliary)


def reducers(members: list[Member], size_bytes: int) -> list[int]:
    found = shares_of(members, size_bytes)
    assert sum(found) == pytest.approx(1.0)
    return [place for place, share in enumerate(found) if share > 0.0]


def test_a_large_group_shares_a_small_vector_among_as_few_members_as_its_bytes_need() -> None:
    members = [member(place) for place in range(33)]
    assert reducers(members, 1000) == list(range(REDUCERS_ALWAYS))
    assert reducers(members, 20 * SHARD_BYTES_MIN) == list(range(20))
    assert reducers(members, 33 * SHARD_BYTES_MIN) == list(range(33))


def test_a_small_group_shares_any_vector_among_all_members() -> None:
    members = [member(place) for place in range(REDUCERS_ALWAYS)]
    assert reducers(members, 1) == list(range(REDUCERS_ALWAYS))


def test_newcomers_reduce_only_if_there_are_too_few_other_members() -> None:
    joining = [member(place, weight=0.0, bandwidth=2e8) for place in range(10)]
    trainers = [member(place) for place in range(10, 20)]
    helper = member(20, weight=0.0, auxiliary=True)
    assert not set(reducers([*joining, *trainers, helper], 1)) & set(range(10))
    assert len(reducers([*joining, *trainers[:6], helper], 1)) == REDUCERS_ALWAYS


def test_the_members_with_the_best_links_reduce_a_small_vector() -> None:
    members = [member(place, bandwidth=1e8 if place % 2 else 4e8) for place in range(20)]
    assert reducers(members, 1) == [0, 2, 4, 6, 8, 10, 12, 14]
