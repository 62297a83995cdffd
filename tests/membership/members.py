"""Owners, invites and capabilities with keys from a seed."""

from __future__ import annotations

import random

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from swarm.core.identity import Identity
from swarm.core.ids import Address, Contact
from swarm.dht.logic.blobs import run_id_of
from swarm.membership.capability import ROLES, Grants, Role
from swarm.membership.invite import Invite, RunIdentity, Terms, make_invite

NAME = "tiny"
NOW_S = 1_700_000_000.0
DAY_S = 86400.0
DIALED = Address("203.0.113.7", 4000)


def identity(rng: random.Random) -> Identity:
    """Return an identity whose key follows from the generator."""
    return Identity(Ed25519PrivateKey.from_private_bytes(rng.randbytes(32)))


class InvitedRun:
    """A run, its owner, and invites to it."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.owner = identity(self.rng)
        self.run_id = run_id_of(self.owner.peer_id, NAME)

    def invite(
        self,
        issuer: Identity | None = None,
        held: Grants = (),
        *,
        roles: tuple[Role, ...] = ROLES,
        uses: int = 1,
        days: float = 7.0,
        peer: Identity | None = None,
        now_s: float = NOW_S,
    ) -> Invite:
        """Return an invite of the owner, or of another issuer with its capability."""
        invite = make_invite(
            RunIdentity(self.owner.peer_id, NAME),
            issuer or self.owner,
            held,
            Terms(
                roles=roles,
                uses=uses,
                lifetime_s=days * DAY_S,
                peer=peer.peer_id if peer is not None else None,
            ),
            now_s=now_s,
        )
        return invite.with_contacts([Contact(self.owner.peer_id, (DIALED,))])
