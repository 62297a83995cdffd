"""The places of a grid: the servers of each expert, and the experts that a server with `--num-experts`
takes.
"""

from __future__ import annotations

import random

from moe.protocol.declarations import Directory
from moe.protocol.finding import ExpertPattern, hosted_experts
from moe.protocol.names import NAMES_MAX, ExpertGrid, ExpertUid
from moe.server.logic.placement import GridLoad, choose_needed
from swarm.core.errors import UsageError
from swarm.core.ids import PeerId

_DRAWS_PER_PLACE_MAX = 64


async def read_load(directory: Directory, grid: ExpertGrid, *, timeout_s: float) -> GridLoad:
    """Return the servers of a grid's experts, and how busy each of them is. Experts that nobody hosts are in
    it unless the grid is too large to list.
    """
    pattern = ExpertPattern(grid.block, grid.dimensions)
    found = {
        uid: {one.peer_id: one.load.busy for one in replicas}
        for uid, replicas in (await hosted_experts(directory, [pattern], timeout_s=timeout_s)).items()
    }
    return {**{uid: {} for uid in grid.names()}, **found} if grid.count <= NAMES_MAX else found


def choose_places(
    grid: ExpertGrid, load: GridLoad, own: PeerId, count: int, rng: random.Random
) -> list[ExpertUid]:
    """Return the `count` experts of a grid that it needs most and that this peer does not host: those that
    nobody hosts, drawn at random, then the busiest and the rarest. Raises UsageError when the grid has fewer.
    """
    if grid.count <= NAMES_MAX:
        chosen = choose_needed(load, own, count, rng)
        if len(chosen) < count:
            raise UsageError(f"{grid} has {grid.count} experts, and {count} are asked for: choose fewer")
        return chosen
    free: set[ExpertUid] = set()
    for _ in range(_DRAWS_PER_PLACE_MAX * count):
        uid = ExpertUid(grid.block, tuple(rng.choice(dimension) for dimension in grid.dimensions))
        if uid not in load:
            free.add(uid)
        if len(free) == count:
            return sorted(free)
    raise UsageError(f"{grid} has hardly any free places: choose a larger grid")
