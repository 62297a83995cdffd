"""Free places of a grid, from which `--num-experts` chooses."""

from __future__ import annotations

import random
from collections.abc import Collection

from moe.protocol.declarations import Directory
from moe.protocol.finding import ExpertPattern, hosted_experts
from moe.protocol.names import NAMES_MAX, ExpertGrid, ExpertUid
from swarm.core.errors import UsageError

_DRAWS_PER_PLACE_MAX = 64


async def taken_places(directory: Directory, grid: ExpertGrid, *, timeout_s: float) -> set[ExpertUid]:
    """Return the experts of a grid that some server hosts."""
    pattern = ExpertPattern(grid.block, grid.dimensions)
    return set(await hosted_experts(directory, [pattern], timeout_s=timeout_s))


def choose_places(
    grid: ExpertGrid, taken: Collection[ExpertUid], count: int, rng: random.Random
) -> list[ExpertUid]:
    """Return `count` free places, drawn at random, so that servers that start together rarely choose the same
    ones. Raises UsageError when there are fewer.
    """
    if grid.count <= NAMES_MAX:
        free = [uid for uid in grid.names() if uid not in taken]
        if len(free) < count:
            raise UsageError(
                f"{grid} has {len(free)} free places of {grid.count}, and {count} experts need one: "
                "choose a larger grid"
            )
        return sorted(rng.sample(free, count))
    chosen: set[ExpertUid] = set()
    for _ in range(_DRAWS_PER_PLACE_MAX * count):
        uid = ExpertUid(grid.block, tuple(rng.choice(dimension) for dimension in grid.dimensions))
        if uid not in taken:
            chosen.add(uid)
        if len(chosen) == count:
            return sorted(chosen)
    raise UsageError(f"{grid} has hardly any free places: choose a larger grid")
