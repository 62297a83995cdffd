"""Matchmaking in a simulated swarm, with arrivals, losses and failures in any order."""

from __future__ import annotations

import asyncio
from typing import Any, get_args

import pytest

from averaging.blocklist import BLOCK_AFTER_LIE_S
from averaging.matchmaking.logic.grace_period import GracePeriod
from averaging.matchmaking.logic.group import Group
from averaging.matchmaking.logic.messages import SearchFailed
from swarm.core.presets import LAN, LOCAL, WAN, Preset, Timings
from swarm.testing.group_swarm import SimulatedVolunteer, Swarm, check_groups
from swarm.testing.network import LinkConfig
from swarm.testing.virtual_loop import run_virtual


@pytest.mark.parametrize("peers", [2, 3, 4, 8, 16])
@pytest.mark.parametrize("seed", range(4))
def test_aligned_peers_end_in_one_group(seed: int, peers: int) -> None:
    async def scenario() -> None:
        swarm = Swarm(seed)
        for _ in range(peers):
            swarm.add(target_group_size=16)
        began_s = asyncio.get_running_loop().time()
        found = await swarm.all([swarm.rng.random() * 0.03 for _ in range(peers)])
        [group] = check_groups(swarm, found)
        assert len(group.members) == peers
        # one read of the records (0.05), then query and Join; a first leader may turn out not to be the best
        assert asyncio.get_running_loop().time() - began_s < 0.03 + 0.05 + 4 * 0.05
        await swarm.close()

    run_virtual(scenario())


@pytest.mark.parametrize("seed", range(4))
def test_known_peers_meet_in_two_round_trips(seed: int) -> None:
    async def scenario() -> None:
        swarm = Swarm(seed, LinkConfig(delay_s=0.025, jitter=0.0))
        for _ in range(4):
            swarm.add(target_group_size=8)
        for number in range(3):
            began_s = asyncio.get_running_loop().time()
            check_groups(swarm, await swarm.all([0.0] * 4))
            took_s = asyncio.get_running_loop().time() - began_s
            assert number == 0 or took_s <= 2 * 0.05 + 1e-5
            for volunteer in swarm.volunteers:
                volunteer.service.round_over(committed=True)
        await swarm.close()

    run_virtual(scenario())


@pytest.mark.parametrize("seed", range(12))
def test_more_peers_than_fit_into_a_group_form_several(seed: int) -> None:
    async def scenario() -> None:
        swarm = Swarm(seed)
        for _ in range(12):
            swarm.add(target_group_size=4)
        found = await swarm.all([swarm.rng.random() * 0.2 for _ in range(12)])
        groups = check_groups(swarm, found)
        assert [len(group.members) for group in groups] == [4, 4, 4]
        await swarm.close()

    run_virtual(scenario())


@pytest.mark.parametrize("seed", range(24))
def test_random_faults_never_break_agreement_or_deadlines(seed: int) -> None:
    """Random arrivals, windows, keys, crashes, freezes and losses: groups agree, no search exceeds its
    deadline, and peers never wait in a circle.
    """

    async def scenario() -> None:
        swarm = Swarm(seed, LinkConfig(delay_s=0.02, jitter=1.0, loss=0.02 if seed % 2 else 0.0))
        rng = swarm.rng
        for _ in range(rng.randrange(3, 12)):
            swarm.add(
                target_group_size=rng.choice([2, 4, 16]),
                dialable=rng.random() < 0.8,
                known=rng.random() < 0.9,
            )
        results: list[Group | SearchFailed] = []

        async def one(volunteer: SimulatedVolunteer) -> None:
            for number in range(4):
                await asyncio.sleep(rng.random() * 2.0)
                found = await volunteer.find(
                    key=rng.choice(["", str(number)]), window_s=rng.choice([0.5, 3.0, 10.0])
                )
                results.append(found)
                if isinstance(found, Group):
                    await asyncio.sleep(rng.random() * 0.5)
                    volunteer.service.round_over(committed=rng.random() < 0.8)

        async def trouble() -> None:
            for victim in rng.sample(swarm.volunteers, 2):
                await asyncio.sleep(rng.random() * 3.0)
                victim.peer.frozen = True
                await asyncio.sleep(rng.random() * 3.0)
                victim.peer.frozen = False
            await asyncio.sleep(rng.random())
            swarm.volunteers[0].peer.up = False

        async with asyncio.TaskGroup() as tasks:
            background = [tasks.create_task(swarm.watch()), tasks.create_task(trouble())]
            async with asyncio.TaskGroup() as searches:
                for volunteer in swarm.volunteers:
                    searches.create_task(one(volunteer))
            for task in background:
                task.cancel()
        assert results
        await swarm.close()

    run_virtual(scenario())


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("how", ["crashed", "frozen"])
def test_a_leader_that_dies_is_replaced(seed: int, how: str) -> None:
    async def scenario() -> None:
        swarm = Swarm(seed)
        for _ in range(4):
            swarm.add(target_group_size=8)
        leader, *others = swarm.volunteers
        slow = others.pop()  # all others wait for it
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as tasks:
            first = tasks.create_task(leader.find(window_s=9.0))
            rest = [tasks.create_task(one.find()) for one in others]
            await asyncio.sleep(1.0)
            assert all(one.service.machine.following == leader.peer.peer_id for one in others)
            died_s = loop.time()
            leader.peer.up, leader.peer.frozen = how != "crashed", how == "frozen"
            await asyncio.sleep(0.2)
            rest.append(tasks.create_task(slow.find()))
            groups = [await task for task in rest]
            took_s = loop.time() - died_s
            first.cancel()
        group = groups[0]
        assert isinstance(group, Group)
        assert set(group.peer_ids) == {one.peer.peer_id for one in [*others, slow]}
        assert groups == [group] * 3
        assert took_s < 2.5
        await swarm.close()

    run_virtual(scenario())


