"""Create a run, or publish a run again that the same owner created before."""

from __future__ import annotations

import asyncio
import random
from typing import Any

from swarm.core.backoff import Backoff
from swarm.core.clock import Clock
from swarm.core.errors import NetworkError, PeerError, UsageError
from swarm.core.identity import Identity
from swarm.run.directory import RunDirectory
from swarm.run.signed import AnySpecification, SignedSpecification, newest, run_id_of, sign

_READ_TRIES = 4  # attempts to read the present specification
RETRY_S_FIRST, _RETRY_S_MAX = 0.5, 4.0


async def create_run(
    directory: RunDirectory, specification: AnySpecification, owner: Identity, clock: Clock
) -> tuple[SignedSpecification, bool]:
    """Sign and publish a specification. Return the signed specification and whether the run is new.

    If the swarm already has a run of this owner and name, an unchanged specification keeps its version and
    creation time, and a changed one becomes the next version. If the swarm has forgotten the run, it is
    created again with a version above that of every copy that members may still have on disk, and is not over
    any more. What `swarm change` has set otherwise and the file lacks stays as it was, in both cases.

    Raises UsageError if the recovery key gave the run to another owner.
    """
    stored = _stored_run(await directory.stored(specification.name), specification, owner)
    if stored is not None:
        run_id = stored.run_id
        specification = specification.model_copy(update={"recovery_key": stored.specification.recovery_key})
    else:
        run_id = run_id_of(owner.peer_id, specification.name, specification.recovery_peer)
    try:
        known = await _present(directory, run_id)
    except PeerError:
        last = newest(await directory.stored(run_id))
        _check_owner(last, owner)
        if last is not None:  # among others, an invite that was revoked must not be valid again
            specification = specification.model_copy(update={**_kept(last, specification), "ended": False})
        signed = sign(
            specification,
            owner,
            version=last.version + 1 if last is not None else 1,
            created_s=clock.swarm_s(),
            handover=last.handover if last is not None else None,
        )
        new = True
    else:
        new = False
        if stored is not None:
            known = newest([known], held=stored) or known
        _check_owner(known, owner)
        specification = specification.model_copy(update=_kept(known, specification))
        if known.specification == specification:
            signed = known
        else:
            signed = sign(
                specification,
                owner,
                version=known.version + 1,
                created_s=known.created_s,
                handover=known.handover,
            )
    await directory.publish(signed)
    return signed, new


def _kept(known: SignedSpecification, specification: AnySpecification) -> dict[str, Any]:
    """Return the settings made with `swarm change`, which are not in the file. They stay until `swarm change`
    resets them.
    """
    return {key: getattr(known.specification, key) for key in specification.OWNERS_KEYS}


def _stored_run(
    stored: list[SignedSpecification], specification: AnySpecification, owner: Identity
) -> SignedSpecification | None:
    """Return the stored run that a run file describes: same owner, same name and, if the file names a
    recovery key, the same key. If the owner recovered the run, it has another founder.
    """
    matching = [
        one
        for one in stored
        if one.name == specification.name
        and one.owner == owner.peer_id
        and specification.recovery_key in (None, one.specification.recovery_key)
    ]
    return max(
        matching,
        key=lambda one: (one.specification.recovery_key == specification.recovery_key, one.version),
        default=None,
    )


def _check_owner(known: SignedSpecification | None, owner: Identity) -> None:
    if known is not None and known.owner != owner.peer_id:
        raise UsageError(
            f"{known.full_name} belongs to {known.owner} since it was recovered, and this identity is "
            f"{owner.peer_id}: take part with `swarm join`, or pass the owner's identity with --identity"
        )


async def _present(directory: RunDirectory, run_id: str) -> SignedSpecification:
    """Return the swarm's specification. Raise PeerError if there is none, and NetworkError if this is still
    unknown after some attempts: a busy peer must not cause a second run of the same name.
    """
    retries = Backoff(RETRY_S_FIRST, _RETRY_S_MAX, random.Random())
    while True:
        try:
            return await directory.specification(run_id, from_disk=False)
        except NetworkError:
            pause_s = retries.next_s()
            if retries.failures >= _READ_TRIES:
                raise
            await asyncio.sleep(pause_s)
