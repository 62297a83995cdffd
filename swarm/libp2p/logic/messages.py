"""The messages of libp2p's control protocols, decoded from untrusted bytes with bounds.

They are protobuf on the wire. Their few fields are decoded by hand for two reasons. The `type` of a circuit
message must be written even if it is 0: py-libp2p's generated classes omit it, and js-libp2p then refuses the
message. And fields that are not needed are not stored.

Sources: libp2p specifications "Circuit RelayState v2", "Direct Connection Upgrade through Relay", "Identify"
and "Addressing".
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

from swarm.core.errors import PeerError, UsageError
from swarm.core.ids import ADDRESSES_MAX, Address, PeerId

HOP_PROTOCOL = "/libp2p/circuit/relay/0.2.0/hop"
STOP_PROTOCOL = "/libp2p/circuit/relay/0.2.0/stop"
IDENTIFY_PROTOCOL = "/ipfs/id/1.0.0"
PING_PROTOCOL = "/ipfs/ping/1.0.0"
PUNCH_PROTOCOL = "/libp2p/dcutr"
MESSAGE_BYTES_MAX = 4096  # size of a circuit message (specification)
IDENTIFY_BYTES_MAX = 16 << 10
_FIELDS_MAX = 256
_VARINT_BYTES_MAX = 10
_PROTOCOLS_MAX = 64
_TEXT_BYTES_MAX = 128
_IP4, _TCP, _IP6, _P2P, _CIRCUIT = 4, 6, 41, 421, 290


class Status(IntEnum):
    """The answer to a circuit message."""

    OK = 100
    RESERVATION_REFUSED = 200
    RESOURCE_LIMIT_EXCEEDED = 201
    PERMISSION_DENIED = 202
    CONNECTION_FAILED = 203
    NO_RESERVATION = 204
    MALFORMED_MESSAGE = 400
    UNEXPECTED_MESSAGE = 401


class HopKind(IntEnum):
    """The requests to a relay, and STATUS, its answer."""

    RESERVE = 0
    CONNECT = 1
    STATUS = 2


class StopKind(IntEnum):
    """The request of a relay to the target of a circuit, and STATUS, the answer."""

    CONNECT = 0
    STATUS = 1


class PunchKind(IntEnum):
    """The messages of hole punching: addresses of both peers, and the signal to dial."""

    CONNECT = 100
    SYNC = 300


@dataclass(frozen=True, slots=True)
class Limit:
    """The limits of one circuit: seconds, and bytes in each direction; 0: no limit."""

    duration_s: int = 0
    data_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Hop:
    """A message between a peer and its relay. `expires_s` is Unix time of a reservation."""

    kind: HopKind
    peer: PeerId | None = None
    status: int = 0
    expires_s: int = 0
    addresses: tuple[bytes, ...] = ()
    limit: Limit | None = None


@dataclass(frozen=True, slots=True)
class Stop:
    """A message between a relay and the target of a circuit."""

    kind: StopKind
    peer: PeerId | None = None
    status: int = 0
    limit: Limit | None = None


@dataclass(frozen=True, slots=True)
class HolePunch:
    """A message of hole punching. `addresses`: multiaddrs at which its sender can be dialed now."""

    kind: PunchKind
    addresses: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Identify:
    """A peer's description of itself."""

    agent: str
    protocols: tuple[str, ...]
    addresses: tuple[bytes, ...] = ()
    observed: bytes = b""
    public_key: bytes = b""


