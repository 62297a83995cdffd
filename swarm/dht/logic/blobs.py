"""Self-certifying blobs: a run's signed specification, which any peer may store and keep alive for its owner.

A blob is msgpack of [body, signature]; the body is a map with the founder's PeerID, a version, and the
specification, which names the run and may name a recovery key. The run's id is a hash over these three, and
the key is `run.<id>/specification`. Key, blob and signature therefore confirm one another: no other content
can be stored under that key. In the DHT a blob is one entry of its owner, independent of the peer that stored
it. A higher version replaces a lower one; storing the same version again prolongs its life. The content of
the specification is not checked here (`swarm.run.specification` does that).

The founder owns the run until the recovery key signs a handover. The versions of the first owner are 1 to
2^32, those of the second are the next 2^32, and so on, so every version of a new owner is above all versions
that a thief of the old owner's key can sign.
"""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from typing import Any

import msgpack

from swarm.core.errors import UsageError
from swarm.core.identity import verify
from swarm.core.ids import Key, PeerId

BLOB_NAME = "specification"
VERSION_MAX = 1 << 32  # versions of one owner
# A peer follows at most this many versions at once, so nobody can jump to the last version in one step.
VERSION_STEP_MAX = 1000
HANDOVERS_MAX = 1000
SIGNATURE_CONTEXT = b"swarm run specification 1\0"
_HANDOVER_CONTEXT = b"swarm run handover 1\0"
_ID_CONTEXT = b"swarm run id 1\0"
_ID_WITH_RECOVERY_CONTEXT = b"swarm run id 2\0"
_ID_CHARACTERS = 20  # 100 bits in base32: short enough to read aloud, too many to find by trying keys
_NAME_CHARACTERS_MAX = 63
_SIGNATURE_BYTES = 64
_RUN_PREFIX = "run."


@dataclass(frozen=True, slots=True)
class Blob:
    """Fields that the record of a blob must have. The signature is not verified yet; it covers
    `blob_message`.
    """

    writer: PeerId  # the owner
    version: int
    signature: bytes


@dataclass(frozen=True, slots=True)
class Handover:
    """The recovery key's statement that a run has a new owner: all versions above `after` are of `owner`."""

    founder: PeerId
    owner: PeerId
    after: int
    signature: bytes  # signature by the recovery key

    @classmethod
    def decode(cls, value: Any, founder: PeerId, run_id: str, recovery: PeerId | None) -> Handover | None:
        """Decode and check a handover from an untrusted source; None stands for no handover. Raises
        UsageError when it is malformed or is not signed by the run's recovery key.
        """
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != 3:
            raise UsageError("a handover is an owner, a version and a signature")
        owner, after, signature = value
        if (
            not isinstance(owner, bytes)
            or not isinstance(after, int)
            or not isinstance(signature, bytes)
            or after not in range(VERSION_MAX, (HANDOVERS_MAX + 1) * VERSION_MAX, VERSION_MAX)
        ):
            raise UsageError("a handover is an owner, a version and a signature")
        handover = cls(founder, PeerId.from_bytes(owner), after, signature)
        if recovery is None or not verify(
            recovery, handover_message(run_id, handover.owner, after), signature
        ):
            raise UsageError("the handover to a new owner is not signed by the run's recovery key")
        return handover

    def encode(self) -> list[object]:
        """Return the form that `decode` reads."""
        return [self.owner.to_bytes(), self.after, self.signature]


def handover_message(run_id: str, owner: PeerId, after: int) -> bytes:
    """Return what the recovery key signs to make `owner` the owner of all versions above `after`."""
    return _HANDOVER_CONTEXT + run_id.encode() + owner.to_bytes() + after.to_bytes(8, "big")


def is_version_of(version: object, handover: Handover | None) -> bool:
    """Return whether this is a version that the owner after this handover (None: the founder) may sign."""
    after = handover.after if handover is not None else 0
    return isinstance(version, int) and not isinstance(version, bool) and 0 < version - after <= VERSION_MAX


