"""Read the experts of a grid: the servers of each, and the load that they declare."""

from __future__ import annotations

from moe.protocol.declarations import Directory, ExpertReplica
from moe.protocol.finding import ExpertPattern, hosted_experts
from moe.protocol.names import ExpertUid
from swarm.monitor.logic.robust import median
from swarm.monitor.logic.view import ExpertView

_EXPERTS_MAX = 2000
_TIMEOUT_S = 5.0  # timeout of each read
_GRIDS_MAX = 64  # limit of announced grids; each costs one read


async def experts_of(directory: Directory, grids: tuple[str, ...]) -> tuple[ExpertView, ...]:
    """Return the experts of the grids with these names or, without names, of all announced grids. Raise
    NetworkError when no peer answers.
    """
    prefixes = [ExpertUid.parse_prefix(grid) for grid in grids]
    if not prefixes:
        prefixes = (await directory.grids(timeout_s=_TIMEOUT_S))[:_GRIDS_MAX]
    found = await hosted_experts(
        directory,
        [ExpertPattern.below(prefix) for prefix in prefixes],
        timeout_s=_TIMEOUT_S,
        experts_max=_EXPERTS_MAX,
    )
    return tuple(_view(uid, replicas) for uid, replicas in found.items())


def _view(uid: ExpertUid, replicas: tuple[ExpertReplica, ...]) -> ExpertView:
    """Return the view of one expert. Its load is the median wait over its servers, so that one false
    declaration changes little.
    """
    waits = [replica.load.wait_s for replica in replicas]
    rates = [replica.load.samples_per_s for replica in replicas if replica.load.samples_per_s > 0]
    rate = f"{median(rates):,.0f} samples/s a server" if rates else ""
    return ExpertView(uid=str(uid), servers=len(replicas), load=median(waits), text=rate)
