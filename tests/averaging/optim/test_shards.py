"""Sums of shards: aggregators, counted reports, and limits on liars; arithmetic on reports only."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from averaging.optim.progress.logic.epoch_reached import epoch_of
from averaging.optim.progress.logic.reports import (
    SLACK_S,
    EpochProgress,
    ProgressReport,
    ProgressTotal,
)
from averaging.optim.progress.logic.shards import (
    AGGREGATORS,
    FANOUT_BITS,
    PERIOD_S,
    TreeNode,
    aggregators,
    bits_for,
    children_of,
    median_of,
    place_of,
    shard_of,
    sum_of_children,
    sum_of_reports,
)
from averaging.optim.progress.logic.standing import ReportStanding
from averaging.optim.progress.tree import Tree
from swarm.core.errors import PeerError
from swarm.core.identity import Identity
from swarm.core.ids import PeerId

RUN, NOW_S = "a" * 20, 1_000.0
PEERS = [Identity.generate().peer_id for _ in range(300)]


def report(
    samples: int = 100, rate: float = 10.0, epoch: int = 3, since_s: float = NOW_S - 10, at_s: float = NOW_S
) -> ProgressReport:
    return ProgressReport(epoch=epoch, samples=samples, rate=rate, at_s=at_s, since_s=since_s)


def test_nodes_have_the_right_parents_names_and_members() -> None:
    leaf = TreeNode(5, 0, 17)
    assert (leaf.parent, leaf.parent.is_root, leaf.parent.parent) == (
        TreeNode(5, 1, 0),
        True,
        TreeNode(5, 1, 0),
    )
    deep = TreeNode(12, 0, 0b1010_1010_1010)
    assert deep.parent == TreeNode(12, 1, 0b1010_101)
    assert deep.parent.parent == TreeNode(12, 2, 0b10)
    assert deep.parent.parent.parent == TreeNode(12, 3, 0)
    assert deep.parent.parent.parent.is_root
    assert TreeNode(0, 0, 0).name == "progress", "a small run has the one dictionary that it always had"
    for peer in PEERS[:50]:
        node = shard_of(RUN, peer, 12)
        while True:
            assert node.holds(place_of(RUN, peer))
            if node.is_root:
                break
            assert not replace(node, prefix=node.prefix ^ 1).holds(place_of(RUN, peer))
            node = node.parent
    assert len({TreeNode(12, 0, number).name for number in range(1 << 12)}) == 1 << 12


def test_shards_have_about_thirty_members_and_change_rarely() -> None:
    assert [bits_for(peers, 0) for peers in (1, 64, 65, 100, 1000, 100_000)] == [0, 0, 2, 2, 5, 12]
    for peers in range(65, 5000, 7):
        bits = bits_for(peers, 0)
        assert 16 <= peers / (1 << bits) <= 48
        assert bits_for(int(peers * 1.3), bits) == bits or peers * 1.3 / (1 << bits) > 48, (
            "a fifth more or less changes nothing"
        )
        assert bits_for(peers, bits) == bits
    assert bits_for(30, 2) == 0
    assert bits_for(60, 2) == 2, "no to and fro about the limit"


def test_three_writers_aggregate_and_change_with_the_period() -> None:
    node = shard_of(RUN, PEERS[0], 2)
    first = aggregators(node, RUN, PEERS, NOW_S)
    assert len(first) == AGGREGATORS
    assert aggregators(node, RUN, reversed(PEERS), NOW_S) == first
    assert aggregators(node, RUN, PEERS, NOW_S + PERIOD_S) != first
    rest = [peer for peer in PEERS if peer != first[0]]
    assert aggregators(node, RUN, rest, NOW_S)[:2] == first[1:], "when one is gone the next steps in"


@pytest.mark.parametrize("electors", [1, 2, 3, 20])
def test_electors_aggregate_before_any_number_of_other_identities(electors: int) -> None:
    node = shard_of(RUN, PEERS[0], 2)
    last = aggregators(node, RUN, PEERS, NOW_S)  # whose hashes are the lowest among 300
    known = [peer for peer in PEERS if peer not in last][:electors]
    found = aggregators(node, RUN, PEERS, NOW_S, known)
    assert set(found[: min(electors, AGGREGATORS)]) <= set(known)
    assert found[electors:] == last[: AGGREGATORS - min(electors, AGGREGATORS)]


@pytest.mark.parametrize("there", [1, 2, 3])
def test_sums_of_strangers_do_not_stand_for_a_shard_that_has_an_elector(there: int) -> None:
    root = TreeNode(2, 1, 0)
    shard = [peer for peer in PEERS if shard_of(RUN, peer, 2).prefix == 1]
    chosen = aggregators(TreeNode(2, 0, 1), RUN, shard, NOW_S)
    electors = [peer for peer in shard if peer not in chosen][:there]
    written = {peer: (1, total() if peer in electors else LIES[0]) for peer in shard}
    assert children_of(root, RUN, written, NOW_S)[1] == [LIES[0]] * 3, "by the hash alone liars decide"
    sums = children_of(root, RUN, written, NOW_S, electors)[1]
    assert sums == [total()] * max(there, 2)
    assert median_of(sums) == total(), "that of a single elector stands as it is"
    del written[electors[0]]  # its sum is too old
    if there == 1:
        assert children_of(root, RUN, written, NOW_S, electors)[1] == [LIES[0]] * 3


def test_an_elector_aggregates_the_shard_that_it_is_in() -> None:
    bits = 2
    leaf = shard_of(RUN, PEERS[0], bits)
    shard = [peer for peer in PEERS if shard_of(RUN, peer, bits) == leaf]
    chosen = aggregators(leaf, RUN, shard, NOW_S)
    own = next(peer for peer in shard if peer not in chosen)
    reports = {peer: report() for peer in shard}
    for electors, publishes in (((), False), ((own,), True)):
        dht = StoredSums()
        tree = Tree(dht, RUN, own, NOW_S)  # type: ignore[arg-type]
        tree.bits = bits
        standing = ReportStanding(own, electors)
        asyncio.run(tree.after_refresh([], reports, standing, NOW_S))
        assert bool(dht.stored) is publishes


class StoredSums:
    """A DHT that holds nothing, and remembers what is written."""

    def __init__(self) -> None:
        self.stored: list[object] = []

    async def store(self, key: object, value: object, **options: object) -> bool:
        self.stored.append((key, value))
        return True

    async def get(self, key: object, **options: object) -> dict[str, object]:
        return {}


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 40), st.randoms(use_true_random=False))
def test_a_shard_counts_as_a_small_run_does(count: int, rng: random.Random) -> None:
    """The sum follows the rule of `EpochProgress`, as seen by a member without samples that began with the
    others.
    """
    reports = {
        peer: report(rng.randint(0, 400), rng.choice([5.0, 10.0, 40.0]), at_s=NOW_S - rng.random())
        for peer in PEERS[:count]
    }
    total = sum_of_reports(reports, NOW_S)
    own = PEERS[299]
    progress = EpochProgress(own, 10**9, NOW_S - 10)
    progress.begin_epoch(3, NOW_S - 10)
    for peer, one in reports.items():
        progress.on_report(peer, one, NOW_S)
    assert total.samples == pytest.approx(sum(progress.counted(NOW_S).values()), rel=1e-9)
    assert (total.epoch, total.peers, total.since_s) == (3, count, NOW_S - 10)


def test_a_lying_member_counts_three_times_an_honest_one() -> None:
    reports = {peer: report() for peer in PEERS[:31]}
    honest = sum_of_reports(reports, NOW_S)
    for lie in (report(samples=10**9, rate=1e9), report(samples=10**9, rate=10.0, since_s=0.0)):
        total = sum_of_reports({**reports, PEERS[31]: lie}, NOW_S)
        assert total.samples - honest.samples <= 3 * 10.0 * (10 + SLACK_S) + 1e-6
    ahead = sum_of_reports({**reports, PEERS[31]: report(epoch=10**6)}, NOW_S)
    assert ahead.epoch == 3


def total(
    samples: float = 3200.0,
    peers: int = 32,
    epoch: int = 3,
    rate: float = 320.0,
    median_rate: float = 10.0,
    **other: float,
) -> ProgressTotal:
    values = {"at_s": NOW_S, "since_s": NOW_S - 10, **other}
    return ProgressTotal(
        epoch=epoch, samples=samples, rate=rate, peers=peers, median_rate=median_rate, **values
    )  # type: ignore[arg-type]


LIES = [
    total(samples=1e12, rate=1e12, median_rate=1e12, peers=10**9),
    total(epoch=10**6, samples=0.0),
    total(epoch=4, samples=1e12),
    total(samples=0.0, rate=0.0, peers=0, median_rate=0.0),
    total(epoch=0, since_s=0.0, at_s=1.0),
    total(bits=24),
]


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("place", range(3))
def test_one_lying_aggregator_of_three_changes_nothing(lie: ProgressTotal, place: int) -> None:
    honest = [total(), total(samples=3190.0), total(samples=3210.0)]
    told = [lie if number == place else one for number, one in enumerate(honest)]
    middle = median_of(told)
    assert middle is not None
    assert (middle.epoch, middle.peers, middle.bits) == (3, 32, 0)
    assert 3190.0 <= middle.samples <= 3210.0
    assert 3190.0 <= middle.samples_at(NOW_S) <= 3210.0


def test_of_two_totals_the_lower_counts_and_a_single_one_as_two_peers() -> None:
    assert median_of([total(), LIES[0]]) == total()
    alone = median_of([LIES[0]])
    assert alone is not None
    assert alone.peers == 2
    assert median_of([]) is None


@pytest.mark.parametrize("lie", LIES)
def test_a_whole_shard_of_liars_does_not_close_the_epoch(lie: ProgressTotal) -> None:
    """All three aggregators of one shard of thirty-two lie: the others' rates bound what it can claim, and
    its epoch is one voice.
    """
    children = {prefix: [total()] * 3 for prefix in range(31)}
    honest = sum_of_children(children, 1, NOW_S)
    assert honest.samples == 31 * 3200.0
    lied = sum_of_children({**children, 31: [lie] * 3}, 1, NOW_S)
    assert lied.epoch == 3
    # 128 members at most, three times the median rate each, since the epoch began
    assert lied.samples - honest.samples <= 128 * 3 * 10.0 * (10 + SLACK_S) + 1e-6


def test_a_third_of_all_peers_moves_the_epoch() -> None:
    assert epoch_of([(5, 1), (3, 1)]) == 5, "of two, one"
    assert epoch_of([(9, 10), (3, 21)]) == 3
    assert epoch_of([(9, 11), (3, 21)]) == 9
    assert epoch_of([(9, 1), (8, 10), (3, 20)]) == 8
    assert epoch_of([]) == 0


def test_only_sums_of_a_childs_own_members_count() -> None:
    root = TreeNode(2, 1, 0)
    written = {peer: (shard_of(RUN, peer, 2).prefix, total()) for peer in PEERS}
    children = children_of(root, RUN, written, NOW_S)
    assert {prefix: len(sums) for prefix, sums in children.items()} == dict.fromkeys(range(4), AGGREGATORS)
    strangers = {peer: (shard_of(RUN, peer, 2).prefix ^ 1, LIES[0]) for peer in PEERS}
    assert children_of(root, RUN, strangers, NOW_S) == {}
    assert children_of(root, RUN, {PEERS[0]: (10**9, total())}, NOW_S) == {}


@settings(deadline=None, max_examples=30)
@given(st.integers(70, 300), st.randoms(use_true_random=False))
def test_a_tree_of_shards_gives_the_same_sum_as_one_dictionary(count: int, rng: random.Random) -> None:
    reports = {peer: report(rng.randint(50, 150), rng.uniform(8, 12)) for peer in PEERS[:count]}
    bits = bits_for(count, 0)
    shards: dict[int, dict[PeerId, ProgressReport]] = {}
    for peer, one in reports.items():
        shards.setdefault(shard_of(RUN, peer, bits).prefix, {})[peer] = one
    children = {prefix: [sum_of_reports(members, NOW_S)] * 3 for prefix, members in shards.items()}
    added = sum_of_children(children, 1, NOW_S)
    assert added.samples == pytest.approx(sum(one.samples for one in reports.values()))
    assert added.peers == count
    assert FANOUT_BITS == 5


def test_an_encoded_total_decodes_to_the_same_and_malformed_ones_are_refused() -> None:
    assert ProgressTotal.decode(total().encode(), NOW_S) == total()
    good = total().encode()
    for place, wrong in [
        (0, -1),
        (0, 1.5),
        (1, float("nan")),
        (2, float("inf")),
        (3, 1 << 40),
        (5, NOW_S + 100),
        (6, NOW_S + 1),
        (7, 99),
    ]:
        with pytest.raises(PeerError):
            ProgressTotal.decode([*good[:place], wrong, *good[place + 1 :]], NOW_S)
    for nonsense in (None, "12345678", b"12345678", good[:7], 5):
        with pytest.raises(PeerError):
            ProgressTotal.decode(nonsense, NOW_S)


def test_a_known_total_decides_about_the_epoch() -> None:
    progress = EpochProgress(PEERS[0], 100_000, NOW_S - 10)
    progress.begin_epoch(3, NOW_S - 10)
    progress.update_own(100, 10.0, NOW_S)
    assert not progress.is_full(NOW_S)
    progress.total = total(samples=100_000.0, peers=1000, rate=10_000.0)
    assert progress.is_full(NOW_S)
    assert (progress.swarm_epoch(NOW_S), progress.view(NOW_S).peers_total) == (3, 1000)
    progress.begin_epoch(4, NOW_S)
    assert not progress.is_full(NOW_S), "what the epoch before it gathered does not count"
    progress.total = total(epoch=6)
    assert progress.swarm_epoch(NOW_S) == 6
