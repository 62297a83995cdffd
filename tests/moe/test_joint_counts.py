"""Counts of replicas that step jointly."""

from __future__ import annotations

import pytest

from moe.server.joint_steps import read_count
from moe.server.logic.joint_counts import BatchCount, JointCounts
from swarm.core.errors import PeerError
from swarm.testing.identities import SeededIdentity
from swarm.wire.expert_pb2 import ExpertCount

A, B, C = (SeededIdentity(name).peer_id for name in "abc")
HEAD = b"h" * 16


def test_only_counts_for_the_same_parameters_are_added_up() -> None:
    counts, own = JointCounts(), BatchCount(3, HEAD, 5)
    counts.note(A, BatchCount(3, HEAD, 7))
    counts.note(B, BatchCount(3, b"", 100))
    counts.note(C, BatchCount(2, HEAD, 100))
    assert counts.samples(own) == 12
    assert counts.together(own) == [A]
    assert set(counts.apart(own, 0.0)) == {B, C}
    counts.forget(A)
    assert counts.samples(own) == 5


def test_a_replica_that_stays_apart_is_left_out() -> None:
    counts, own = JointCounts(), BatchCount(3, HEAD, 5)
    counts.note(A, BatchCount(9, b"", 1))
    assert counts.is_behind(own, 0.0)
    assert counts.is_behind(own, 4.0)
    assert not counts.is_behind(own, 6.0), "one that is ahead for ever must not stop the expert"
    assert not counts.apart(own, 6.0)
    counts.note(A, BatchCount(3, HEAD, 1))
    assert not counts.apart(own, 7.0)
    counts.note(A, BatchCount(4, HEAD, 1))
    assert counts.is_behind(own, 8.0), "it has come back meanwhile"


@pytest.mark.parametrize(
    "message",
    [ExpertCount(version=1 << 63), ExpertCount(head=b"short"), ExpertCount(samples=1 << 60)],
    ids=["version", "head", "samples"],
)
def test_a_malformed_count_is_refused(message: ExpertCount) -> None:
    with pytest.raises(PeerError, match="the count of a replica is malformed"):
        read_count(message)
