"""Groups of peers that can be called through relays only: who leads, reduces, and is called."""

from __future__ import annotations

import pytest

from averaging.matchmaking.logic.group import can_dial
from swarm.testing.group_swarm import Swarm, check_groups
from swarm.testing.virtual_loop import run_virtual


@pytest.mark.parametrize("hidden", [2, 3, 6])
@pytest.mark.parametrize("seed", range(4))
def test_peers_behind_relays_alone_form_a_group_in_which_all_reduce(seed: int, hidden: int) -> None:
    async def scenario() -> None:
        swarm = Swarm(seed)
        relay = swarm.network.peer()
        for _ in range(hidden):
            swarm.add(dialable=False, relays=[relay], target_group_size=8)
        found = await swarm.all([swarm.rng.random() * 0.03 for _ in range(hidden)])
        [group] = check_groups(swarm, found)
        assert len(group.members) == hidden
        assert all(can_dial(member) for member in group.members)
        await swarm.close()

    run_virtual(scenario())


@pytest.mark.parametrize("seed", range(8))
def test_a_peer_with_an_address_leads_and_reduces_without_calls_through_relays(seed: int) -> None:
    async def scenario() -> None:
        swarm = Swarm(seed)
        relay = swarm.network.peer()
        direct = {swarm.add(target_group_size=8).peer.peer_id for _ in range(2)}
        for _ in range(4):
            swarm.add(dialable=False, relays=[relay], target_group_size=8)
        found = await swarm.all([swarm.rng.random() * 0.03 for _ in range(6)])
        [group] = check_groups(swarm, found)
        assert len(group.members) == 6
        assert {member.peer_id for member in group.members if can_dial(member)} == direct
        assert not direct & set(swarm.network.relayed_calls)
        await swarm.close()

    run_virtual(scenario())


@pytest.mark.parametrize("seed", range(4))
def test_peers_without_any_way_to_them_follow_one_behind_a_relay(seed: int) -> None:
    async def scenario() -> None:
        swarm = Swarm(seed)
        relay = swarm.network.peer()
        leader = swarm.add(dialable=False, relays=[relay], target_group_size=8).peer.peer_id
        for _ in range(3):
            swarm.add(dialable=False, target_group_size=8)
        found = await swarm.all([swarm.rng.random() * 0.03 for _ in range(4)])
        [group] = check_groups(swarm, found)
        assert {member.peer_id for member in group.members if can_dial(member)} == {leader}
        assert len(group.members) == 4
        await swarm.close()

    run_virtual(scenario())


@pytest.mark.parametrize("seed", range(4))
def test_peers_whose_relay_is_gone_are_clients_of_one_with_an_address(seed: int) -> None:
    async def scenario() -> None:
        swarm = Swarm(seed)
        relay = swarm.network.peer()
        direct = swarm.add(target_group_size=8).peer.peer_id
        for _ in range(3):
            swarm.add(dialable=False, relays=[relay], target_group_size=8)
        await swarm.network.crash(relay)
        found = await swarm.all([swarm.rng.random() * 0.03 for _ in range(4)])
        [group] = check_groups(swarm, found)
        assert len(group.members) == 4
        assert {member.peer_id for member in group.members if can_dial(member)} == {direct}
        await swarm.close()

    run_virtual(scenario())
