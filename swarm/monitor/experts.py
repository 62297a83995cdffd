"""Reading of a grid's experts: the servers of each, and the load that these declare."""

from __future__ import annotations

from moe.protocol.declarations import Directory, ExpertReplica
from moe.protocol.names import ExpertUid
from swarm.monitor.logic.robust import median
from swarm.monitor.logic.view import ExpertView

_EXPERTS_MAX = 2000
_PREFIXES_MAX = 1024  # read at once
_LEVELS_MAX = 8
_GRIDS_MAX = 64  # of the announced ones; each costs a read


async def experts_of(
    directory: Directory, grids: tuple[str, ...], *, timeout_s: float = 5.0
) -> tuple[ExpertView, ...]:
    """Return the experts below the grids of these names, level by level; without names, of all grids that
    servers announce. Raise NetworkError when no peer answers.
    """
    level, found = [ExpertUid.parse_prefix(grid) for grid in grids], list[ExpertView]()
    if not grids:
        level = (await directory.grids(timeout_s=timeout_s))[:_GRIDS_MAX]
    for _ in range(_LEVELS_MAX):
        if not level or len(found) >= _EXPERTS_MAX:
            break
        branches = await directory.branches(level[:_PREFIXES_MAX], timeout_s=timeout_s)
        found += [
            _view(prefix.child(coordinate), one)
            for prefix, branch in branches.items()
            for coordinate, one in branch.experts.items()
        ]
        level = [
            prefix.child(coordinate)
            for prefix, branch in branches.items()
            for coordinate in sorted(branch.deeper)
        ]
    return tuple(found[:_EXPERTS_MAX])


def _view(uid: ExpertUid, replicas: tuple[ExpertReplica, ...]) -> ExpertView:
    """Return the view of one expert. Its load is the median wait over its servers, so that one false
    declaration changes little.
    """
    waits = [replica.load.wait_s for replica in replicas]
    rates = [replica.load.samples_per_s for replica in replicas if replica.load.samples_per_s > 0]
    rate = f"{median(rates):,.0f} samples/s a server" if rates else ""
    return ExpertView(uid=str(uid), servers=len(replicas), load=median(waits), text=rate)
