"""The scope of an address: this machine, a private network, or the internet. It decides which addresses of a
peer are dialed, and which strangers share a limit.

A peer's addresses are its own claim. A peer on the internet may claim an address of this machine or of a
router in this private network, and must not make this node connect there.
"""

from __future__ import annotations

import functools
import ipaddress
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum

from swarm.core.ids import Address, Contact, PeerId

_MET_MAX = 4096  # remembered peers; the one that was met longest ago is forgotten
_IPV4_PREFIX, _IPV6_PREFIX = 24, 48
_IPV4_NETWORK, _IPV6_NETWORK = 16, 32
NOT_DIALED = "it is in a private network or on this machine, but the peer was met in a wider one"

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address


class Scope(IntEnum):
    """The widest network from which an address can be reached."""

    MACHINE = 0
    SITE = 1
    INTERNET = 2


def ip_of(host: str) -> IPAddress | None:
    """Return the IP address of a host text; an IPv4-mapped IPv6 address becomes IPv4. None for a name."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


@functools.lru_cache(maxsize=4096)
def scope_of(host: str) -> Scope | None:
    """Return the scope of a host's address; None for a name, which must be resolved first."""
    address = ip_of(host)
    if address is None:
        return None
    if address.is_loopback or address.is_unspecified:  # 0.0.0.0 connects to this machine
        return Scope.MACHINE
    return Scope.INTERNET if address.is_global and not address.is_multicast else Scope.SITE


@functools.lru_cache(maxsize=4096)  # cached, because it is needed for every call
def prefix_of(host: str) -> str:
    """Return the network whose addresses may all belong to one user: /24 of IPv4, /48 of IPv6. A host that is
    no IP address is returned unchanged.
    """
    return _network(host, _IPV4_PREFIX, _IPV6_PREFIX)


def network_of(host: str) -> str:
    """Return the network that one provider is likely to run: /16 of IPv4, /32 of IPv6. A host that is no IP
    address is returned unchanged.
    """
    return _network(host, _IPV4_NETWORK, _IPV6_NETWORK)


def _network(host: str, ipv4_bits: int, ipv6_bits: int) -> str:
    address = ip_of(host)
    if address is None:
        return host
    return str(
        ipaddress.ip_network((address, ipv4_bits if address.version == 4 else ipv6_bits), strict=False)
    )


@functools.lru_cache(maxsize=4096)
def endpoint_of(peer: str) -> tuple[str, int]:
    """Return host and port of gRPC's name for the other end of a connection, `ipv4:192.0.2.1:4000` or
    `ipv6:%5B2001:db8::1%5D:4000`. Of anything else the host is the name itself, and the port 0.
    """
    kind, _, rest = peer.partition(":")
    host, _, port = rest.rpartition(":")
    if kind not in ("ipv4", "ipv6") or not port.isdecimal():
        return peer, 0
    host = host.removeprefix("%5B").removesuffix("%5D").strip("[]")
    address = ip_of(host)
    return str(address) if address is not None else host, int(port)


class Surroundings:
    """The networks in which this node meets peers. It belongs to the network thread.

    A node that the user entered through, or announces, addresses of the internet is in the internet. It dials
    public addresses, those that the user named, and those in the network in which it has met the peer: a peer
    on the LAN that has called may be called at its private address. A node on a LAN alone dials all but other
    machines' loopback addresses, and one on loopback alone dials everything.
    """

    def __init__(self, named: Iterable[Contact] = (), widest: Scope = Scope.INTERNET) -> None:
        """`named` are the contacts that the user, or an invite, gave. `widest` is the widest scope that the
        node assumes for itself, if the user declares that all peers are near.
        """
        self._widest = widest
        self._own = Scope.MACHINE
        self._named: set[tuple[PeerId, Address]] = set()
        self._met: OrderedDict[PeerId, Scope] = OrderedDict()
        self._awaited: dict[PeerId, str] = {}
        for contact in named:
            self._named |= {(contact.peer_id, address) for address in contact.addresses}
            self.widen(address.host for address in contact.addresses)

    @property
    def is_open(self) -> bool:
        """Return whether the user's settings allow that this node is in the internet."""
        return self._widest is Scope.INTERNET

    @property
    def own(self) -> Scope:
        """Return the widest network that this node is in."""
        return self._own

    def widen(self, hosts: Iterable[str]) -> None:
        """Add hosts that the user named, or that this node announces. Names count once they are resolved."""
        scopes = [scope for host in hosts if (scope := scope_of(host)) is not None]
        self._own = min(max([self._own, *scopes]), self._widest)

    def on_called(self, peer: PeerId, host: str) -> None:
        """Record that a peer, whose PeerID is proven, has called from this host."""
        scope = scope_of(host)
        if scope is Scope.INTERNET and peer in self._awaited:
            self._awaited[peer] = host
        if scope is None or scope is Scope.INTERNET or scope >= self._met.get(peer, Scope.INTERNET):
            return
        self._met[peer] = scope
        if len(self._met) > _MET_MAX:
            self._met.popitem(last=False)

    @contextmanager
    def awaiting(self, peer: PeerId) -> Iterator[Callable[[], str]]:
        """Watch for calls of a peer from the internet. Yield a function that returns the IP address that the
        last one came from; empty while there was none.
        """
        self._awaited[peer] = ""
        try:
            yield lambda: self._awaited[peer]
        finally:
            del self._awaited[peer]

    def announceable(self, addresses: Iterable[Address]) -> tuple[Address, ...]:
        """Return this node's addresses whose scope is at least that of the network it is in, so that peers in
        the internet receive no private ones.
        """
        scopes = [(one, scope_of(one.host)) for one in addresses]
        return tuple(one for one, scope in scopes if scope is None or scope >= self._own)

    def dialable(self, peer: PeerId, address: Address, hosts: Sequence[str]) -> list[str]:
        """Return those of an address's resolved hosts at which this peer may be dialed."""
        if (peer, address) in self._named:
            self.widen(hosts)
            return list(hosts)
        least = min(self._own, self._met.get(peer, Scope.INTERNET))
        return [host for host in hosts if (scope := scope_of(host)) is not None and scope >= least]
