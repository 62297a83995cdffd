"""Signed, expiring records, and the rules that every record must pass at replicas and at readers.

Times are swarm time. Inside the DHT they are whole microseconds, so that two peers never disagree about which
of two records is later; users see Unix seconds (`Entry`).
"""

from __future__ import annotations

import gc
import hashlib
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeAlias

import msgpack

from swarm.core.errors import UsageError
from swarm.core.identity import Signer, verify
from swarm.core.ids import Key, PeerId
from swarm.dht.logic.blobs import Blob, blob_message, blob_of, is_blob_key

VALUE_BYTES_MAX = 64 << 10
SUBKEY_BYTES_MAX = 256
TTL_MAX_US = 24 * 3600 * 1_000_000
# A writer's clock may be this far ahead of this peer's. Less would refuse peers whose clocks are not
# corrected yet; more would let a writer block its own later entries for longer.
FUTURE_MAX_US = 30 * 1_000_000
NESTING_MAX = 32
FORGED = "its signature is not its writer's"
_SIGNATURE_BYTES = 64
VERIFIED_MAX = 8192
_DOMAIN = b"swarm/dht/record/1\0"
_RUN_PREFIX = "run."
_CONTAINERS = (list, dict)  # the types that msgpack decodes to, apart from scalars
_BINARY_FORMATS = (b"\xc4", b"\xc5", b"\xc6")  # first byte of a byte string in msgpack

Value: TypeAlias = Any  # None, bool, int, float, str, bytes, and lists and maps of these


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A writer's entry under a key. Its owner is (writer, subkey): no other writer can replace it."""

    key: Key
    subkey: str | None  # None: a plain entry
    value: bytes = field(repr=False)  # msgpack; empty in a tombstone
    issued_at_us: int
    expiration_us: int
    writer: PeerId
    deleted: bool = False
    # A self-certifying blob (`blobs`): any peer that stores it again prolongs its life.
    is_blob: bool = False
    signature: bytes = field(default=b"", repr=False)

    @property
    def owner(self) -> Owner:
        return self.writer, self.subkey

    @property
    def run(self) -> str | None:
        """Return the id of the run whose namespace the key is in, None in other namespaces."""
        return run_of(self.key.namespace)

    @property
    def version(self) -> tuple[int, bytes]:
        """Return the version: of two records of one owner the greater version wins. The signature breaks ties
        the same way on every replica.
        """
        return self.issued_at_us, self.signature

    @property
    def size_bytes(self) -> int:
        """Return the approximate memory cost on a replica in bytes; never zero, so that empty values are not
        free.
        """
        return 256 + len(self.value) + len(self.subkey or "")


