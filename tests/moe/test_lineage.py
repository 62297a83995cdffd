"""Which state is used: lineages of replicas, and the turns in which they are averaged."""

from __future__ import annotations

from collections import Counter

import pytest

from moe.protocol.names import ExpertUid
from moe.server.logic.lineage import PAST_MAX, ExpertLineage, donors, next_version
from moe.server.logic.turns import PER_PERIOD, is_due, turns_for
from swarm.testing.identities import SeededIdentity

PEERS = sorted(SeededIdentity(f"fleet/{number}").peer_id for number in range(6))
OWN, ONE, TWO, THREE, FOUR, LAST = PEERS


def name(number: int) -> bytes:
    return number.to_bytes(16, "big")


def trained(versions: int, *, steps: int = 100, branch: int = 0) -> ExpertLineage:
    """Return a lineage of averages after 100, 200, … steps, and of `steps` steps after the last one."""
    found = ExpertLineage()
    for number in range(1, versions + 1):
        found = found.averaged(name(1000 * branch + number), 100 * number)
    return ExpertLineage(100 * versions + steps, found.past)


def test_steps_are_counted_from_the_last_common_version() -> None:
    today, yesterday = trained(20, steps=7), trained(3, steps=2)
    assert (today.steps_since_common(yesterday), yesterday.steps_since_common(today)) == (1707, 2)
    assert (today.steps_since_common(trained(20)), today.steps_since_common(ExpertLineage(5))) == (7, 2007)
    assert len(trained(500).past) == PAST_MAX


def test_a_new_replica_takes_over_a_state_and_a_trained_one_does_not() -> None:
    live, fresh = trained(5), ExpertLineage()
    assert donors(fresh, {ONE: live}, OWN, is_declared=False) == [ONE]
    assert donors(live, {ONE: fresh}, OWN, is_declared=True) == []
    assert donors(fresh, {}, OWN, is_declared=False) == []


@pytest.mark.parametrize("old", [trained(3), trained(1, steps=0), trained(64)], ids=["mid", "early", "far"])
@pytest.mark.parametrize("is_declared", [True, False])
def test_an_old_checkpoint_takes_over_and_todays_is_kept(old: ExpertLineage, is_declared: bool) -> None:
    """Regression: lifetime samples were the weight, so yesterday's checkpoint outvoted today's replicas."""
    today = trained(200, steps=3)
    assert donors(old, {ONE: today, TWO: today}, OWN, is_declared=is_declared)
    assert donors(today, {ONE: old}, OWN, is_declared=is_declared) == []
    assert donors(today, {ONE: old, TWO: old}, OWN, is_declared=is_declared) == []


def test_replicas_with_one_head_are_averaged_and_take_nothing_over() -> None:
    behind, ahead = trained(5, steps=1), trained(5, steps=90)
    assert donors(behind, {ONE: ahead}, OWN, is_declared=True) == []
    assert donors(behind, {ONE: ahead}, OWN, is_declared=False) == [ONE], "nobody uses it yet"


def test_exactly_one_of_two_replicas_that_began_alike_takes_over() -> None:
    for versions in ((0, 0), (4, 4), (3, 5)):
        one, other = map(ExpertLineage, versions)
        first = donors(one, {LAST: other}, OWN, is_declared=True)
        second = donors(other, {OWN: one}, LAST, is_declared=True)
        assert bool(first) != bool(second), versions


def test_one_liar_among_three_is_no_majority() -> None:
    honest, liar = trained(5), ExpertLineage(1 << 61, trained(5).past)
    assert donors(honest, {ONE: honest, TWO: liar}, OWN, is_declared=True) == []
    assert donors(trained(5, steps=200), {ONE: honest, TWO: liar}, OWN, is_declared=False) == []


def test_a_newcomer_prefers_what_most_replicas_have() -> None:
    honest = {ONE: trained(5, steps=1), TWO: trained(5, steps=9), THREE: trained(5, steps=5)}
    stranger = ExpertLineage(1 << 61, trained(64, branch=1).past)
    copying = ExpertLineage(1 << 61, trained(5).past)
    for liar in (stranger, copying):
        order = donors(ExpertLineage(), {**honest, FOUR: liar}, OWN, is_declared=False)
        assert order[0] in honest
        assert order[-1] == FOUR


def test_a_claimed_version_moves_the_common_one_no_further_than_an_honest_one() -> None:
    assert next_version(10, [10, 12, 1 << 61]) == 13
    assert next_version(10, [10, -5, "x", None, 1 << 63, True]) == 11
    assert next_version(10, []) == 11


@pytest.mark.parametrize("shared", [1, 64, 65, 200, 4096])
def test_every_shared_expert_has_its_turn(shared: int) -> None:
    """Regression: beyond 64 shared experts the rest were never averaged."""
    uids = [ExpertUid.parse(f"ffn.{number}") for number in range(shared)]
    turns = turns_for(shared)
    due = Counter(uid for period in range(7, 7 + turns) for uid in uids if is_due(uid, turns, period))
    assert due == Counter(uids), "once each"
    sizes = [sum(is_due(uid, turns, period) for uid in uids) for period in range(turns)]
    assert max(sizes) <= 1.6 * PER_PERIOD


def test_servers_that_share_few_experts_follow_those_that_share_many() -> None:
    uid, many, few = ExpertUid.parse("ffn.3"), turns_for(1000), turns_for(10)
    assert (many, few) == (16, 1)
    assert sum(is_due(uid, max(many, few), period) for period in range(16)) == 1
