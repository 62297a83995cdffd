"""Create a run, or publish a run again that the same owner created before."""

from __future__ import annotations

import asyncio
import random

from swarm.core.backoff import Backoff
from swarm.core.clock import Clock
from swarm.core.errors import NetworkError, PeerError
from swarm.core.identity import Identity
from swarm.run.directory import RunDirectory
from swarm.run.specification import RunSpecification, SignedSpecification, run_id_of, sign

_READ_TRIES = 4  # of the present specification, while the network fails
_RETRY_S_FIRST, _RETRY_S_MAX = 0.5, 4.0


async def create_run(
    directory: RunDirectory, specification: RunSpecification, owner: Identity, clock: Clock
) -> tuple[SignedSpecification, bool]:
    """Sign and publish a specification. Return the signed specification and whether the run is new.

    If the swarm already has a run of this owner and name, an unchanged specification keeps its version and
    creation time, and a changed one becomes the next version. If the swarm has forgotten the run, it is
    created again with a version above that of every copy that members may still have on disk.
    """
    run_id = run_id_of(owner.peer_id, specification.name)
    try:
        known = await _present(directory, run_id)
    except PeerError:
        version = max((stored.version for stored in await directory.stored(run_id)), default=0) + 1
        signed, new = sign(specification, owner, version=version, created_s=clock.swarm_s()), True
    else:
        new = False
        # The file does not contain what the owner set with `swarm change`; those settings stay until
        # `swarm change` resets them.
        changed = {key: getattr(known.specification, key) for key in ("paused", "ended", "banned")}
        specification = specification.model_copy(update=changed)
        if known.specification == specification:
            signed = known
        else:
            signed = sign(specification, owner, version=known.version + 1, created_s=known.created_s)
    await directory.publish(signed)
    return signed, new


async def _present(directory: RunDirectory, run_id: str) -> SignedSpecification:
    """Return the specification that the swarm has. Raise PeerError if it has none, and NetworkError if that is
    not known after some tries: a second run of the same name must not begin because a peer was busy.
    """
    retries = Backoff(_RETRY_S_FIRST, _RETRY_S_MAX, random.Random())
    while True:
        try:
            return await directory.specification(run_id, from_disk=False)
        except NetworkError:
            pause_s = retries.next_s()
            if retries.failures >= _READ_TRIES:
                raise
            await asyncio.sleep(pause_s)
