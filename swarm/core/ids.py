"""Identifiers: peers (`PeerId`), their addresses (`Address`, `Contact`), and DHT entries (`Key`).

A `PeerId` is libp2p's, for Ed25519 only: the identity multihash of the protobuf-encoded public key (libp2p
specification, "Peer Ids and Keys"), so that the public key can be read out of it. It is computed here because
importing libp2p costs a trainer 0.4 s and 85 MB (docs/decisions/0002). A test checks that it equals libp2p's
own.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import base58

from swarm.core.errors import PeerError, UsageError

ADDRESSES_MAX = 8  # maximum for one peer: remembered, dialed, in a message or a record
RELAYS_MAX = 3  # maximum for one peer, within these: it keeps reservations at two, and changes one at a time
_CIRCUIT = "/p2p-circuit"
# Multihash: identity (0x00), 36 bytes; protobuf PublicKey: field 1 (type) = Ed25519 (1), field 2 (data) = 32
# bytes.
_PEER_ID_PREFIX = bytes.fromhex("002408011220")
_PEER_ID_CHARACTERS = 52  # length of an Ed25519 PeerID in base58
_PUBLIC_KEY_BYTES = 32
_HOST_NAME = re.compile(
    r"(?=.{1,253}$)[A-Za-z0-9_]([A-Za-z0-9_-]{0,62})?(\.[A-Za-z0-9_]([A-Za-z0-9_-]{0,62})?)*\.?"
)
_KEY_BYTES_MAX = 256
RUN_ID = re.compile(r"[a-z2-7]{20}")
RUN_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")  # name of a run with a specification
_RUN_NAME_CHARACTERS_MAX = 100
_TARGET_SCHEMES = {"ip4": "ipv4", "ip6": "ipv6", "dns": "dns"}  # gRPC's names for them


# The same few peers are named in every message and log line. The caches are bounded, also against input from
# strangers.
@functools.lru_cache(maxsize=16384)
def _place(public_key: bytes) -> int:
    return int.from_bytes(hashlib.sha256(_PEER_ID_PREFIX + public_key).digest(), "big")


@functools.lru_cache(maxsize=4096)
def _place_of_key(namespace: str, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{namespace}/{name}".encode()).digest(), "big")


@functools.lru_cache(maxsize=4096)
def _text(public_key: bytes) -> str:
    return base58.b58encode(_PEER_ID_PREFIX + public_key).decode()


@functools.lru_cache(maxsize=4096)
def _kind(host: str) -> str:
    try:
        return f"ip{ipaddress.ip_address(host).version}"
    except ValueError:
        return "dns"


class _PublicKey(NamedTuple):
    public_key: bytes  # 32 bytes, raw


class PeerId(_PublicKey):
    """A peer's name: its Ed25519 public key, written as a libp2p PeerID (`12D3Koo…`).

    It is a tuple, so that hashing and comparison run in C: most tables are keyed by PeerIDs.
    """

    __slots__ = ()

    def __new__(cls, public_key: bytes) -> PeerId:
        # decoders pass what other peers sent: a text of 32 characters must not become a key
        if not isinstance(public_key, bytes):
            raise UsageError(f"an Ed25519 public key is bytes, not {type(public_key).__name__}")
        if len(public_key) != _PUBLIC_KEY_BYTES:
            raise UsageError(f"an Ed25519 public key has {_PUBLIC_KEY_BYTES} bytes, not {len(public_key)}")
        return super().__new__(cls, public_key)

    @classmethod
    def from_bytes(cls, raw: bytes) -> PeerId:
        """Decode the 38 bytes of the multihash form. Raises UsageError when they are not an Ed25519
        PeerID.
        """
        if not isinstance(raw, bytes):
            raise UsageError(f"a PeerID is bytes, not {type(raw).__name__}")
        if len(raw) != len(_PEER_ID_PREFIX) + _PUBLIC_KEY_BYTES or not raw.startswith(_PEER_ID_PREFIX):
            raise UsageError("not an Ed25519 PeerID (38 bytes that begin with 002408011220)")
        return _peer_id(raw[len(_PEER_ID_PREFIX) :])

    @classmethod
    def parse(cls, text: str) -> PeerId:
        """Decode the base58 form. Raises UsageError when it is not an Ed25519 PeerID."""
        if text.startswith("12D3KooW") and len(text) < _PEER_ID_CHARACTERS:
            raise UsageError(
                f"{text!r} is too short for a PeerID, by {_PEER_ID_CHARACTERS - len(text)} of "
                f"{_PEER_ID_CHARACTERS} characters: was the address copied whole?"
            )
        if not 40 <= len(text) <= 64:
            raise UsageError(f"{text[:64]!r} is not a PeerID: one looks like 12D3KooW… and has 52 characters")
        try:
            return cls.from_bytes(base58.b58decode(text))
        except ValueError as error:
            raise UsageError(f"{text!r} is not a PeerID: {error}") from error

    def to_bytes(self) -> bytes:
        return _PEER_ID_PREFIX + self.public_key

    @property
    def dht_id(self) -> int:
        """Return the peer's position in the DHT's key space: SHA-256 of the multihash form, 256 bits."""
        return _place(self.public_key)

    @property
    def short(self) -> str:
        """Return the last eight characters, which tell peers apart in a log line."""
        return str(self)[-8:]

    def __str__(self) -> str:
        return _text(self.public_key)

    def __repr__(self) -> str:
        return f"PeerId({self})"


@functools.lru_cache(maxsize=16384)
def _peer_id(public_key: bytes) -> PeerId:
    return PeerId(public_key)  # one object per peer: dictionary lookups need no comparison


@dataclass(frozen=True, slots=True, order=True)
class Address:
    """The address of a peer's gRPC port: a host (IPv4, IPv6 or name) and a TCP port."""

    host: str
    port: int

    def __post_init__(self) -> None:
        if not 1 <= self.port <= 65535:
            raise UsageError(f"{self.port} is not a TCP port (1 to 65535)")
        if self._kind() == "dns" and not _HOST_NAME.fullmatch(self.host):
            raise UsageError(f"{self.host!r} is neither an IP address nor a host name")

    def _kind(self) -> str:
        return _kind(self.host)

    @property
    def multiaddr(self) -> str:
        """Return the multiaddr `/ip4/…/tcp/…/tls/http`, without the peer."""
        return f"/{self._kind()}/{self.host}/tcp/{self.port}/tls/http"

    @property
    def target(self) -> str:
        """Return the form that gRPC dials."""
        host = f"[{self.host}]" if self._kind() == "ip6" else self.host
        return f"{_TARGET_SCHEMES[self._kind()]}:{host}:{self.port}"

    @classmethod
    def parse(cls, multiaddr: str) -> Address:
        """Parse `/ip4|ip6|dns|dns4|dns6/HOST/tcp/PORT[/tls/http]`. Raises UsageError that names what is
        wrong.
        """
        parts = multiaddr.rstrip("/").split("/")
        if (
            len(parts) not in (5, 7)
            or parts[0]
            or parts[1] not in ("ip4", "ip6", "dns", "dns4", "dns6")
            or parts[3] != "tcp"
        ):
            raise UsageError(f"{multiaddr[:200]!r} is not an address like /ip4/203.0.113.7/tcp/4000/tls/http")
        if len(parts) == 7 and parts[5:] != ["tls", "http"]:
            raise UsageError(f"{multiaddr[:200]!r}: a gRPC address ends in /tls/http")
        if not parts[4].isascii() or not parts[4].isdigit() or len(parts[4]) > 5:
            raise UsageError(f"{multiaddr[:200]!r}: {parts[4][:20]!r} is not a TCP port")
        address = cls(parts[2], int(parts[4]))
        if parts[1].startswith("ip") and address._kind() != parts[1]:
            raise UsageError(f"{multiaddr[:200]!r}: {parts[2]!r} is not an {parts[1]} address")
        return address


