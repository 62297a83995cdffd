"""A simulated swarm of production DHT peers: joined one by one, or put together as a network that has run for
long would be.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from swarm.core.ids import Contact, PeerId
from swarm.dht.logic.config import DhtConfig
from swarm.dht.logic.routing import ID_BITS, RoutingConfig
from swarm.dht.service.dht_service import DhtService
from swarm.net.rpc import Handlers, StreamHandler, UnaryHandler
from swarm.testing.chance import Chance
from swarm.testing.network import SimulatedNetwork, SimulatedPeer

# in a swarm that has run for long, peers have known each other for so long, and up to twice that
_KNOWN_S = 7200.0
_HEARD_S = 10.0  # and have heard of each other so long ago, and up to twice that


@dataclass(slots=True, eq=False)
class SwarmMember:
    """One peer with its DHT service, which a restart replaces."""

    peer: SimulatedPeer
    service: DhtService


def service_of(peer: SimulatedPeer, config: DhtConfig | None = None) -> DhtService:
    """The production service on a simulated peer."""
    return DhtService(
        own=lambda: peer.contact,
        identity=peer.identity,
        caller=peer.caller,
        handlers=peer.handlers,
        book=peer.book,
        clock=peer.clock,
        supervisor=peer.supervisor,
        config=config or DhtConfig(),
        rng=Chance(peer.network.seed, "service", peer.index),
    )


class DhtSwarm:
    """All members, dead ones included."""

    def __init__(self, network: SimulatedNetwork, config: DhtConfig | None = None) -> None:
        self.network = network
        self.config = config or DhtConfig()
        self.members: list[SwarmMember] = []

    @property
    def live(self) -> list[SwarmMember]:
        return [member for member in self.members if member.peer.up]

    def add(self, *, skew_s: float = 0.0, drift: float = 0.0) -> SwarmMember:
        """A new peer that knows nobody yet."""
        peer = self.network.peer(skew_s=skew_s, drift=drift)
        member = SwarmMember(peer, service_of(peer, self.config))
        self.members.append(member)
        return member

    async def grow(self, count: int) -> None:
        """Peers that join one after the other, each through one that is there."""
        for _ in range(count):
            there = self.live
            member = self.add()
            if there:
                await member.service.join([self.network.rng.choice(there).peer.contact])

    def settle(self, count: int, strangers: Sequence[SimulatedPeer] = ()) -> Overview:
        """`count` new peers that know each other, and `strangers`, as if the swarm had run for long. No
        message is sent.
        """
        made = [self.add() for _ in range(count)]
        everybody = Overview(
            [member.peer.contact for member in self.members] + [peer.contact for peer in strangers]
        )
        for member in made:
            acquaint(member.service, everybody, self.network.rng)
        return everybody

    async def restart(self, member: SwarmMember, bootstrap: Sequence[Contact] = ()) -> None:
        """The process starts again, its storage and table empty. Without `bootstrap` it finds its way by its
        peer book alone.
        """
        self.network.restart(member.peer)
        member.service = service_of(member.peer, self.config)
        if bootstrap:
            await member.service.join(bootstrap)


def acquaint(service: DhtService, everybody: Overview, chance: Chance) -> None:
    """Fill a peer's routing table as a long-running network would have it: in every bucket live peers of its
    range, chosen evenly. The table itself is asked with `on_answer`, as on the wire, and need not be told more
    contacts than it keeps: known for hours, seen of late.
    """
    table, now_s = service.overlay.table, service.clock.monotonic_s()
    contacts = everybody.around(service.peer_id, table.config, chance)
    # in the order in which the table hears of them
    heard_s = sorted(now_s - _HEARD_S * (1.0 + chance.random()) for _ in contacts)
    for contact, at_s in zip(contacts, heard_s, strict=True):
        table.on_answer(contact, at_s, since_s=now_s - _KNOWN_S * (1.0 + chance.random()))


class _Sleeper(Handlers):
    """The handlers of a peer whose service is made when somebody first calls it."""

    def __init__(self, wake: Callable[[], object]) -> None:
        super().__init__()
        self._wake: Callable[[], object] | None = wake

    def find(self, name: str) -> UnaryHandler | StreamHandler | None:
        if self._wake is not None:
            wake, self._wake = self._wake, None
            wake()
        return super().find(name)


class LazySwarm:
    """As `DhtSwarm.settle`, for swarms so large that only those services are made which are needed: ten
    thousand tables are gigabytes.
    """

    def __init__(self, network: SimulatedNetwork, count: int, config: DhtConfig | None = None) -> None:
        self.peers = [network.peer() for _ in range(count)]
        self.everybody = Overview(peer.contact for peer in self.peers)
        self._config = config
        self._services: dict[int, DhtService] = {}
        for peer in self.peers:
            peer.handlers = _Sleeper(functools.partial(self.service, peer))

    def service(self, peer: SimulatedPeer) -> DhtService:
        """A peer's service, made when first asked for, by the scenario or by a caller on the network."""
        service = self._services.get(peer.index)
        if service is None:
            service = self._services[peer.index] = service_of(peer, self._config)
            acquaint(service, self.everybody, peer.chance)
        return service


class Overview:
    """Everybody's place, sorted: the oracle for who is nearest."""

    def __init__(self, contacts: Iterable[Contact]) -> None:
        self._sorted = sorted(
            ((contact.peer_id.dht_id, contact) for contact in contacts), key=lambda item: item[0]
        )

    def nearest(self, dht_id: int, count: int) -> list[Contact]:
        """By brute force."""
        return [contact for _, contact in sorted(self._sorted, key=lambda item: item[0] ^ dht_id)[:count]]

    def around(self, peer_id: PeerId, config: RoutingConfig, chance: Chance) -> list[Contact]:
        """Whom the buckets of a full table would hold, given the table's rule for splitting them."""
        own = peer_id.dht_id
        found: list[Contact] = []
        # a range of the sorted places, and how many first bits its members share
        pending = [(0, len(self._sorted), 0)]
        while pending:
            low, high, depth = pending.pop()
            if high - low <= config.bucket_max:
                found.extend(contact for _, contact in self._sorted[low:high] if contact.peer_id != peer_id)
                continue
            shift = ID_BITS - depth
            holds_own = self._sorted[low][0] >> shift == own >> shift
            if not holds_own and depth % config.depth_step == 0:
                found.extend(
                    self._sorted[low + place][1]
                    for place in chance.sample(range(high - low), config.bucket_max)
                )
                continue
            middle = self._first_set(low, high, shift - 1)
            pending += [(low, middle, depth + 1), (middle, high, depth + 1)]
        chance.shuffle(found)
        return found

    def _first_set(self, low: int, high: int, bit: int) -> int:
        """Where the bit becomes 1 in a sorted range whose higher bits are all equal."""
        while low < high:
            middle = (low + high) // 2
            if self._sorted[middle][0] >> bit & 1:
                high = middle
            else:
                low = middle + 1
        return low
