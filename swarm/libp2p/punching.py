"""Hole punching: a direct connection between two peers that reach each other through a relay (DCUtR).

Both dial each other at the same time, from the ports at which they listen, so that each router takes the
other's connection for an answer. The peer that accepted the relayed connection begins as soon as that is
established. It acts as the server of the new connection, even if its own dial succeeds.

py-libp2p's own driver begins after 2 s, dials private addresses first, for 10 s each, and closes the relayed
connection after 60 s, even if it is in use (docs/decisions/0039).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from swarm.core.clock import Clock
from swarm.core.errors import NetworkError, PeerError, SwarmError
from swarm.core.ids import Address, PeerId
from swarm.core.notify import wait_until_set
from swarm.libp2p.basics import identify
from swarm.libp2p.circuits import RELAY_PING_S, RELAY_SILENT_S
from swarm.libp2p.connection import MuxedStream, PeerConnection
from swarm.libp2p.host import Host
from swarm.libp2p.logic.messages import (
    MESSAGE_BYTES_MAX,
    PUNCH_PROTOCOL,
    HolePunch,
    PunchKind,
    decode_address,
    decode_punch,
    encode_address,
    encode_punch,
)
from swarm.libp2p.logic.punching import Punches

_logger = logging.getLogger(__name__)

DIAL_S = 2.5
_EXCHANGE_S = 10.0  # timeout of the exchange of addresses
_AGAIN_S = 0.1  # pause between two dials: a router without an entry for the connection refuses the first
_OBSERVED_S = 2.0  # timeout for relays to report this peer's observed address
_ADDRESSES_MAX = 3  # addresses of a peer that are dialed
_PORT_MIN = 1024  # lower ports belong to services that no peer needs to name
_BUSY_S = 5.0  # retry interval while too many attempts are under way

MayDialFn = Callable[[PeerId, Address], bool]


class Punching:
    """Replaces relayed connections of a host by direct ones if the routers permit it.

    `may_dial(peer_id, address)` returns whether an address that a peer names may be dialed. `on_direct` is
    called with each peer that has a relayed connection and now also a direct one.
    """

    def __init__(
        self, host: Host, clock: Clock, may_dial: MayDialFn, on_direct: Callable[[PeerId], None]
    ) -> None:
        self._host, self._clock = host, clock
        self._may_dial, self._on_direct = may_dial, on_direct
        self._punches = Punches()
        self._upgrading: set[PeerId] = set()  # peers with a task that replaces their relayed connections
        # relayed connections with an attempt that this side began and that has not ended
        self._asking: dict[PeerId, PeerConnection] = {}
        self._awaited: dict[PeerId, asyncio.Event] = {}
        # observed address of this peer, by the relay that reports it
        self._observed: dict[PeerConnection, Address] = {}
        self._identifying: set[asyncio.Task[None]] = set()
        host.handle(PUNCH_PROTOCOL, self._answer)
        host.at_connected.append(self._connected)
        host.at_ended.append(self._ended)

    def _connected(self, connection: PeerConnection) -> None:
        peer_id = connection.peer_id
        if connection.relay is not None:
            _logger.debug("%s is connected through the relay %s", peer_id.short, connection.relay.short)
            if not connection.is_client and peer_id not in self._upgrading:
                self._upgrading.add(peer_id)
                upgrading = self._host.supervisor.spawn(
                    f"hole punching to {peer_id.short}", lambda: self._upgrade(peer_id)
                )
                upgrading.add_done_callback(lambda _: self._upgrading.discard(peer_id))
            return
        if peer_id in self._awaited:
            self._awaited[peer_id].set()
        here = (one for one in self._host.connections if one.peer_id == peer_id and not one.ended)
        others = [one for one in here if one is not connection]
        if any(one.relay is None for one in others):
            return  # the dials of both have got through
        if others:
            _logger.info("%s is called directly from now on, not through a relay", peer_id.short)
            connection.watch(RELAY_PING_S, RELAY_SILENT_S)
            self._on_direct(peer_id)
        elif connection.is_client and self._host.listening is not None:
            identifying = self._host.supervisor.spawn(
                f"address as {peer_id.short} sees it", lambda: self._ask_observed(connection)
            )
            self._identifying.add(identifying)
            identifying.add_done_callback(self._identifying.discard)

    def _ended(self, connection: PeerConnection) -> None:
        self._observed.pop(connection, None)

    async def _ask_observed(self, relay: PeerConnection) -> None:
        try:
            observed = decode_address((await identify(relay)).observed)
        except SwarmError as error:
            self._host.fault(str(relay.peer_id), f"it does not report this peer's observed address: {error}")
            return
        if not relay.ended:
            self._observed[relay] = observed

    async def _own_addresses(self) -> tuple[bytes, ...]:
        """Return the addresses at which relays observe the port from which this host dials."""
        if self._identifying:
            await asyncio.wait(self._identifying, timeout=_OBSERVED_S)
        return tuple(encode_address(one) for one in dict.fromkeys(self._observed.values()))

    async def _upgrade(self, peer_id: PeerId) -> None:
        """Try until there is a direct connection to a peer that calls through a relay, and again when it is
        lost, until the relayed one has ended.
        """
        while True:
            if (direct := self._host.direct(peer_id)) is not None:
                await direct.wait_ended()
                continue
            here = (one for one in self._host.connections if one.peer_id == peer_id and not one.ended)
            relayed = next((one for one in here if one.relay is not None and not one.is_client), None)
            if relayed is None:
                return
            wait_s = self._punches.next_s(peer_id) - self._clock.monotonic_s()
            if wait_s <= 0.0 and self._punches.begin(peer_id, self._clock.monotonic_s(), is_asked=False):
                wait_s = _BUSY_S
            if wait_s <= 0.0:
                await self._initiate(relayed)
                continue
            try:
                async with asyncio.timeout(wait_s):
                    await relayed.wait_ended()
            except TimeoutError:
                pass

    async def _initiate(self, relayed: PeerConnection) -> None:
        peer_id, stream = relayed.peer_id, None
        self._asking[peer_id] = relayed
        try:
            async with asyncio.timeout(_EXCHANGE_S):
                own = await self._own_addresses()
                stream = await relayed.open(PUNCH_PROTOCOL)
                sent_s = time.monotonic()
                await _send(stream, PunchKind.CONNECT, own)
                addresses = self._named(peer_id, await _receive(stream, PunchKind.CONNECT))
                round_trip_s = time.monotonic() - sent_s
                await _send(stream, PunchKind.SYNC)
                stream.finish()
            if self._asking.pop(peer_id, None) is relayed:
                with self._awaiting(peer_id) as connected:
                    # until the peer has received the signal, or its dial has already got through
                    await wait_until_set(connected, round_trip_s / 2)
                    await self._punch(peer_id, addresses, connected, is_client=False)
                self._punches.end(peer_id, self._clock.monotonic_s(), has_worked=connected.is_set())
        except (SwarmError, TimeoutError) as error:
            if self._asking.pop(peer_id, None) is relayed:
                if relayed.ended:  # an ended relayed connection says nothing about the routers
                    self._punches.give_way(peer_id)
                else:
                    self._punches.end(peer_id, self._clock.monotonic_s(), has_worked=False)
            _logger.debug("no hole to %s: %s", peer_id.short, error or "no answer")
        finally:
            if stream is not None:
                stream.close()

    async def _answer(self, stream: MuxedStream) -> None:
        """Take part in the attempt of a peer that this one has called through a relay."""
        peer_id = stream.peer_id
        if stream.connection.relay is None or not stream.connection.is_client:
            raise PeerError("it wants to punch a hole, but was not called through a relay")
        if peer_id in self._asking and peer_id.to_bytes() < self._host.peer_id.to_bytes():
            # Each has called the other and both have begun: the peer with the lower PeerID continues.
            del self._asking[peer_id]
            self._punches.give_way(peer_id)
        if reason := self._punches.begin(peer_id, self._clock.monotonic_s(), is_asked=True):
            raise NetworkError(f"no hole is punched: {reason}")
        hosts = set[str]()
        with self._awaiting(peer_id) as connected:
            try:
                async with asyncio.timeout(_EXCHANGE_S):
                    addresses = self._named(peer_id, await _receive(stream, PunchKind.CONNECT))
                    # set before the answer, because the peer's dial may arrive before its signal
                    hosts = {one.host for one in addresses}
                    self._host.crossing.update(dict.fromkeys(hosts, peer_id))
                    await _send(stream, PunchKind.CONNECT, await self._own_addresses())
                    await _receive(stream, PunchKind.SYNC)
                await self._punch(peer_id, addresses, connected, is_client=True)
            finally:
                for host in hosts:
                    if self._host.crossing.get(host) == peer_id:
                        del self._host.crossing[host]
                self._punches.end(peer_id, self._clock.monotonic_s(), has_worked=connected.is_set())

    def _named(self, peer_id: PeerId, message: HolePunch) -> list[Address]:
        """Return the named addresses of a peer at which it may be dialed: no private ones if the peer is in
        another network.
        """
        found: dict[Address, None] = {}
        for raw in message.addresses:
            try:
                address = decode_address(raw)
            except PeerError:
                continue  # an address of a transport that this host does not support
            if address.port >= _PORT_MIN and self._may_dial(peer_id, address):
                found[address] = None
        return list(found)[:_ADDRESSES_MAX]

    @contextmanager
    def _awaiting(self, peer_id: PeerId) -> Iterator[asyncio.Event]:
        """Yield an event that is set once there is, or has been, a direct connection to a peer."""
        connected = self._awaited[peer_id] = asyncio.Event()
        if self._host.direct(peer_id) is not None:
            connected.set()
        try:
            yield connected
        finally:
            del self._awaited[peer_id]

    async def _punch(
        self, peer_id: PeerId, addresses: Sequence[Address], connected: asyncio.Event, *, is_client: bool
    ) -> None:
        """Dial a peer while it dials this one, until they are `connected`."""
        async with asyncio.TaskGroup() as group:
            dialing = [group.create_task(self._dial(peer_id, one, is_client=is_client)) for one in addresses]
            await wait_until_set(connected, DIAL_S)
            for task in dialing:
                task.cancel()

    async def _dial(self, peer_id: PeerId, address: Address, *, is_client: bool) -> None:
        while True:
            try:
                await self._host.dial(peer_id, address, is_client=is_client)
                return
            except SwarmError as error:
                _logger.debug("no hole to %s yet: %s", peer_id.short, error)
            await asyncio.sleep(_AGAIN_S)


async def _send(stream: MuxedStream, kind: PunchKind, addresses: tuple[bytes, ...] = ()) -> None:
    await stream.write_message(encode_punch(HolePunch(kind, addresses)))


async def _receive(stream: MuxedStream, kind: PunchKind) -> HolePunch:
    message = decode_punch(await stream.read_message(MESSAGE_BYTES_MAX))
    if message.kind is not kind:
        raise PeerError(f"it sent {message.kind.name} about hole punching; {kind.name} is due")
    return message
