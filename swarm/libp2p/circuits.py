"""Circuits through relays: reservations of a peer that cannot be called directly, and calls to such peers."""

from __future__ import annotations

import asyncio
import functools
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from swarm.core.clock import Clock
from swarm.core.errors import NetworkError, PeerError, SwarmError
from swarm.core.ids import Contact, PeerId
from swarm.core.notify import ChangeEvent
from swarm.libp2p.connection import MuxedStream, PeerConnection, answered
from swarm.libp2p.host import Host
from swarm.libp2p.logic.admission import through
from swarm.libp2p.logic.messages import (
    HOP_PROTOCOL,
    MESSAGE_BYTES_MAX,
    STOP_PROTOCOL,
    Hop,
    HopKind,
    Status,
    Stop,
    StopKind,
    decode_hop,
    decode_stop,
    encode_hop,
    encode_stop,
)
from swarm.libp2p.logic.reserving import Reservations
from swarm.libp2p.racing import Races

ANSWER_S = 15.0  # for a relay's answer, of which the relay waits 10 s for the target of the circuit
CONNECT_S = 20.0
# A relay that sends nothing for 3 s after a ping counts as failed, so another one is asked after 4 s at most.
RELAY_PING_S, RELAY_SILENT_S = 1.0, 3.0
_NOT_TAKEN_MAX = 64  # circuits remembered as not taken: more than are tried at a time


