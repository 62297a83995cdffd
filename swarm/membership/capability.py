"""Capabilities: what a run's owner allows a peer, as a chain of signed grants.

The first grant is signed by the owner, each later one by the subject of the grant before it. A subject is a
peer, or the key of an invite: a peer with the invite's text has that key, and signs a grant for its own
PeerID with it. A grant never allows more than the one before: the same roles or fewer, as many uses or fewer,
and no later expiration. So a peer that may invite can pass on a part of what it has, without the owner.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

import msgpack

from swarm.core.errors import NotInvited, PeerError, UsageError
from swarm.core.identity import Identity, verify
from swarm.core.ids import PeerId

Role = Literal["train", "serve", "observe", "invite"]
Subject = Literal["peer", "invite"]
ROLES: tuple[Role, ...] = get_args(Role)
USES_MAX = 10_000  # PeerIDs of one invite; every member that a peer calls remembers it
# invites in one chain: by the owner, by a peer that it invited, and by a peer that this peer invited
INVITES_MAX = 3
GRANTS_MAX = 2 * INVITES_MAX  # one grant for each invite, and one for the peer that used it
CAPABILITY_BYTES_MAX = 2048
_CLOCKS_APART_S = 300.0  # a grant may be dated this far in the future
_TIME_S_MAX = 1 << 40
_CONTEXT = b"swarm capability 1\0"
_KINDS: tuple[Subject, ...] = get_args(Subject)


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """One link of a capability. The signature has not been checked (`check`)."""

    kind: Subject
    subject: PeerId  # the peer, or the public key of the invite
    roles: tuple[Role, ...]  # in the order of ROLES
    uses: int  # PeerIDs that may take part through this grant, the subject itself included if it is a peer
    issued_s: int  # Unix seconds, claimed by the issuer
    expires_s: int
    signature: bytes = b""

    def message(self, run_id: str, issuer: PeerId) -> bytes:
        """Return the bytes that the issuer signs."""
        fields = [run_id, issuer.public_key, *self._fields()]
        packed: bytes = msgpack.packb(fields)
        return _CONTEXT + packed

    def packed(self) -> list[object]:
        """Return the fields as they are encoded."""
        return [*self._fields(), self.signature]

    def _fields(self) -> list[object]:
        roles = sum(1 << ROLES.index(role) for role in self.roles)
        kind = _KINDS.index(self.kind)
        return [kind, self.subject.public_key, roles, self.uses, self.issued_s, self.expires_s]


Grants = tuple[Grant, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rights:
    """The rights that a checked capability gives to its holder."""

    roles: frozenset[Role]
    expires_s: float
    signed_s: int  # when the last grant was signed
    grants: Grants
    # methods that these roles were found to allow: to its holder as a caller, and as the one that is called
    may_call: set[str] = field(default_factory=set, compare=False, repr=False)
    may_answer: set[str] = field(default_factory=set, compare=False, repr=False)

    def concerns(self, peers: frozenset[PeerId]) -> bool:
        """Return whether one of these keys is the holder, its invite, or an earlier issuer."""
        return any(grant.subject in peers for grant in self.grants)


def roles_of(names: Iterable[str]) -> tuple[Role, ...]:
    """Return roles in the order of ROLES. Raise UsageError if one is unknown or there is none."""
    wanted = set(names)
    unknown = wanted - set(ROLES)
    if unknown or not wanted:
        raise UsageError(f"the roles are {', '.join(ROLES)}, not {', '.join(sorted(unknown)) or 'none'}")
    return tuple(role for role in ROLES if role in wanted)


def issue(run_id: str, issuer: Identity, grant: Grant) -> Grant:
    """Return the grant with the issuer's signature."""
    return replace(grant, signature=issuer.sign(grant.message(run_id, issuer.peer_id)))


def bear(run_id: str, grants: Grants, key: Identity, holder: PeerId, now_s: float) -> Grants:
    """Return the capability of a peer that bears an invite: the invite's grants, and one for the peer, signed
    with the invite's key.
    """
    last = grants[-1]
    own = Grant(
        kind="peer",
        subject=holder,
        roles=last.roles,
        uses=last.uses,
        issued_s=int(now_s),
        expires_s=last.expires_s,
    )
    return (*grants, issue(run_id, key, own))


