"""Conversion between the DHT's values and its protobuf messages. Messages from peers are checked here: a
malformed one raises PeerError.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

from swarm.core.errors import PeerError, UsageError
from swarm.core.ids import Contact, Key, PeerId
from swarm.dht.logic.records import Record
from swarm.wire.dht_pb2 import DhtKey, DhtRecord

_ID_BYTES = 32
_KNOWN_BYTES = 8
# Peers in one request that its caller knows; a caller that knows more names none. A contact takes ten times
# as many bytes in each answer, and has to be read. Larger: in large swarms most contacts in answers are new,
# and requests grow in vain
KNOWN_MAX = 64


def known_to_wire(contacts: Iterable[Contact]) -> bytes:
    """Encode peers that an answer need not name: the last 8 bytes of each key, so that no match can be
    forged.
    """
    return b"".join([contact.peer_id.public_key[-_KNOWN_BYTES:] for contact in contacts])


def without_known(contacts: list[Contact], known: bytes) -> list[Contact]:
    """Return the contacts that the caller does not know yet. Raises PeerError when it claims to know more
    than `KNOWN_MAX` peers.
    """
    if not known:
        return contacts
    if len(known) > KNOWN_MAX * _KNOWN_BYTES or len(known) % _KNOWN_BYTES:
        raise PeerError(
            f"a request names at most {KNOWN_MAX} known peers with {_KNOWN_BYTES} bytes each, not "
            f"{len(known)} bytes"
        )
    known_suffixes = {known[place : place + _KNOWN_BYTES] for place in range(0, len(known), _KNOWN_BYTES)}
    return [
        contact for contact in contacts if contact.peer_id.public_key[-_KNOWN_BYTES:] not in known_suffixes
    ]


def key_to_wire(key: Key) -> DhtKey:
    return DhtKey(namespace=key.namespace, name=key.name)


def key_from_wire(message: DhtKey) -> Key:
    try:
        return _key(message.namespace, message.name)
    except UsageError as error:
        raise PeerError(f"a malformed key: {error}") from error


@functools.lru_cache(maxsize=1024)
def _key(namespace: str, name: str) -> Key:
    """Return a key. A call and each record in it name the same few keys, which are checked once."""
    return Key(namespace, name)


def record_to_wire(record: Record) -> DhtRecord:
    return DhtRecord(
        key=key_to_wire(record.key),
        subkey=record.subkey,
        value=record.value,
        issued_at_us=record.issued_at_us,
        expiration_us=record.expiration_us,
        writer=record.writer.to_bytes(),
        signature=record.signature,
        deleted=record.deleted,
        lasting=record.is_blob,
    )


def record_from_wire(message: DhtRecord) -> Record:
    """Decode a record. Raises PeerError when a field is malformed; `RecordValidator` decides whether it is
    acceptable.
    """
    try:
        writer = PeerId.from_bytes(message.writer)
    except UsageError as error:
        raise PeerError(f"a record with a malformed writer: {error}") from error
    return Record(
        key=key_from_wire(message.key),
        subkey=message.subkey if message.HasField("subkey") else None,
        value=message.value,
        issued_at_us=message.issued_at_us,
        expiration_us=message.expiration_us,
        writer=writer,
        deleted=message.deleted,
        is_blob=message.lasting,
        signature=message.signature,
    )


def id_to_wire(dht_id: int) -> bytes:
    return dht_id.to_bytes(_ID_BYTES, "big")


def id_from_wire(raw: bytes) -> int:
    if len(raw) != _ID_BYTES:
        raise PeerError(f"a place in the DHT has {_ID_BYTES} bytes, not {len(raw)}")
    return int.from_bytes(raw, "big")
