"""A node: this process as a peer of the swarm. All other services are built on one."""

from __future__ import annotations

import asyncio
import atexit
import functools
import logging
import os
import platform
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import swarm
from swarm.core.clock import SystemClock
from swarm.core.errors import SwarmError, UsageError
from swarm.core.identity import Identity
from swarm.core.ids import Address, Contact, PeerId
from swarm.core.notify import wait_until_set
from swarm.core.presets import Preset, timings_of
from swarm.core.standing import Founding, PeerStanding
from swarm.dht.handle import Dht
from swarm.dht.service.dht_service import DhtService
from swarm.membership.invite import Entrance
from swarm.net.announcing import Announcing, GivenCheck, OwnAddresses
from swarm.net.channels import Channels, ConnectionLimits
from swarm.net.dial import Routes
from swarm.net.dialback import DialBacks
from swarm.net.hello import NEAR_HELLO_S, Introductions
from swarm.net.joining import Joining
from swarm.net.listening import WILDCARDS, given_addresses, parse_listen
from swarm.net.logic.nat import NatKind
from swarm.net.logic.reachability import NodeReach
from swarm.net.membership import RunMembership, register
from swarm.net.peerbook import KnownPeer, PeerBook
from swarm.net.rpc import Handlers
from swarm.net.scope import Scope, Surroundings, scope_of
from swarm.net.server import Server
from swarm.net.throttle import Bandwidth, Throttle
from swarm.net.throughput import Throughput, Throughputs, throughput
from swarm.reach.on_demand import Libp2p
from swarm.reach.reaching import Reaching, RelayTerms, RelayView
from swarm.reach.rendezvous import Rendezvous
from swarm.runtime.fork import NodeSockets, close_after_fork
from swarm.runtime.services import Services
from swarm.runtime.supervise import Supervisor
from swarm.runtime.thread import TURN_S_MAX, NetworkThread

_logger = logging.getLogger(__name__)

# The constructor waits at most this long for the first bootstrap peer; joining continues in the background.
_FIRST_JOIN_S = 0.2
_BOOK_ENTRIES_MAX = 1000  # 200 bytes each, written as one file
_HOUSEKEEPING_S = 30.0  # interval at which the peer book is saved and unused connections are closed
_CALLBACKS_S_MAX = 1.0
_CLOSE_S_MAX = 1.8
_RELAYS_S_MAX, _THROUGHPUT_S_MAX = 20.0, 25.0
# the widest network that a node of each preset assumes
_WIDEST: dict[Preset, Scope] = {"local": Scope.MACHINE, "lan": Scope.SITE, "wan": Scope.INTERNET}
ServiceT = TypeVar("ServiceT")
CallbackT = TypeVar("CallbackT", bound=Callable[[], object])


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig:
    """A node's settings."""

    # The links between the peers: "local" (all on one machine), "lan" or "wan" (the internet). It sets the
    # timeouts, grace periods and intervals of the node and of every service on it.
    preset: Preset = "wan"
    # Display name, at most 40 characters; it is published with this peer's metrics.
    name: str = ""
    # Addresses to announce instead of this machine's: host, host:port or multiaddr; for a forwarded port.
    announce: tuple[str, ...] = ()
    # Limits of tensors and other bulk data; if they are too small, rounds wait for this peer.
    bandwidth: Bandwidth = field(default_factory=Bandwidth)
    # Relay calls to peers that nobody can call directly, at most at this rate in Mbit/s, on the TCP port
    # after that of `listen`; 0: none. It works only if others can call this machine.
    relay_mbit: float = 0.0