def is_within_step(old: int, new: int) -> bool:
    """Return whether a peer that holds the version `old` takes the version `new`: the next few of the same
    owner, or any of a later owner.
    """
    return new - old <= VERSION_STEP_MAX or (new - 1) // VERSION_MAX > (old - 1) // VERSION_MAX


def version_text(version: int) -> str:
    """Return a version as users read it: `7`, or `7 of owner 2` after a handover."""
    handovers, number = divmod(version - 1, VERSION_MAX)
    return f"{number + 1} of owner {handovers + 1}" if handovers > 0 else str(version)


def run_id_of(founder: PeerId, name: str, recovery: PeerId | None = None) -> str:
    """Return the self-certifying id of a run: 20 lower-case base32 characters of SHA-256 over the founder's
    key, the recovery key if there is one, and the name.
    """
    if recovery is None:
        message = _ID_CONTEXT + founder.to_bytes() + name.encode()
    else:
        message = _ID_WITH_RECOVERY_CONTEXT + founder.to_bytes() + recovery.to_bytes() + name.encode()
    return base64.b32encode(hashlib.sha256(message).digest()).decode().lower()[:_ID_CHARACTERS]


def blob_key(run_id: str) -> Key:
    """Return the key under which the blob of a run is stored."""
    return Key(_RUN_PREFIX + run_id, BLOB_NAME)


def is_blob_key(key: Key) -> bool:
    """Return whether this key takes blobs only. The id must have the form of a self-certifying run id: other
    namespaces belong to users.
    """
    return (
        key.name == BLOB_NAME
        and key.namespace.startswith(_RUN_PREFIX)
        and len(key.namespace) == len(_RUN_PREFIX) + _ID_CHARACTERS
    )


def blob_message(raw: bytes) -> bytes:
    """Return the bytes that the owner signed, for a blob that `blob_of` has accepted."""
    return SIGNATURE_CONTEXT + _parts(raw)[0]


def blob_of(key: Key, raw: bytes) -> Blob:
    """Decode a blob from an untrusted source. Raises UsageError when it is malformed or belongs to another
    key.
    """
    if not is_blob_key(key):
        raise UsageError(f"{key} takes no blob: only run.<run id>/{BLOB_NAME} does")
    body, signature = _parts(raw)
    try:
        table: Any = msgpack.unpackb(body, strict_map_key=True)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise UsageError(f"a specification cannot be decoded ({type(error).__name__})") from error
    run_id, owner, handover = ownership_of(table)
    if key != blob_key(run_id):
        raise UsageError("a specification of another run")
    version = table.get("version")
    if not is_version_of(version, handover):
        raise UsageError("a specification's version is a number from 1 up")
    return Blob(owner, version, signature)


def ownership_of(table: Any) -> tuple[str, PeerId, Handover | None]:
    """Return the id of the run that a decoded body belongs to, its owner, and the checked handover by which
    that owner got the run. Raises UsageError when they cannot be read, or when the recovery key did not sign
    the handover. The owner's signature is not checked here.
    """
    try:
        founder = PeerId.from_bytes(table["owner"])
        name, recovery = table["specification"]["name"], table["specification"].get("recovery_key")
        recovery = PeerId.parse(recovery) if recovery is not None else None
        if not isinstance(name, str) or len(name) > _NAME_CHARACTERS_MAX:
            raise UsageError("the name of a run is a short text")
        run_id = run_id_of(founder, name, recovery)
        handover = Handover.decode(table.get("handover"), founder, run_id, recovery)
    except UsageError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UsageError(f"a specification cannot be decoded ({type(error).__name__})") from error
    return run_id, handover.owner if handover is not None else founder, handover


def _parts(raw: bytes) -> tuple[bytes, bytes]:
    try:
        body, signature = msgpack.unpackb(raw, strict_map_key=True, max_map_len=0, max_array_len=2)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise UsageError(f"a specification cannot be decoded ({type(error).__name__})") from error
    if not isinstance(body, bytes) or not isinstance(signature, bytes) or len(signature) != _SIGNATURE_BYTES:
        raise UsageError("a specification is a pair of bytes: its body and a signature")
    return body, signature