@dataclass(frozen=True, slots=True)
class Contact:
    """A peer, its addresses, and the relays through which it takes calls: about 100 bytes on the wire. A peer
    without addresses cannot be dialed (a client peer); one with relays can be called nevertheless, through a
    tunnel. `relays`: each with the address of its libp2p port.
    """

    peer_id: PeerId
    addresses: tuple[Address, ...] = ()
    relays: tuple[Contact, ...] = ()

    @property
    def is_callable(self) -> bool:
        """Return whether the peer can be called, directly or through a relay."""
        return bool(self.addresses or self.relays)

    def is_called_by(self, own: Contact) -> bool:
        """Return whether the peer `own` calls this one of itself, as in rounds. A peer with addresses leaves
        calls through relays to the others: they can call it, and it needs no libp2p.
        """
        return bool(self.addresses or (self.relays and not own.addresses))

    @property
    def through(self) -> str:
        """Return the relays through which the peer takes calls, in words; empty if there are none."""
        names = " and ".join(one.peer_id.short for one in self.relays)
        return f"{'relays' if len(self.relays) > 1 else 'relay'} {names}" if names else ""

    @classmethod
    def parse(cls, text: str) -> Contact:
        """Parse a multiaddr that ends in `/p2p/<PeerID>`. Raises UsageError that names what is wrong."""
        address, separator, peer_id = text.strip().partition("/p2p/")
        if not separator:
            example = "/ip4/203.0.113.7/tcp/4000/tls/http/p2p/12D3KooW…"
            raise UsageError(
                f"{text[:200]!r} names no peer: an address ends in /p2p/<PeerID>, like {example}"
            )
        return cls(PeerId.parse(peer_id), (Address.parse(address),))

    @classmethod
    def of_published(cls, peer_id: PeerId, texts: Iterable[str]) -> Contact:
        """Return the contact of a peer from what it published: multiaddrs of its own port, and of relays with
        `/p2p-circuit` at the end. Raises UsageError that names what is wrong.
        """
        addresses, relays = list[Address](), dict[PeerId, tuple[Address, ...]]()
        for text in texts:
            if not text.endswith(_CIRCUIT):
                addresses.append(Address.parse(text))
                continue
            relay = cls.parse(text.removesuffix(_CIRCUIT))
            relays[relay.peer_id] = (*relays.get(relay.peer_id, ()), *relay.addresses)
        found = tuple(cls(*one) for one in relays.items() if one[0] != peer_id)
        return cls(peer_id, tuple(addresses), found[:RELAYS_MAX])

    @classmethod
    def from_record(cls, writer: PeerId, addresses: object) -> Contact:
        """Return the contact that `writer` published in a record as a list of addresses (`published`). Raises
        PeerError when the list is malformed.
        """
        if (
            not isinstance(addresses, list)
            or len(addresses) > ADDRESSES_MAX
            or not all(isinstance(one, str) for one in addresses)
        ):
            raise PeerError(f"a record's addresses are a list of at most {ADDRESSES_MAX} multiaddrs")
        try:
            return cls.of_published(writer, addresses)
        except UsageError as error:
            raise PeerError(str(error)) from None

    @property
    def published(self) -> list[str]:
        """Return the addresses as a record has them, whose writer is the peer: at most `ADDRESSES_MAX`."""
        relayed = [
            f"/ip{6 if ':' in one.host else 4}/{one.host}/tcp/{one.port}/p2p/{relay.peer_id}{_CIRCUIT}"
            for relay in self.relays
            for one in relay.addresses[:1]
        ]
        direct = [address.multiaddr for address in self.addresses[: ADDRESSES_MAX - len(relayed)]]
        return [*direct, *relayed]

    @property
    def multiaddrs(self) -> list[str]:
        """Return its own addresses, each with the PeerID, by which others can enter the swarm."""
        return [f"{address.multiaddr}/p2p/{self.peer_id}" for address in self.addresses]


