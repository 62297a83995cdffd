"""Give a run a new owner with its recovery key, after the owner's key was lost or stolen.

The recovery key is an identity that its owner keeps offline. The specification names it, and the run's id
depends on it, so a thief of the owner's key can neither remove nor replace it. It signs one statement, the
handover: "all versions above N belong to this new owner". N is above all versions that the old owner can
sign, so members follow the new owner whatever a thief has signed or will sign.
"""

from __future__ import annotations

from collections.abc import Collection

from swarm.core.errors import UsageError
from swarm.core.identity import Identity, MissingIdentity
from swarm.core.ids import PeerId
from swarm.dht.logic.blobs import HANDOVERS_MAX, VERSION_MAX, Handover, handover_message
from swarm.run.owned import CONFIRMED_MAX
from swarm.run.signed import SignedSpecification, sign


def recover(
    known: SignedSpecification, recovery: Identity, owner: Identity, confirmed: Collection[PeerId] = ()
) -> SignedSpecification:
    """Sign the first version of a new owner.

    It keeps the settings of the known version. The run is not paused or ended in it and nobody is banned,
    since these may be orders of a thief. `confirmed`: peers and invites of the founder whose capabilities
    stay valid; above the limit of a specification some are left out, and need a new invite.

    Raises UsageError if `recovery` is not the run's recovery key, or the new owner is the present one.
    """
    handover = make_handover(known, recovery, owner)
    kept = tuple(sorted(str(peer) for peer in confirmed if peer not in known.specification.revoked_peers))
    specification = known.specification.model_copy(
        update={"paused": False, "ended": False, "banned": (), "confirmed": kept[:CONFIRMED_MAX]}
    )
    return sign(
        specification,
        owner,
        version=handover.after + 1,
        created_s=known.created_s,
        handover=handover,
    )


def make_handover(known: SignedSpecification, recovery: Identity, owner: Identity) -> Handover:
    """Sign the statement that the run has this new owner. Raises UsageError as `recover` does."""
    _check(known, recovery, owner)
    after = ((known.version - 1) // VERSION_MAX + 1) * VERSION_MAX
    if after > HANDOVERS_MAX * VERSION_MAX:
        raise UsageError(f"{known.full_name} was recovered {HANDOVERS_MAX} times, and that is the limit")
    signature = recovery.sign(handover_message(known.run_id, owner.peer_id, after))
    return Handover(known.founder, owner.peer_id, after, signature)


def recovery_key_of(text: str) -> str:
    """Return the recovery key that a user means: the text of a PeerID, or of the PeerID in an identity file.

    Raises UsageError if it is neither.
    """
    try:
        return str(PeerId.parse(text))
    except UsageError as error:
        try:
            return str(Identity.read(text).peer_id)
        except MissingIdentity:
            raise UsageError(
                f"--recovery-key takes a PeerID or an identity file, and there is no file {text}: {error}"
            ) from None


def read_recovery_key(file: str) -> Identity:
    """Read the recovery key from its identity file. Raise UsageError if there is none."""
    try:
        return Identity.read(file)
    except MissingIdentity:
        raise UsageError(f"--recovery-key {file}: there is no such identity file") from None


def _check(known: SignedSpecification, recovery: Identity, owner: Identity) -> None:
    if known.specification.recovery_peer is None:
        raise UsageError(
            f"{known.full_name} has no recovery key: a run gets one when it is created, "
            "with `swarm start --recovery-key`"
        )
    if known.specification.recovery_peer != recovery.peer_id:
        raise UsageError(
            f"the recovery key of {known.full_name} is {known.specification.recovery_key}, "
            f"and this file holds {recovery.peer_id}"
        )
    if owner.peer_id == recovery.peer_id:
        raise UsageError(
            "the recovery key cannot be the owner as well, since it is to stay offline: pass another "
            "identity with --identity (`swarm identity --create --identity FILE` makes one)"
        )
    if owner.peer_id in (known.owner, known.founder):
        raise UsageError(
            f"{owner.peer_id} owned {known.full_name} before: pass another identity with --identity "
            "(`swarm identity --create --identity FILE` makes one)"
        )
