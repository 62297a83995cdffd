"""A simulated swarm that averages in the grid, round after round. The matchmaking messages are real; the
averaged value is one number.

`measure` forms groups of 16, 64, 256 peers and reports the costs and the remaining deviation from the mean;
`Averaging` does the same with peers that join, fail, fail rounds or are late, for tests.
"""

from __future__ import annotations

import asyncio
import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from averaging.matchmaking.logic.group import Group
from averaging.matchmaking.logic.messages import SearchFailed
from swarm.core.ids import PeerId
from swarm.testing.group_swarm import SimulatedVolunteer, Swarm
from swarm.testing.network import LinkConfig
from swarm.testing.virtual_loop import run_virtual

ROUND_S = 0.2  # duration of a round after its group has formed


@dataclass(frozen=True, slots=True, kw_only=True)
class GridFigures:
    """Costs of forming groups, round by round. In the first round no peer knows any other."""

    peers: int
    target_group_size: int
    cells: int
    rounds_to_mix: int
    messages: tuple[float, ...]  # requests and replies that a peer sends, on average
    messages_most: tuple[int, ...]  # messages of the busiest peer
    bytes_sent: tuple[float, ...]  # per peer, protobuf without TLS and TCP
    reads: tuple[float, ...]  # reads of the presence records, per peer
    forming_s: tuple[float, ...]  # virtual seconds from the aligned start until every peer has its group
    # root mean square distance from the mean, relative to that before the first round
    deviations: tuple[float, ...]


class Averaging:
    """Values that are averaged as `swarm.Averager` would: after a round every member has the group's mean,
    and its mean weight.
    """

    def __init__(self, seed: int, link: LinkConfig | None = None, *, target_group_size: int) -> None:
        self.swarm = Swarm(seed, link)
        self.target_group_size = target_group_size
        self.values: dict[PeerId, float] = {}
        self.weights: dict[PeerId, float] = {}
        self.rounds = 0

    def add(self, value: float, weight: float = 1.0) -> SimulatedVolunteer:
        volunteer = self.swarm.add(target_group_size=self.target_group_size)
        self.values[volunteer.peer.peer_id], self.weights[volunteer.peer.peer_id] = value, weight
        return volunteer

    def live(self) -> list[SimulatedVolunteer]:
        """Return the peers that are up."""
        return [one for one in self.swarm.volunteers if one.peer.up]

    def remove(self, volunteer: SimulatedVolunteer, *, goodbye: bool) -> None:
        """Stop a peer. With `goodbye` it closes its averager and withdraws its presence record; otherwise it
        fails and the record stays.
        """
        volunteer.peer.up = False
        if goodbye:
            del self.swarm.table.records[volunteer.peer.peer_id]

    def mean(self) -> float:
        """Return the weighted mean of all live peers."""
        live = [one.peer.peer_id for one in self.live()]
        return sum(self.values[one] * self.weights[one] for one in live) / sum(
            self.weights[one] for one in live
        )

    def deviation(self) -> float:
        """Return the root mean square distance of the live peers' values from their mean."""
        mean = self.mean()
        return math.sqrt(statistics.fmean((self.values[one.peer.peer_id] - mean) ** 2 for one in self.live()))

    async def step(
        self,
        *,
        key: str | None = None,
        window_s: float = 20.0,
        late_s: Callable[[], float] = lambda: 0.0,
        breaks: Callable[[Group], bool] = lambda group: False,
    ) -> list[Group | SearchFailed]:
        """Let every live peer step once, and return the outcomes in order.

        The round key is `key`, or a new one per step; `late_s` draws each peer's delay; `breaks` returns
        whether a group's round fails.
        """
        key, self.rounds = str(self.rounds) if key is None else key, self.rounds + 1
        live = self.live()

        async def one(volunteer: SimulatedVolunteer, delay_s: float) -> Group | SearchFailed:
            await asyncio.sleep(delay_s)
            found = await volunteer.find(
                key=key, window_s=window_s, weight=self.weights[volunteer.peer.peer_id]
            )
            if isinstance(found, Group):
                await asyncio.sleep(ROUND_S)
                volunteer.service.round_over(committed=not breaks(found))
            return found

        async with asyncio.TaskGroup() as tasks:
            searches = [tasks.create_task(one(volunteer, late_s())) for volunteer in live]
        found = [search.result() for search in searches]
        averages = self._averages({one.group_id: one for one in found if isinstance(one, Group)})
        for volunteer, group in zip(live, found, strict=True):
            if isinstance(group, Group) and not breaks(group):
                self.values[volunteer.peer.peer_id], self.weights[volunteer.peer.peer_id] = averages[
                    group.group_id
                ]
        return found

    def _averages(self, groups: Mapping[bytes, Group]) -> dict[bytes, tuple[float, float]]:
        averages = {}
        for group_id, group in groups.items():
            whole = sum(self.weights[member.peer_id] for member in group.members)
            value = (
                sum(self.weights[member.peer_id] * self.values[member.peer_id] for member in group.members)
                / whole
            )
            averages[group_id] = (value, whole / len(group.members))
        return averages


def measure(
    peers: int, target_group_size: int, *, rounds: int = 4, seed: int = 1, link: LinkConfig | None = None
) -> GridFigures:
    """Form groups of aligned peers, round after round, and measure the costs. All peers are in the presence
    records before the first round.
    """

    async def scenario() -> GridFigures:
        averaging = Averaging(seed, link, target_group_size=target_group_size)
        swarm = averaging.swarm
        for _ in range(peers):
            averaging.add(swarm.rng.gauss(0.0, 1.0))
        loop, first = asyncio.get_running_loop(), averaging.deviation()
        rows: list[tuple[float, int, float, float, float, float]] = []
        members = [one.peer for one in swarm.volunteers]
        for _ in range(rounds):
            began_s, reads = loop.time(), swarm.table.reads
            sent = [(peer.messages_sent, peer.bytes_sent) for peer in members]
            found = await averaging.step(late_s=lambda: 0.02 * swarm.rng.random())
            if not all(isinstance(one, Group) for one in found):
                raise AssertionError(
                    f"not all peers found a group: {[one for one in found if isinstance(one, SearchFailed)]}"
                )
            messages = [peer.messages_sent - before for peer, (before, _) in zip(members, sent, strict=True)]
            size_bytes = sum(
                peer.bytes_sent - before for peer, (_, before) in zip(members, sent, strict=True)
            )
            formed_s = loop.time() - began_s - ROUND_S
            reads_each = (swarm.table.reads - reads) / peers
            rows.append(
                (
                    sum(messages) / peers,
                    max(messages),
                    size_bytes / peers,
                    reads_each,
                    formed_s,
                    averaging.deviation() / first,
                )
            )
            await asyncio.sleep(1.0)  # the peers compute
        shape = swarm.volunteers[0].service.cells.grid.shape
        await swarm.close()
        messages_of, most, sizes, reads_of, forming, deviations = zip(*rows, strict=True)
        return GridFigures(
            peers=peers,
            target_group_size=target_group_size,
            cells=shape.cells,
            rounds_to_mix=shape.rounds_to_mix,
            messages=messages_of,
            messages_most=most,
            bytes_sent=sizes,
            reads=reads_of,
            forming_s=forming,
            deviations=deviations,
        )

    return run_virtual(scenario())
