"""All parts of libp2p that a node uses, on one host. Importing this loads py-libp2p."""

from __future__ import annotations

from collections.abc import Callable

from swarm.core.clock import Clock
from swarm.core.errors import UsageError
from swarm.core.identity import Identity
from swarm.core.ids import Address, Contact, PeerId
from swarm.core.standing import PeerStanding
from swarm.libp2p.basics import identify, ping, serve_basics
from swarm.libp2p.circuits import Circuits
from swarm.libp2p.host import Host
from swarm.libp2p.logic.messages import decode_address
from swarm.libp2p.logic.relaying import RelayLimits
from swarm.libp2p.punching import MayDialFn, Punching
from swarm.libp2p.relay import RelayService
from swarm.libp2p.tunnel import Tunnels
from swarm.runtime.sockets import Endpoint


class Stack:
    """A host with circuits and tunnels, and a relay once `offer_relay` was called.

    `on_change` is called when the set of relays with a reservation of this peer changes.
    """

    def __init__(
        self,
        identity: Identity,
        agent: str,
        clock: Clock,
        standing: PeerStanding,
        on_change: Callable[[], None],
    ) -> None:
        self._clock, self._standing = clock, standing
        self.host = Host(identity)
        serve_basics(self.host, agent)
        self.circuits = Circuits(self.host, clock, on_change)
        self.tunnels = Tunnels(self.host, self.circuits)
        self.relay: RelayService | None = None

    async def start(
        self, listening: Endpoint | None, may_dial: MayDialFn, on_direct: Callable[[PeerId], None]
    ) -> None:
        """Start. `listening`: the IP address and port at which to listen; if the port is taken, another one
        is used; None: do not listen. The other parameters are those of `Punching`.
        """
        Punching(self.host, self._clock, may_dial, on_direct)
        await self.host.start()
        if listening is None:
            return
        try:
            await self.host.listen(*listening)
        except UsageError:
            await self.host.listen(listening[0], 0)

    def take_calls(self, server: Address) -> None:
        """Keep reservations, and forward calls that come through relays to this gRPC server."""
        self.tunnels.serve(server)
        self.host.supervisor.spawn("reservations at relays", self.circuits.run, restart=True)

    def offer_relay(self, bytes_per_s: float) -> RelayService:
        """Start to relay for others at this rate, and return the service."""
        limits = RelayLimits(bytes_per_s=bytes_per_s)
        self.relay = RelayService(self.host, limits, self._standing, self._clock)
        return self.relay

    async def look_at(self, relay: Contact) -> tuple[float, Address | None]:
        """Return the round-trip time to a relay in seconds, and this host's address as the relay observes it.
        The address is None if the host did not dial from its listening port, because it then says nothing
        about the router. Raises SwarmError when it does not answer.
        """
        connection = await self.host.connect(relay.peer_id, relay.addresses)
        round_trip_s = await ping(connection)
        if not connection.is_client or connection.relay is not None:
            return round_trip_s, None
        return round_trip_s, decode_address((await identify(connection)).observed)

    @property
    def listening(self) -> tuple[Endpoint, ...]:
        """Return the addresses at which its sockets listen."""
        own = self.host.listening
        return (*self.tunnels.listening, *([(own.host, own.port)] if own is not None else []))

    @property
    def dialed(self) -> frozenset[Endpoint]:
        """Return every (IP, port) that it is connected to, or may be connecting to."""
        return self.host.dialed | self.tunnels.dialed

    async def close(self) -> None:
        """Close all parts."""
        await self.tunnels.close()
        await self.host.close()
