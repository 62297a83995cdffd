"""Announcements of runs on a local network: their format and validation. Pure; times are seconds, passed in.

An announcement is the TXT record of libp2p's mDNS discovery (`dnsaddr=` with a multiaddr each), so that other
implementations see these peers, too; `swarm-…` fields name the run, and others ignore them. Announcements are
not authenticated. Those that come from another network, or name an address in one, are therefore ignored.
Everything is bounded, and the PeerID is verified when the peer is dialed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from ipaddress import AddressValueError, IPv4Address, IPv4Interface, IPv4Network

from swarm.core.errors import PeerError, UsageError
from swarm.core.ids import RUN_ID, RUN_NAME, Contact

SERVICE = "_p2p._udp.local."  # libp2p's
RUNS_MAX = 32  # limit of listed runs
PEERS_MAX = 16  # limit of peers of one run
WHO_CHARACTERS_MAX = 40
DATAGRAM_BYTES_MAX = 4096
_TEXT_BYTES_MAX = 2048
_FIELDS_MAX = 24
_ADDRESSES_MAX = 4  # addresses of one peer: machines with more private networks are rare
_FIELD_BYTES_MAX = 255  # size of a field in a TXT record
_PRIVATE = tuple(IPv4Network(one) for one in ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16"))
# limits of one sender; an honest one sends a few at its start
_DATAGRAMS_PER_S, _DATAGRAMS_BURST = 10.0, 40.0
_ALL_PER_S, _ALL_BURST = 100.0, 400.0  # limits of all senders together
_SENDERS_MAX = 256
_ADDRESS, _RUN, _NAME, _MEMBERS, _WHO = "dnsaddr", "swarm-run", "swarm-name", "swarm-members", "swarm-who"


@dataclass(frozen=True, slots=True, kw_only=True)
class NearbyPeer:
    """A peer on the local network that trains a run. `who`: the name that its user gave."""

    contact: Contact
    run_id: str
    run_name: str
    is_invited: bool
    who: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NearbyRun:
    """A run on the local network, as its peers there describe it."""

    run_id: str
    name: str
    is_invited: bool
    peers: tuple[NearbyPeer, ...]

    @property
    def full_name(self) -> str:
        return f"{self.name}@{self.run_id}"


def is_private(address: IPv4Address) -> bool:
    """Return whether an address belongs to a private network of a home or an office: RFC 1918, excluding
    carrier networks.
    """
    return any(address in network for network in _PRIVATE)


def encode(peer: NearbyPeer) -> bytes:
    """Return the TXT record that announces a peer."""
    fields = [f"{_ADDRESS}={one}" for one in peer.contact.multiaddrs[:_ADDRESSES_MAX]]
    fields += [
        f"{_RUN}={peer.run_id}",
        f"{_NAME}={peer.run_name}",
        f"{_MEMBERS}={'invited' if peer.is_invited else 'open'}",
    ]
    if who := _cleaned(peer.who):
        fields.append(f"{_WHO}={who}")
    raw = [field.encode()[:_FIELD_BYTES_MAX] for field in fields]
    return b"".join(bytes([len(one)]) + one for one in raw)


def decode(text: bytes, networks: Iterable[IPv4Interface]) -> NearbyPeer:
    """Return the peer that a TXT record describes, with its addresses in the given networks of this machine.
    Raises PeerError if the record does not describe a peer of a run in these networks.
    """
    fields = _fields(text)
    contacts = [contact for one in fields.get(_ADDRESS, ()) if (contact := _contact(one)) is not None]
    if len({one.peer_id for one in contacts}) != 1:
        raise PeerError("it does not name exactly one peer")
    near = list(networks)
    addresses = dict.fromkeys(
        address for one in contacts for address in one.addresses if _is_near(address.host, near)
    )
    if not addresses:
        raise PeerError("it names no address in a network of this machine")
    run_id, name = fields.get(_RUN, ("",))[0], fields.get(_NAME, ("",))[0]
    if not RUN_ID.fullmatch(run_id) or not RUN_NAME.fullmatch(name):
        raise PeerError("it names no run")
    return NearbyPeer(
        contact=Contact(contacts[0].peer_id, tuple(addresses)[:_ADDRESSES_MAX]),
        run_id=run_id,
        run_name=name,
        is_invited=fields.get(_MEMBERS, ("",))[0] != "open",
        who=_cleaned(fields.get(_WHO, ("",))[0]),
    )


def grouped(peers: Iterable[NearbyPeer]) -> list[NearbyRun]:
    """Return the runs of these peers, the one with most peers first. Peers with different descriptions of a
    run are listed separately, so that a liar affects only its own line.
    """
    found: dict[tuple[str, str, bool], list[NearbyPeer]] = {}
    for peer in peers:
        key = peer.run_id, peer.run_name, peer.is_invited
        if key not in found and len(found) >= RUNS_MAX:
            continue
        others = found.setdefault(key, [])
        if len(others) < PEERS_MAX and all(one.contact.peer_id != peer.contact.peer_id for one in others):
            others.append(peer)
    runs = [
        NearbyRun(run_id=run_id, name=name, is_invited=is_invited, peers=tuple(of_run))
        for (run_id, name, is_invited), of_run in found.items()
    ]
    return sorted(runs, key=lambda one: (-len(one.peers), one.full_name))


class Doorkeeper:
    """Decides which datagrams are read: short ones from this machine's local networks, at a limited rate."""

    def __init__(self, networks: Sequence[IPv4Interface], *, takes_answers: bool) -> None:
        """Set the limits. `takes_answers`: read announcements of other peers, and not only questions."""
        self._networks = networks
        self._takes_answers = takes_answers
        self._all = _Allowance(_ALL_PER_S, _ALL_BURST)
        self._of: OrderedDict[str, _Allowance] = OrderedDict()

    def admits(self, datagram: bytes, host: str, now_s: float) -> bool:
        """Return whether to read a datagram that came from this IP address."""
        if len(datagram) > DATAGRAM_BYTES_MAX or len(datagram) < 3:
            return False
        is_answer = bool(datagram[2] & 0x80)
        if (is_answer and not self._takes_answers) or not _is_near(host, self._networks):
            return False
        own = self._of.pop(host, None) or _Allowance(_DATAGRAMS_PER_S, _DATAGRAMS_BURST)
        self._of[host] = own
        if len(self._of) > _SENDERS_MAX:
            self._of.popitem(last=False)
        return own.take(now_s) and self._all.take(now_s)


