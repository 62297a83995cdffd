"""A simulated swarm that forms groups: the real service and messages on virtual time, all randomness from one
seed.

During every search a watcher checks every 5 virtual ms that peers do not wait for one another in a circle: a
peer that delays calls of followers does not follow another peer, and circles of calls in progress (for
example after a lost reply) are resolved soon.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from averaging.matchmaking.logic.group import Group, Member
from averaging.matchmaking.logic.messages import AveragerName, Holder, SearchFailed, VectorSchema
from averaging.matchmaking.logic.presence_shards import HolderShard
from averaging.matchmaking.service.exchange import GroupExchange
from averaging.matchmaking.service.matchmaking_service import GroupService
from averaging.matchmaking.service.presence import Presence
from swarm.core.ids import PeerId
from swarm.testing.network import LinkConfig, SimulatedNetwork, SimulatedPeer

WINDOW_S = 10.0
CIRCLE_S_MAX = 3.0  # two pings to a leader that no longer leads, or one that times out
SCHEMA = b"schema"


@dataclass
class PresenceTable:
    """Presence records as one table that all peers read after a delay."""

    records: dict[PeerId, Holder] = field(default_factory=dict)
    delay_s: float = 0.05
    reads: int = 0
    shard: HolderShard = field(default_factory=HolderShard)

    @property
    def total(self) -> int:
        return len(self.records)

    async def read_at(self, place: str, timeout_s: float) -> dict[PeerId, Holder]:
        return await self.read(timeout_s)

    async def read(self, timeout_s: float) -> dict[PeerId, Holder]:
        self.reads += 1
        await asyncio.sleep(self.delay_s)
        return dict(self.records)


@dataclass
class SimulatedVolunteer:
    """One simulated peer with its matchmaking service."""

    peer: SimulatedPeer
    service: GroupService
    exchange: GroupExchange

    async def find(
        self,
        *,
        key: str = "",
        window_s: float = WINDOW_S,
        weight: float = 1.0,
        gathered: bytes = b"",
        electors: int = 0,
    ) -> Group | SearchFailed:
        """Search for a group, and assert that the search ends by its deadline. `electors`: in the electors'
        cell, where this many are expected.
        """
        now_s = asyncio.get_running_loop().time()
        member = Member(
            contact=self.peer.contact, weight=weight, bandwidth=1.0 if self.peer.contact.is_callable else 0.0
        )
        found = await self.service.find(
            member=member,
            round_key=key,
            deadline_s=now_s + window_s,
            gathered=gathered,
            electors=electors,
        )
        ended_s = asyncio.get_running_loop().time()
        assert ended_s <= now_s + window_s + 1e-5, "a search ends by its deadline"
        return found


class Swarm:
    """Simulated peers that all hold the averager `a` of the run `r`."""

    def __init__(
        self,
        seed: int,
        link: LinkConfig | None = None,
        presence_of: Callable[[SimulatedPeer], Presence] | None = None,
    ) -> None:
        """`presence_of` returns the source of a peer's presence records; None: one table for all."""
        self._presence_of = presence_of
        self.network, self.table, self.rng = (
            SimulatedNetwork(seed, link),
            PresenceTable(),
            random.Random(seed),
        )
        self.volunteers: list[SimulatedVolunteer] = []

    def add(
        self,
        *,
        schema: bytes = SCHEMA,
        dialable: bool = True,
        relays: Sequence[SimulatedPeer] = (),
        known: bool = True,
        **how: Any,
    ) -> SimulatedVolunteer:
        """Add a peer. `relays`: as in `SimulatedNetwork.peer`; `known`: it has a presence record; `how`:
        group sizes and times of its service.
        """
        peer = self.network.peer(dialable=dialable, relays=relays)
        exchange = GroupExchange(
            handlers=peer.handlers, caller=peer.caller, own=peer.peer_id, clock=peer.clock
        )
        service = GroupService(
            exchange=exchange,
            presence=self.table if self._presence_of is None else self._presence_of(peer),
            name=AveragerName(run="r", averager="a"),
            schema=VectorSchema(digest=schema, text="a schema", codec="float32"),
            rng=random.Random(self.rng.random()),
            supervisor=peer.supervisor,
            **how,
        )
        if known:
            self.table.records[peer.peer_id] = Holder(
                contact=peer.contact, schema=schema, schema_text="a schema"
            )
        volunteer = SimulatedVolunteer(peer, service, exchange)
        self.volunteers.append(volunteer)
        return volunteer

    async def watch(self) -> None:
        """Assert, until cancelled, that no peers wait in a circle."""
        since_s: dict[PeerId, float] = {}
        while True:
            now_s = asyncio.get_running_loop().time()
            machines = {one.peer.peer_id: one.service.machine for one in self.volunteers if one.peer.up}
            waits = {peer_id: machine.following for peer_id, machine in machines.items()}
            for peer_id, machine in machines.items():
                assert machine.following is None or not machine.followers, (
                    "a follower must not delay calls of followers"
                )
                at = machine.following
                for _ in machines:
                    at = waits.get(at) if at is not None and at != peer_id else at
                if at != peer_id:
                    since_s.pop(peer_id, None)
                else:
                    assert now_s - since_s.setdefault(peer_id, now_s) < CIRCLE_S_MAX, "peers wait in a circle"
            await asyncio.sleep(0.005)

    async def all(self, delays_s: list[float], **search: object) -> list[Group | SearchFailed]:
        """Let all peers search, each after its delay, and return their results in order."""

        async def one(volunteer: SimulatedVolunteer, delay_s: float) -> Group | SearchFailed:
            await asyncio.sleep(delay_s)
            return await volunteer.find(**search)  # type: ignore[arg-type]

        async with asyncio.TaskGroup() as tasks:
            watcher = tasks.create_task(self.watch())
            async with asyncio.TaskGroup() as searches:
                found = [
                    searches.create_task(one(v, d)) for v, d in zip(self.volunteers, delays_s, strict=True)
                ]
            watcher.cancel()
        return [task.result() for task in found]

    async def close(self) -> None:
        await self.network.close()
        assert not self.network.errors, self.network.errors


def check_groups(swarm: Swarm, found: list[Group | SearchFailed]) -> list[Group]:
    """Assert that every group is the same on all its members and contains only peers that found it; return
    the groups.
    """
    groups = {one.group_id: one for one in found if isinstance(one, Group)}
    places = Counter(one.group_id for one in found if isinstance(one, Group))
    for volunteer, one in zip(swarm.volunteers, found, strict=True):
        if isinstance(one, Group):
            assert one == groups[one.group_id]
            assert volunteer.peer.peer_id in one.peer_ids
    for group_id, group in groups.items():
        assert places[group_id] == len(group.members), "a member did not learn that its group began"
    return list(groups.values())