Owner: TypeAlias = tuple[PeerId, str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """An entry as readers get it. Times are swarm time in Unix seconds."""

    value: Value
    subkey: str | None
    writer: PeerId
    issued_at: float
    expiration: float

    @classmethod
    def of(cls, record: Record) -> Entry:
        return cls(
            value=decode_value(record.value),
            subkey=record.subkey,
            writer=record.writer,
            issued_at=record.issued_at_us / 1e6,
            expiration=record.expiration_us / 1e6,
        )


def _with_length(part: bytes) -> bytes:
    return len(part).to_bytes(4, "big") + part


def signing_bytes(record: Record) -> bytes:
    """Return the canonical bytes that are signed: a domain separator, then every field with its length."""
    return b"".join(
        (
            _DOMAIN,
            _with_length(record.key.namespace.encode()),
            _with_length(record.key.name.encode()),
            b"\0" if record.subkey is None else b"\1" + _with_length(record.subkey.encode()),
            _with_length(record.value),
            record.issued_at_us.to_bytes(8, "big", signed=True),
            record.expiration_us.to_bytes(8, "big", signed=True),
            record.writer.public_key,
            b"\1" if record.deleted else b"\0",
        )
    )


def signed(record: Record, signer: Signer) -> Record:
    return replace(record, signature=signer.sign(signing_bytes(record)))


def encode_value(value: Value) -> bytes:
    """Encode a value as msgpack. Raises UsageError when it is not made of scalars, str, bytes, lists and
    maps, is nested too deep or too large.
    """
    try:
        raw: bytes = msgpack.packb(value, use_bin_type=True)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise UsageError(
            f"a DHT value is made of None, bool, int, float, str, bytes, lists and maps: {error}"
        ) from error
    if len(raw) > VALUE_BYTES_MAX:
        raise UsageError(f"a DHT value has at most {VALUE_BYTES_MAX} bytes as msgpack, not {len(raw)}")
    decode_value(raw)
    return raw


def record_of_blob(key: Key, raw: bytes, expiration_us: int) -> Record:
    """Return the record of a blob; it does not depend on the peer that stores it. Raises UsageError when the
    blob is malformed or belongs to another key. The signature is not verified here.
    """
    blob = blob_of(key, raw)
    return Record(
        key=key,
        subkey=None,
        value=encode_value(raw),
        issued_at_us=blob.version,
        expiration_us=expiration_us,
        writer=blob.writer,
        is_blob=True,
        signature=blob.signature,
    )


def decode_value(raw: bytes) -> Value:
    """Decode a value from an untrusted source. Raises UsageError when it breaks a rule."""
    # A value may have 65,536 lists. The garbage collector would look at all objects of the process for it,
    # several times: 0.3 s instead of 10 ms, on the event loop.
    was_collecting = gc.isenabled()
    gc.disable()
    try:
        value = msgpack.unpackb(raw, raw=False, use_list=True, strict_map_key=False, max_ext_len=0)
        is_flat = _is_flat(value)
    # TypeError: a list or map used as a map's key.
    except (TypeError, ValueError, RecursionError, msgpack.UnpackException) as error:
        raise UsageError(f"not a DHT value: {error}") from error
    finally:
        if was_collecting:
            gc.enable()
    if not is_flat:
        raise UsageError(f"a DHT value is nested at most {NESTING_MAX} deep")
    return value


def _is_flat(value: Value) -> bool:
    """Return whether no part of a value is deeper than NESTING_MAX. Works level by level, which takes a
    quarter of the time of a walk.
    """
    containers = [value] if type(value) in _CONTAINERS else []
    for _ in range(NESTING_MAX):
        if not containers:
            return True
        containers = [
            part
            for one in containers
            for part in (one.values() if type(one) is dict else one)
            if type(part) in _CONTAINERS
        ]
    return not any(containers)


def run_of(namespace: str) -> str | None:
    """Return the id of the run whose namespace this is, None for other namespaces."""
    return namespace.removeprefix(_RUN_PREFIX) if is_run_namespace(namespace) else None


def is_run_namespace(namespace: str) -> bool:
    return namespace.startswith(_RUN_PREFIX) and len(namespace) > len(_RUN_PREFIX)


def namespace_refusal(record: Record) -> str | None:
    """Return why the record's namespace cannot take it regardless of its rules, or None. Further rules are in
    `namespaces`.
    """
    namespace = record.key.namespace
    if namespace.startswith(_RUN_PREFIX) and not is_run_namespace(namespace):
        return f"{namespace!r} names no run: run.<run id>/…"
    if is_run_namespace(namespace) and record.subkey != str(record.writer) and not record.is_blob:
        return f"in {namespace} an entry's subkey is its writer's PeerID"
    return None  # every other namespace is as open as `public`


class Rules(Protocol):
    """Additional rules that `RecordValidator` applies: `swarm.dht.logic.namespaces.Namespaces`. `changes`
    counts the changes of the rules so far; until the next one they judge the same record alike.
    """

    @property
    def changes(self) -> int: ...

    def refusal(self, record: Record) -> str | None: ...


class RecordValidator:
    """Check records. Verified signatures are cached, and so are records whose value and rules were checked,
    because readers get each record from several replicas.
    """

    def __init__(self, rules: Rules | None = None) -> None:
        self._rules = rules
        self._verified: OrderedDict[bytes, bool] = OrderedDict()
        # digests of accepted records, with `Rules.changes` when they were
        self._accepted: OrderedDict[bytes, int] = OrderedDict()

    @property
    def changes(self) -> int:
        """Return `Rules.changes`: until the next one an accepted record stays so while it lives."""
        return self._rules.changes if self._rules is not None else 0

    def refusal(self, record: Record, now_us: int) -> str | None:
        """Return why the record is not acceptable now, or None. Its value is decoded after its signature was
        verified: a check of the signature always takes the same time, and only the writer of a record can
        make its value expensive.
        """
        if record.subkey is not None and len(record.subkey.encode()) > SUBKEY_BYTES_MAX:
            return f"its subkey has more than {SUBKEY_BYTES_MAX} bytes"
        if len(record.value) > VALUE_BYTES_MAX:
            return f"its value has {len(record.value)} bytes, more than {VALUE_BYTES_MAX}"
        if record.expiration_us > now_us + TTL_MAX_US + FUTURE_MAX_US:
            return "it would live longer than 24 hours"
        if record.is_blob:
            return self._blob_refusal(record, now_us)
        if record.issued_at_us < 0 or record.expiration_us <= record.issued_at_us:
            return "it expires before it is issued"
        if record.expiration_us - record.issued_at_us > TTL_MAX_US:
            return "it would live longer than 24 hours"
        if record.issued_at_us > now_us + FUTURE_MAX_US:
            ahead_s = (record.issued_at_us - now_us) / 1e6
            return f"it was issued {ahead_s:.0f} s in the future: one of the two clocks is wrong"
        if record.expiration_us <= now_us:
            return f"it expired {(now_us - record.expiration_us) / 1e6:.0f} s ago"
        if len(record.signature) != _SIGNATURE_BYTES:
            return namespace_refusal(record) or f"a signature has {_SIGNATURE_BYTES} bytes"
        message = signing_bytes(record)
        digest = _digest(message, record)
        changes = self.changes
        if self._accepted.get(digest) == changes:
            return None  # the rest depends on nothing but the record and the rules
        refusal = (
            namespace_refusal(record)
            or self._verify(record, message, digest)
            or self._value_refusal(record)
            or self._rules_refusal(record)
        )
        if refusal is None:
            self._accepted[digest] = changes
            if len(self._accepted) > VERIFIED_MAX:
                self._accepted.popitem(last=False)
        return refusal

    def _rules_refusal(self, record: Record) -> str | None:
        return self._rules.refusal(record) if self._rules is not None else None

    def _blob_refusal(self, record: Record, now_us: int) -> str | None:
        """Return why the record of a blob is not acceptable now, or None. Every field must match the blob:
        the owner signed nothing else.
        """
        if record.expiration_us <= now_us:
            return f"it expired {(now_us - record.expiration_us) / 1e6:.0f} s ago"
        if record.deleted:
            return "a blob cannot be deleted"
        if not is_blob_key(record.key):
            return f"{record.key} takes no blob"
        if record.value[:1] not in _BINARY_FORMATS:
            return "a blob is bytes"
        try:
            raw = decode_value(record.value)
            if encode_value(raw) != record.value:
                return "a blob is bytes"
            message = blob_message(raw)
            refusal = self._verify(record, message, _digest(message, record))
            if refusal:
                return refusal
            blob = blob_of(record.key, raw)
        except UsageError as error:
            return str(error)
        if (
            blob != Blob(writer=record.writer, version=record.issued_at_us, signature=record.signature)
            or record.subkey is not None
        ):
            return "its fields are not the blob's"
        return self._rules_refusal(record)

    def _value_refusal(self, record: Record) -> str | None:
        if record.deleted:
            return "a tombstone has no value" if record.value else None
        try:
            decode_value(record.value)
        except UsageError as error:
            return str(error)
        return None

    def _verify(self, record: Record, message: bytes, digest: bytes) -> str | None:
        valid = self._verified.get(digest)
        if valid is None:
            valid = verify(record.writer, message, record.signature)
            self._verified[digest] = valid
            if len(self._verified) > VERIFIED_MAX:
                self._verified.popitem(last=False)
        return None if valid else FORGED


def _digest(message: bytes, record: Record) -> bytes:
    """Return the digest under which the check of a signed message is remembered."""
    return hashlib.sha256(message + record.signature).digest()
