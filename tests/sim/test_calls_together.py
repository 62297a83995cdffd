"""Calls of several experts that are made together, with scripted servers: each has its own replicas, failures
and repetitions, and those to one peer share requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from moe.client.replicas.calling import ForwardCall, ForwardResult, ReplicaCalls
from moe.protocol.calls import UNCOMPRESSED, BackwardReply, GradientPass
from moe.protocol.declarations import ExpertReplica
from moe.protocol.errors import ExpertFailed, ExpertOverloaded
from moe.protocol.names import ExpertUid
from swarm.core.errors import DeadlineExceeded, NetworkError, NotEnoughPeers, SwarmError
from swarm.core.ids import PeerId
from swarm.testing.virtual_loop import run_virtual
from tests.sim.scripted_experts import INPUTS, PEERS, REPLICAS, Scripted, calls_of, forward_result

EXPERTS = [ExpertUid.parse(f"ffn.{number}") for number in range(6)]


async def forward_all(
    calls: ReplicaCalls, hosts: Sequence[Sequence[ExpertReplica]], deadline_s: float = 10.0
) -> tuple[dict[int, ForwardResult | SwarmError], dict[int, float]]:
    """Call an expert at each of the hosts' replicas, together. Return the results, and when they came."""
    found: dict[int, ForwardResult | SwarmError] = {}
    came_s: dict[int, float] = {}

    def note(results: Mapping[int, ForwardResult | SwarmError]) -> None:
        assert not found.keys() & results.keys()
        found.update(results)
        came_s.update(dict.fromkeys(results, asyncio.get_running_loop().time()))

    made = [ForwardCall(uid, one, INPUTS, True) for uid, one in zip(EXPERTS, hosts, strict=False)]
    await calls.forward_all(made, note, deadline_s=deadline_s, codecs=UNCOMPRESSED)
    assert found.keys() == set(range(len(hosts)))
    return found, came_s


def hosts_of(results: Mapping[int, ForwardResult | SwarmError]) -> list[PeerId | str]:
    """Return who answered each call, or its error."""
    return [
        one.replica.peer_id if isinstance(one, ForwardResult) else str(one)
        for _, one in sorted(results.items())
    ]


def test_calls_that_are_made_together_reach_each_peer_once() -> None:
    async def scenario() -> None:
        scripted = Scripted({PEERS[0]: 0.1, PEERS[1]: 5.0, PEERS[2]: NetworkError("gone")})
        calls = calls_of(scripted)
        hosts = [[REPLICAS[number % 3]] for number in range(6)]
        results, came_s = await forward_all(calls, hosts)
        assert hosts_of(results) == [PEERS[0], PEERS[1], "gone"] * 2
        assert sorted(scripted.asked) == sorted((0.0, peer) for peer in PEERS)
        assert sorted(scripted.together) == sorted((peer, 2) for peer in PEERS)
        assert [round(came_s[number], 1) for number in range(3)] == [0.1, 5.0, 0.0], "nobody waits for others"

    run_virtual(scenario())


def test_a_peer_computes_while_the_calls_of_the_next_one_are_prepared() -> None:
    async def scenario() -> None:
        scripted = Scripted()
        calls, replicas = calls_of(scripted), [[replica] for replica in REPLICAS]
        results, _ = await forward_all(calls, replicas)
        assert [number for number, _ in scripted.described] == [0, 1, 2], (
            "prepared after the one before was sent"
        )
        passes = [
            (one, GradientPass(INPUTS, INPUTS)) for one in results.values() if isinstance(one, ForwardResult)
        ]
        found: dict[int, BackwardReply | SwarmError] = {}
        await calls.backward_all(passes, found.update, deadline_s=10.0, codecs=UNCOMPRESSED)
        assert [number for number, _ in scripted.described] == [0, 1, 2, 3, 4, 5]
        assert len(found) == 3

    run_virtual(scenario())


