"""gRPC through libp2p: a port on loopback stands for a peer that cannot be called.

gRPC dials that port, and every connection to it becomes a stream to the peer, which connects it to its own
gRPC port. TLS goes from end to end inside: the peer proves its PeerID to gRPC as over any other connection.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from swarm.core.errors import NetworkError, PeerError, SwarmError, UsageError
from swarm.core.ids import Address, Contact, PeerId
from swarm.libp2p.circuits import Circuits
from swarm.libp2p.connection import MuxedStream, PeerConnection
from swarm.libp2p.host import Host
from swarm.libp2p.pipes import TcpPipe, serve
from swarm.libp2p.splicing import splice
from swarm.net.scope import prefix_of
from swarm.runtime.sockets import Endpoint

GRPC_PROTOCOL = "/swarm/grpc/1"
TARGETS_MAX = 256  # peers for which a port is open
PER_PEER_MAX = 8  # connections to a peer, and connections of a peer
SERVED_MAX = 256  # connections of all peers to the own gRPC port
_LOOPBACK = "127.0.0.1"
_LOCAL_DIAL_S = 5.0
_PLACE_S = 30.0  # time that an end is remembered after its tunnel has closed


@dataclass(slots=True, eq=False)
class _Target:
    """A peer for which a port is open."""

    relays: Sequence[Contact]
    server: asyncio.Server
    address: Address
    open: int = 0
    failure: str = ""


class Tunnels:
    """The tunnels of a host in both directions. `close` ends the tunnels of this side; call it before or
    together with closing the host, which ends the tunnels of other peers.
    """

    def __init__(self, host: Host, circuits: Circuits) -> None:
        self._host, self._circuits = host, circuits
        self._targets: dict[PeerId, _Target] = {}
        self._opening = asyncio.Lock()
        self._pipes: set[TcpPipe] = set()  # connections from the local gRPC
        self._serving: Counter[PeerId] = Counter()  # tunnels of other peers, including those being opened
        # connections by the local end that calls this process's gRPC port
        self._served: dict[Endpoint, PeerConnection] = {}
        self._places: dict[Endpoint, str] = {}  # names of these connections and of recently ended ones
        self._server: Address | None = None

    def serve(self, server: Address) -> None:
        """Let peers reach the gRPC server of this process, which listens at this address of the machine."""
        self._server = server

        async def connected(stream: MuxedStream) -> None:
            peer_id = stream.peer_id
            if self._serving.total() >= SERVED_MAX or self._serving[peer_id] >= PER_PEER_MAX:
                raise PeerError(f"{PER_PEER_MAX} tunnels of a peer, or {SERVED_MAX} of all, are open")
            self._serving[peer_id] += 1
            try:
                await self._carry_in(stream, server)
            finally:
                self._serving[peer_id] -= 1
                if not self._serving[peer_id]:
                    del self._serving[peer_id]

        self._host.handle(GRPC_PROTOCOL, connected)

    async def _carry_in(self, stream: MuxedStream, server: Address) -> None:
        try:
            async with asyncio.timeout(_LOCAL_DIAL_S):
                pipe = await TcpPipe.connect(server.host, server.port)
        except TimeoutError:
            raise NetworkError("this process's gRPC port does not answer") from None
        self._served[pipe.local] = stream.connection
        self._places[pipe.local] = prefix_of(stream.connection.host)
        try:
            await splice(stream, pipe)
        finally:
            del self._served[pipe.local]
            pipe.close()
            # gRPC may process a call of this connection later; it must not count as a call of this machine
            asyncio.get_running_loop().call_later(_PLACE_S, self._forget, pipe.local)

    def _forget(self, end: Endpoint) -> None:
        if end not in self._served:
            self._places.pop(end, None)

    @property
    def served(self) -> Mapping[Endpoint, PeerConnection]:
        """Return the connections of peers that call this process's gRPC server through tunnels, by the local
        end of the connection, whose address says nothing about the peer.
        """
        return self._served

    def place(self, end: Endpoint) -> str:
        """Return the name under which limits count a call from this end: the relay, or the network of a peer
        to which a hole was punched. Empty if it does not come through a tunnel.
        """
        return self._places.get(end, "")

    @property
    def listening(self) -> tuple[Endpoint, ...]:
        """Return the ends on loopback that stand for peers."""
        return tuple((one.address.host, one.address.port) for one in self._targets.values())

    @property
    def dialed(self) -> frozenset[Endpoint]:
        """Return the target of other peers' tunnels: this process's gRPC port."""
        return frozenset([(self._server.host, self._server.port)] if self._server is not None else [])

    def failure(self, peer_id: PeerId) -> str:
        """Return why the last connection to a peer through its port failed; empty if it did not."""
        target = self._targets.get(peer_id)
        return target.failure if target is not None else ""

    async def endpoint(self, peer_id: PeerId, relays: Sequence[Contact]) -> Address:
        """Return the address on loopback at which gRPC reaches this peer through one of these relays. Nothing
        is dialed before gRPC connects. Raises UsageError when ports for 256 peers are in use.
        """
        async with self._opening:  # simultaneous requests for a peer share one port
            target = self._targets.get(peer_id)
            if target is not None:
                target.relays = relays
                return target.address
            self._make_room()
            server = await serve(_LOOPBACK, 0, lambda pipe: self._accept(peer_id, pipe))
            address = Address(_LOOPBACK, server.sockets[0].getsockname()[1])
            self._targets[peer_id] = _Target(relays, server, address)
            return address

    async def close(self) -> None:
        """Close the ports on loopback, and the connections to them."""
        async with self._opening:
            for target in self._targets.values():
                target.server.close()
            self._targets.clear()
        for pipe in self._pipes:
            pipe.close()

    def _make_room(self) -> None:
        if len(self._targets) < TARGETS_MAX:
            return
        unused = next((one for one, target in self._targets.items() if not target.open), None)
        if unused is None:
            raise UsageError(f"tunnels to {TARGETS_MAX} peers are open")
        self._targets.pop(unused).server.close()

    def _accept(self, peer_id: PeerId, pipe: TcpPipe) -> None:
        target = self._targets.get(peer_id)
        if target is None or target.open >= PER_PEER_MAX:
            pipe.close()
            return
        target.open += 1
        self._pipes.add(pipe)
        name = f"tunnel to {peer_id.short}"
        carrying = self._host.supervisor.spawn(name, lambda: self._carry(peer_id, target, pipe))

        def ended(_: object) -> None:  # runs even if the task never began
            target.open -= 1
            self._pipes.discard(pipe)
            pipe.close()

        carrying.add_done_callback(ended)

    async def _carry(self, peer_id: PeerId, target: _Target, pipe: TcpPipe) -> None:
        stream = None
        try:
            connection = await self._circuits.connect(peer_id, target.relays)
            stream = await connection.open(GRPC_PROTOCOL)
            target.failure = ""
            await splice(pipe, stream)
        except SwarmError as error:
            target.failure = str(error)
        finally:
            if stream is not None:
                stream.close()
