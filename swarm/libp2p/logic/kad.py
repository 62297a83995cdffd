"""libp2p's kad-dht, as a client: messages, and the search for the peers nearest to a key. Pure.

Runs are found by name: peers that can be called are providers of the key that is derived from the name. No
other function of the DHT is used. Anybody can provide any key, so a provider is only a hint.

Source: libp2p specification "Kademlia DHT".
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum

from swarm.core.errors import PeerError, UsageError
from swarm.core.ids import ADDRESSES_MAX, Address, Contact, PeerId
from swarm.libp2p.logic.messages import decode_address, encode_address, fields, varint

KAD_PROTOCOL = "/ipfs/kad/1.0.0"
MESSAGE_BYTES_MAX = 256 << 10
NEAREST = 20  # number of peers that hold a key (specification: k)
PARALLEL = 3  # simultaneous queries (specification: alpha)
ASKED_MAX = 60  # limit of peers queried in one search
PROVIDERS_MAX = 16
_CLOSER_MAX = 20  # limit of peers taken from one answer
_KNOWN_MAX = 512
_TLS_HTTP = varint(448) + varint(480)  # the end of a gRPC port's multiaddr
_SHA2_256 = bytes.fromhex("1220")  # the beginning of a multihash


class KadKind(IntEnum):
    """The message types that this client uses."""

    ADD_PROVIDER = 2
    GET_PROVIDERS = 3
    FIND_NODE = 4


@dataclass(frozen=True, slots=True)
class KadAnswer:
    """Peers nearer to the key with addresses of libp2p, and providers with addresses of their gRPC ports."""

    closer: tuple[Contact, ...]
    providers: tuple[Contact, ...]


def run_key(run: str) -> bytes:
    """Return the key of a run's peers, a multihash of the run's name or id."""
    return _SHA2_256 + hashlib.sha256(b"swarm run " + run.encode()).digest()


def encode_question(kind: KadKind, key: bytes, provider: Contact | None = None) -> bytes:
    """Encode a request. `provider`: for ADD_PROVIDER, this peer with the addresses of its gRPC port."""
    message = b"\x08" + varint(kind) + _field(2, key)
    if provider is not None:
        # host names are left out
        addresses = [one for one in map(_encoded, provider.addresses[:ADDRESSES_MAX]) if one]
        body = _field(1, provider.peer_id.to_bytes()) + b"".join(_field(2, one) for one in addresses)
        message += _field(9, body)
    return message


def decode_answer(data: bytes) -> KadAnswer:
    """Decode an answer. Peers of other kinds than Ed25519, or without a usable address, are left out. Raises
    PeerError when it is malformed.
    """
    closer, providers = list[Contact](), list[Contact]()
    for number, value in fields(data):
        if number not in (8, 9) or not isinstance(value, bytes):
            continue
        if number == 9 and len(providers) == PROVIDERS_MAX:
            break  # a server may add many peers; the nearest come first
        found = _peer(value, is_grpc=number == 9)
        if found is not None and number == 8 and len(closer) < _CLOSER_MAX:
            closer.append(found)
        elif found is not None and number == 9:
            providers.append(found)
    return KadAnswer(tuple(closer), tuple(providers))


class ServerSearch:
    """A search for the servers nearest to a key: decides which to query next, and when to stop."""

    def __init__(self, key: bytes, start: Iterable[Contact]) -> None:
        self._place = int.from_bytes(hashlib.sha256(key).digest(), "big")
        self._known: dict[PeerId, Contact] = {}
        self._asked: set[PeerId] = set()
        self._answered: set[PeerId] = set()
        self._waiting: set[PeerId] = set()
        self.learn(start)

    def learn(self, peers: Iterable[Contact]) -> None:
        """Add candidates that may be near the key."""
        for one in peers:
            if one.addresses and (one.peer_id in self._known or len(self._known) < _KNOWN_MAX):
                self._known.setdefault(one.peer_id, one)

    def due(self) -> list[Contact]:
        """Return the peers to query now: the nearest that were not queried, unless enough have answered."""
        live = [one for one in self._sorted() if one not in self._asked or self._is_useful(one)]
        wanted = [self._known[one] for one in live[:NEAREST] if one not in self._asked]
        room = min(PARALLEL - len(self._waiting), ASKED_MAX - len(self._asked))
        chosen = wanted[: max(room, 0)]
        self._asked |= {one.peer_id for one in chosen}
        self._waiting |= {one.peer_id for one in chosen}
        return chosen

    def on_answer(self, peer: PeerId, closer: Iterable[Contact]) -> None:
        """Process the answer of a peer."""
        self._waiting.discard(peer)
        self._answered.add(peer)
        self.learn(closer)

    def on_failure(self, peer: PeerId) -> None:
        """Record that a peer did not answer."""
        self._waiting.discard(peer)

    @property
    def nearest(self) -> list[Contact]:
        """Return the peers that have answered, nearest first, at most `NEAREST`."""
        return [self._known[one] for one in self._sorted() if one in self._answered][:NEAREST]

    def _is_useful(self, peer: PeerId) -> bool:
        return peer in self._answered or peer in self._waiting

    def _sorted(self) -> list[PeerId]:
        return sorted(self._known, key=lambda one: one.dht_id ^ self._place)


def _peer(data: bytes, *, is_grpc: bool) -> Contact | None:
    peer_id, addresses = None, list[Address]()
    for number, value in fields(data):
        if number == 1 and isinstance(value, bytes):
            try:
                peer_id = PeerId.from_bytes(value)
            except UsageError:
                return None
        elif number == 2 and isinstance(value, bytes) and len(addresses) < ADDRESSES_MAX:
            addresses += _decoded(value, is_grpc=is_grpc)
    return Contact(peer_id, tuple(addresses)) if peer_id is not None and addresses else None


def _decoded(data: bytes, *, is_grpc: bool) -> Sequence[Address]:
    """Return the address of a multiaddr of a gRPC port or a plain TCP port; None for any other."""
    try:
        address = decode_address(data)
    except PeerError:
        return []
    plain = encode_address(address)
    return [address] if data == plain + (_TLS_HTTP if is_grpc else b"") else []


def _encoded(address: Address) -> bytes:
    try:
        return encode_address(address) + _TLS_HTTP
    except UsageError:
        return b""


def _field(number: int, value: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(value)) + value
