"""Presence records of swarms that are too large for one dictionary: reads are bounded, peers find their
groups, and the division follows the number of holders.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, cast

import pytest

from averaging.matchmaking.logic.group import Group
from averaging.matchmaking.logic.messages import AveragerName, VectorSchema
from averaging.matchmaking.logic.presence_shards import (
    BITS_MAX,
    BITS_MIN,
    FLAT_MAX,
    SHARD_HOLDERS,
    bits_for,
    holders_estimated,
    nearest,
    place_of,
    shard_at,
)
from averaging.matchmaking.service.presence import TTL_S, DhtPresence
from swarm.core.errors import NetworkError
from swarm.core.ids import Key, PeerId
from swarm.dht.service.dht_service import DhtService, Entry
from swarm.testing.group_swarm import SCHEMA, SimulatedVolunteer, Swarm, check_groups
from swarm.testing.network import SimulatedPeer
from swarm.testing.virtual_loop import collector_off, run_virtual

GROUP = 16
READ_S = 0.05


@dataclass
class Stored:
    replicas: int = 5


class TableDht:
    """The dictionaries of a simulated DHT, and one peer's view of them."""

    def __init__(self, tables: dict[Key, dict[str, Entry]], read: Counter[int], peer: SimulatedPeer) -> None:
        self._tables, self._read, self._peer = tables, read, peer
        self.fails = False

    async def store(self, key: Key, value: object, *, ttl_s: float, subkey: str, **how: Any) -> Stored:
        await asyncio.sleep(READ_S)
        now_s = self._peer.clock.swarm_s()
        self._tables.setdefault(key, {})[subkey] = Entry(
            value=value,
            subkey=subkey,
            writer=self._peer.peer_id,
            issued_at=now_s,
            expiration=now_s + ttl_s,
        )
        return Stored()

    async def get(self, key: Key, **how: Any) -> dict[str, Entry]:
        await asyncio.sleep(READ_S)
        if self.fails:
            raise NetworkError("no peer answered")
        now_s = self._peer.clock.swarm_s()
        found = {name: entry for name, entry in self._tables.get(key, {}).items() if entry.expiration > now_s}
        self._read[self._peer.index] += len(found)
        return found

    async def delete(self, key: Key, *, subkey: str, **how: Any) -> None:
        self._tables.get(key, {}).pop(subkey, None)


class LargeSwarm:
    """Peers with production presence records over one table."""

    def __init__(self, seed: int) -> None:
        self.tables: dict[Key, dict[str, Entry]] = {}
        self.read: Counter[int] = Counter()  # records, by peer
        self.presences: dict[int, DhtPresence] = {}
        self.dhts: dict[int, TableDht] = {}
        self.renewing: dict[int, asyncio.Task[None]] = {}
        self.swarm = Swarm(seed, presence_of=self._presence)

    def _presence(self, peer: SimulatedPeer) -> DhtPresence:
        dht = self.dhts[peer.index] = TableDht(self.tables, self.read, peer)
        presence = self.presences[peer.index] = DhtPresence(
            dht=cast(DhtService, dht),
            name=AveragerName(run="r", averager="a"),
            own=lambda: peer.contact,
            schema=VectorSchema(digest=SCHEMA, text="a schema", codec="float32"),
            group_size=GROUP,
        )
        return presence

    async def add(self, count: int) -> list[SimulatedVolunteer]:
        added = [self.swarm.add(target_group_size=GROUP, known=False) for _ in range(count)]
        for volunteer in added:
            presence = self.presences[volunteer.peer.index]
            self.renewing[volunteer.peer.index] = volunteer.peer.supervisor.spawn("renews", presence.renew)
        await asyncio.sleep(1.0)
        return added

    async def read_all(self) -> dict[int, set[PeerId]]:
        """Let every peer read its records once, as searches do, and return what each saw."""
        async with asyncio.TaskGroup() as tasks:
            reads = {
                index: tasks.create_task(presence.read(5.0)) for index, presence in self.presences.items()
            }
        await asyncio.sleep(2.0)
        return {index: set(read.result()) for index, read in reads.items()}

    async def remove(self, volunteer: SimulatedVolunteer) -> None:
        presence = self.presences.pop(volunteer.peer.index)
        self.renewing.pop(volunteer.peer.index).cancel()
        await presence.withdraw()
        volunteer.peer.up = False

    def live(self) -> list[SimulatedVolunteer]:
        return [one for one in self.swarm.volunteers if one.peer.up]

    def bits(self) -> Counter[int]:
        return Counter(presence.shard.bits for presence in self.presences.values())


@pytest.mark.parametrize("bits", [0, BITS_MIN, 5, BITS_MAX])
def test_every_place_is_in_one_shard_and_neighbours_overlap(bits: int) -> None:
    for number in range(200):
        place = place_of(str(number).encode())
        shard = shard_at(place, bits)
        assert shard.holds(place)
        for other in (bits - 1, bits + 1):
            near = shard_at(place, other if other >= BITS_MIN else 0) if 0 <= other <= BITS_MAX else shard
            assert near == shard or near in shard.neighbours() or bits == 0


