"""Hedging and the order of replicas, in virtual time."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from moe.client.logic.hedging import HedgeBudget, HedgedCall
from moe.client.logic.replica_stats import ReplicaStats
from swarm.core.ids import PeerId
from swarm.testing.identities import SeededIdentity

PEERS = [SeededIdentity(f"fleet/{number}").peer_id for number in range(3)]
ONE, TWO, THREE = PEERS


def replica_stats(seed: int = 0, **how: Any) -> ReplicaStats:
    return ReplicaStats(random.Random(seed), **how)


class TestHedgedCall:
    def call(self, order: str, after_s: float = 0.2, budget: HedgeBudget | None = None) -> HedgedCall[str]:
        return HedgedCall(order, after_s, budget or HedgeBudget(share_max=0.5, budget_max=1.0))

    def test_a_second_replica_is_asked_only_when_the_first_is_slow(self) -> None:
        call = self.call("ab")
        assert call.poll(10.0) == ["a"]
        assert call.deadline_s() == 10.2
        assert call.poll(10.19) == []
        assert call.poll(10.2) == ["b"]
        assert call.deadline_s() is None
        assert call.poll(99.0) == []
        call.answered("b")
        assert (call.winner, call.over, call.hedged) == ("b", True, True)
        call.answered("a")
        assert call.winner == "b"

    def test_after_a_failure_the_next_is_asked_at_once_without_budget(self) -> None:
        budget = HedgeBudget(share_max=0.5, budget_max=1.0)
        call = self.call("abc", budget=budget)
        for replica in "abc":
            assert call.poll(0.0) == [replica]
            call.failed(replica)
        assert call.over
        assert call.winner is None
        assert call.poll(0.0) == []
        assert budget.try_spend()

    def test_only_one_second_request_and_no_more_attempts_than_allowed(self) -> None:
        call = self.call("abcd")
        assert call.poll(0.0) == ["a"]
        assert call.poll(1.0) == ["b"]
        assert call.poll(9.0) == []
        call.failed("b")
        assert call.poll(9.0) == [], "the first is still pending"
        call.failed("a")
        assert call.poll(9.0) == ["c"]
        call.failed("c")
        assert call.over

    def test_a_call_is_hedged_once_even_when_replicas_fail(self) -> None:
        call = HedgedCall("abcd", 0.2, HedgeBudget(share_max=0.5, budget_max=4.0), attempts_max=4)
        assert (call.poll(0.0), call.poll(0.2)) == (["a"], ["b"])
        for replica in "ab":
            call.failed(replica)
        assert call.poll(0.3) == ["c"]
        assert call.deadline_s() is None
        assert call.poll(9.0) == []

    def test_the_budget_bounds_second_requests_over_time(self) -> None:
        budget, hedged = HedgeBudget(share_max=0.1, budget_max=2.0), 0
        for _ in range(1000):
            call = HedgedCall("ab", 0.1, budget)
            call.poll(0.0)
            hedged += len(call.poll(1.0))
        assert 100 <= hedged <= 102

    def test_a_single_replica_is_not_hedged(self) -> None:
        call = self.call("a")
        assert call.poll(0.0) == ["a"]
        assert call.deadline_s() is None
        assert not call.over
        assert self.call("").over


class TestReplicaStats:
    def test_network_failures_count_against_the_peer_and_refusals_against_the_replica(self) -> None:
        stats = replica_stats()
        stats.unreachable(ONE, 0.0, "gone")
        stats.failed("ffn.0", TWO, 0.0, "NaN")
        assert stats.available("ffn.0", PEERS, 0.5) == [THREE]
        assert stats.available("ffn.1", PEERS, 0.5) == [TWO, THREE]
        assert stats.why_avoided("ffn.1", ONE, 0.5) == "gone"
        assert stats.why_avoided("ffn.0", TWO, 0.5) == "NaN"
        assert stats.why_avoided("ffn.1", TWO, 0.5) is None
        assert stats.available("ffn.0", PEERS, 1.0) == PEERS

    def test_not_failed_since_includes_avoided_peers(self) -> None:
        stats = replica_stats()
        stats.unreachable(ONE, 1.0, "gone")
        stats.failed("e", TWO, 2.0, "NaN")
        assert stats.not_failed_since("e", PEERS, 0.5) == [THREE]
        assert stats.not_failed_since("f", PEERS, 0.5) == [TWO, THREE]
        assert stats.not_failed_since("e", PEERS, 1.5) == [ONE, THREE]
        assert stats.not_failed_since("e", PEERS, 2.5) == PEERS

    def test_quick_replicas_get_more_calls(self) -> None:
        stats = replica_stats()
        for _ in range(30):
            stats.answered("e", ONE, 0.1)
            stats.answered("e", TWO, 0.2)
        firsts = Counter(stats.order("e", [ONE, TWO], 0.0)[0] for _ in range(2000))
        assert firsts[ONE] / firsts[TWO] == pytest.approx(4.0, rel=0.2), (
            "in proportion to the square of 1 / time"
        )

    def test_calls_in_flight_lower_a_peers_rank(self) -> None:
        stats = replica_stats(selection_exponent=50.0)
        for peer in (ONE, TWO):
            stats.answered("e", peer, 0.1)
        stats.begin(ONE)
        assert stats.order("e", [ONE, TWO], 0.0)[0] == TWO
        stats.begin(TWO)
        stats.begin(TWO)
        assert stats.order("e", [ONE, TWO], 0.0)[0] == ONE
        for _ in range(2):
            stats.end(TWO)
        stats.end(ONE)
        assert stats.expected_s("e", ONE) == stats.expected_s("e", TWO) == 0.1

    def test_declared_waits_count_until_a_reported_wait_replaces_them(self) -> None:
        stats = replica_stats(selection_exponent=50.0)
        for peer in (ONE, TWO):
            stats.answered("e", peer, 0.1)
        assert stats.order("e", [ONE, TWO], 0.0, [3.0, 0.0])[0] == TWO
        stats.wait_reported(ONE, 0.0, 10.0)
        stats.wait_reported(TWO, 2.0, 10.0)
        assert stats.order("e", [ONE, TWO], 11.0, [3.0, 0.0])[0] == ONE
        assert stats.order("e", [ONE, TWO], 16.0, [3.0, 0.0])[0] == TWO, "the reported wait is too old"

    def test_the_delay_before_a_second_request_adapts(self) -> None:
        stats = replica_stats()
        assert stats.hedge_after_s("e", ONE) == 1.0
        for _ in range(50):
            stats.answered("e", ONE, 0.3)
        assert stats.hedge_after_s("e", ONE) == pytest.approx(0.3, abs=0.01)
        for seconds in (0.1, 0.5) * 50:
            stats.answered("e", ONE, seconds)
        assert 0.9 < stats.hedge_after_s("e", ONE) < 1.3
        for _ in range(50):
            stats.answered("e", ONE, 0.001)
        assert stats.hedge_after_s("e", ONE) == 0.05

    def test_a_slow_peer_is_tried_again_only_while_the_call_could_be_hedged(self) -> None:
        """Regression (seeds 7 and 8 of the simulated swarm): four slow peers were tried at once, with second
        requests for only two of them.
        """
        stats = replica_stats(selection_exponent=50.0, budget=HedgeBudget(budget_max=2.0))
        stats.answered("e", THREE, 1.0)
        for peer in (ONE, TWO):
            stats.slow("other", peer, 0.0, "it was overtaken")
        assert stats.order("e", PEERS, 0.5)[0] == THREE, "for a while they come last"
        first = stats.order("e", PEERS, 2.0)[0]
        assert first in (ONE, TWO), "unknown ones count as quick"
        stats.begin(first)
        assert stats.order("e", [first, THREE], 2.0)[0] == THREE, "it is being tried"
        second = ONE if first == TWO else TWO
        assert stats.order("e", PEERS, 2.0)[0] == second
        assert stats.budget.try_spend()
        assert stats.order("e", PEERS, 2.0)[0] == THREE, "the last second request is reserved for the first"
        stats.end(first)
        assert stats.order("e", [first, THREE], 2.0)[0] == first
        assert stats.budget.try_spend()
        assert stats.order("e", [first, THREE], 2.0)[0] == THREE
        stats.answered("other", first, 0.01)
        assert stats.order("e", [first, THREE], 2.0)[0] == first, "it answered: it is ranked like the others"

    def test_without_hedging_a_full_peer_is_asked_again_after_a_while(self) -> None:
        stats = replica_stats(selection_exponent=50.0, budget=HedgeBudget(share_max=0.0))
        stats.answered("e", TWO, 1.0)
        stats.overloaded(ONE, 0.0)
        assert stats.order("e", [ONE, TWO], 0.5)[0] == TWO
        assert stats.order("e", [ONE, TWO], 2.0)[0] == ONE

    def test_the_number_of_remembered_replicas_is_bounded(self) -> None:
        stats = replica_stats(replicas_max=2)
        for peer in PEERS:
            stats.answered("e", peer, 1.0)
            stats.wait_reported(peer, 1.0, 0.0)
        assert stats.expected_s("e", ONE) == 0.05
        assert stats.expected_s("e", THREE) == 1.0

    def test_an_order_contains_every_peer_once(self) -> None:
        stats: list[PeerId] = replica_stats(3).order("e", PEERS, 0.0)
        assert sorted(stats) == sorted(PEERS)
