"""Open a connection: race the addresses of a contact, and a tunnel through its relays; the first one that
proves to be the peer wins.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

import grpc
from grpc import aio

from swarm.core.errors import DeadlineExceeded, NetworkError, SwarmError
from swarm.core.ids import ADDRESSES_MAX, Address, Contact, PeerId
from swarm.net.certificate import KeyAndCertificate, tls_name, trust_anchor
from swarm.net.rpc import SIZE_OPTIONS
from swarm.net.scope import NOT_DIALED, Surroundings
from swarm.runtime.sockets import Endpoint

_STAGGER_S = 0.2  # head start of the address that is dialed first
_RESOLVED_MAX = 4
_DIALED_MAX = 256

_CLIENT_OPTIONS: tuple[tuple[str, int], ...] = (
    *SIZE_OPTIONS,
    # Without this, channels to one peer would share one TCP connection and its back-off after a failure.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),  # ignore an HTTP proxy from the environment
    ("grpc.enable_retries", 0),  # the caller decides whether a call may be repeated
    ("grpc.service_config_disable_resolution", 1),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 0),
    ("grpc.http2.max_pings_without_data", 0),
)


class TunnelWays(Protocol):
    """Provides local endpoints for peers that can be called through relays only."""

    async def endpoint(self, contact: Contact) -> Address:
        """Return the address on loopback that stands for this peer. Raises SwarmError when there is none."""
        ...

    def failure(self, peer_id: PeerId) -> str:
        """Return why the last connection to a peer through its address failed; empty if it did not."""
        ...


@dataclass(frozen=True, slots=True)
class Routes:
    """Ways to reach peers. `surroundings` decide which of their addresses are dialed. `tunnels` lead to peers
    that can be called through relays only; None: such peers cannot be called.
    """

    surroundings: Surroundings = field(default_factory=Surroundings)
    tunnels: TunnelWays | None = None
    # recently dialed (IP, port) pairs, to which a connection may be in progress
    dialed: deque[Endpoint] = field(default_factory=lambda: deque(maxlen=_DIALED_MAX))

    def permitted(self, peer_id: PeerId, address: Address, endpoints: list[Endpoint]) -> list[Endpoint]:
        """Return the resolved addresses at which the peer may be dialed, and remember them."""
        hosts = self.surroundings.dialable(peer_id, address, [host for host, _ in endpoints])
        found = [one for one in endpoints if one[0] in hosts]
        self.dialed.extend(found)
        return found


@dataclass(frozen=True, slots=True)
class Connection:
    """An open, authenticated connection. `address`: what was dialed; None: a tunnel through a relay."""

    channel: aio.Channel
    address: Address | None
    endpoints: tuple[Endpoint, ...]  # the dialed (IP, port) pairs in gRPC's order, one of which is connected
    seconds: float  # time that connecting took

    @property
    def where(self) -> str:
        """Return how the peer is reached, for messages."""
        return _where(self.address)

    @property
    def is_alive(self) -> bool:
        """Return whether the channel still has its connection: one that fell back from READY has lost it, and
        gRPC would dial again with a backoff of its own.
        """
        return self.channel.get_state() is grpc.ChannelConnectivity.READY


async def dial(
    contact: Contact,
    own: KeyAndCertificate,
    *,
    timeout_s: float,
    first: Address | None = None,
    options: tuple[tuple[str, int], ...] = (),
    routes: Routes | None = None,
) -> Connection:
    """Connect to the peer at any of its addresses; `first` is tried before the others, and a tunnel through
    its relays after them. `options` are gRPC options that extend or replace the defaults. `routes` decide
    which addresses may be dialed; None: all.

    Raises NetworkError that names the peer, each address and why it failed, or DeadlineExceeded when some
    address did not answer at all in `timeout_s`.
    """
    addresses: list[Address | None] = [
        *sorted(contact.addresses[:ADDRESSES_MAX], key=lambda address: address != first)
    ]
    routes = routes or Routes()
    if contact.relays and routes.tunnels is not None:
        addresses.append(None)
    if not addresses:
        raise NetworkError(f"peer {contact.peer_id} has no address that can be dialed")
    credentials = grpc.ssl_channel_credentials(
        trust_anchor(contact.peer_id), own.key_pem, own.certificate_pem
    )
    race = _Race(contact, credentials, options, routes)
    try:
        return await race.run(addresses, timeout_s)
    finally:
        await race.close_losers()


class _Race:
    def __init__(
        self,
        contact: Contact,
        credentials: grpc.ChannelCredentials,
        options: tuple[tuple[str, int], ...],
        routes: Routes,
    ) -> None:
        self._routes = routes
        self._contact = contact
        self._credentials = credentials
        self._options = [
            *options,  # first in the list, because gRPC uses the first option of a name
            *_CLIENT_OPTIONS,
            ("grpc.ssl_target_name_override", tls_name(contact.peer_id)),
        ]
        self._channels: list[aio.Channel] = []
        self._failures: dict[Address | None, str] = {}  # reasons by dialed address; None: the tunnel
        self._winner: Connection | None = None

    async def run(self, addresses: list[Address | None], timeout_s: float) -> Connection:
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        waiting = list(addresses)
        running: set[asyncio.Task[Connection | None]] = set()
        async with asyncio.TaskGroup() as group:
            while self._winner is None and (waiting or running) and loop.time() < deadline_s:
                if waiting:
                    running.add(group.create_task(self._attempt(waiting.pop(0))))
                remaining_s = deadline_s - loop.time()
                done, running = await asyncio.wait(
                    running,
                    timeout=min(_STAGGER_S, remaining_s) if waiting else remaining_s,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                self._winner = next((task.result() for task in done if task.result() is not None), None)
            for task in running:
                task.cancel()
        if self._winner is None:
            raise self._error(addresses, timeout_s)
        return self._winner

    async def close_losers(self) -> None:
        for channel in self._channels:
            if self._winner is None or channel is not self._winner.channel:
                await channel.close()

    def _error(self, addresses: list[Address | None], timeout_s: float) -> NetworkError:
        silent = f"no answer within {timeout_s:.3g} s"
        reasons = "; ".join(
            f"{_where(address)}: {self._failures.get(address, silent)}" for address in addresses
        )
        kind = NetworkError if all(address in self._failures for address in addresses) else DeadlineExceeded
        return kind(f"cannot reach peer {self._contact.peer_id}: {reasons}")

    async def _attempt(self, address: Address | None) -> Connection | None:
        started_s = asyncio.get_running_loop().time()
        resolved = await (self._tunnel() if address is None else self._endpoints(address))
        if not resolved:
            return None
        channel = aio.secure_channel(_target(resolved), self._credentials, options=self._options)
        self._channels.append(channel)
        state = channel.get_state(try_to_connect=True)
        while state not in (
            grpc.ChannelConnectivity.READY,
            grpc.ChannelConnectivity.TRANSIENT_FAILURE,
            grpc.ChannelConnectivity.SHUTDOWN,
        ):
            await channel.wait_for_state_change(state)
            state = channel.get_state(try_to_connect=True)
        if state is not grpc.ChannelConnectivity.READY:
            tunnels = self._routes.tunnels if address is None else None
            reason = tunnels.failure(self._contact.peer_id) if tunnels is not None else ""
            self._failures[address] = reason or await _failure_reason(channel)
            return None
        return Connection(channel, address, tuple(resolved), asyncio.get_running_loop().time() - started_s)

    async def _endpoints(self, address: Address) -> list[Endpoint]:
        """Return the endpoints of this address. Without any, note the reason and return an empty list."""
        try:
            resolved = await resolve(address)
        except OSError as error:
            self._failures[address] = f"the name cannot be resolved ({error.strerror or error})"
            return []
        resolved = self._routes.permitted(self._contact.peer_id, address, resolved)
        if not resolved:
            self._failures[address] = NOT_DIALED
        return resolved

    async def _tunnel(self) -> list[Endpoint]:
        """Return the local end of a tunnel to the peer. Without one, note the reason and return an empty
        list.
        """
        assert self._routes.tunnels is not None
        try:
            end = await self._routes.tunnels.endpoint(self._contact)
        except SwarmError as error:
            self._failures[None] = str(error)
            return []
        return [(end.host, end.port)]


def _where(address: Address | None) -> str:
    return "the other end of a relay" if address is None else address.multiaddr


async def resolve(address: Address) -> list[tuple[str, int]]:
    """Return IP addresses of the one family that the system prefers. Names are resolved here, so that the
    sockets of this node are known (swarm.runtime.fork).
    """
    if not address.target.startswith("dns:"):
        return [(address.host, address.port)]
    found = await asyncio.get_running_loop().getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    family = found[0][0]
    return [(str(item[4][0]), address.port) for item in found if item[0] == family][:_RESOLVED_MAX]


def _target(resolved: list[tuple[str, int]]) -> str:
    if ":" in resolved[0][0]:
        return "ipv6:" + ",".join(f"[{host}]:{port}" for host, port in resolved)
    return "ipv4:" + ",".join(f"{host}:{port}" for host, port in resolved)


async def _failure_reason(channel: aio.Channel) -> str:
    """Return why a channel has just failed to connect: a call on it fails at once with the reason."""
    try:
        await channel.unary_unary("/swarm.Node/Why")(b"", timeout=0.5)
    except aio.AioRpcError as error:
        return explain(error.details() or error.code().name.lower())
    return "the connection failed"


def explain(details: str) -> str:
    """Return gRPC's description of a failed connection in fewer words."""
    if any(
        words in details
        for words in (
            "CERTIFICATE_VERIFY_FAILED",
            "unable to get local issuer",
            "certificate signature failure",
        )
    ):
        return "another peer answers there (its certificate was not issued by this PeerID)"
    if "handshake failed" in details.lower():
        return "it does not speak TLS as a swarm peer does"
    for words in (
        "Connection refused",
        "No route to host",
        "Network is unreachable",
        "Connection reset by peer",
        "Socket closed",
    ):
        if words.lower() in details.lower():
            return words.lower()
    return details[:300]