def varint(value: int) -> bytes:
    """Encode an unsigned integer as protobuf and multiaddr do."""
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the unsigned integer at position `at`, and the position after it. Raises PeerError when it is
    cut or longer than 64 bits.
    """
    value = 0
    for count in range(_VARINT_BYTES_MAX):
        if at + count >= len(data):
            break
        byte = data[at + count]
        value |= (byte & 0x7F) << (7 * count)
        if byte < 0x80:
            if value >> 64:
                break
            return value, at + count + 1
    raise PeerError("a number of the message is cut or too long")


def fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield number and value of each field of a protobuf message. Raises PeerError when it is malformed."""
    at = 0
    for _ in range(_FIELDS_MAX):
        if at == len(data):
            return
        key, at = read_varint(data, at)
        number, kind = key >> 3, key & 7
        if kind == 0:
            value, at = read_varint(data, at)
            yield number, value
            continue
        if kind == 2:
            size, at = read_varint(data, at)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
        else:
            raise PeerError(f"a field of the message has wire type {kind}")
        if size > len(data) - at:
            raise PeerError("a field of the message is longer than the message")
        yield number, data[at : at + size]
        at += size
    raise PeerError(f"the message has more than {_FIELDS_MAX} fields")


def _number(value: int | bytes) -> int:
    if isinstance(value, bytes):
        raise PeerError("a number of the message is text")
    return value


def _bytes(value: int | bytes) -> bytes:
    if not isinstance(value, bytes):
        raise PeerError("a text of the message is a number")
    return value


def _field(number: int, value: int | bytes) -> bytes:
    if isinstance(value, bytes):
        return varint(number << 3 | 2) + varint(len(value)) + value
    return varint(number << 3) + varint(value)


def _peer(data: bytes) -> PeerId:
    raw = b""
    for number, value in fields(data):
        if number == 1:
            raw = _bytes(value)
    try:
        return PeerId.from_bytes(raw)
    except UsageError as error:
        raise PeerError(f"the peer that the message names is {error}") from None


def _limit(data: bytes) -> Limit:
    duration = size = 0
    for number, value in fields(data):
        if number == 1:
            duration = _number(value)
        elif number == 2:
            size = _number(value)
    return Limit(duration, size)


def _encode_limit(limit: Limit) -> bytes:
    return _field(1, limit.duration_s) + _field(2, limit.data_bytes)


def _reservation(data: bytes) -> tuple[int, tuple[bytes, ...]]:
    expires, addresses = 0, list[bytes]()
    for number, value in fields(data):
        if number == 1:
            expires = _number(value)
        elif number == 2 and len(addresses) < ADDRESSES_MAX:
            addresses.append(_bytes(value))
    return expires, tuple(addresses)


def encode_hop(message: Hop) -> bytes:
    """Encode a message to or of a relay, without its length."""
    out = _field(1, int(message.kind))
    if message.peer is not None:
        out += _field(2, _field(1, message.peer.to_bytes()))
    if message.expires_s:
        reservation = _field(1, message.expires_s)
        out += _field(3, reservation + b"".join(_field(2, one) for one in message.addresses))
    if message.limit is not None:
        out += _field(4, _encode_limit(message.limit))
    if message.status:
        out += _field(5, message.status)
    return out


def decode_hop(data: bytes) -> Hop:
    """Decode a message to or of a relay. Raises PeerError when it is malformed."""
    kind, peer, status, limit = 0, None, 0, None
    expires: int = 0
    addresses: tuple[bytes, ...] = ()
    for number, value in fields(data):
        if number == 1:
            kind = _number(value)
        elif number == 2:
            peer = _peer(_bytes(value))
        elif number == 3:
            expires, addresses = _reservation(_bytes(value))
        elif number == 4:
            limit = _limit(_bytes(value))
        elif number == 5:
            status = _number(value)
    if kind not in tuple(HopKind):
        raise PeerError(f"it sent a message of a relay of unknown type {kind}")
    return Hop(HopKind(kind), peer, status, expires, addresses, limit)


def encode_stop(message: Stop) -> bytes:
    """Encode a message to or of the target of a circuit, without its length."""
    out = _field(1, int(message.kind))
    if message.peer is not None:
        out += _field(2, _field(1, message.peer.to_bytes()))
    if message.limit is not None:
        out += _field(3, _encode_limit(message.limit))
    if message.status:
        out += _field(4, message.status)
    return out


