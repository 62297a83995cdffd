"""The state of a relay: reservations, circuits, bytes per second. Circuit relay v2 without I/O; times are
seconds of a clock that never jumps.

A peer that nobody can call keeps a reservation at a relay; others ask the relay for a circuit to it. The
relay decides by the authenticated peer at the other end of the connection, never by the content of a message.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from swarm.core.ids import PeerId
from swarm.core.standing import PeerStanding
from swarm.libp2p.logic.messages import Status
from swarm.net.bucket import Bucket
from swarm.net.logic.relay_counts import RelayCounts
from swarm.net.scope import prefix_of


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayLimits:
    """Limits that the owner of a relay sets."""

    # if members are known, strangers get at most half of these and of the circuits
    reservations_max: int = 128
    reservations_per_prefix_max: int = 32  # reservations from one /24 (IPv6: /48)
    reservation_s: float = 3600.0
    # Each circuit buffers at most two windows of 256 KiB here, and the host limits all buffers. In a group of
    # hidden peers each calls each: 20 peers need 190 to 380 circuits, of which 19 end at the leader.
    circuits_max: int = 1024
    # circuits in which a peer calls, and circuits in which it is called, each
    circuits_per_peer_max: int = 64
    circuit_s: float = 3600.0
    bytes_per_s: float = 6.25e6  # throughput of all circuits in both directions: 50 Mbit/s
    # Peers that train send the parts of a round at once and nothing before the next: the rate that they left
    # unused for up to this time is theirs then.
    burst_s: float = 1.0


@dataclass(slots=True, eq=False)
class Circuit:
    """A circuit that a relay carries."""

    caller: PeerId
    target: PeerId
    until_s: float
    carried_bytes: int = 0


@dataclass(frozen=True, slots=True)
class RelayAnswer:
    """A relay's answer. `reason`: why it is not OK."""

    status: Status
    reason: str = ""
    circuit: Circuit | None = None


@dataclass(slots=True)
class _Reservation:
    prefix: str
    until_s: float
    is_member: bool


class RelayState:
    """The state of a relay."""

    def __init__(self, limits: RelayLimits, standing: PeerStanding) -> None:
        self.limits = limits
        self._standing = standing
        self._reservations: dict[PeerId, _Reservation] = {}
        self._circuits: set[Circuit] = set()
        self._calls: Counter[PeerId] = Counter()  # circuits by caller
        self._called: Counter[PeerId] = Counter()  # circuits by target
        self._bucket = Bucket(limits.bytes_per_s, limits.burst_s)
        self.carried_bytes = 0
        self.refused: Counter[Status] = Counter()

    @property
    def circuits(self) -> int:
        """Return the number of circuits that are open or being opened."""
        return len(self._circuits)

    def reservations(self, now_s: float) -> list[PeerId]:
        """Return the peers that have a reservation."""
        self._expire(now_s)
        return list(self._reservations)

    def counts(self, now_s: float) -> RelayCounts:
        """Return counts of this relay's past and present work."""
        reserved = len(self.reservations(now_s))
        return RelayCounts(reserved, self.circuits, self.carried_bytes, self.refused.total())

    def reserve(self, peer_id: PeerId, host: str, now_s: float) -> RelayAnswer:
        """Grant or renew the reservation of the peer that asks, whose connection comes from this host."""
        self._expire(now_s)
        held = self._reservations.get(peer_id)
        prefix = prefix_of(host)
        is_member = self._standing.is_member(peer_id)
        if held is None:
            limit = self._share(self.limits.reservations_max, is_member)
            counted = [one for one in self._reservations.values() if is_member or not one.is_member]
            if len(counted) >= limit:
                return self._refuse(Status.RESERVATION_REFUSED, f"{limit} peers have a reservation")
            of_prefix = sum(one.prefix == prefix for one in self._reservations.values())
            if of_prefix >= self.limits.reservations_per_prefix_max:
                return self._refuse(Status.RESERVATION_REFUSED, f"{of_prefix} of {prefix} have a reservation")
        until_s = now_s + self.limits.reservation_s
        self._reservations[peer_id] = _Reservation(prefix, until_s, is_member)
        return RelayAnswer(Status.OK)

    def leave(self, peer_id: PeerId) -> None:
        """Drop the reservation of a peer whose last direct connection has ended."""
        self._reservations.pop(peer_id, None)

    def connect(self, caller: PeerId, target: PeerId | None, now_s: float) -> RelayAnswer:
        """Decide whether `caller` gets a circuit to `target`. It counts from now until `end`."""
        self._expire(now_s)
        if target is None:
            return self._refuse(Status.MALFORMED_MESSAGE, "it names no peer to connect to")
        if target == caller:
            return self._refuse(Status.PERMISSION_DENIED, "it asks for a circuit to itself")
        if target not in self._reservations:
            return self._refuse(Status.NO_RESERVATION, f"{target.short} has no reservation")
        of_peer = self.limits.circuits_per_peer_max
        limit = self._share(self.limits.circuits_max, self._standing.is_member(caller))
        if self._calls[caller] >= of_peer or self._called[target] >= of_peer or self.circuits >= limit:
            return self._refuse(
                Status.RESOURCE_LIMIT_EXCEEDED, f"{of_peer} circuits of a peer, or {limit} of all, are open"
            )
        circuit = Circuit(caller, target, now_s + self.limits.circuit_s)
        self._circuits.add(circuit)
        self._calls[caller] += 1
        self._called[target] += 1
        return RelayAnswer(Status.OK, circuit=circuit)

    def end(self, circuit: Circuit) -> None:
        """Record that a circuit has ended or could not be opened. Idempotent."""
        if circuit not in self._circuits:
            return
        self._circuits.remove(circuit)
        for counts, peer_id in ((self._calls, circuit.caller), (self._called, circuit.target)):
            counts[peer_id] -= 1
            if not counts[peer_id]:
                del counts[peer_id]

    def pass_s(self, circuit: Circuit, size: int, now_s: float) -> float:
        """Account for bytes of a circuit. Return the seconds to wait before they are forwarded."""
        circuit.carried_bytes += size
        self.carried_bytes += size
        return self._bucket.pass_s(size, now_s)

    def _share(self, limit: int, is_member: bool) -> int:
        return limit if is_member or not self._standing.has_members() else limit // 2

    def _refuse(self, status: Status, reason: str) -> RelayAnswer:
        self.refused[status] += 1
        return RelayAnswer(status, reason)

    def _expire(self, now_s: float) -> None:
        for peer_id in [one for one, held in self._reservations.items() if held.until_s <= now_s]:
            del self._reservations[peer_id]
