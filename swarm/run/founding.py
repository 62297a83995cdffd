"""Founding a run, or taking up again one that the same owner founded before."""

from __future__ import annotations

from swarm.core.clock import Clock
from swarm.core.errors import PeerError
from swarm.core.identity import Identity
from swarm.run.directory import RunDirectory
from swarm.run.specification import RunSpecification, SignedSpecification, run_id_of, sign


async def found(
    directory: RunDirectory, specification: RunSpecification, owner: Identity, clock: Clock
) -> tuple[SignedSpecification, bool]:
    """Sign, publish, and return the specification, and whether the run is new.

    Where the swarm knows a run of this owner and name already, an unchanged specification is taken as it is
    (version, founding time), and a changed one becomes the next version of it. Where the swarm has forgotten
    it the run is founded anew, with a version above that of the copies that members may still have on disk.
    """
    run_id = run_id_of(owner.peer_id, specification.name)
    try:
        known = await directory.specification(run_id, from_disk=False)
    except PeerError:
        version = max((kept.version for kept in await directory.kept(run_id)), default=0) + 1
        signed, new = sign(specification, owner, version=version, founded_s=clock.swarm_s()), True
    else:
        new = False
        # what the owner said since by `swarm change` is in no file; it holds until it is taken back in the
        # same way
        told = {key: getattr(known.specification, key) for key in ("paused", "ended", "banned")}
        specification = specification.model_copy(update=told)
        if known.specification == specification:
            signed = known
        else:
            signed = sign(specification, owner, version=known.version + 1, founded_s=known.founded_s)
    await directory.publish(signed)
    return signed, new
