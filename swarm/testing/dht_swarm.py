"""A simulated swarm of production DHT peers, either joined one by one, or constructed in the state of a
long-running network.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from swarm.core.ids import Contact
from swarm.core.presets import WAN, Timings
from swarm.dht.logic.constants import BUCKET_MAX
from swarm.dht.logic.routing import ID_BITS, RoutingTable
from swarm.dht.logic.storage import PRODUCTION_QUOTAS, Quotas
from swarm.dht.service.dht_service import DhtService
from swarm.net.rpc import Handlers, StreamHandler, UnaryHandler
from swarm.testing.chance import Chance
from swarm.testing.network import SimulatedNetwork, SimulatedPeer

# in a long-running swarm, peers have known each other for this time, up to twice as long
_KNOWN_S = 7200.0
_CONTACT_S = 10.0  # time since their last contact, up to twice as long


@dataclass(slots=True, eq=False)
class SwarmMember:
    """One peer with its DHT service, which a restart replaces."""

    peer: SimulatedPeer
    service: DhtService


def service_of(
    peer: SimulatedPeer,
    bucket_max: int = BUCKET_MAX,
    *,
    quotas: Quotas = PRODUCTION_QUOTAS,
    timings: Timings = WAN,
) -> DhtService:
    """Create the production service on a simulated peer. With small buckets, few peers behave like a large
    swarm.
    """
    service = DhtService(
        own=lambda: peer.contact,
        identity=peer.identity,
        caller=peer.caller,
        handlers=peer.handlers,
        book=peer.book,
        clock=peer.clock,
        supervisor=peer.supervisor,
        timings=timings,
        quotas=quotas,
        rng=Chance(peer.network.seed, "service", peer.index),
    )
    service.overlay.table = RoutingTable(service.peer_id, bucket_max=bucket_max)
    return service


class DhtSwarm:
    """All members of a swarm, including crashed ones."""

    def __init__(self, network: SimulatedNetwork) -> None:
        self.network = network
        self.members: list[SwarmMember] = []

    @property
    def live(self) -> list[SwarmMember]:
        return [member for member in self.members if member.peer.up]

    def add(self, *, skew_s: float = 0.0, drift: float = 0.0) -> SwarmMember:
        """Add a new peer that knows no other peer yet."""
        peer = self.network.peer(skew_s=skew_s, drift=drift)
        member = SwarmMember(peer, service_of(peer))
        self.members.append(member)
        return member

    async def grow(self, count: int) -> None:
        """Add peers that join one after the other, each through a live one."""
        for _ in range(count):
            live = self.live
            member = self.add()
            if live:
                await member.service.join([self.network.rng.choice(live).peer.contact])

    def settle(self, count: int, strangers: Sequence[SimulatedPeer] = ()) -> Overview:
        """Add `count` new peers that know each other and `strangers`, as if the swarm had run for long. No
        message is sent.
        """
        created = [self.add() for _ in range(count)]
        overview = Overview(
            [member.peer.contact for member in self.members] + [peer.contact for peer in strangers]
        )
        for member in created:
            fill_routing_table(member.service, overview, self.network.rng)
        return overview

    async def restart(self, member: SwarmMember, bootstrap: Sequence[Contact] = ()) -> None:
        """Restart a member with empty storage and routing table. Without `bootstrap` it finds the swarm by
        its peer book alone.
        """
        self.network.restart(member.peer)
        member.service = service_of(member.peer)
        if bootstrap:
            await member.service.join(bootstrap)


def fill_routing_table(service: DhtService, overview: Overview, chance: Chance) -> None:
    """Fill a peer's routing table as a long-running network would have it: in every bucket live peers of its
    range, chosen evenly. The table is filled through `met`, as by calls, with the contacts that it keeps:
    known for hours, seen lately.
    """
    table, now_s = service.overlay.table, service.clock.monotonic_s()
    contacts = overview.around(table, chance)
    # in the order in which they enter the table
    contact_s = sorted(now_s - _CONTACT_S * (1.0 + chance.random()) for _ in contacts)
    for contact, at_s in zip(contacts, contact_s, strict=True):
        table.on_answer(contact, at_s, since_s=now_s - _KNOWN_S * (1.0 + chance.random()))


class _LazyHandlers(Handlers):
    """Handlers of a peer whose service is created by the first call to it."""

    def __init__(self, wake: Callable[[], object]) -> None:
        super().__init__()
        self._wake: Callable[[], object] | None = wake

    def find(self, name: str) -> UnaryHandler | StreamHandler | None:
        if self._wake is not None:
            wake, self._wake = self._wake, None
            wake()
        return super().find(name)


class LazySwarm:
    """A settled swarm as of `DhtSwarm.settle` for sizes at which only the services in use are created: ten
    thousand tables are gigabytes.
    """

    def __init__(self, network: SimulatedNetwork, count: int) -> None:
        self.peers = [network.peer() for _ in range(count)]
        self.overview = Overview(peer.contact for peer in self.peers)
        self._services: dict[int, DhtService] = {}
        for peer in self.peers:
            peer.handlers = _LazyHandlers(functools.partial(self.service, peer))

    @property
    def services_made(self) -> int:
        """Return the number of services that were created so far."""
        return len(self._services)

    def service(self, peer: SimulatedPeer) -> DhtService:
        """Return the service of a peer. It is created by the first request of the scenario or of a caller on
        the network.
        """
        service = self._services.get(peer.index)
        if service is None:
            service = self._services[peer.index] = service_of(peer)
            fill_routing_table(service, self.overview, peer.chance)
        return service


class Overview:
    """Sorted DHT ids of all peers: the oracle for the nearest ones."""

    def __init__(self, contacts: Iterable[Contact]) -> None:
        self._sorted = sorted(
            ((contact.peer_id.dht_id, contact) for contact in contacts), key=lambda item: item[0]
        )

    def nearest(self, dht_id: int, count: int) -> list[Contact]:
        """Return the nearest contacts, by brute force."""
        return [contact for _, contact in sorted(self._sorted, key=lambda item: item[0] ^ dht_id)[:count]]

    def around(self, table: RoutingTable, chance: Chance) -> list[Contact]:
        """Return the contacts that the buckets of a full table would hold, by the table's rule for splitting
        them.
        """
        own = table.own_id
        found: list[Contact] = []
        # (start and end of a range of the sorted ids, number of leading bits that its members share)
        pending = [(0, len(self._sorted), 0)]
        while pending:
            low, high, depth = pending.pop()
            if high - low <= table.bucket_max:
                found.extend(contact for _, contact in self._sorted[low:high] if contact.peer_id != table.own)
                continue
            shift = ID_BITS - depth
            holds_own = self._sorted[low][0] >> shift == own >> shift
            if not holds_own and depth % table.depth_step == 0:
                found.extend(
                    self._sorted[low + place][1]
                    for place in chance.sample(range(high - low), table.bucket_max)
                )
                continue
            middle = self._first_set(low, high, shift - 1)
            pending += [(low, middle, depth + 1), (middle, high, depth + 1)]
        chance.shuffle(found)
        return found

    def _first_set(self, low: int, high: int, bit: int) -> int:
        """Return where the bit becomes 1 in a sorted range whose higher bits are all equal."""
        while low < high:
            middle = (low + high) // 2
            if self._sorted[middle][0] >> bit & 1:
                high = middle
            else:
                low = middle + 1
        return low