class Circuits:
    """Reservations of this host, and its connections through relays. `run` keeps the reservations valid.

    `on_change` is called when `held` changes: the relays through which this peer can be called.
    """

    def __init__(self, host: Host, clock: Clock, on_change: Callable[[], None] | None = None) -> None:
        self._host, self._clock = host, clock
        self._on_change = on_change
        self._reservations = Reservations()
        self._races: Races[PeerConnection] = Races()
        self._changed = ChangeEvent()
        self._kept: dict[PeerId, PeerConnection] = {}
        # targets and relays whose last circuits the target did not take, the newest last
        self._not_taken: deque[tuple[PeerId, PeerId]] = deque(maxlen=_NOT_TAKEN_MAX)
        host.handle(STOP_PROTOCOL, self._accept, direct_only=True)
        host.at_ended.append(self._ended)

    @property
    def held(self) -> list[Contact]:
        """Return the relays through which this peer can be called."""
        return self._reservations.held(self._clock.monotonic_s())

    def offer(
        self, relays: Iterable[Contact], round_trip_s: Callable[[PeerId], float] = lambda peer_id: math.inf
    ) -> None:
        """Learn of relays at which this peer may keep a reservation. `round_trip_s` returns what is known
        about their latency.
        """
        others = [one for one in relays if one.peer_id != self._host.peer_id]
        self._reservations.offer(others, round_trip_s)
        self._changed.notify()

    async def run(self) -> None:
        """Keep reservations at two relays, until cancelled."""
        while True:
            now_s = self._clock.monotonic_s()
            for relay in self._reservations.due(now_s):
                self._host.supervisor.spawn(
                    f"reservation at {relay.peer_id.short}", functools.partial(self._ask, relay)
                )
            next_s = self._reservations.next_s(now_s)
            await self._changed.wait(None if next_s == math.inf else max(next_s - now_s, 0.01))

    async def _ask(self, relay: Contact) -> None:
        try:
            await self.reserve(relay)
        except SwarmError as error:
            self._reservations.failed(relay.peer_id, self._clock.monotonic_s())
            self._release(relay.peer_id)
            self._host.fault(str(relay.peer_id), f"no reservation: {error}")
        self._tell()

    async def reserve(self, relay: Contact) -> None:
        """Make or renew a reservation at a relay. Raises NetworkError or PeerError with the reason."""
        connection = await self._host.connect(relay.peer_id, relay.addresses)
        stream = await self.request(connection, Hop(HopKind.RESERVE))
        answer = await granted(stream)
        stream.close()
        life_s = answer.expires_s - self._clock.swarm_s()
        now_s = self._clock.monotonic_s()
        if connection.ended:
            raise NetworkError(connection.ended)
        self._reservations.granted(relay.peer_id, life_s, connection.round_trip_s, now_s)
        connection.watch(RELAY_PING_S, RELAY_SILENT_S)
        before = self._kept.get(relay.peer_id)
        if before is not connection:
            self._release(relay.peer_id)
            connection.kept += 1
            self._kept[relay.peer_id] = connection

    async def connect(
        self, target: PeerId, relays: Sequence[Contact], timeout_s: float = CONNECT_S
    ) -> PeerConnection:
        """Return a connection to a peer that cannot be called: an open one, or the first that can be opened
        through one of these relays. Raises NetworkError that names what failed, DeadlineExceeded after
        `timeout_s`.

        The peer may still refuse the connection (`Host.secure`). It ends then, and the next one is made
        through another relay if there is one: relays can name a false caller, and limits count by relay.
        """
        ordered = sorted(relays, key=lambda one: (target, one.peer_id) in self._not_taken)
        attempts = [
            (f"through {one.peer_id.short}", functools.partial(self._connect, target, one)) for one in ordered
        ]
        known = functools.partial(self._host.connection, target)
        return await self._races.run(target, known, attempts, timeout_s)

    async def _connect(self, target: PeerId, relay: Contact) -> PeerConnection:
        to_relay = await self._host.connect(relay.peer_id, relay.addresses)
        stream = await self.request(to_relay, Hop(HopKind.CONNECT, peer=target))

        async def connected() -> None:
            await granted(stream)
            to_relay.watch(RELAY_PING_S, RELAY_SILENT_S)

        # The handshake follows the request at once, and its first read takes the relay's answer.
        stream.expect(connected)
        return await self._host.secure(
            stream, is_client=True, expected=target, relay=relay.peer_id, timeout_s=CONNECT_S
        )

    async def request(self, connection: PeerConnection, request: Hop) -> MuxedStream:
        """Send a request to a relay, and return the stream, which `granted` reads. Raises NetworkError when
        the connection has ended.
        """
        stream = await connection.open(HOP_PROTOCOL)
        async with answered(stream, ANSWER_S, "the relay took no request"):
            await stream.write_message(encode_hop(request))
        return stream

    async def _accept(self, stream: MuxedStream) -> None:
        """Take a circuit that a relay offers."""
        relay = stream.peer_id
        async with asyncio.timeout(ANSWER_S):
            message = decode_stop(await stream.read_message(MESSAGE_BYTES_MAX))
        if message.kind is not StopKind.CONNECT or message.peer is None:
            reason = "it offered a circuit without naming the peer"
            await self._refuse(stream, Status.UNEXPECTED_MESSAGE, reason)
            return
        if relay not in {one.peer_id for one in self.held}:
            reason = "it offered a circuit, but this peer has no reservation at it"
            await self._refuse(stream, Status.PERMISSION_DENIED, reason)
            return
        if reason := self._host.admission.begin(through(relay)):
            await self._refuse(stream, Status.RESOURCE_LIMIT_EXCEEDED, f"a circuit was refused: {reason}")
            return
        try:
            await stream.write_message(encode_stop(Stop(StopKind.STATUS, status=Status.OK)))
            connection = await self._host.secure(stream, is_client=False, expected=message.peer, relay=relay)
        finally:
            self._host.admission.end(through(relay))
        await connection.wait_ended()

    async def _refuse(self, stream: MuxedStream, status: Status, reason: str) -> None:
        self._host.fault(str(stream.peer_id), reason)
        await stream.write_message(encode_stop(Stop(StopKind.STATUS, status=status)))

    def _release(self, relay: PeerId) -> None:
        connection = self._kept.pop(relay, None)
        if connection is not None:
            connection.kept -= 1

    def _ended(self, connection: PeerConnection) -> None:
        if connection.relay is not None and connection.is_client:
            circuit = connection.peer_id, connection.relay
            if circuit in self._not_taken:
                self._not_taken.remove(circuit)
            if not connection.is_confirmed:
                self._not_taken.append(circuit)
                self._host.fault(str(circuit[1]), f"{circuit[0].short} took no circuit through it")
        if self._kept.get(connection.peer_id) is connection:
            del self._kept[connection.peer_id]
            self._reservations.failed(connection.peer_id, self._clock.monotonic_s())
            self._tell()

    def _tell(self) -> None:
        self._changed.notify()
        if self._on_change is not None:
            self._on_change()


async def granted(stream: MuxedStream) -> Hop:
    """Return a relay's answer to a request. Raises PeerError with the relay's refusal, NetworkError when it
    does not answer.
    """
    async with answered(stream, ANSWER_S, "the relay did not answer"):
        answer = decode_hop(await stream.read_message(MESSAGE_BYTES_MAX))
        if answer.kind is not HopKind.STATUS or answer.status != Status.OK:
            raise PeerError(f"the relay answered {_status(answer.status)}")
    return answer


def _status(status: int) -> str:
    try:
        return f"{Status(status).name} ({status})"
    except ValueError:
        return f"with status {status}"
