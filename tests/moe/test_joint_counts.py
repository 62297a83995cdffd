"""Counts of replicas that step jointly."""

from __future__ import annotations

import math

import pytest

from moe.server.joint_steps import read_count
from moe.server.logic.joint_counts import BatchCount, JointCounts, judge
from swarm.core.errors import PeerError
from swarm.testing.identities import SeededIdentity
from swarm.wire.expert_pb2 import ExpertCount

A, B, C = (SeededIdentity(name).peer_id for name in "abc")
HEAD = b"h" * 16


def test_only_counts_for_the_same_parameters_are_added_up() -> None:
    counts, own = JointCounts(), BatchCount(3, HEAD, 5)
    counts.note(A, BatchCount(3, HEAD, 7), 0.0)
    counts.note(B, BatchCount(3, b"", 100), 0.0)
    counts.note(C, BatchCount(2, HEAD, 100), 0.0)
    assert counts.samples(own, 32) == 12
    assert counts.together(own) == [A]
    assert set(counts.apart(own, 0.0)) == {B, C}
    counts.forget(A)
    assert counts.samples(own, 32) == 5


def test_a_replica_that_stays_apart_is_left_out() -> None:
    counts, own = JointCounts(), BatchCount(3, HEAD, 5)
    counts.note(A, BatchCount(9, b"", 1), 0.0)
    assert counts.is_behind(own, 0.0)
    assert counts.is_behind(own, 4.0)
    assert not counts.is_behind(own, 6.0), "one that is ahead forever must not stop the expert"
    assert not counts.apart(own, 6.0)
    counts.note(A, BatchCount(3, HEAD, 1), 0.0)
    assert not counts.apart(own, 7.0)
    counts.note(A, BatchCount(4, HEAD, 1), 0.0)
    assert counts.is_behind(own, 8.0), "it has come back meanwhile"


def test_a_replica_counts_for_at_most_two_target_batches() -> None:
    counts, own = JointCounts(), BatchCount(3, HEAD, 5)
    counts.note(A, BatchCount(3, HEAD, 1 << 40), 0.0)
    assert counts.samples(own, 32) == 5 + 64


def test_a_replica_that_brings_less_than_it_announced_is_not_counted_for_longer_each_time() -> None:
    counts, own = JointCounts(), BatchCount(3, HEAD, 5)
    now_s = 0.0
    for pause_s in (10.0, 40.0, 160.0, 640.0, 2560.0, 10240.0, 40960.0, 40960.0):
        counts.note(A, BatchCount(3, HEAD, 32), now_s)
        assert counts.together(own) == [A]
        counts.distrust([A], now_s)
        counts.note(A, BatchCount(3, HEAD, 32), now_s + pause_s - 1.0)
        assert not counts.together(own)
        now_s += pause_s


def test_a_replica_that_brought_invented_gradients_is_not_counted_for_long_from_the_first_time() -> None:
    counts, own = JointCounts(), BatchCount(3, HEAD, 5)
    counts.distrust([A], 0.0, gravely=True)
    counts.note(A, BatchCount(9, HEAD, 32), 639.0)
    assert not counts.peers, "its state is not taken over either"
    counts.note(A, BatchCount(3, HEAD, 32), 640.0)
    assert counts.together(own) == [A]


def test_a_round_is_judged_by_what_its_members_bring() -> None:
    kept = judge({A: 20, B: 12, C: 0}, {A: 20.0, B: 12.0, C: 0.0}, {B: 12, C: 0}, 32)
    assert (kept.samples, kept.excessive, kept.unkept) == (32, frozenset(), frozenset())
    lie = judge({A: 4, B: 0}, {A: 4.0, B: 0.0}, {B: 32}, 32)
    assert (lie.samples, lie.unkept) == (4, {B})
    assert judge({A: 4}, {A: 4.0}, {B: 32}, 32).unkept == {B}, "it did not take part"


@pytest.mark.parametrize(
    ("count", "weight"), [(1 << 40, 1.0), (1, 1e9), (1, math.nan), (-1, 1.0), ("1", 1.0), (None, 1.0)]
)
def test_a_member_that_claims_more_than_a_replica_can_have_is_named(count: object, weight: float) -> None:
    verdict = judge({A: 4, B: count}, {A: 4.0, B: weight}, {}, 32)
    assert verdict.excessive == {B}
    assert verdict.samples == 4


@pytest.mark.parametrize(
    "message",
    [ExpertCount(version=1 << 63), ExpertCount(head=b"short"), ExpertCount(samples=1 << 60)],
    ids=["version", "head", "samples"],
)
def test_a_malformed_count_is_refused(message: ExpertCount) -> None:
    with pytest.raises(PeerError, match="the count of a replica is malformed"):
        read_count(message)


@pytest.mark.parametrize(
    ("heard", "answered", "kept"),
    [
        ((4, 0), (3, 16), (4, 0)),  # it answered before its step, and told of the step afterwards
        ((3, 12), (3, 8), (3, 12)),
        ((3, 8), (3, 12), (3, 12)),  # it told first, and answered afterwards
        (None, (3, 8), (3, 8)),
        (None, (2, 8), (2, 8)),  # it continues from an older state
    ],
)
def test_an_answer_that_arrives_late_replaces_no_newer_count(
    heard: tuple[int, int] | None, answered: tuple[int, int], kept: tuple[int, int]
) -> None:
    """Regression: an answer from before a step replaced the count from after it."""
    counts = JointCounts()
    counts.note(A, BatchCount(3, HEAD, 4), 0.0)
    before = counts.last(A)
    if heard is not None:
        counts.note(A, BatchCount(heard[0], HEAD, heard[1]), 0.1)
    counts.note_answer(A, BatchCount(answered[0], HEAD, answered[1]), before, 0.2)
    assert counts.last(A) == BatchCount(kept[0], HEAD, kept[1])