def test_the_division_changes_with_hysteresis_and_by_one_bit() -> None:
    assert bits_for(FLAT_MAX, 0) == 0
    assert bits_for(FLAT_MAX + 1, 0) == BITS_MIN
    assert bits_for(32 * SHARD_HOLDERS, 0) == 5
    for bits in range(BITS_MIN, 10):
        nominal = SHARD_HOLDERS << bits
        assert bits_for(nominal, bits) == bits
        assert bits_for(nominal, bits + 1) == bits + 1, "half of the nominal size is kept"
        assert bits_for(100 * nominal, bits) == bits + 1
    assert bits_for(100, BITS_MIN) == BITS_MIN
    assert bits_for(96, BITS_MIN) == 0
    assert bits_for(1, 9) == 8
    assert bits_for(200, 0, flat_max=256) == 0


def test_a_few_false_notices_divide_no_small_swarm() -> None:
    assert holders_estimated(20, [20] * 7) == 27
    assert holders_estimated(60, [3] * 9) == 60 + 72, "peers that have not followed yet count the others"
    assert holders_estimated(0, [5] * 30 + [20] * 3) == 33 << 5


@pytest.mark.simulation
def test_reads_are_bounded_and_every_peer_sees_the_holders_of_its_shard() -> None:
    peers = 400

    async def scenario() -> None:
        large = LargeSwarm(2)
        await large.add(peers)
        for _ in range(4):
            await large.read_all()
        await asyncio.sleep(TTL_S + 11.0)  # old records have expired
        large.read.clear()
        seen = await large.read_all()
        # shards differ by chance, and with them the divisions that their peers assume, by one bit at most
        assert max(large.bits()) - min(large.bits()) <= 1
        assert max(large.read.values()) < 4 * 1.5 * SHARD_HOLDERS, "shard, both halves, and the coarser shard"
        for index, holders in seen.items():
            shard = large.presences[index].shard
            wanted = {
                one.peer.peer_id for one in large.live() if shard.holds(place_of(one.peer.peer_id.to_bytes()))
            }
            assert holders == wanted
        large.read.clear()
        [newcomer] = await large.add(1)
        presence = large.presences[newcomer.peer.index]
        await presence.read(5.0)
        assert presence.shard.bits in large.bits()
        assert large.read[newcomer.peer.index] < 5 * 1.5 * SHARD_HOLDERS, "and the notices"
        for name in ("16.64.5", "16.64.63", "*"):
            hosts = {
                tuple(nearest(name, await one.read_at(name, 5.0), 3)) for one in large.presences.values()
            }
            assert len(hosts) == 1, "all ask the same peers for the members of a cell"
        for volunteer in large.live()[60:]:
            await large.remove(volunteer)
        for _ in range(6):
            await asyncio.sleep(TTL_S + 11.0)
            await large.read_all()
        assert large.bits() == {0: 60}, "a swarm that shrinks returns to one dictionary"
        await asyncio.sleep(11.0)
        assert all(len(holders) == 60 for holders in (await large.read_all()).values())
        await large.swarm.close()

    play(scenario())


def play(scenario: Coroutine[Any, Any, None]) -> None:
    with collector_off():  # a swarm of 140 peers is a third of a million objects
        run_virtual(scenario)


async def step(large: LargeSwarm, key: str) -> list[Group | object]:
    async def one(volunteer: SimulatedVolunteer) -> Group | object:
        found = await volunteer.find(key=key, window_s=30.0)
        if isinstance(found, Group):
            await asyncio.sleep(0.2)
            volunteer.service.round_over(committed=True)
        return found

    async with asyncio.TaskGroup() as tasks:
        searches = [tasks.create_task(one(volunteer)) for volunteer in large.live()]
    return [search.result() for search in searches]


@pytest.mark.simulation
@pytest.mark.parametrize("seed", [1, 2, 3, 4])
def test_everybody_finds_a_group_in_a_swarm_of_several_shards(seed: int) -> None:
    peers = 140

    async def scenario() -> None:
        large = LargeSwarm(seed)
        await large.add(peers)
        for _ in range(2):
            await large.read_all()
        await asyncio.sleep(TTL_S + 11.0)
        assert large.bits() == {BITS_MIN: peers}
        for number in range(3):
            found = await step(large, str(number))
            missed = sum(not isinstance(one, Group) for one in found)
            # first cells follow from ranks, which a peer knows within its shard only: one may be too full
            assert missed <= (0 if number else 1), f"round {number}"
            if number:  # in the first round peers still find out how many they are
                groups = check_groups(large.swarm, cast(Any, found))
                assert min(len(group.members) for group in groups) >= GROUP // 2
            await asyncio.sleep(1.0)
        await large.swarm.close()

    play(scenario())


def test_peers_of_uneven_shards_agree_on_the_number_of_holders() -> None:
    peers = 140

    async def scenario() -> None:
        large = LargeSwarm(4)
        await large.add(peers)
        for _ in range(2):
            await large.read_all()
        await asyncio.sleep(TTL_S + 11.0)
        seen = await large.read_all()
        sizes = {len(holders) for holders in seen.values()}
        assert max(sizes) > 1.5 * min(sizes), "by its own shard alone each would assume another number"
        assert {presence.total for presence in large.presences.values()} == {peers}
        await large.swarm.close()

    play(scenario())


def test_records_of_shards_that_cannot_be_read_are_an_ordinary_error() -> None:
    async def scenario() -> None:
        large = LargeSwarm(1)
        await large.add(140)
        await large.read_all()
        presence = large.presences[0]
        assert presence.shard.bits
        large.dhts[0].fails = True
        with pytest.raises(NetworkError, match="no peer answered"):  # searches continue with what they know
            await presence.read(5.0)
        with pytest.raises(NetworkError):
            await presence.read_at("16.12.5", 5.0)
        await large.swarm.close()

    play(scenario())