class _Allowance:
    """A number of datagrams per second, with a burst after a pause."""

    def __init__(self, per_s: float, burst: float) -> None:
        self._per_s, self._burst = per_s, burst
        self._left, self._since_s = burst, 0.0

    def take(self, now_s: float) -> bool:
        self._left = min(self._left + max(now_s - self._since_s, 0.0) * self._per_s, self._burst)
        self._since_s = now_s
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True


def _is_near(host: str, networks: Iterable[IPv4Interface]) -> bool:
    try:
        address = IPv4Address(host)
    except AddressValueError:
        return False
    return is_private(address) and any(address in one.network for one in networks)


def _contact(multiaddr: str) -> Contact | None:
    """Return the contact that a multiaddr of a gRPC port names; None for libp2p's other addresses."""
    try:
        return Contact.parse(multiaddr)
    except UsageError:
        return None


def _cleaned(who: str) -> str:
    """Return a name without control characters and characters that a terminal does not show."""
    return "".join(one for one in who[:WHO_CHARACTERS_MAX] if one.isprintable()).strip()


def _fields(text: bytes) -> dict[str, list[str]]:
    """Return the fields of a TXT record. Raises PeerError when it is malformed."""
    if len(text) > _TEXT_BYTES_MAX:
        raise PeerError(f"a record of {len(text)} bytes")
    fields: dict[str, list[str]] = {}
    position = count = 0
    while position < len(text) and count < _FIELDS_MAX:
        end = position + 1 + text[position]
        if end > len(text):
            raise PeerError("its last field is cut off")
        key, _, value = text[position + 1 : end].decode(errors="replace").partition("=")
        fields.setdefault(key, []).append(value)
        position, count = end, count + 1
    return fields
