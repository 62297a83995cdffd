"""A relay: serves reservations and circuits to peers that cannot be called (circuit relay v2, hop side).

py-libp2p's own relay makes reservations for any peer that a message names, and ends all circuits of a peer
with the first one (docs/decisions/0040). `logic/relaying.py` decides about requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from swarm.core.clock import Clock
from swarm.core.errors import NetworkError, PeerError
from swarm.core.ids import PeerId
from swarm.core.standing import PeerStanding
from swarm.libp2p.connection import MuxedStream, PeerConnection
from swarm.libp2p.host import Host
from swarm.libp2p.logic.messages import (
    HOP_PROTOCOL,
    MESSAGE_BYTES_MAX,
    STOP_PROTOCOL,
    Hop,
    HopKind,
    Limit,
    Status,
    Stop,
    StopKind,
    decode_hop,
    decode_stop,
    encode_address,
    encode_hop,
    encode_stop,
)
from swarm.libp2p.logic.relaying import Circuit, RelayAnswer, RelayLimits, RelayState
from swarm.libp2p.splicing import splice
from swarm.net.logic.relay_counts import RelayCounts

MESSAGE_S = 10.0  # timeout from opening a stream to its message
OPEN_S = 10.0  # timeout for the target of a circuit to accept it
EARLY_BYTES_MAX = 4096  # of the caller that its target gets with the offer of a circuit
CIRCUIT_IDLE_S = 120.0  # idle limit of one direction; a connection inside the circuit pings more often


class RelayService:
    """Relays for others on this host, until the host closes."""

    def __init__(self, host: Host, limits: RelayLimits, standing: PeerStanding, clock: Clock) -> None:
        self.host, self._clock = host, clock
        self.relay = RelayState(limits, standing)
        self._kept: dict[PeerId, PeerConnection] = {}
        host.handle(HOP_PROTOCOL, self._serve, direct_only=True)
        host.at_ended.append(self._ended)

    def counts(self) -> RelayCounts:
        """Return counts of this relay's past and present work."""
        return self.relay.counts(self._clock.monotonic_s())

    async def _serve(self, stream: MuxedStream) -> None:
        try:
            async with asyncio.timeout(MESSAGE_S):
                message = decode_hop(await stream.read_message(MESSAGE_BYTES_MAX))
        except PeerError as error:
            await self._refuse(stream, Status.MALFORMED_MESSAGE, str(error))
            return
        except TimeoutError:
            raise PeerError("it asked for nothing on a stream to the relay") from None
        now_s = self._clock.monotonic_s()
        if message.kind is HopKind.RESERVE:
            await self._reserve(stream, now_s)
        elif message.kind is HopKind.CONNECT:
            await self._connect(stream, self.relay.connect(stream.peer_id, message.peer, now_s))
        else:
            await self._refuse(stream, Status.UNEXPECTED_MESSAGE, "it sent a relay an answer")

    async def _reserve(self, stream: MuxedStream, now_s: float) -> None:
        if stream.connection.ended:  # data that arrived earlier can still be read
            raise NetworkError(stream.connection.ended)
        # for the peer at the other end, no matter which peer the message names
        decision = self.relay.reserve(stream.peer_id, stream.connection.host, now_s)
        if decision.status is not Status.OK:
            await self._refuse(stream, decision.status, f"a reservation was refused: {decision.reason}")
            return
        self._keep(stream.connection)
        answer = Hop(
            HopKind.STATUS,
            status=Status.OK,
            expires_s=int(self._clock.swarm_s() + self.relay.limits.reservation_s),
            addresses=tuple(encode_address(one, self.host.peer_id) for one in self.host.announced),
            limit=self._limit,
        )
        await stream.write_message(encode_hop(answer))

    async def _connect(self, stream: MuxedStream, decision: RelayAnswer) -> None:
        circuit = decision.circuit
        if circuit is None:
            await self._refuse(stream, decision.status, f"a circuit was refused: {decision.reason}")
            return
        there = None
        # A caller may send its first bytes without a wait for the circuit. The target gets them with the
        # offer: a round trip between the two less. Later bytes wait until the target has agreed.
        early = stream.take(EARLY_BYTES_MAX)
        self.relay.pass_s(circuit, len(early), self._clock.monotonic_s())
        try:
            try:
                async with asyncio.timeout(OPEN_S):
                    there = await self.open_circuit(circuit, early)
            except (NetworkError, PeerError, TimeoutError) as error:
                reason = f"{circuit.target.short} took no circuit: {error}"
                await self._refuse(stream, Status.CONNECTION_FAILED, reason)
                return
            await self._answer(stream, Status.OK)
            stream.grows = there.grows = False
            try:
                async with asyncio.timeout(circuit.until_s - self._clock.monotonic_s()):
                    await splice(stream, there, self._pacer(circuit), CIRCUIT_IDLE_S)
            except TimeoutError:
                raise NetworkError("the circuit has reached its time limit") from None
        finally:
            self.relay.end(circuit)
            if there is not None:
                there.close()

    async def open_circuit(self, circuit: Circuit, early: bytes) -> MuxedStream:
        """Offer a circuit to its target with the first bytes of its caller, and return the stream to the
        target. Raises PeerError when it refuses, NetworkError when it is gone; the caller sets a time limit.
        """
        connection = self._kept.get(circuit.target)
        if connection is None or connection.ended:
            raise NetworkError("it has no connection")
        stream = await connection.open(STOP_PROTOCOL)
        try:
            await stream.write_message(
                encode_stop(Stop(StopKind.CONNECT, peer=circuit.caller, limit=self._limit))
            )
            await stream.write(early)
            answer = decode_stop(await stream.read_message(MESSAGE_BYTES_MAX))
            if answer.kind is not StopKind.STATUS or answer.status != Status.OK:
                raise PeerError(f"it answered with status {answer.status}")
        except BaseException:
            stream.close()
            raise
        return stream

    @property
    def _limit(self) -> Limit:
        return Limit(duration_s=int(self.relay.limits.circuit_s))

    async def _answer(self, stream: MuxedStream, status: Status) -> None:
        async with asyncio.timeout(MESSAGE_S):
            await stream.write_message(encode_hop(Hop(HopKind.STATUS, status=status, limit=self._limit)))

    async def _refuse(self, stream: MuxedStream, status: Status, reason: str) -> None:
        self.host.fault(str(stream.peer_id), reason)
        await self._answer(stream, status)

    def _pacer(self, circuit: Circuit) -> Callable[[int], float]:
        return lambda size: self.relay.pass_s(circuit, size, self._clock.monotonic_s())

    def _keep(self, connection: PeerConnection) -> None:
        before = self._kept.get(connection.peer_id)
        if before is not connection:
            if before is not None:
                before.kept -= 1
            connection.kept += 1
            self._kept[connection.peer_id] = connection

    def _ended(self, connection: PeerConnection) -> None:
        # A new connection of the peer must make a new reservation.
        if self._kept.get(connection.peer_id) is connection:
            del self._kept[connection.peer_id]
            self.relay.leave(connection.peer_id)
