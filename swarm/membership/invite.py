"""Invites: everything that a newcomer needs to join an invited run, in one line of text.

An invite is `swarm1` and base58 of: the run's owner and name, addresses to dial, the grants, the private key
of the invite (none if it is for one PeerID), and a checksum. Anybody with the text can use it: treat it as a
password. `uses` and `expires` limit the damage of a leak.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import base58
import msgpack
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from swarm.core.errors import PeerError, UsageError
from swarm.core.identity import Identity
from swarm.core.ids import Contact, PeerId
from swarm.dht.logic.blobs import Handover, run_id_of
from swarm.membership.capability import (
    CAPABILITY_BYTES_MAX,
    USES_MAX,
    Grant,
    Grants,
    Rights,
    Role,
    bear,
    check_rooted,
    decode,
    encode,
    issue,
)

PREFIX = "swarm1"
CONTACTS_MAX = 8
TEXT_CHARACTERS_MAX = 8192
_FORMAT = 1
_CHECKSUM_BYTES = 4
_KEY_BYTES = 32
_EXPIRES_S_MAX = 10 * 365 * 86400.0


@dataclass(frozen=True, slots=True)
class RunIdentity:
    """The values from which the id of a run follows."""

    founder: PeerId
    name: str
    recovery: PeerId | None = None  # the run's recovery key, if it has one
    # gives the run to its present owner; None: the founder is still the owner
    handover: Handover | None = None

    @property
    def run_id(self) -> str:
        return run_id_of(self.founder, self.name, self.recovery)

    @property
    def owner(self) -> PeerId:
        """Return the present owner, as far as is known."""
        return self.handover.owner if self.handover is not None else self.founder

    @property
    def owners(self) -> tuple[PeerId, ...]:
        """Return the owners that may sign the first grant of a capability, the present one first."""
        return tuple(dict.fromkeys((self.owner, self.founder)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Invite:
    """An invite to one run."""

    run: RunIdentity
    contacts: tuple[Contact, ...]  # peers to dial
    grants: Grants
    key: bytes  # private key of the invite; empty: the invite is for one PeerID

    @property
    def owner(self) -> PeerId:
        """Return the owner of the run, as far as the invite's issuer knew."""
        return self.run.owner

    @property
    def name(self) -> str:
        return self.run.name

    @property
    def run_id(self) -> str:
        return self.run.run_id

    @property
    def subject(self) -> PeerId:
        """Return the PeerID that the invite is for, or its public key. An owner revokes the invite by this
        value.
        """
        return self.grants[-1].subject

    def capability_of(self, holder: PeerId, now_s: float) -> Grants:
        """Return the capability that this invite gives to a peer; the owner of the run needs none.

        Raises UsageError when the invite is for another peer, has expired, or is not valid.
        """
        if holder == self.owner:
            return ()
        if self.key:
            key = Identity(Ed25519PrivateKey.from_private_bytes(self.key))
            grants = bear(self.run_id, self.grants, key, holder, now_s)
        elif self.subject == holder:
            grants = self.grants
        else:
            raise UsageError(f"this invite is for peer {self.subject}, and this peer is {holder}")
        try:
            check_rooted(self.run_id, self.run.owners, grants, now_s)
        except PeerError as error:
            raise UsageError(f"this invite to {self.name} cannot be used: {error}") from error
        return grants

    def with_contacts(self, contacts: Iterable[Contact]) -> Invite:
        """Return the same invite with these peers to dial, up to the limit of an invite."""
        dialed = [contact for contact in contacts if contact.addresses]
        return replace(self, contacts=tuple(dialed[:CONTACTS_MAX]))

    def text(self) -> str:
        """Return the invite as one word, `swarm1…`."""
        contacts = [[contact.peer_id.public_key, contact.published] for contact in self.contacts]
        recovery = self.run.recovery.public_key if self.run.recovery is not None else b""
        founder, grants = self.run.founder.public_key, encode(self.grants)
        fields = [_FORMAT, founder, self.name, recovery, contacts, grants, self.key]
        if self.run.handover is not None:
            fields.append(self.run.handover.encode())
        packed: bytes = msgpack.packb(fields)
        return PREFIX + base58.b58encode(packed + _checksum(packed)).decode()

    @classmethod
    def parse(cls, text: str) -> Invite:
        """Decode an invite. Raises UsageError when it is damaged or malformed. Signatures are not checked."""
        try:
            raw = _decoded(text.strip())
            format_, founder, name, recovery, contacts, grants, key, *handover = msgpack.unpackb(
                raw, max_map_len=0, max_array_len=CONTACTS_MAX, max_bin_len=CAPABILITY_BYTES_MAX
            )
            if format_ != _FORMAT:
                raise UsageError(f"this invite has the format {format_!r:.20}: update swarm")
            if not isinstance(name, str) or not isinstance(key, bytes) or len(key) not in (0, _KEY_BYTES):
                raise ValueError("a field has another type")
            invite = cls(
                run=_identity(PeerId(founder), name, PeerId(recovery) if recovery else None, *handover),
                contacts=tuple(_contact(*item) for item in contacts),
                grants=decode(grants),
                key=key,
            )
            if not invite.grants or (invite.grants[-1].kind == "invite") != bool(key):
                raise ValueError("its grants and its key do not belong together")
        except UsageError:
            raise
        except (ValueError, TypeError, PeerError, msgpack.UnpackException) as error:
            raise UsageError(f"this invite cannot be decoded: {error}") from error
        return invite