def test_a_member_that_dies_before_the_start_is_not_in_the_group() -> None:
    async def scenario() -> None:
        swarm = Swarm(1)
        for _ in range(3):
            swarm.add(target_group_size=8)
        leader, dies, late = swarm.volunteers
        async with asyncio.TaskGroup() as tasks:
            first = tasks.create_task(leader.find())
            await asyncio.sleep(0.3)
            second = tasks.create_task(dies.find())
            await asyncio.sleep(0.3)
            dies.peer.up = False
            second.cancel()  # what a closed connection does to its call
            await asyncio.sleep(0.1)
            third = tasks.create_task(late.find())
        group = first.result()
        assert isinstance(group, Group)
        assert group == third.result()
        assert set(group.peer_ids) == {leader.peer.peer_id, late.peer.peer_id}
        await swarm.close()

    run_virtual(scenario())


@pytest.mark.parametrize("late_s", [0.1, 0.5, 1.0, 2.0])
def test_a_late_peer_is_waited_for(late_s: float) -> None:
    async def scenario() -> None:
        swarm = Swarm(2)
        for _ in range(4):
            swarm.add(target_group_size=8)
        for _ in range(3):
            [group] = check_groups(swarm, await swarm.all([0.0, 0.0, 0.0, late_s]))
            assert len(group.members) == 4
            for volunteer in swarm.volunteers:
                volunteer.service.round_over(committed=True)
        await swarm.close()

    run_virtual(scenario())


def test_a_peer_that_was_late_once_is_waited_for_in_later_rounds() -> None:
    """Four seconds exceed the grace period of an unknown peer: the first round goes without it, later ones
    wait for it.
    """

    async def scenario() -> None:
        swarm = Swarm(3)
        for _ in range(3):
            swarm.add(target_group_size=8)
        sizes = []
        for number in range(4):
            found = await swarm.all([0.0, 0.0, 4.0], key=str(number))
            check_groups(swarm, found)
            sizes.append(max(len(one.members) for one in found if isinstance(one, Group)))
            for volunteer in swarm.volunteers:
                volunteer.service.round_over(committed=True)
        assert sizes == [2, 3, 3, 3]
        await swarm.close()

    run_virtual(scenario())


@pytest.mark.parametrize("step_s", [2.5, 7.0, 60.0])
def test_waiting_for_a_slow_peer_takes_a_tenth_of_the_time(step_s: float) -> None:
    """Three peers train epochs of a second, and a fourth makes steps of several epochs."""
    share, epochs = 0.1, 200

    async def scenario() -> None:
        swarm, loop = Swarm(11), asyncio.get_running_loop()
        for _ in range(4):
            swarm.add(target_group_size=8, grace_period=GracePeriod(waiting_share_max=share))
        *punctual, slow = swarm.volunteers
        sizes: list[int] = []
        epoch = 0

        async def train(volunteer: SimulatedVolunteer) -> None:
            nonlocal epoch
            for number in range(epochs):
                await asyncio.sleep(1.0 + 0.02 * swarm.rng.random())
                found = await volunteer.find(key=str(number))
                assert isinstance(found, Group)
                assert {one.peer.peer_id for one in punctual} <= set(found.peer_ids), (
                    "punctual peers are waited for"
                )
                sizes.append(len(found.members))
                volunteer.service.round_over(committed=True)
                epoch = number + 1

        async def compute() -> None:
            while True:
                await asyncio.sleep(step_s)
                if isinstance(await slow.find(key=str(epoch), window_s=3.0), Group):
                    slow.service.round_over(committed=True)

        began_s = loop.time()
        async with asyncio.TaskGroup() as tasks:
            slow_task = tasks.create_task(compute())
            async with asyncio.TaskGroup() as trainers:
                for volunteer in punctual:
                    trainers.create_task(train(volunteer))
            slow_task.cancel()
        # the advance of its account, and what it takes to form a group of peers that are there
        usual_s = epochs * 1.02 + WAN.unknown_peer_s + epochs * 0.1
        assert loop.time() - began_s < usual_s / (1.0 - share)
        assert 4 in sizes or step_s > 10.0
        await swarm.close()

    run_virtual(scenario())