@dataclass(frozen=True, slots=True, order=True)
class Key:
    """The name of a DHT entry. Its namespace decides which peers may write; both parts are sent in the clear,
    so that validators can see them.
    """

    namespace: str
    name: str

    def __post_init__(self) -> None:
        if not isinstance(self.namespace, str) or not isinstance(self.name, str):
            raise UsageError(f"a DHT key is text, not {self.namespace!r:.60} and {self.name!r:.60}")
        if not self.namespace or "/" in self.namespace or not self.name:
            raise UsageError(
                f"a DHT key reads namespace/name, both non-empty, not {self.namespace!r}/{self.name!r}"
            )
        try:
            size = len(self.namespace.encode()) + len(self.name.encode())
        except UnicodeEncodeError as error:
            raise UsageError(f"a DHT key is text that UTF-8 can write: {error}") from None
        if size > _KEY_BYTES_MAX:
            raise UsageError(f"a DHT key has at most {_KEY_BYTES_MAX} bytes, not {size}")

    @classmethod
    def parse(cls, text: str | Key) -> Key:
        """Parse `namespace/name`; without a slash the namespace is `public`. A key is returned unchanged.
        Raises UsageError for anything else.
        """
        if isinstance(text, cls):
            return text
        if not isinstance(text, str):
            raise UsageError(f"a DHT key is text, namespace/name, or a Key, not {text!r:.60}")
        namespace, separator, name = text.partition("/")
        return cls(namespace, name) if separator else cls("public", text)

    @property
    def dht_id(self) -> int:
        """Return the key's position in the DHT's key space: SHA-256 of `namespace/name`, 256 bits."""
        return _place_of_key(self.namespace, self.name)

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


def open_run_id(run: str) -> str:
    """Return a run's id unchanged (20 lower-case base32 characters), or the id of the open run of that name,
    which has no owner.
    """
    if not isinstance(run, str) or not 1 <= len(run) <= _RUN_NAME_CHARACTERS_MAX:
        raise UsageError(
            f"run is a name of 1 to {_RUN_NAME_CHARACTERS_MAX} characters, or a run's id, not {run!r:.120}"
        )
    if RUN_ID.fullmatch(run):
        return run
    return base64.b32encode(hashlib.sha256(b"swarm open run " + run.encode()).digest()).decode().lower()[:20]