def is_invite(text: str) -> bool:
    """Return whether a text is meant as an invite, not as an address."""
    return text.strip().startswith(PREFIX)


@dataclass(frozen=True, slots=True)
class Entrance:
    """The peers through which to enter a swarm, from addresses and invites."""

    contacts: tuple[Contact, ...]
    invite: Invite | None = None

    @classmethod
    def of(cls, entries: str | Contact | Sequence[str | Contact]) -> Entrance:
        """Read addresses and invites. Raises UsageError when one is wrong, or when invites are to several
        runs. Of several invites to one run, the one with the most roles is used, then the one with the latest
        expiration, with the peers of all of them.
        """
        contacts: list[Contact] = []
        invites: list[Invite] = []
        for entry in [entries] if isinstance(entries, str | Contact) else entries:
            if isinstance(entry, Contact):
                contacts.append(entry)
            elif is_invite(entry):
                invites.append(Invite.parse(entry))
                contacts += invites[-1].contacts
            else:
                contacts.append(Contact.parse(entry))
        if len({invite.run_id for invite in invites}) > 1:
            names = ", ".join(sorted({invite.name for invite in invites}))
            raise UsageError(f"these invites are to several runs ({names}), and a process joins one")
        return cls(tuple(contacts), max(invites, key=_worth, default=None))


def _worth(invite: Invite) -> tuple[int, int]:
    last = invite.grants[-1]
    return len(last.roles), last.expires_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """The terms of an invite, chosen by its issuer."""

    roles: tuple[Role, ...]
    uses: int
    lifetime_s: float
    peer: PeerId | None = None  # the only peer that can use it; None: any peer that has its text


def make_invite(run: RunIdentity, issuer: Identity, held: Grants, terms: Terms, *, now_s: float) -> Invite:
    """Issue an invite without addresses.

    `held` is the issuer's own capability; empty for the owner. Raises UsageError if the issuer must not issue
    such an invite. Uses and expiration are at most those of the issuer.
    """
    if not 1 <= terms.uses <= USES_MAX:
        raise UsageError(f"an invite has 1 to {USES_MAX} uses, not {terms.uses}")
    if not 0 < terms.lifetime_s <= _EXPIRES_S_MAX:
        raise UsageError("the lifetime of an invite is above 0 and at most ten years")
    owner, run_id = run.owner, run.run_id
    expires_s = int(now_s + terms.lifetime_s)
    uses = terms.uses
    if issuer.peer_id != owner:
        standing = _own_standing(run, held, now_s, issuer.peer_id)
        own_roles = standing.grants[-1].roles
        if missing := set(terms.roles) - set(own_roles):
            raise UsageError(
                f"this identity cannot give the role {' and '.join(sorted(missing))}: the invite by which it "
                f"joined is for {', '.join(own_roles)}"
            )
        uses = min(uses, standing.grants[-1].uses)
        expires_s = min(expires_s, int(standing.expires_s))
    private, subject = b"", terms.peer
    if subject is None:
        key = Identity.generate()
        private = key.private_key.private_bytes(Encoding.Raw, PrivateFormat.Raw, NoEncryption())
        subject = key.peer_id
    grant = Grant(
        kind="invite" if private else "peer",
        subject=subject,
        roles=terms.roles,
        uses=uses,
        issued_s=int(now_s),
        expires_s=expires_s,
    )
    grants = (*(() if issuer.peer_id == owner else held), issue(run_id, issuer, grant))
    try:
        check_rooted(run_id, run.owners, grants, now_s)
    except PeerError as error:
        raise UsageError(f"this identity cannot give that invite to {run.name}: {error}") from error
    return Invite(run=run, contacts=(), grants=grants, key=private)


def _own_standing(run: RunIdentity, held: Grants, now_s: float, issuer: PeerId) -> Rights:
    try:
        standing = check_rooted(run.run_id, run.owners, held, now_s)
    except PeerError as error:
        raise UsageError(f"this identity cannot invite: {error}") from error
    if standing.grants[-1].subject != issuer:
        raise UsageError(f"the capability that is kept here belongs to {standing.grants[-1].subject}")
    return standing


def _identity(founder: PeerId, name: str, recovery: PeerId | None, handover: object = None) -> RunIdentity:
    checked = Handover.decode(handover, founder, run_id_of(founder, name, recovery), recovery)
    return RunIdentity(founder, name, recovery, checked)


def _contact(peer: bytes, addresses: list[str]) -> Contact:
    return Contact.from_record(PeerId(peer), addresses)


def _checksum(packed: bytes) -> bytes:
    return hashlib.sha256(packed).digest()[:_CHECKSUM_BYTES]


def _decoded(text: str) -> bytes:
    """Return the fields that an invite's text encodes."""
    if len(text) > TEXT_CHARACTERS_MAX:
        raise UsageError(f"an invite has at most {TEXT_CHARACTERS_MAX} characters")
    try:
        raw = base58.b58decode(text.removeprefix(PREFIX))
    except ValueError:  # a character that is not in base58
        raw = b""
    packed, checksum = raw[:-_CHECKSUM_BYTES], raw[-_CHECKSUM_BYTES:]
    if not packed or checksum != _checksum(packed):
        raise UsageError("this invite is damaged: copy the whole word again, from `swarm1` to its end")
    return packed