@pytest.mark.parametrize("keyed", [True, False], ids=["keyed", "unkeyed"])
def test_an_early_peer_meets_the_others_in_the_next_round(keyed: bool) -> None:
    """A peer that is done early and looks for round n+1 meets those that still finish round n, with and
    without keys.
    """

    async def scenario() -> None:
        swarm = Swarm(4)
        for _ in range(4):
            swarm.add(target_group_size=8)
        rng = swarm.rng

        async def one(volunteer: SimulatedVolunteer) -> list[Group | SearchFailed]:
            found = []
            for number in range(10):
                found.append(await volunteer.find(key=str(number) if keyed else ""))
                await asyncio.sleep(0.2 + 0.3 * rng.random())  # the round
                volunteer.service.round_over(committed=True)
            return found

        async with asyncio.TaskGroup() as tasks:
            rounds = [tasks.create_task(one(volunteer)) for volunteer in swarm.volunteers]
        for number in range(10):
            [group] = check_groups(swarm, [task.result()[number] for task in rounds])
            assert len(group.members) == 4
        await swarm.close()

    run_virtual(scenario())


def test_a_network_partition_makes_two_groups() -> None:
    async def scenario() -> None:
        swarm = Swarm(5)
        for _ in range(6):
            swarm.add(target_group_size=8)
        swarm.network.partition(
            [one.peer for one in swarm.volunteers[:3]], [one.peer for one in swarm.volunteers[3:]]
        )
        groups = check_groups(swarm, await swarm.all([0.0] * 6))
        sides = [{one.peer.peer_id for one in side} for side in (swarm.volunteers[:3], swarm.volunteers[3:])]
        assert sorted((set(group.peer_ids) for group in groups), key=min) == sorted(sides, key=min)
        await swarm.close()

    run_virtual(scenario())


def test_peers_that_cannot_be_dialed_join_others() -> None:
    async def scenario() -> None:
        swarm = Swarm(9)
        for dialable in (False, True, False, True):
            swarm.add(target_group_size=8, dialable=dialable)
        [group] = check_groups(swarm, await swarm.all([0.0, 0.1, 0.2, 0.3]))
        assert len(group.members) == 4
        await swarm.close()

    run_virtual(scenario())


def test_gathered_metadata_reaches_all_members_in_group_order() -> None:
    async def scenario() -> None:
        swarm = Swarm(10)
        one, other = swarm.add(), swarm.add()
        async with asyncio.TaskGroup() as tasks:
            first = tasks.create_task(one.find(gathered=b"one"))
            tasks.create_task(other.find(gathered=b"other"))
        group = first.result()
        assert isinstance(group, Group)
        assert group.gathered[group.index(one.peer.peer_id)] == b"one"
        assert group.gathered[group.index(other.peer.peer_id)] == b"other"
        await swarm.close()

    run_virtual(scenario())


def test_a_search_that_is_cancelled_leaves_nobody_waiting() -> None:
    async def scenario() -> None:
        swarm = Swarm(11)
        for _ in range(3):
            swarm.add(target_group_size=8)
        leader, follower, third = swarm.volunteers
        async with asyncio.TaskGroup() as tasks:
            first = tasks.create_task(leader.find(window_s=9.0))
            second = tasks.create_task(follower.find())
            await asyncio.sleep(0.5)
            first.cancel()
            await asyncio.sleep(0.1)
            assert follower.service.machine.following is None
            last = tasks.create_task(third.find())
        assert second.result() == last.result()
        await swarm.close()

    run_virtual(scenario())


