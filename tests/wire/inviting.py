"""Invites to a run of a test."""

from __future__ import annotations

import time

from swarm.core.identity import Identity
from swarm.core.ids import PeerId
from swarm.membership.capability import ROLES, Role
from swarm.membership.invite import Invite, RunIdentity, Terms, make_invite
from swarm.node import Node

DAY_S = 86400.0


def invite_of(
    owner: Identity,
    node: Node | None = None,
    *,
    roles: tuple[Role, ...] = ROLES,
    uses: int = 9,
    now_s: float | None = None,
    peer: PeerId | None = None,
) -> Invite:
    terms = Terms(roles=roles, uses=uses, lifetime_s=DAY_S, peer=peer)
    now_s = time.time() if now_s is None else now_s
    invite = make_invite(RunIdentity(owner.peer_id, "tiny"), owner, (), terms, now_s=now_s)
    return invite.with_contacts([node.contact] if node is not None else [])
