"""libp2p for a node, loaded on first use; most nodes never need it.

A node needs it when nobody can call it, when it relays for others, and when it calls a peer that takes calls
through relays only.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import TYPE_CHECKING

from swarm.core.clock import Clock
from swarm.core.errors import NetworkError
from swarm.core.identity import Identity
from swarm.core.ids import Address, Contact, PeerId
from swarm.core.standing import PeerStanding
from swarm.net.scope import Surroundings
from swarm.runtime.sockets import Endpoint

if TYPE_CHECKING:
    from swarm.libp2p.stack import Stack


class Libp2p:
    """The libp2p host of a node and its services. It belongs to the network thread."""

    def __init__(
        self,
        identity: Identity,
        agent: str,
        clock: Clock,
        standing: PeerStanding,
        surroundings: Surroundings,
        pool: Executor,
    ) -> None:
        """`surroundings` decides which addresses of relays are dialed. `pool` runs the import of the
        library.
        """
        self._identity, self._agent, self._clock, self._standing = identity, agent, clock, standing
        self._surroundings, self._pool = surroundings, pool
        self._stack: Stack | None = None
        self._loading = asyncio.Lock()
        self._closed = False
        self._beside: Endpoint | None = None
        # called with each peer to which a hole was punched
        self.on_direct: list[Callable[[PeerId], None]] = []
        self.on_change: list[Callable[[], None]] = []  # called when `held` has changed

    def listen_beside(self, endpoint: Endpoint) -> None:
        """Set where the gRPC server listens: the host will listen at the next port, once it is loaded."""
        self._beside = endpoint

    async def stack(self) -> Stack:
        """Return the host and its parts, loaded and started if they were not. Raises UsageError if the
        installed version of the library is not the tested one.
        """
        async with self._loading:
            if self._closed:
                raise NetworkError("this node is closed")
            if self._stack is None:
                loop = asyncio.get_running_loop()
                # takes 0.5 s of processor time, so not on the event loop
                module = await loop.run_in_executor(self._pool, importlib.import_module, "swarm.libp2p.stack")
                stack: Stack = module.Stack(
                    self._identity, self._agent, self._clock, self._standing, self._tell
                )
                await stack.start(self._own_endpoint(), self._may_dial, self._tell_direct)
                self._stack = stack
            return self._stack

    @property
    def loaded(self) -> Stack | None:
        """Return the host and its parts if they are loaded, else None."""
        return self._stack

    async def endpoint(self, contact: Contact) -> Address:
        """Return the address on loopback that stands for a peer behind relays. Raises NetworkError when none
        of its relays may be dialed.
        """
        relays = self.dialable(contact.relays)
        if not relays:
            raise NetworkError("its relays are in a private network, but the peer was met in a wider one")
        return await (await self.stack()).tunnels.endpoint(contact.peer_id, relays)

    def failure(self, peer_id: PeerId) -> str:
        """Return why the last connection to a peer through its relays failed; empty if it did not."""
        return self._stack.tunnels.failure(peer_id) if self._stack is not None else ""

    def dialable(self, relays: Sequence[Contact]) -> list[Contact]:
        """Return the relays, and their addresses, that may be dialed from this node."""
        found = [
            Contact(
                relay.peer_id,
                tuple(
                    one
                    for one in relay.addresses
                    if self._surroundings.dialable(relay.peer_id, one, [one.host])
                ),
            )
            for relay in relays
            if relay.peer_id != self._identity.peer_id
        ]
        return [relay for relay in found if relay.addresses]

    @property
    def held(self) -> tuple[Contact, ...]:
        """Return the relays at which this peer has reservations."""
        return tuple(self._stack.circuits.held) if self._stack is not None else ()

    def tunnelled(self, endpoint: Endpoint) -> str:
        """Return the relay through which a call from this endpoint comes; empty if there is none."""
        return self._stack.tunnels.place(endpoint) if self._stack is not None else ""

    @property
    def listening(self) -> tuple[Endpoint, ...]:
        """Return the addresses at which its sockets listen."""
        return self._stack.listening if self._stack is not None else ()

    @property
    def dialed(self) -> frozenset[Endpoint]:
        """Return every (IP, port) that it is connected to, or may be connecting to."""
        return self._stack.dialed if self._stack is not None else frozenset()

    async def close(self) -> None:
        """Close the host and its services. They cannot be loaded again."""
        self._closed = True
        if self._stack is not None:
            await self._stack.close()

    def _own_endpoint(self) -> Endpoint | None:
        if self._beside is None:
            return None
        host, port = self._beside
        return host, port + 1 if port < 65535 else 0

    def _may_dial(self, peer_id: PeerId, address: Address) -> bool:
        return bool(self._surroundings.dialable(peer_id, address, [address.host]))

    def _tell_direct(self, peer_id: PeerId) -> None:
        for listener in self.on_direct:
            listener(peer_id)

    def _tell(self) -> None:
        for listener in self.on_change:
            listener()
