"""The places of a grid: the servers of each expert, and the experts that a server with `--num-experts`
takes.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from moe.protocol.declarations import Directory
from moe.protocol.finding import ExpertPattern, hosted_experts
from moe.protocol.names import NAMES_MAX, ExpertGrid, ExpertUid
from moe.server.logic.placement import GridLoad, choose_needed
from swarm.core.errors import UsageError
from swarm.core.ids import PeerId

_DRAWS_PER_PLACE_MAX = 64


async def read_load(directory: Directory, patterns: Sequence[ExpertGrid], *, timeout_s: float) -> GridLoad:
    """Return the servers of the experts that the patterns stand for, and how busy each of them is. Experts
    that nobody hosts are in it unless they are too many to list.
    """
    searched = [ExpertPattern(one.block, one.dimensions) for one in patterns]
    found = {
        uid: {one.peer_id: one.load.busy for one in replicas}
        for uid, replicas in (await hosted_experts(directory, searched, timeout_s=timeout_s)).items()
    }
    return (
        {**{uid: {} for one in patterns for uid in one.names()}, **found} if _are_listed(patterns) else found
    )


def choose_places(
    patterns: Sequence[ExpertGrid], load: GridLoad, own: PeerId, count: int, rng: random.Random
) -> list[ExpertUid]:
    """Return the `count` experts among those of the patterns that a grid needs most and that this peer does
    not host: those that nobody hosts, drawn at random, then the busiest and the rarest. Raises UsageError
    when there are fewer.
    """
    if _are_listed(patterns):
        chosen = choose_needed(load, own, count, rng)
        if len(chosen) < count:
            named = ", ".join(map(str, patterns))
            raise UsageError(f"{named} has {len(load)} experts, and {count} are asked for: choose fewer")
        return chosen
    free: set[ExpertUid] = set()
    sizes = [one.count for one in patterns]
    for _ in range(_DRAWS_PER_PLACE_MAX * count):
        if len(free) == count:
            break
        (grid,) = rng.choices(patterns, sizes)
        uid = ExpertUid(grid.block, tuple(rng.choice(dimension) for dimension in grid.dimensions))
        if not load.get(uid):
            free.add(uid)
    if len(free) < count:
        raise UsageError(f"{', '.join(map(str, patterns))} has hardly any free places: choose a larger grid")
    return sorted(free)


def first_places(
    patterns: Sequence[ExpertGrid],
    load: GridLoad,
    own: PeerId,
    count: int,
    saved: Sequence[ExpertUid],
    rng: random.Random,
) -> list[ExpertUid]:
    """Return the `count` experts that a server hosts when it starts: first those that nobody else hosts among
    `saved`, of which it has checkpoints, then those of `choose_places`, whose errors it raises. Declarations
    of this peer in `load` are of an earlier process that was killed, and do not count.
    """
    load = {uid: {peer: busy for peer, busy in hosts.items() if peer != own} for uid, hosts in load.items()}
    kept = [uid for uid in saved if any(uid in one for one in patterns) and not load.get(uid)][:count]
    load |= {uid: {own: 0.0} for uid in kept}
    return sorted([*kept, *choose_places(patterns, load, own, count - len(kept), rng)])


def _are_listed(patterns: Sequence[ExpertGrid]) -> bool:
    """Return whether the patterns stand for few enough experts to list them."""
    return sum(one.count for one in patterns) <= NAMES_MAX
