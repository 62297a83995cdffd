"""This process as a peer of libp2p: connections by Noise and yamux, and the streams that others open.

It runs on one event loop. Nothing that a stranger sends or omits can make it exceed its limits or deadlines,
or end it. A peer that breaks a rule loses its stream or connection, and is named in `faults`.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from ipaddress import ip_address

from swarm.core.errors import NetworkError, PeerError, SwarmError, UsageError
from swarm.core.identity import Identity
from swarm.core.ids import Address, PeerId
from swarm.libp2p.agreement import answer, confirm, propose
from swarm.libp2p.connection import NEGOTIATION_S, MuxedStream, PeerConnection
from swarm.libp2p.logic import yamux
from swarm.libp2p.logic.admission import ConnectionCounts
from swarm.libp2p.noise import Noise
from swarm.libp2p.pipes import Pipe, PortInUse, TcpPipe, serve
from swarm.libp2p.racing import Races
from swarm.net.scope import ip_of
from swarm.runtime.sockets import Endpoint
from swarm.runtime.supervise import Supervisor

_logger = logging.getLogger(__name__)

# time from the first byte to an established connection; too short: a busy machine fails handshakes
HANDSHAKE_S = 10.0
DIAL_S = 10.0
IDLE_S = 120.0  # a connection without streams and without users is closed after this time
HELD_BYTES_MAX = 128 << 20  # unread and unsent bytes of all connections
_HELD_STEP_BYTES = 16 << 10  # growth of one connection's buffers that triggers a new sum over all connections
HOUSEKEEPING_S = 5.0
REPLACED_S = 2.0  # idle time after which a relayed connection is closed if there is a direct one
_LINGER_S = 10.0  # time that an answered stream may stay half open
_FAULTS_MAX = 64
_DIALED_MAX = 64  # remembered addresses to which a connection may be under way

Handler = Callable[[MuxedStream], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of another peer. `who`: a PeerID, or an IP address if the PeerID is not known."""

    who: str
    what: str


