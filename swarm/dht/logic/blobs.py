"""Self-certifying blobs: a run's signed specification, which any peer may store and keep alive for its owner.

A blob is msgpack of [body, signature]; the body is a map with the owner's PeerID, a version, and the
specification, which names the run. The run's id is a hash over owner and name, and the key is
`run.<id>/specification`. Key, blob and signature therefore confirm one another: no other content can be
stored under that key. In the DHT a blob is one entry of its owner, independent of the peer that stored it. A
higher version replaces a lower one; storing the same version again prolongs its life. The content of the
specification is not checked here (`swarm.run.specification` does that).
"""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from typing import Any

import msgpack

from swarm.core.errors import UsageError
from swarm.core.ids import Key, PeerId

BLOB_NAME = "specification"
VERSION_MAX = 1 << 32
SIGNATURE_CONTEXT = b"swarm run specification 1\0"
_ID_CONTEXT = b"swarm run id 1\0"
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


def run_id_of(owner: PeerId, name: str) -> str:
    """Return the self-certifying id of a run: 20 lower-case base32 characters of SHA-256 over the owner's key
    and the name.
    """
    digest = hashlib.sha256(_ID_CONTEXT + owner.to_bytes() + name.encode()).digest()
    return base64.b32encode(digest).decode().lower()[:_ID_CHARACTERS]


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
        owner, version, name = (
            PeerId.from_bytes(table["owner"]),
            table["version"],
            table["specification"]["name"],
        )
    except (ValueError, TypeError, KeyError, RecursionError, msgpack.UnpackException) as error:
        raise UsageError(f"a specification cannot be decoded ({type(error).__name__})") from error
    if not isinstance(version, int) or isinstance(version, bool) or not 1 <= version <= VERSION_MAX:
        raise UsageError("a specification's version is a number from 1 up")
    if (
        not isinstance(name, str)
        or len(name) > _NAME_CHARACTERS_MAX
        or key != blob_key(run_id_of(owner, name))
    ):
        raise UsageError("a specification of another run")
    return Blob(owner, version, signature)


def _parts(raw: bytes) -> tuple[bytes, bytes]:
    try:
        body, signature = msgpack.unpackb(raw, strict_map_key=True, max_map_len=0, max_array_len=2)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise UsageError(f"a specification cannot be decoded ({type(error).__name__})") from error
    if not isinstance(body, bytes) or not isinstance(signature, bytes) or len(signature) != _SIGNATURE_BYTES:
        raise UsageError("a specification is a pair of bytes: its body and a signature")
    return body, signature