def check_rooted(run_id: str, owners: Iterable[PeerId], grants: Grants, now_s: float) -> Rights:
    """Check a chain of grants whose first grant may be by any of these owners, the present one first. Raises
    NotInvited with the reason for the last of them.
    """
    reason = NotInvited("the run has no owner")
    for owner in owners:
        try:
            return check_grants(run_id, owner, grants, now_s)
        except NotInvited as error:
            reason = error
    raise reason


def check_grants(run_id: str, owner: PeerId, grants: Grants, now_s: float) -> Rights:
    """Check a chain of grants and return what it allows to its last subject.

    Raises NotInvited with the reason. Checking stops at the first problem, so that a stranger costs at most
    one signature check.
    """
    if not 1 <= len(grants) <= GRANTS_MAX:
        raise NotInvited(f"a capability has 1 to {GRANTS_MAX} grants, not {len(grants)}")
    issuer, before, invites = owner, None, 0
    for grant in grants:
        if before is None or before.kind == "peer":
            invites += 1
        if invites > INVITES_MAX:
            raise NotInvited(f"a chain has at most {INVITES_MAX} invites")
        problem = _problem(before, grant, now_s)
        if problem:
            raise NotInvited(problem)
        if not verify(issuer, grant.message(run_id, issuer), grant.signature):
            raise NotInvited("the capability was not signed by the run's owner, or for another run")
        issuer, before = grant.subject, grant
    assert before is not None
    return Rights(
        roles=frozenset(before.roles), expires_s=before.expires_s, signed_s=before.issued_s, grants=grants
    )


def _problem(before: Grant | None, grant: Grant, now_s: float) -> str:
    """Return why a grant is not valid after the one before it; empty if it is."""
    if now_s >= grant.expires_s:
        return "the invite has expired: ask for a new one"
    if grant.issued_s > now_s + _CLOCKS_APART_S:
        return "the capability is dated in the future: check this machine's clock"
    if before is None:
        return ""
    if before.kind == "invite" and grant.kind != "peer":
        return "the key of an invite may sign grants for peers only"
    if before.kind == "peer" and "invite" not in before.roles:
        return "the peer that invited this one must not invite others"
    if (
        not set(grant.roles) <= set(before.roles)
        or grant.uses > before.uses
        or grant.expires_s > before.expires_s
    ):
        return "the capability allows more than its issuer was allowed"
    return ""


def encode(grants: Sequence[Grant]) -> bytes:
    """Encode grants; no grants are empty bytes."""
    packed: bytes = msgpack.packb([grant.packed() for grant in grants]) if grants else b""
    return packed


def decode(raw: bytes) -> Grants:
    """Decode the grants of a peer; empty bytes mean no grants. Raises PeerError when they are malformed.
    Signatures are not checked (`check_grants`).
    """
    if not raw:
        return ()
    try:
        if len(raw) > CAPABILITY_BYTES_MAX:
            raise ValueError(f"more than {CAPABILITY_BYTES_MAX} bytes")
        items = msgpack.unpackb(raw, max_array_len=7, max_map_len=0, max_str_len=0, max_bin_len=64)
        if not isinstance(items, list) or len(items) > GRANTS_MAX:
            raise ValueError("not a list of grants")
        return tuple(_decode_one(item) for item in items)
    except (ValueError, TypeError, UsageError, msgpack.UnpackException) as error:
        raise PeerError(f"a capability was refused: it cannot be decoded ({error})") from error


def _decode_one(item: object) -> Grant:
    if not isinstance(item, list) or len(item) != 7:
        raise ValueError("a grant has seven fields")
    kind, subject, roles, uses, issued_s, expires_s, signature = item
    numbers = ((kind, 0, 1), (roles, 1, (1 << len(ROLES)) - 1), (uses, 1, USES_MAX))
    times = ((issued_s, 0, _TIME_S_MAX), (expires_s, 0, _TIME_S_MAX))
    for value, least, most in (*numbers, *times):
        if type(value) is not int or not least <= value <= most:
            raise ValueError("a number is out of its range")
    if not isinstance(subject, bytes) or not isinstance(signature, bytes) or len(signature) != 64:
        raise ValueError("a key or a signature is missing")
    return Grant(
        kind=_KINDS[kind],
        subject=PeerId(subject),
        roles=tuple(role for place, role in enumerate(ROLES) if roles >> place & 1),
        uses=uses,
        issued_s=issued_s,
        expires_s=expires_s,
        signature=signature,
    )