class Host:
    """A peer of libp2p. `start` it on an event loop, and `close` it there.

    Raises UsageError if the installed version of py-libp2p is not the tested one.
    """

    def __init__(self, identity: Identity) -> None:
        self.noise = Noise(identity)
        self.identity = identity
        self.peer_id = identity.peer_id
        self.supervisor = Supervisor()
        self.faults: deque[Fault] = deque(maxlen=_FAULTS_MAX)
        self.at_connected: list[Callable[[PeerConnection], None]] = []
        self.at_ended: list[Callable[[PeerConnection], None]] = []
        # by IP address: peers that this one dials while they dial it, and which must answer as if they were
        # dialed
        self.crossing: dict[str, PeerId] = {}
        self.listening: Address | None = None  # an IP address and a port
        self.admission = ConnectionCounts()
        self._connections: list[PeerConnection] = []
        self._handlers: dict[str, Handler] = {}
        self._direct_only: set[str] = set()
        self._races: Races[PeerConnection] = Races()
        self._handshaking: set[TcpPipe] = set()
        self._server: asyncio.Server | None = None
        self._dialed: deque[Endpoint] = deque(maxlen=_DIALED_MAX)
        self._closed = False

    async def start(self, host: str | None = None, port: int = 0) -> None:
        """Begin to work; with `host`, an IP address, listen there, and set `listening`. Raises UsageError
        when the port is taken.
        """
        self.supervisor.spawn("housekeeping of libp2p", self._run_housekeeping, restart=True)
        if host is not None:
            await self.listen(host, port)

    async def listen(self, host: str, port: int) -> None:
        """Listen at this IP address, and set `listening`. Raises UsageError when the port is taken."""
        try:
            self._server = await serve(host, port, self._accept, is_shared=True)
        except OSError as error:
            raise UsageError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
        self.listening = Address(host, self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """End all connections and tasks."""
        self._closed = True
        if self._server is not None:
            self._server.close()
        for connection in list(self._connections):
            connection.close()
        for pipe in self._handshaking:  # a task that is cancelled before it begins does not close its pipe
            pipe.close()
        await self.supervisor.close()

    def handle(self, protocol: str, handler: Handler, *, direct_only: bool = False) -> None:
        """Call `handler` with each stream that a peer opens for this protocol. The stream ends when the
        handler returns. `direct_only`: refuse streams that come through a relay.
        """
        self._handlers[protocol] = handler
        if direct_only:
            self._direct_only.add(protocol)

    def protocols(self, connection: PeerConnection) -> frozenset[str]:
        """Return the protocols that the peer of a connection may use."""
        names = frozenset(self._handlers)
        return names if connection.relay is None else names - self._direct_only

    def connection(self, peer_id: PeerId) -> PeerConnection | None:
        """Return the connection to a peer that is used for new streams: a direct one, if there is one."""
        found = [one for one in self._connections if one.peer_id == peer_id and not one.ended]
        return min(found, key=lambda one: one.relay is not None, default=None)

    @property
    def announced(self) -> list[Address]:
        """Return the addresses that this host announces to others."""
        listening = self.listening
        return [listening] if listening is not None and not ip_address(listening.host).is_unspecified else []

    @property
    def connections(self) -> list[PeerConnection]:
        """Return the open connections, the oldest first."""
        return list(self._connections)

    @property
    def dialed(self) -> frozenset[Endpoint]:
        """Return every (IP, port) to which a direct connection may be open, in either direction."""
        ends = [one.remote for one in self._connections] + [one.remote for one in self._handshaking]
        return frozenset(self._dialed).union((one.host, one.port) for one in ends if one is not None)

    async def connect(
        self, peer_id: PeerId, addresses: Sequence[Address], timeout_s: float = DIAL_S
    ) -> PeerConnection:
        """Return a direct connection to a peer: an open one, or the first that can be opened at one of its
        addresses. Attempts begin 0.25 s apart. Raises NetworkError that names what failed, DeadlineExceeded
        after `timeout_s`.
        """
        if peer_id == self.peer_id:
            raise UsageError(f"{peer_id} is this peer itself")
        attempts = [
            (f"{one.host}:{one.port}", functools.partial(self._dial, peer_id, one)) for one in addresses
        ]
        return await self._races.run(peer_id, lambda: self.direct(peer_id), attempts, timeout_s)

    def direct(self, peer_id: PeerId) -> PeerConnection | None:
        """Return an open direct connection to a peer."""
        known = self.connection(peer_id)
        return known if known is not None and known.relay is None else None

    async def _dial(self, peer_id: PeerId, address: Address) -> PeerConnection:
        try:
            return await self.dial(peer_id, address)
        except PortInUse:  # a connection to this address from the host's port has just ended
            pipe = await TcpPipe.connect(address.host, address.port)
            return await self.secure(pipe, is_client=True, expected=peer_id, remote=address)

    async def dial(self, peer_id: PeerId, address: Address, *, is_client: bool = True) -> PeerConnection:
        """Make a direct connection to a peer at this address, from the host's listening port if it has one.
        `is_client`: act as the side that has dialed. Raises NetworkError or PeerError; the caller sets a time
        limit for connecting.
        """
        self._dialed.append((address.host, address.port))
        pipe = await TcpPipe.connect(address.host, address.port, self._source(address.host))
        return await self.secure(pipe, is_client=is_client, expected=peer_id, remote=address)

    def _source(self, host: str) -> Endpoint | None:
        own, there = self.listening, ip_of(host)
        if own is None or there is None or ip_address(own.host).version != there.version:
            return None
        return own.host, own.port

    async def secure(
        self,
        pipe: Pipe,
        *,
        is_client: bool,
        expected: PeerId | None,
        remote: Address | None = None,
        relay: PeerId | None = None,
        timeout_s: float | None = None,
    ) -> PeerConnection:
        """Secure a pipe, and run the connection. `is_client`: this side has dialed. `expected`: the PeerID
        required at the other end; None: any. `remote` or `relay`: the other end of the pipe. `timeout_s`:
        for the handshake; None: 10 s. Raises NetworkError or PeerError after closing the pipe.

        The other end has proven its PeerID, but may still refuse the connection: `is_confirmed`.
        """
        timeout_s = HANDSHAKE_S if timeout_s is None else timeout_s
        connection = None
        try:
            async with asyncio.timeout(timeout_s):
                channel = await self.noise.handshake(pipe, is_client=is_client, expected=expected)
                if channel.uses_yamux:
                    pass
                elif is_client:
                    await propose(channel, yamux.PROTOCOL)
                    await confirm(channel, yamux.PROTOCOL)
                else:
                    await answer(channel, frozenset([yamux.PROTOCOL]))
            connection = self._register(
                PeerConnection(channel, is_client=is_client, remote=remote, relay=relay, events=self)
            )
        except TimeoutError:
            raise NetworkError(f"it did not finish its handshake within {timeout_s:.0f} s") from None
        finally:
            if connection is None:
                pipe.close()
        return connection

    def _register(self, connection: PeerConnection) -> PeerConnection:
        if self._closed:
            raise NetworkError("this peer is closing")
        if connection.peer_id == self.peer_id:
            raise PeerError("it is this peer itself, or has a copy of its identity")
        peer_id, host, is_client = connection.peer_id, connection.host, connection.is_client
        reason = self.admission.join(peer_id, host, is_client=is_client)
        if reason:
            raise NetworkError(reason)
        self._connections.append(connection)
        for listener in self.at_connected:
            listener(connection)

        def ended(_: object) -> None:  # also when the task never began
            connection.close()
            self._connections.remove(connection)
            self.admission.leave(peer_id, host, is_client=is_client)
            for listener in self.at_ended:
                listener(connection)

        name = f"libp2p connection to {peer_id.short}"
        self.supervisor.spawn(name, connection.run).add_done_callback(ended)
        return connection

    def _accept(self, pipe: TcpPipe) -> None:
        remote = pipe.remote
        if remote is None or self._closed:
            pipe.close()
            return
        if reason := self.admission.begin(remote.host):
            pipe.close()
            self.fault(remote.host, reason)
            return

        has_begun = False

        async def handshake() -> None:
            nonlocal has_begun
            has_begun = True
            try:
                peer_id = self.crossing.get(remote.host)
                await self.secure(pipe, is_client=peer_id is not None, expected=peer_id, remote=remote)
            except (NetworkError, PeerError) as error:
                self.fault(remote.host, str(error))

        def ended(_: object) -> None:
            self._handshaking.discard(pipe)
            self.admission.end(remote.host)
            if not has_begun:
                pipe.close()

        self._handshaking.add(pipe)
        name = f"libp2p handshake of {remote.host}"
        self.supervisor.spawn(name, handshake).add_done_callback(ended)

    def fault(self, who: str, what: str) -> None:
        """Record a fault of another peer."""
        fault = Fault(who, what)
        if not self.faults or self.faults[-1] != fault:  # repeated equal faults are recorded once
            _logger.debug("%s: %s", who, what)
            self.faults.append(fault)

    def opened(self, stream: MuxedStream) -> None:
        """Serve a stream that a peer has opened (see `Events`)."""
        if reason := self.admission.serve(stream.connection.host):
            stream.close()
            self.fault(str(stream.peer_id), reason)
            return
        serving = self.supervisor.spawn(
            f"libp2p stream of {stream.peer_id.short}", lambda: self._serve(stream)
        )

        def ended(_: object) -> None:  # also when the task never began
            self.admission.served(stream.connection.host)
            stream.close()

        serving.add_done_callback(ended)

    def received(self, connection: PeerConnection) -> None:
        """Close the connection with the largest buffers if all buffers together are too large (see
        `Events`).
        """
        if connection.take_refused():
            self.fault(str(connection.peer_id), f"it opened more than {yamux.STREAMS_MAX} streams at a time")
        held = connection.held
        connection.counted = min(connection.counted, held)
        if held < connection.counted + _HELD_STEP_BYTES:
            return
        connection.counted = held
        if sum(one.held for one in self._connections) > HELD_BYTES_MAX:
            most = max(self._connections, key=lambda one: one.held)
            self.fault(str(most.peer_id), f"it made this peer hold {most.held} bytes")
            most.close("the connection's unread and unsent data exceeded the limit of this host")

    async def _serve(self, stream: MuxedStream) -> None:
        try:
            async with asyncio.timeout(NEGOTIATION_S):
                stream.protocol = await answer(stream, self.protocols(stream.connection))
            await self._handlers[stream.protocol](stream)
            stream.finish()
            async with asyncio.timeout(_LINGER_S):
                while await stream.read():
                    pass
        except (SwarmError, TimeoutError) as error:
            if isinstance(error, PeerError) or not stream.lost:
                what = str(error) or "it left its stream open"
                self.fault(str(stream.peer_id), f"{stream.protocol or 'a stream'}: {what}")

    async def _run_housekeeping(self) -> None:
        while True:
            await asyncio.sleep(HOUSEKEEPING_S)
            now_s = time.monotonic()
            for one in list(self._connections):
                if one.streams or one.kept:
                    continue
                idle_s = now_s - one.idle_since_s
                is_replaced = one.relay is not None and self.direct(one.peer_id) is not None
                if idle_s > (REPLACED_S if is_replaced else IDLE_S):
                    one.close("it was not used")