def decode_stop(data: bytes) -> Stop:
    """Decode a message to or of the target of a circuit. Raises PeerError when it is malformed."""
    kind, peer, status, limit = 0, None, 0, None
    for number, value in fields(data):
        if number == 1:
            kind = _number(value)
        elif number == 2:
            peer = _peer(_bytes(value))
        elif number == 3:
            limit = _limit(_bytes(value))
        elif number == 4:
            status = _number(value)
    if kind not in tuple(StopKind):
        raise PeerError(f"it sent a message about a circuit of unknown type {kind}")
    return Stop(StopKind(kind), peer, status, limit)


def encode_punch(message: HolePunch) -> bytes:
    """Encode a message about hole punching, without its length."""
    return _field(1, int(message.kind)) + b"".join(_field(2, one) for one in message.addresses)


def decode_punch(data: bytes) -> HolePunch:
    """Decode a message about hole punching. Raises PeerError when it is malformed."""
    kind = 0
    addresses: list[bytes] = []
    for number, value in fields(data):
        if number == 1:
            kind = _number(value)
        elif number == 2 and len(addresses) < ADDRESSES_MAX:
            addresses.append(_bytes(value)[:_TEXT_BYTES_MAX])
    if kind not in tuple(PunchKind):
        raise PeerError(f"it sent a message about hole punching of unknown type {kind}")
    return HolePunch(PunchKind(kind), tuple(addresses))


def encode_identify(message: Identify) -> bytes:
    """Encode a peer's description of itself, without its length."""
    out = _field(1, message.public_key) if message.public_key else b""
    out += b"".join(_field(2, one) for one in message.addresses)
    out += b"".join(_field(3, one.encode()) for one in message.protocols)
    if message.observed:
        out += _field(4, message.observed)
    return out + _field(5, b"ipfs/0.1.0") + _field(6, message.agent.encode())


def decode_identify(data: bytes) -> Identify:
    """Decode a peer's description of itself. Raises PeerError when it is malformed."""
    agent, observed, public_key = "", b"", b""
    protocols: list[str] = []
    addresses: list[bytes] = []
    for number, value in fields(data):
        if number == 1:
            public_key = _bytes(value)[:_TEXT_BYTES_MAX]
        elif number == 2 and len(addresses) < ADDRESSES_MAX:
            addresses.append(_bytes(value)[:_TEXT_BYTES_MAX])
        elif number == 3 and len(protocols) < _PROTOCOLS_MAX:
            protocols.append(_text(value))
        elif number == 4:
            observed = _bytes(value)[:_TEXT_BYTES_MAX]
        elif number == 6:
            agent = _text(value)
    return Identify(agent, tuple(protocols), tuple(addresses), observed, public_key)


def _text(value: int | bytes) -> str:
    text = _bytes(value)[:_TEXT_BYTES_MAX].decode(errors="replace")
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def encode_address(address: Address, relay: PeerId | None = None) -> bytes:
    """Encode the multiaddr of a TCP port; with `relay` that of a circuit through the relay at this address.
    Raises UsageError for a host name.
    """
    try:
        ip = ipaddress.ip_address(address.host)
    except ValueError:
        raise UsageError(f"{address.host!r} is a name: an address of libp2p is an IP address here") from None
    out = (
        varint(_IP4 if ip.version == 4 else _IP6) + ip.packed + varint(_TCP) + address.port.to_bytes(2, "big")
    )
    if relay is not None:
        raw = relay.to_bytes()
        out += varint(_P2P) + varint(len(raw)) + raw + varint(_CIRCUIT)
    return out


def decode_address(data: bytes) -> Address:
    """Decode a multiaddr that begins with an IP address and a TCP port. Raises PeerError for any other."""
    code, at = read_varint(data, 0)
    size = {_IP4: 4, _IP6: 16}.get(code)
    if size is None:
        raise PeerError(f"the address has the protocol {code}, not IP")
    ip = data[at : at + size]
    code, at = read_varint(data, at + size)
    port = data[at : at + 2]
    if len(ip) != size or code != _TCP or len(port) != 2 or port == b"\0\0":
        raise PeerError("the address names no TCP port")
    return Address(str(ipaddress.ip_address(ip)), int.from_bytes(port, "big"))
