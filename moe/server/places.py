"""The places of a grid: who hosts which expert, and which ones a server with `--num-experts` takes."""

from __future__ import annotations

import random

from moe.protocol.declarations import Directory
from moe.protocol.names import NAMES_MAX, ExpertGrid, ExpertUid
from moe.server.logic.placement import GridLoad, choose_needed
from swarm.core.errors import UsageError
from swarm.core.ids import PeerId

_PREFIXES_AT_ONCE = 1024
_DRAWS_PER_PLACE_MAX = 64


async def read_load(directory: Directory, grid: ExpertGrid, *, timeout_s: float) -> GridLoad:
    """Return the servers of a grid's experts, and how busy each of them is. Experts that nobody hosts are in
    it unless the grid is too large to list. Reads the directory level by level; the cost depends on the live
    experts, not on the size of the grid.
    """
    found: dict[ExpertUid, dict[PeerId, float]] = {}
    prefixes = [grid.root]
    for depth, dimension in enumerate(grid.dimensions):
        leaves = depth + 1 == len(grid.dimensions)
        below: list[ExpertUid] = []
        for start in range(0, len(prefixes), _PREFIXES_AT_ONCE):
            branches = await directory.branches(
                prefixes[start : start + _PREFIXES_AT_ONCE], timeout_s=timeout_s
            )
            for prefix, branch in branches.items():
                alive = branch.experts.keys() if leaves else branch.deeper
                below += [prefix.child(coordinate) for coordinate in alive if coordinate in dimension]
                if leaves:
                    found |= {
                        prefix.child(coordinate): {one.peer_id: one.load.busy for one in replicas}
                        for coordinate, replicas in branch.experts.items()
                        if coordinate in dimension
                    }
        prefixes = below[:NAMES_MAX]
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
