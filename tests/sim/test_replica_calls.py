"""Calls of one expert among its replicas, with scripted servers: retries, deadlines, avoidance; and the
directory cache.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence

import pytest

from moe.client.replicas.calling import ForwardCall, ForwardResult, ReplicaCalls
from moe.client.replicas.directory_cache import STALE_S, ExpertDirectoryCache
from moe.protocol.calls import UNCOMPRESSED, BackwardReply, GradientPass
from moe.protocol.declarations import ExpertReplica, GridBranch
from moe.protocol.errors import ExpertApplied, ExpertFailed, ExpertMissing, ExpertOverloaded, ExpertRefused
from moe.protocol.names import ExpertUid
from swarm.core.errors import DeadlineExceeded, NetworkError, NotEnoughPeers, SwarmError
from swarm.core.ids import Contact
from swarm.runtime.supervise import Supervisor
from swarm.testing.identities import SeededIdentity
from swarm.testing.virtual_loop import EPOCH_UNIX_S, VirtualClock, run_virtual
from tests.sim.scripted_experts import (
    INPUTS,
    PEERS,
    REPLICAS,
    ROOT,
    SCHEMA,
    UID,
    Scripted,
    Table,
    calls_of,
    forward_result,
)


def forward(
    calls: ReplicaCalls, replicas: Sequence[ExpertReplica], deadline_s: float = 10.0
) -> Awaitable[ForwardResult]:
    return calls.forward(ForwardCall(UID, replicas, INPUTS, True), deadline_s=deadline_s, codecs=UNCOMPRESSED)


def backward(calls: ReplicaCalls, deadline_s: float = 10.0) -> Awaitable[BackwardReply]:
    return calls.backward(
        forward_result(), GradientPass(INPUTS, INPUTS), deadline_s=deadline_s, codecs=UNCOMPRESSED
    )


def forward_any(calls: ReplicaCalls, timeout_s: float = 10.0) -> Awaitable[ForwardResult]:
    deadline_s = asyncio.get_running_loop().time() + timeout_s
    return calls.forward_any(UID, INPUTS, keep=True, deadline_s=deadline_s, codecs=UNCOMPRESSED)


def test_after_a_failure_the_next_replica_is_asked_at_once() -> None:
    async def scenario() -> None:
        scripted = Scripted({PEERS[0]: NetworkError("gone"), PEERS[1]: ExpertFailed("NaN")})
        calls = calls_of(scripted)
        for _ in range(4):
            assert (await forward(calls, REPLICAS)).replica.peer_id == PEERS[2]
        assert [peer for _, peer in scripted.asked].count(PEERS[2]) == 4
        assert [peer for _, peer in scripted.asked].count(PEERS[0]) <= 1, "avoided from then on"

    run_virtual(scenario())


def test_a_slow_replica_is_overtaken_and_then_comes_last() -> None:
    async def scenario() -> None:
        scripted = Scripted({PEERS[0]: 30.0, PEERS[1]: 0.2})
        calls = calls_of(scripted)
        calls.stats.answered(str(UID), PEERS[1], 5.0)  # so that the other is asked first
        answer = await forward(calls, REPLICAS[:2])
        assert answer.replica.peer_id == PEERS[1]
        assert asyncio.get_running_loop().time() == pytest.approx(1.2), (
            "a second until the unknown replica is hedged, 0.2 for the answer"
        )
        assert calls.stats.available(str(UID), PEERS[:2], 1.2) == [PEERS[1]]
        assert len([task for task in asyncio.all_tasks() if task is not asyncio.current_task()]) == 0

    run_virtual(scenario())


def test_a_slow_replica_may_still_answer_first() -> None:
    async def scenario() -> None:
        calls = calls_of(Scripted({PEERS[0]: 1.5, PEERS[1]: 9.0}))
        calls.stats.answered(str(UID), PEERS[1], 5.0)
        assert (await forward(calls, REPLICAS[:2])).replica.peer_id == PEERS[0]
        assert asyncio.get_running_loop().time() == pytest.approx(1.5)
        assert calls.stats.available(str(UID), PEERS[:2], 1.5) == PEERS[:2], "the second was not late"

    run_virtual(scenario())


@pytest.mark.parametrize(
    "error",
    [ExpertOverloaded("full", 9), ExpertMissing("gone"), ExpertRefused("no"), DeadlineExceeded("silent")],
)
def test_after_a_refusal_another_replica_is_asked(error: SwarmError) -> None:
    async def scenario() -> None:
        scripted = Scripted({PEERS[0]: error})
        calls = calls_of(scripted)
        calls.stats.answered(str(UID), PEERS[1], 5.0)  # so that the other is asked first
        for _ in range(3):
            assert (await forward(calls, REPLICAS[:2])).replica.peer_id == PEERS[1]
        assert [peer for _, peer in scripted.asked] == [PEERS[0], *PEERS[1:2] * 3], (
            "and it comes last for a while"
        )
        reason = calls.stats.why_avoided(str(UID), PEERS[0], 0.5)
        assert reason is None if isinstance(error, ExpertOverloaded) else reason == str(error)

    run_virtual(scenario())


def test_when_all_queues_are_full_the_call_fails_at_once() -> None:
    async def scenario() -> None:
        scripted = Scripted({peer: ExpertOverloaded("full", 9) for peer in PEERS})
        for _ in range(2):
            with pytest.raises(ExpertOverloaded):
                await forward_any(calls_of(scripted, Table(REPLICAS)), 60.0)
        assert asyncio.get_running_loop().time() < 1.0
        assert len(scripted.asked) == 6

    run_virtual(scenario())


def test_forward_any_asks_every_replica_and_then_new_ones() -> None:
    async def scenario() -> None:
        many = [
            ExpertReplica(
                Contact(SeededIdentity(f"many/{number}").peer_id), b"", expiration=EPOCH_UNIX_S + 1e6
            )
            for number in range(9)
        ]
        table, scripted = (
            Table(many[:6]),
            Scripted({replica.peer_id: NetworkError("gone") for replica in many[:5]}),
        )
        calls = calls_of(scripted, table)
        assert (await forward_any(calls)).replica == many[5]
        scripted.forward_outcomes = {replica.peer_id: NetworkError("gone") for replica in many[:8]}
        table.branches_of[ROOT] = GridBranch({0: tuple(many)})
        assert (await forward_any(calls)).replica == many[8]
        del scripted.forward_outcomes[many[0].peer_id]
        scripted.forward_outcomes[many[8].peer_id] = NetworkError("gone, too")
        assert (await forward_any(calls)).replica == many[0], "though it is avoided"
        scripted.forward_outcomes[many[0].peer_id] = NetworkError("gone")
        with pytest.raises(NetworkError, match="gone"):
            await forward_any(calls)

    run_virtual(scenario())


def test_a_call_fails_when_nobody_hosts_the_expert_or_the_dht_is_silent() -> None:
    async def scenario() -> None:
        table = Table()
        for ask in (forward_any, lambda calls: calls.schema(UID, deadline_s=10.0)):
            with pytest.raises(NotEnoughPeers, match=r"nobody hosts ffn\.0"):
                await ask(calls_of(Scripted(), table))
        table.down = True
        with pytest.raises(NetworkError, match="the DHT is silent"):
            await forward_any(calls_of(Scripted(), table))

    run_virtual(scenario())


def test_replicas_are_asked_for_the_schema_in_turn() -> None:
    async def scenario() -> None:
        failures = {PEERS[0]: NetworkError("gone"), PEERS[1]: ExpertMissing("not here")}
        calls = calls_of(Scripted(schema=dict(failures)), Table(REPLICAS))
        assert await calls.schema(UID, deadline_s=10.0) == SCHEMA
        alone = calls_of(Scripted(schema=dict(failures)), Table(REPLICAS[:2]))
        with pytest.raises((NetworkError, ExpertMissing)):
            await alone.schema(UID, deadline_s=10.0)
        assert not alone.available(UID, REPLICAS[:2])

    run_virtual(scenario())


def test_a_replica_that_is_pending_at_the_deadline_is_avoided() -> None:
    async def scenario() -> None:
        calls = calls_of(Scripted({PEERS[0]: 30.0}))
        with pytest.raises(DeadlineExceeded):
            await forward(calls, REPLICAS[:1], 2.0)
        assert asyncio.get_running_loop().time() == pytest.approx(2.0)
        with pytest.raises(NotEnoughPeers, match="are avoided, silent"):
            await forward(calls, REPLICAS[:1])

    run_virtual(scenario())


def test_a_call_that_is_cancelled_counts_as_late() -> None:
    async def scenario() -> None:
        calls = calls_of(Scripted({PEERS[0]: 30.0}))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await forward(calls, REPLICAS[:1])
        assert calls.stats.why_avoided(str(UID), PEERS[0], 0.6) == "it was too slow to be waited for"
        assert calls.stats.expected_s(str(UID), PEERS[0]) == 0.05, "nothing is in flight there any more"

    run_virtual(scenario())


def test_backward_is_repeated_under_the_same_request_id_until_it_is_answered() -> None:
    async def scenario() -> None:
        scripted = Scripted(
            backward=[NetworkError("broken"), ExpertOverloaded("full"), NetworkError("broken")]
        )
        answer = await backward(calls_of(scripted))
        assert answer.gradients[0] is not None
        assert scripted.request_ids == [b"one"] * 4
        assert {peer for _, peer in scripted.asked} == {PEERS[0]}, "nowhere else"
        pauses_s = [
            later - sooner
            for (sooner, _), (later, _) in zip(scripted.asked, scripted.asked[1:], strict=False)
        ]
        assert pauses_s == [pytest.approx(pause_s) for pause_s in (0.05, 0.1, 0.2)]

    run_virtual(scenario())


@pytest.mark.parametrize(
    ("outcomes", "error", "avoided"),
    [
        ([NetworkError("broken")] * 9, NetworkError, True),
        ([DeadlineExceeded("silent")] * 9, DeadlineExceeded, True),
        ([ExpertOverloaded("full")] * 9, ExpertOverloaded, False),
        ([ExpertFailed("NaN")], ExpertFailed, True),
        ([ExpertMissing("gone")], ExpertMissing, True),
        ([ExpertRefused("wrong")], ExpertRefused, True),
        ([ExpertApplied("twice")], ExpertApplied, False),
    ],
)
def test_a_backward_pass_that_fails_raises_the_last_error(
    outcomes: list[Exception], error: type[Exception], avoided: bool
) -> None:
    async def scenario() -> None:
        scripted = Scripted(backward=outcomes)
        calls = calls_of(scripted)
        with pytest.raises(error):
            await backward(calls)
        assert len(scripted.asked) == (4 if len(outcomes) == 9 else 1)
        assert (
            calls.stats.why_avoided(str(UID), PEERS[0], asyncio.get_running_loop().time()) is not None
        ) == avoided

    run_virtual(scenario())


def test_a_lost_backward_answer_is_asked_for_again_before_the_deadline() -> None:
    async def scenario() -> None:
        scripted = Scripted(backward=[1e6])
        await backward(calls_of(scripted))
        assert scripted.request_ids == [b"one"] * 2
        assert asyncio.get_running_loop().time() == pytest.approx(6.15)
        with pytest.raises(DeadlineExceeded):
            await backward(calls_of(Scripted(backward=[1e6] * 9)), deadline_s=16.15)
        assert asyncio.get_running_loop().time() == pytest.approx(16.15)

    run_virtual(scenario())


def test_the_directory_cache_refreshes_in_the_background_and_drops_expired_replicas() -> None:
    async def scenario() -> None:
        loop, table, clock = asyncio.get_running_loop(), Table(), VirtualClock()
        directory = ExpertDirectoryCache(table, clock, Supervisor())
        soon = ExpertReplica(REPLICAS[0].contact, b"", expiration=EPOCH_UNIX_S + 5.0)
        table.branches_of[ROOT] = GridBranch({0: (soon,), 1: (soon, REPLICAS[1])})
        assert set((await directory.branches([ROOT], timeout_s=1.0))[ROOT].experts) == {0, 1}
        assert loop.time() == pytest.approx(0.1)
        await asyncio.sleep(1.0)
        await directory.branches([ROOT], timeout_s=1.0)
        assert len(table.reads) == 1
        await asyncio.sleep(2.0)
        at_s = loop.time()
        for _ in range(3):
            await directory.branches([ROOT], timeout_s=1.0)
        assert loop.time() == at_s, "no caller waits"
        await asyncio.sleep(0.2)
        assert len(table.reads) == 2
        table.down = True
        await asyncio.sleep(3.0)
        found = (await directory.branches([ROOT], timeout_s=1.0))[ROOT]
        assert found.experts == {1: (REPLICAS[1],)}, "what has expired is dropped, though the DHT is silent"
        await asyncio.sleep(STALE_S + 10.0)
        assert (await directory.branches([ROOT], timeout_s=1.0))[ROOT].experts == {1: (REPLICAS[1],)}
        with pytest.raises(NetworkError):
            await directory.branches([ExpertUid.parse_prefix("other")], timeout_s=1.0)

    run_virtual(scenario())


def test_the_directory_cache_keeps_empty_branches_briefly_and_is_bounded() -> None:
    async def scenario() -> None:
        table = Table()
        directory = ExpertDirectoryCache(table, VirtualClock(), Supervisor(), prefixes_max=3)
        assert await directory.replicas(UID, timeout_s=1.0) == ()
        assert await directory.replicas(UID, timeout_s=1.0) == ()
        assert len(table.reads) == 1
        table.branches_of[ROOT] = GridBranch({0: (REPLICAS[0],)})
        await asyncio.sleep(0.6)
        assert await directory.replicas(UID, timeout_s=1.0) == (REPLICAS[0],)
        assert await directory.replicas(UID, timeout_s=1.0, refresh=True) == (REPLICAS[0],)
        assert len(table.reads) == 3
        await directory.branches([ExpertUid("ffn", (place,)) for place in range(10)], timeout_s=1.0)
        assert len(directory) == 3

    run_virtual(scenario())