def test_a_search_that_is_cancelled_in_the_moment_when_its_group_begins_leaves_the_averager_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The leader's answer has come, and the task of the follower's search has not run since."""

    async def scenario() -> None:
        swarm = Swarm(1)
        volunteers = [swarm.add(), swarm.add()]
        searches = [asyncio.create_task(volunteer.find()) for volunteer in volunteers]
        for volunteer, search in zip(volunteers, searches, strict=True):
            machine = volunteer.service.machine
            answered = machine.on_join_answer

            def and_cancelled(*arguments: Any, answered: Any = answered, search: Any = search) -> None:
                answered(*arguments)
                search.cancel()

            monkeypatch.setattr(machine, "on_join_answer", and_cancelled)
        await asyncio.wait(searches)
        assert [search.cancelled() for search in searches].count(True) == 1
        monkeypatch.undo()
        for volunteer, search in zip(volunteers, searches, strict=True):
            if not search.cancelled():
                volunteer.service.round_over(committed=False)
        check_groups(swarm, await swarm.all([0.0, 0.0]))
        await swarm.close()

    run_virtual(scenario())


@pytest.mark.parametrize(
    ("timings", "waits_s"), [(LOCAL, 1.67), (LAN, 2.0), (WAN, 3.0)], ids=get_args(Preset)
)
def test_a_group_waits_for_an_unknown_idle_peer_as_long_as_the_preset_says(
    timings: Timings, waits_s: float
) -> None:
    async def scenario() -> None:
        swarm = Swarm(12)
        for _ in range(3):
            swarm.add(target_group_size=8, timings=timings)
        began_s = asyncio.get_running_loop().time()
        searching = swarm.volunteers[:2]
        async with asyncio.TaskGroup() as tasks:
            found = [tasks.create_task(one.find()) for one in searching]
        group = found[0].result()
        assert isinstance(group, Group)
        assert len(group.members) == 2
        took_s = asyncio.get_running_loop().time() - began_s
        assert waits_s <= took_s <= waits_s + 0.5, "the searches' messages are the rest"
        await swarm.close()

    run_virtual(scenario())


@pytest.mark.parametrize("keyed", [True, False], ids=["keyed", "unkeyed"])
@pytest.mark.parametrize("seed", range(20))
def test_nobody_is_left_out_because_messages_overtake_one_another(seed: int, keyed: bool) -> None:
    """All peers step within milliseconds, round after round, and messages arrive in any order: one group each
    time.
    """

    async def scenario() -> None:
        swarm = Swarm(seed, LinkConfig(delay_s=0.01, jitter=1.0))
        for _ in range(4):
            swarm.add(target_group_size=8)
        for number in range(12):
            found = await swarm.all(
                [swarm.rng.random() * 0.03 for _ in range(4)], key=str(number) if keyed else ""
            )
            assert [len(group.members) for group in check_groups(swarm, found)] == [4], found
            await asyncio.sleep(0.02)
            for volunteer in swarm.volunteers:
                volunteer.service.round_over(committed=True)
        await swarm.close()

    run_virtual(scenario())


@pytest.mark.parametrize("seed", range(8))
def test_a_banned_peer_is_in_no_group(seed: int) -> None:
    """All peers know the banned one, which itself continues searching."""

    async def scenario() -> None:
        swarm = Swarm(seed)
        banned, *others = [swarm.add(target_group_size=8) for _ in range(4)]
        for volunteer in others:
            volunteer.exchange.blocklist_of("r").ban({banned.peer.peer_id})
        alone, *found = await swarm.all([swarm.rng.random() * 0.2 for _ in range(4)])
        assert isinstance(alone, SearchFailed)
        assert all(
            isinstance(group, Group) and set(group.peer_ids) == {one.peer.peer_id for one in others}
            for group in found
        ), found
        await swarm.close()

    run_virtual(scenario())


@pytest.mark.parametrize("seed", range(8))
def test_a_peer_that_was_proved_to_lie_is_blocked_for_a_while(seed: int) -> None:
    async def scenario() -> None:
        swarm = Swarm(seed)
        liar, *others = [swarm.add(target_group_size=8) for _ in range(3)]
        check_groups(swarm, await swarm.all([0.0] * 3))
        liar.service.round_over(committed=False)
        for volunteer in others:
            volunteer.service.round_over(committed=False, accused={liar.peer.peer_id: "it lied about part 3"})
        alone, *found = await swarm.all([swarm.rng.random() * 0.2 for _ in range(3)])
        assert isinstance(alone, SearchFailed)
        assert "it lied about part 3" in alone.detail
        assert all(
            isinstance(group, Group) and set(group.peer_ids) == {one.peer.peer_id for one in others}
            for group in found
        ), found
        for volunteer in others:
            volunteer.service.round_over(committed=True)
        await asyncio.sleep(BLOCK_AFTER_LIE_S)
        [group] = check_groups(swarm, await swarm.all([0.0] * 3))
        assert len(group.members) == 3
        await swarm.close()

    run_virtual(scenario())