class Node:
    """This process as a peer: identity, server, connections, DHT, peer book. A context manager; `close()`
    takes under two seconds.

    Args:
        bootstrap: Addresses that end in /p2p/<PeerID> (or Contacts), which need not be reachable; or an
            invite (swarm1…) to a run. With an invite this peer calls and answers members of that run only.
        listen: host:port, port 0 for a free one; None: no peer can connect to this one.
        identity: A file, which is created when missing, or an Identity; None: a new one that lives as long as
            the node.
        config: Preset, name, addresses to announce, bandwidth and relaying; None: the defaults.

    Raises:
        UsageError: When an argument is wrong, the port is taken, or another process uses the identity file.
    """

    def __init__(
        self,
        bootstrap: str | Contact | Sequence[str | Contact] = (),
        listen: str | None = "0.0.0.0:0",
        identity: Identity | str | os.PathLike[str] | None = None,
        *,
        config: NodeConfig | None = None,
    ) -> None:
        self.config = config or NodeConfig()
        self.timings = timings_of(self.config.preset)
        entrance = self._entrance = Entrance.of(bootstrap)
        listen_address = parse_listen(listen) if listen is not None else None
        self._owns_identity = not isinstance(identity, Identity)
        self.identity = (
            identity
            if isinstance(identity, Identity)
            else Identity.load(identity)
            if identity is not None
            else Identity.generate()
        )
        self.peer_id: PeerId = self.identity.peer_id
        self.contact = Contact(self.peer_id)
        self.clock = SystemClock()
        # None: not in an invited run, so that everybody is answered
        self.membership: RunMembership | None = None
        if entrance.invite is not None:
            entry_points = [one.peer_id for one in entrance.contacts]
            self.membership = RunMembership(entrance.invite, self.peer_id, entry_points, self.clock.swarm_s)
        self.rng: random.Random = random.SystemRandom()
        self.book = PeerBook(self.peer_id, self.clock.swarm_s, _book_path(self.identity), _BOOK_ENTRIES_MAX)
        self.handlers = Handlers()
        invited = self.membership.admission if self.membership is not None else None
        self.standing = PeerStanding({invited.run_id: invited.holders} if invited is not None else None)
        if invited is not None:
            self.standing.set_founding(invited.run_id, Founding(is_invited=True))
        self._services = Services(self)
        self._callbacks: list[Callable[[], Awaitable[None]]] = []
        self._at_announced: list[Callable[[], None]] = []
        self._closed = False
        self._listen_address = listen_address
        self.network = NetworkThread()
        try:
            self.network.run(
                self._start([one for one in entrance.contacts if one.peer_id != self.peer_id]),
                TURN_S_MAX,
            )
        except BaseException:
            self.close()
            raise
        self._end_fork_guard = close_after_fork(self._own_sockets)
        atexit.register(self.close)

    async def _start(self, bootstrap: list[Contact]) -> None:
        self.supervisor = Supervisor()
        self._throttle = throttle = Throttle(self.config.bandwidth)
        surroundings = Surroundings(bootstrap, _WIDEST[self.config.preset])
        self._libp2p = Libp2p(
            self.identity, self.agent, self.clock, self.standing, surroundings, self.network.pool
        )
        self.channels = Channels(
            self.identity,
            on_connected=self._connected,
            throttle=throttle,
            membership=self.membership,
            routes=Routes(surroundings, self._libp2p),
            limits=ConnectionLimits(dial_timeout_s=self.timings.dial_timeout_s),
        )
        self._server = Server(
            throttle=throttle,
            standing=self.standing,
            membership=self.membership,
            surroundings=surroundings,
            tunnelled=self._libp2p.tunnelled,
        )
        self._libp2p.on_direct.append(self._retire)
        register(self.handlers, self.membership)
        self.introductions = Introductions(lambda: self.contact, _agent(), self.channels, self.book)
        self.introductions.register(self.handlers)
        DialBacks(self.channels, self.standing).register(self.handlers)
        Throughputs(self.standing).register(self.handlers)
        service = DhtService(
            own=lambda: self.contact,
            identity=self.identity,
            caller=self.channels,
            handlers=self.handlers,
            book=self.book,
            clock=self.clock,
            supervisor=self.supervisor,
            timings=self.timings,
            standing=self.standing,
        )
        self.dht = Dht(service, self.network)
        # Registered first and called last, because other services send their goodbyes through it.
        self.at_close(service.leave)
        own = OwnAddresses(peer_id=self.peer_id, named=tuple(bootstrap))
        if self._listen_address is not None:
            host, port = self._listen_address
            port = await self._server.start(self.identity, self.handlers, host, port)
            self._listen_address = (host, port)
            self._libp2p.listen_beside(self._listen_address)
            given = given_addresses(self.config.announce, port)
            own = replace(own, listening=self._listen_address, given=given)
        self._announcing = Announcing(
            own, self.channels, self.book, self.standing, surroundings, self._announce
        )
        self.contact = self._announcing.contact
        self.introductions.on_introduced.append(self._announcing.on_introduced)
        self.at_close(self._announcing.close)
        self._reaching = self._reach_through_relays()
        self.rendezvous = Rendezvous(self._libp2p, lambda: self.contact)
        self.at_announced(self.rendezvous.on_announced)
        # without bootstrap peers all contacts come from the peer book
        join = functools.partial(service.join, remembered=not bootstrap)
        self._joining = Joining(bootstrap, self.introductions, self.book, join, self.timings)
        self.supervisor.spawn("joining the swarm", self._joining.run, restart=True)
        self.supervisor.spawn("addresses of this peer", self._announcing.run, restart=True)
        seek = functools.partial(self._reaching.run, service.meet)
        self.supervisor.spawn("relays of this peer", seek, restart=True)
        self.supervisor.spawn("housekeeping", self._run_housekeeping, restart=True)
        self.supervisor.spawn("limits of connections", self._server.connections.run, restart=True)
        if bootstrap:
            await wait_until_set(self._joining.attempted, _FIRST_JOIN_S)

    @property
    def addresses(self) -> list[str]:
        """Multiaddrs that another peer can join by; empty when no peer can connect to this one."""
        return self.contact.multiaddrs

    @property
    def server(self) -> Address | None:
        """Return where this node's server listens, possibly a wildcard address; None: it accepts no calls."""
        return Address(*self._listen_address) if self._listen_address is not None else None

    @property
    def agent(self) -> str:
        """Return the name and version of this peer's software, as announced to others."""
        return f"swarm/{swarm.__version__}"

    @property
    def reach(self) -> NodeReach:
        """Return how others can call this peer, as far as it knows: "direct", "relayed" (through relays),
        "hidden" (they have tried in vain), "unknown" (nobody has tried yet), or "none" (it does not listen).
        """
        return self._announcing.reach

    def check_given(self) -> GivenCheck:
        """Let others call the addresses that the user has given, and return what they found."""
        return self.network.run(self._announcing.check_given(), _RELAYS_S_MAX)

    def relays(self) -> list[RelayView]:
        """Ping the relays that this node knows, and return them: first those with a reservation of this node,
        then the nearest. Takes a few seconds, because it loads libp2p.
        """
        return self.network.run(self._reaching.relays(), _RELAYS_S_MAX)

    def nat(self, relays: Sequence[RelayView]) -> NatKind:
        """Return how the router of this machine maps ports, as observed by these relays."""
        return self._reaching.nat(relays)

    def throughput(self, contact: Contact) -> Throughput:
        """Measure the throughput to a peer and from it, with 1 MiB each way; takes at most 20 s. Raises
        SwarmError when the peer cannot be reached, or refuses.
        """
        return self.network.run(throughput(self.channels, contact), _THROUGHPUT_S_MAX)

    @property
    def bandwidth(self) -> Bandwidth:
        """Return the current limits: those of the configuration until `set_bandwidth`."""
        return self._throttle.bandwidth

    def set_bandwidth(self, bandwidth: Bandwidth) -> None:
        """Limit the bandwidth from now on. May be called on any thread."""
        self.network.loop.call_soon_threadsafe(self._throttle.set_bandwidth, bandwidth)

    @property
    def traffic(self) -> tuple[int, int]:
        """Return the bytes of all messages sent and received so far, without the headers of the transport."""
        return self._throttle.passed

    def tell_reach(self, listener: Callable[[str], None]) -> None:
        """Call `listener` on the network thread with a sentence that says how others reach this peer, as soon
        as this is known and whenever it changes. `listener` is not called on loopback, or if the user gave
        the addresses to announce.
        """
        self.network.loop.call_soon_threadsafe(self._announcing.tell, listener)

    @property
    def closed(self) -> bool:
        return self._closed

    def peers(self) -> list[KnownPeer]:
        """Return the peer book's entries (contact, last seen, round-trip time), most recently seen first."""
        return self.book.known()

    @property
    def entry(self) -> str:
        """Return the text with which another peer can join. In an invited run it is the invite of this peer,
        with this peer's address first, as long as it has uses left. Otherwise it is the first of `entries`.
        Empty if there is none, or if the invite is for this PeerID only.
        """
        if self.membership is None:
            return next(iter(self.entries), "")
        if not self.membership.invite.key:
            return ""
        others = [one for one in self._entrance.contacts if one.peer_id != self.peer_id]
        return self.membership.invite.with_contacts([self.contact, *others]).text()

    @property
    def entries(self) -> list[str]:
        """Multiaddrs with which another peer can enter the swarm: this peer's own or, if no peer can connect
        to it, those of the peers through which it entered.
        """
        if self.addresses:
            return self.addresses
        others = [one for one in self._entrance.contacts if one.peer_id != self.peer_id]
        return [address for one in others for address in one.multiaddrs]

    @property
    def introducers(self) -> tuple[PeerId, ...]:
        """Return the peers that the user gave as entry points, as addresses or in an invite, in order."""
        return tuple(one.peer_id for one in self._entrance.contacts if one.peer_id != self.peer_id)

    def wait_joined(self, timeout_s: float) -> bool:
        """Wait until a bootstrap peer, or a peer remembered from an earlier run, has answered. Returns False
        when none did in time: `join_failures` says why.
        """
        return self.network.run(wait_until_set(self._joining.joined, timeout_s), timeout_s + 1.0)

    @property
    def join_failures(self) -> list[str]:
        """Return one sentence for each peer that did not answer when it was last asked, and one if a given
        address names this peer itself.
        """
        failures = list(self._joining.failures.values())
        named = {one.peer_id for one in self._entrance.contacts}
        if self.peer_id in named and (failures or len(named) == 1):
            failures.append(
                f"an address names this peer itself ({self.peer_id}): if another process answers there, it "
                "has a copy of this identity, and one of the two needs an identity file of its own"
            )
        return failures

    @property
    def join_refused(self) -> bool:
        """Return whether the last attempt to join failed with an answer rather than a timeout: the next
        attempt is then likely to fail, too.
        """
        return self._joining.is_refused

    @property
    def not_invited(self) -> str:
        """Return the reason why a peer of an invited run refused this one; empty if none has."""
        return self._joining.not_invited

    def service(self, kind: Callable[[Node], ServiceT]) -> ServiceT:
        """Return this node's single instance of a service, created as `kind(node)` on the network thread when
        it is first requested.

        A service that must be closed registers a callback with `at_close` in its constructor.
        """
        return self._services.get(kind)

    def at_close(self, callback: Callable[[], Awaitable[None]]) -> Callable[[], None]:
        """Run `callback` on the network loop when the node closes, before its connections do; the callback
        registered last runs first.

        Returns a function that removes the callback again, for services that close before the node does.
        """
        return _entered(self._callbacks, callback)

    def at_announced(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Run `callback` on the network loop whenever `contact` has changed: records with the old addresses
        are out of date. Returns a function that removes the callback again.
        """
        return _entered(self._at_announced, callback)

    def close(self) -> None:
        """Say goodbye, stop the services, release the port and the identity file. Idempotent; takes under two
        seconds, also when peers are dead.

        In a forked child it does nothing: the node belongs to its parent.
        """
        if self._closed or not self.network.is_own_process:
            return
        if self.network.is_current_thread:
            raise UsageError("close() blocks, so it cannot be called on the network thread")
        self._closed = True
        atexit.unregister(self.close)
        try:
            if hasattr(self, "_joining"):
                self.network.run(self._stop(), _CLOSE_S_MAX)
        except TimeoutError:
            _logger.warning("some of the node's services did not stop within %.1f s", _CLOSE_S_MAX)
        finally:
            self.network.stop()
            self.book.save()
            if hasattr(self, "_end_fork_guard"):
                self._end_fork_guard()
            if self._owns_identity:
                self.identity.close()

    def __enter__(self) -> Node:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        addresses = (
            ", ".join(f"{address.host}:{address.port}" for address in self.contact.addresses) or "no address"
        )
        return f"Node({self.peer_id}, {addresses}{', closed' if self._closed else ''})"

    async def _stop(self) -> None:
        goodbyes = Supervisor()
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + _CALLBACKS_S_MAX
        # In sequence: a service may need those that were created before it.
        for left in range(len(self._callbacks), 0, -1):
            callback = self._callbacks[left - 1]
            task = goodbyes.spawn(f"closing {getattr(callback, '__qualname__', callback)}", callback)
            # A callback that hangs must leave time for the others.
            await asyncio.wait([task], timeout=max(deadline_s - loop.time(), 0.0) / left)
        await goodbyes.close(0.1)
        await self.supervisor.close(0.3)
        await self.channels.close()
        await self._libp2p.close()
        await self._server.stop(0.1)

    async def _run_housekeeping(self) -> None:
        while True:
            await asyncio.sleep(_HOUSEKEEPING_S)
            await self.channels.close_idle()
            await asyncio.get_running_loop().run_in_executor(self.network.pool, self.book.save)

    def _announce(self, contact: Contact) -> None:
        self.contact = contact
        for callback in list(self._at_announced):
            callback()
        if contact.addresses:  # the DHT does not call through relays
            self.supervisor.spawn("telling the neighbours", self.dht.service.announce)

    def _connected(self, contact: Contact, address: Address | None, seconds: float) -> None:
        if address is not None:
            self.book.record_connection(contact.peer_id, address)
        if self.introductions.is_due(contact.peer_id):
            is_near = address is not None and scope_of(address.host) in (Scope.MACHINE, Scope.SITE)
            wait_s = self.rng.uniform(*NEAR_HELLO_S) if is_near else 0.0
            self.supervisor.spawn(
                f"introduction to {contact.peer_id.short}", lambda: self._introduce(contact, wait_s)
            )

    def _retire(self, peer_id: PeerId) -> None:
        self.supervisor.spawn(f"other way to {peer_id.short}", lambda: self.channels.retire(peer_id))

    async def _introduce(self, contact: Contact, wait_s: float) -> None:
        await asyncio.sleep(wait_s)
        if not self.channels.connected(contact.peer_id):
            return
        try:
            await self.introductions.introduce_once(contact, timeout_s=self.timings.hello_timeout_s)
        except SwarmError as error:
            _logger.debug("%s", error)

    def _own_sockets(self) -> NodeSockets:
        own = (self._listen_address,) if self._listen_address is not None else ()
        bulk = self._server.bulk
        if self._listen_address is not None and bulk is not None:
            own = (*own, (self._listen_address[0], bulk.port))
        dialed = self.channels.endpoints | self._libp2p.dialed
        return NodeSockets((*own, *self._libp2p.listening), dialed)

    def _reach_through_relays(self) -> Reaching:
        server = self.server
        # a wildcard, replaced by an address that this process can reach
        if server is not None and server.host in WILDCARDS:
            server = Address("127.0.0.1", server.port)
        return Reaching(
            self._libp2p,
            self._announcing,
            self.introductions,
            self.channels,
            self.book,
            RelayTerms(server, self.config.relay_mbit),
        )


def _entered(callbacks: list[CallbackT], callback: CallbackT) -> Callable[[], None]:
    """Add a callback, and return a function that removes it."""
    callbacks.append(callback)
    return lambda: callbacks.remove(callback) if callback in callbacks else None


def _book_path(identity: Identity) -> Path | None:
    return identity.path.with_name(f"{identity.path.name}.peers") if identity.path is not None else None


def _agent() -> str:
    return f"swarm/{swarm.__version__} ({platform.system()}; Python {platform.python_version()})"