def test_calls_whose_peer_fails_or_is_slow_go_to_the_next_one_together() -> None:
    for first, after_s in ((NetworkError("gone"), 0.1), (30.0, 1.1)):

        async def scenario(first: Any = first, after_s: float = after_s) -> None:
            scripted = Scripted({PEERS[0]: first, PEERS[1]: 0.1, PEERS[2]: 0.1})
            calls = calls_of(scripted)
            for uid in EXPERTS:
                calls.stats.answered(str(uid), PEERS[1], 1e6)  # so that the other is asked first
            results, came_s = await forward_all(calls, [REPLICAS[:2]] * 4 + [REPLICAS[2:]])
            assert hosts_of(results) == [PEERS[1]] * 4 + [PEERS[2]]
            assert sorted(scripted.together[:2]) == sorted([(PEERS[0], 4), (PEERS[2], 1)])
            assert scripted.together[2:] == [(PEERS[1], 4)]
            assert came_s == {**dict.fromkeys(range(4), pytest.approx(after_s)), 4: pytest.approx(0.1)}
            assert calls.stats.why_avoided("ffn.3", PEERS[0], after_s) is not None
            assert len(asyncio.all_tasks()) == 1

        run_virtual(scenario())


def test_calls_that_nobody_answers_fail_at_the_deadline_each_with_its_own_error() -> None:
    async def scenario() -> None:
        calls = calls_of(Scripted({PEERS[0]: 30.0, PEERS[1]: ExpertFailed("NaN")}))
        results, came_s = await forward_all(calls, [[REPLICAS[0]], [REPLICAS[1]], []], 2.0)
        assert [type(one) for _, one in sorted(results.items())] == [
            DeadlineExceeded,
            ExpertFailed,
            NotEnoughPeers,
        ]
        assert came_s == {0: pytest.approx(2.0), 1: 0.0, 2: 0.0}
        assert not calls.available(EXPERTS[0], REPLICAS[:1])

    run_virtual(scenario())


def test_only_the_backward_passes_without_a_reply_are_repeated_and_the_others_come_at_once() -> None:
    async def scenario() -> None:
        scripted = Scripted(backward=[0.0, ExpertOverloaded("full"), ExpertFailed("NaN"), 0.0])
        calls, found, came_s = calls_of(scripted), dict[int, Any](), dict[int, float]()

        def note(replies: Mapping[int, BackwardReply | SwarmError]) -> None:
            assert not found.keys() & replies.keys()
            found.update(replies)
            came_s.update(dict.fromkeys(replies, asyncio.get_running_loop().time()))

        passes = [(forward_result(), GradientPass(INPUTS, INPUTS))] * 3
        await calls.backward_all(passes, note, deadline_s=10.0, codecs=UNCOMPRESSED)
        assert [type(found[number]) for number in range(3)] == [BackwardReply, BackwardReply, ExpertFailed]
        assert scripted.together == [(PEERS[0], 3), (PEERS[0], 1)]
        assert came_s == {0: 0.0, 1: pytest.approx(0.05), 2: 0.0}

    run_virtual(scenario())


def test_backward_passes_are_not_repeated_when_they_fail_while_they_are_cancelled() -> None:
    """Regression: the error of the attempt to repeat them replaced the cancellation."""

    class Broken(Scripted):
        async def backward_all(self, *arguments: Any, **settings: Any) -> None:
            _, requests, on_replies = arguments
            try:
                await super().backward_all(*arguments, **settings)
            finally:
                on_replies({number: NetworkError("the connection broke") for number in requests})

    async def scenario() -> None:
        calls = calls_of(Broken(backward=[5.0] * 9))
        results = [forward_result(), replace(forward_result(), replica=REPLICAS[1])]
        passes = [(one, GradientPass(INPUTS, INPUTS)) for one in results]
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0):
                await calls.backward_all(passes, lambda replies: None, deadline_s=60.0, codecs=UNCOMPRESSED)
        assert len(asyncio.all_tasks()) == 1

    run_virtual(scenario())
