"""Rounds in a simulated swarm: the real service and messages, virtual time, crashes and freezes at any
moment, everything from a seed.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
import torch

from averaging.allreduce.config import VOTE, RoundConfig
from averaging.allreduce.outcome import RoundOutcome
from averaging.matchmaking.logic.group import Group, Member
from averaging.reduction.vector import FlatVector
from swarm.testing.network import LinkConfig, SimulatedNetwork, SimulatedPeer
from swarm.testing.rounds import all_reduce_of
from swarm.testing.virtual_loop import run_virtual
from tests.sim.random_rounds import CONFIG, DEADLINE_S, Scenario, check, scenario
from tests.sim.round_scene import Scene


@pytest.mark.parametrize("seed", range(60))
def test_without_faults_all_members_commit_the_mean(seed: int) -> None:
    given = scenario(seed)

    async def main(given: Scenario = given) -> None:
        async with asyncio.TaskGroup() as tasks:
            running = {place: tasks.create_task(given.run(place)) for place in range(len(given.peers))}
        outcomes = {place: task.result() for place, task in running.items()}
        check(outcomes, given, None)
        weights = [member.weight for member in given.group.members]
        mean = sum(
            weight * vector.double() for weight, vector in zip(weights, given.vectors, strict=True)
        ) / sum(weights)
        vector = outcomes[0].vector
        assert vector is not None
        tolerance = {"float32": 1e-6, "float16": 2e-3, "bfloat16": 2e-2}[given.group.codec]
        assert torch.allclose(vector.double(), torch.as_tensor(mean), atol=tolerance, rtol=tolerance)
        given.close()
        await given.network.close()

    run_virtual(main())


@pytest.mark.parametrize("how", ["crash", "freeze"])
@pytest.mark.parametrize("seed", range(60))
def test_a_member_is_lost_at_any_moment(seed: int, how: str) -> None:
    given = scenario(seed)
    rng = random.Random(f"{seed} {how}")
    victim = rng.randrange(len(given.peers))
    lost_s = rng.choice([0.0, 0.01, 0.05, 0.2, 0.5, 2.0]) * rng.random()

    async def main(given: Scenario = given, victim: int = victim, lost_s: float = lost_s) -> None:
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as tasks:
            running = {place: tasks.create_task(given.run(place)) for place in range(len(given.peers))}
            await asyncio.sleep(lost_s)
            already = running[victim].done()
            if how == "crash":
                running[victim].cancel()
                await given.network.crash(given.peers[victim])
            else:
                given.peers[victim].frozen = True
            gone_s = loop.time()
            survivors = {place: task for place, task in running.items() if place != victim}
            if survivors:
                await asyncio.wait(survivors.values())
            ended_s = loop.time()
            running[victim].cancel()
        outcomes = {place: task.result() for place, task in survivors.items()}
        check(outcomes, given, victim)
        if any(outcome.failed for outcome in outcomes.values()):
            assert not already
            name = str(given.peers[victim].peer_id)
            assert all(name in str(outcome.reason) for outcome in outcomes.values()), [
                outcome.reason for outcome in outcomes.values()
            ]
            assert ended_s - gone_s < 6.0  # a freeze before the first heartbeat takes longest
        given.peers[victim].frozen = False
        given.close()
        await given.network.close()

    run_virtual(main())


async def lone_contributor(seed: int, config: RoundConfig, *, dies: bool) -> str:
    """A round whose only contributor dies, or finds a value that it cannot send: how it ended for the two
    others.
    """
    network = SimulatedNetwork(seed, LinkConfig(delay_s=0.02, bandwidth=1e5))
    peers = [network.peer() for _ in range(3)]
    services = [all_reduce_of(peer) for peer in peers]
    members = tuple(
        Member(contact=peer.contact, weight=float(place == 0), bandwidth=1.0)
        for place, peer in enumerate(peers)
    )
    group = Group(group_id=bytes(32), members=members, codec="float32", gathered=(b"",) * 3)
    vectors = [torch.full((30_000,), float(place)) for place in range(3)]
    if not dies:
        vectors[0][1 + 1500 * seed] = float("nan")
    async with asyncio.TaskGroup() as tasks:
        running = [
            tasks.create_task(
                service.run(group, vector, deadline_s=peer.clock.monotonic_s() + DEADLINE_S, config=config)
            )
            for service, vector, peer in zip(services, vectors, peers, strict=True)
        ]
        if dies:
            await asyncio.sleep(0.04 + 0.01 * seed)
            running[0].cancel()
            await network.crash(peers[0])
        one, other = [await task for task in running[1:]]
    for service in services:
        service.close()
    await network.close()
    assert one.failed == other.failed
    fraction = one.contributions.get(peers[0].peer_id, 0.0)
    if one.failed:
        assert "nobody is left who contributes" in str(one.reason)
        assert one.vector is None
        return "failed"
    assert other.contributions == one.contributions
    assert other.digest == one.digest
    assert fraction >= config.min_fraction
    assert one.averages is not None
    assert one.averages.whole == (fraction == 1.0)
    assert one.averages.decoded().nan_to_num(9.0).mean() == pytest.approx(9.0 * (1.0 - fraction), abs=1e-4)
    one.averages.write(FlatVector([vectors[1]]))  # chunks without an average keep their values
    assert vectors[1].mean() == pytest.approx(1.0 - fraction, abs=1e-4)
    return "whole" if fraction == 1.0 else "partial"


@pytest.mark.parametrize("dies", [False, True])
@pytest.mark.parametrize("min_fraction", [1.0, 0.3, 0.01])
@pytest.mark.parametrize("seed", range(20))
def test_members_agree_on_chunks_without_contributors(seed: int, min_fraction: float, dies: bool) -> None:
    """The values of the only contributor that came are averaged, the other chunks have no average, and all
    live members agree on which is which.
    """
    config = RoundConfig(chunk_bytes=4096, min_fraction=min_fraction)
    ending = run_virtual(lone_contributor(seed, config, dies=dies))
    assert ending in ({"whole", "failed"} if dies or min_fraction == 1.0 else {"partial", "failed"})


@pytest.mark.parametrize(
    ("min_fraction", "expected"), [(1.0, {"failed"}), (0.3, {"partial", "failed"}), (0.01, {"partial"})]
)
def test_a_lone_contributor_withdraws_before_and_after_enough_chunks_came(
    min_fraction: float, expected: set[str]
) -> None:
    """The seeds of the test above reach every ending that it is about."""
    config = RoundConfig(chunk_bytes=4096, min_fraction=min_fraction)
    assert {run_virtual(lone_contributor(seed, config, dies=False)) for seed in range(20)} == expected


def test_a_round_whose_only_contributor_dies_counts_if_it_had_voted() -> None:
    """Only contributors vote, so that nobody commits what the contributor did not vote for."""
    config = RoundConfig(chunk_bytes=4096, min_fraction=0.01)
    endings = {run_virtual(lone_contributor(seed, config, dies=True)) for seed in range(20)}
    assert endings == {"whole", "failed"}


@pytest.mark.parametrize("late_s", [0.05, 0.3, 2.0])
def test_member_without_weight_that_opens_its_streams_after_the_end_is_given_the_averages(
    late_s: float,
) -> None:
    """Nobody waits for a member that neither contributes nor reduces. Late, it finds committed rounds, whose
    reducers are not lost.
    """

    async def main() -> None:
        network = SimulatedNetwork(0, LinkConfig(delay_s=0.01))
        peers = [network.peer() for _ in range(3)]
        services = [all_reduce_of(peer) for peer in peers]
        members = tuple(
            Member(contact=peer.contact, weight=weight, bandwidth=weight)
            for peer, weight in zip(peers, [1.0, 2.0, 0.0], strict=True)
        )
        group = Group(group_id=bytes(range(32)), members=members, codec="float32", gathered=(b"",) * 3)
        vectors = [torch.full((5000,), float(place)) for place in range(3)]

        async def run(place: int) -> RoundOutcome:
            await asyncio.sleep(late_s if place == 2 else 0.0)
            deadline_s = peers[place].clock.monotonic_s() + DEADLINE_S
            return await services[place].run(group, vectors[place], deadline_s=deadline_s, config=CONFIG)

        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(run(place)) for place in range(3)]
        outcomes = [task.result() for task in running]
        assert {outcome.digest for outcome in outcomes} == {outcomes[0].digest}
        assert not any(outcome.failed for outcome in outcomes)
        assert [outcome.left_out for outcome in outcomes] == [{}, {}, {}]
        assert not network.errors
        for service in services:
            service.close()
        await network.close()

    run_virtual(main())


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("bad", [0, 5000, 9999])
def test_all_members_learn_why_a_member_was_left_out_before_the_commit(
    seed: int, bad: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression test: a member whose own value, in the part that it reduces itself, cannot be sent was the
    only one that could say so, with its vote, without which the two others commit. `bad`: the element, in the
    part of each member in turn.
    """
    scene = Scene(seed, [1.0] * 3)
    scene.vectors[1][bad] = float("nan")
    slow, send = scene.peers[1], scene.network.send

    def late(own: SimulatedPeer, target: SimulatedPeer, name: str, *rest: Any) -> None:
        if name == VOTE.name and slow in (own, target):
            asyncio.get_running_loop().call_later(0.5, send, own, target, name, *rest)
        else:
            send(own, target, name, *rest)

    monkeypatch.setattr(scene.network, "send", late)

    async def main() -> None:
        outcomes = await scene.conduct()
        await scene.close()
        for outcome in outcomes:
            assert not outcome.failed, outcome.reason
            reason = outcome.left_out[slow.peer_id]
            assert f"element {bad} of its vector is nan, which float32 cannot carry" in reason

    run_virtual(main())


@pytest.mark.parametrize("gone", range(3))
@pytest.mark.parametrize("seed", range(3))
def test_a_member_that_gave_up_before_the_others_began_costs_them_no_wait(seed: int, gone: int) -> None:
    """Regression test: its goodbye waited for the round at the others, and came to a machine whose driver had
    not begun. The successor's question to the third member was lost, so that the two waited for each other
    until the deadline.
    """
    scene = Scene(seed, [1.0] * 3)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        early = loop.create_task(scene.run(gone))
        await asyncio.sleep(0.1)
        early.cancel()  # it tells the others for a second
        await asyncio.sleep(0.2)
        began_s = loop.time()
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(scene.run(place)) for place in range(3) if place != gone]
        outcomes = [task.result() for task in running]
        assert [outcome.reason for outcome in outcomes] == [None, None]
        assert len({outcome.digest for outcome in outcomes}) == 1
        assert loop.time() - began_s < 2.0
        await scene.close()

    run_virtual(main())
