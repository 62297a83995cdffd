"""Limits on the connections that callers hold open, and on new connections of strangers. Connections above a
limit are closed.

A connection costs memory before its caller is known. gRPC counts connections, but not per caller, so the
sockets of the server are listed once a second. A caller is known after its first call, which honest callers
make at once.

A new connection costs a TLS handshake, and then the work of its calls. Only the handshake distinguishes a
member from a stranger at the same address. If the strangers of one address prefix, or all strangers together,
make too many connections, further ones get only the handshake: the first call is refused before its request
is read, and the connection is closed. For the next seconds the system drops new connections from such a
prefix before the handshake, except those from hosts of members.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from swarm.core.ids import PeerId
from swarm.core.standing import PeerStanding
from swarm.net.logic.stranger_budget import BudgetLimits, StrangerBudget
from swarm.net.scope import prefix_of
from swarm.runtime.listener_filter import HOSTS_MAX, NETWORKS_MAX, Instruction, attach, program
from swarm.runtime.sockets import Endpoint, OpenSocket, SocketList, shut_down

CONNECTIONS_MAX = 1024  # no more are accepted; if members are known, strangers get half of them
# connections of callers without a call: 86 KiB each after the TLS handshake, 47 KiB before it
UNKNOWN_MAX = 96
UNKNOWN_PER_PREFIX_MAX = 64
UNKNOWN_AT_ONCE_MAX = 512  # 43 MiB; includes connections within the grace period
UNKNOWN_GRACE_S = 5.0  # too short: callers lose connections that a busy machine could not serve in time
# New connections of strangers of one address prefix: at once, and per second. Too small:
# newcomers behind one public address wait for their first calls. Each makes a few connections.
ARRIVALS_MAX = 128
ARRIVALS_PER_S = 1.0
# The same of all strangers together: each costs 6 ms of processor time, of which 2 ms are the handshake.
ALL_ARRIVALS_MAX = 160
ALL_ARRIVALS_PER_S = 4.0
# The last of these tokens are reserved for prefixes with few connections. A newcomer from another prefix can
# therefore connect during an attack, unless the attacker uses more than 32 prefixes.
RESERVED = 32
FEW_MAX = 4
FEW_PER_S = 0.125
# a prefix with too many is filtered before the handshake for this long, then allowed for a second
AWAY_S = 3.0
_LOCAL_HOSTS = ("127.0.0.1", "::1")  # relayed connections come from these hosts
_INTERVAL_S = 1.0
_PER_TURN = 64  # connections that are looked up or closed per turn of the event loop: about 2 ms


@dataclass(frozen=True, slots=True)
class Held:
    """An open connection. `peer_id` is None while its caller is not known."""

    endpoint: Endpoint
    since_s: float
    peer_id: PeerId | None
    prefix: str  # prefix of its address, or the name of its relay


def surplus(held: Iterable[Held], standing: PeerStanding, now_s: float) -> list[Held]:
    """Return the connections to close, so that limits hold again.

    Of callers that are still unknown after `UNKNOWN_GRACE_S`, the oldest connections are closed first,
    because honest callers call at once. Above `UNKNOWN_AT_ONCE_MAX` unknown callers there is no grace. Of
    known strangers, the latest connections of the address prefixes with the most connections are closed.
    Members keep all.
    """
    unknown, strangers = [], []
    for one in sorted(held, key=lambda one: one.since_s):
        if one.peer_id is None:
            unknown.append(one)
        elif not standing.is_member(one.peer_id):
            strangers.append(one)
    strangers_max = CONNECTIONS_MAX // 2 if standing.has_members() else CONNECTIONS_MAX
    unknown.reverse()  # `_beyond` keeps the first ones, here the newest
    at_once = _beyond(unknown, UNKNOWN_AT_ONCE_MAX, UNKNOWN_AT_ONCE_MAX)
    closed = set(at_once)
    old = [one for one in unknown if now_s - one.since_s >= UNKNOWN_GRACE_S and one not in closed]
    return [
        *at_once,
        *_beyond(old, UNKNOWN_PER_PREFIX_MAX, UNKNOWN_MAX),
        *_beyond(strangers, strangers_max // 2, strangers_max),
    ]


def _beyond(connections: list[Held], per_prefix_max: int, total_max: int) -> list[Held]:
    """Return the connections beyond the limits. The first ones in the given order are kept, and every prefix
    keeps its share of the common limit.
    """
    counts = Counter(one.prefix for one in connections)
    share = min(per_prefix_max, _fair_share(counts.values(), total_max))
    seen: Counter[str] = Counter()
    found = []
    for one in connections:
        seen[one.prefix] += 1
        if seen[one.prefix] > share:
            found.append(one)
    return found


def _fair_share(counts: Iterable[int], total_max: int) -> int:
    """Return the largest limit per prefix, at least 1, under which all prefixes together stay within
    `total_max`.
    """
    left, share = total_max, total_max
    ascending = sorted(counts)
    for place, count in enumerate(ascending):
        share = left // (len(ascending) - place)
        if count > share:
            return max(share, 1)
        left -= count
    return max(share, total_max)


class Arrivals:
    """Decide which new connections of strangers are answered: a token bucket for each address prefix, and one
    for all strangers. Pure.
    """

    def __init__(self) -> None:
        self.budget = StrangerBudget(
            BudgetLimits(
                per_prefix_max=ARRIVALS_MAX,
                per_prefix_per_s=ARRIVALS_PER_S,
                all_max=ALL_ARRIVALS_MAX,
                all_per_s=ALL_ARRIVALS_PER_S,
                reserved=RESERVED,
                few_max=FEW_MAX,
                few_per_s=FEW_PER_S,
            )
        )
        self._refused: dict[str, None] = {}  # since the last `turn`
        self._away_until_s: dict[str, float] = {}

    def enter(self, prefix: str, now_s: float) -> bool:
        """Count a new connection, and return whether it is answered."""
        is_answered = self.budget.enter(prefix, now_s)
        if not is_answered:
            self.refuse(prefix)
        return is_answered

    def refuse(self, prefix: str) -> None:
        """Record that a prefix has too many connections."""
        if prefix not in self._away_until_s and len(self._refused) < NETWORKS_MAX:
            self._refused[prefix] = None

    def turn(self, now_s: float) -> list[str]:
        """Return the prefixes to filter before the handshake until the next call, a second later. No prefix
        is filtered for longer than `AWAY_S` without a pause, because honest strangers may share it.
        """
        away = {prefix: until_s for prefix, until_s in self._away_until_s.items() if until_s > now_s}
        away |= dict.fromkeys(self._refused, now_s + AWAY_S)
        self._refused.clear()
        self._away_until_s = dict(list(away.items())[:NETWORKS_MAX])
        return list(self._away_until_s)


class Connections:
    """The connections of one server, by the other end. It belongs to the network thread."""

    def __init__(
        self,
        standing: PeerStanding,
        port: Callable[[], int | None],
        tunnelled: Callable[[Endpoint], str] = lambda endpoint: "",
    ) -> None:
        """`port` returns the port of the server, None while it does not listen; `tunnelled` returns the relay
        through which a connection from an endpoint comes, empty if there is none.
        """
        self._standing, self._port, self._tunnelled = standing, port, tunnelled
        self._since_s: dict[Endpoint, float] = {}
        self._callers: dict[Endpoint, PeerId] = {}
        self._refused: set[Endpoint] = set()  # endpoints of strangers that made too many connections
        self._arrivals = Arrivals()
        # hosts of members, in the order of their last calls
        self._hosts: OrderedDict[str, None] = OrderedDict()
        self.turned_away: list[str] = []  # prefixes that are filtered until the next check of the sockets
        self._filter: list[Instruction] = []  # program of the listening sockets
        self._sockets = SocketList()

    def prefix_of(self, endpoint: Endpoint) -> str:
        """Return the name under which limits count a connection: its address prefix or, because a relayed
        connection has an address of this machine, its relay.
        """
        return self._tunnelled(endpoint) or prefix_of(endpoint[0])

    def is_refused(self, endpoint: Endpoint) -> bool:
        """Return whether all calls of this connection are refused."""
        return endpoint in self._refused

    def refuse(self, endpoint: Endpoint) -> None:
        """Refuse all further calls of this connection, and close it soon."""
        if endpoint in self._callers:
            self._refused.add(endpoint)

    def on_called(self, peer_id: PeerId, endpoint: Endpoint, now_s: float) -> bool:
        """Record the caller at an endpoint, and return whether its calls are answered."""
        if self._callers.get(endpoint) == peer_id:
            return endpoint not in self._refused
        is_member = self._standing.is_member(peer_id)
        is_answered = (
            is_member
            or not self._standing.has_members()
            or self._arrivals.enter(self.prefix_of(endpoint), now_s)
        )
        if is_member:
            self._hosts[endpoint[0]] = None
            self._hosts.move_to_end(endpoint[0])
            if len(self._hosts) > HOSTS_MAX - len(_LOCAL_HOSTS):
                self._hosts.popitem(last=False)
        if len(self._callers) < 2 * CONNECTIONS_MAX or endpoint in self._callers:
            self._callers[endpoint] = peer_id
            self._refused.discard(endpoint)
            if not is_answered:
                self._refused.add(endpoint)
        return is_answered

    async def run(self) -> None:
        """Once a second, close the surplus and filter the prefixes that caused it, until cancelled."""
        while True:
            await asyncio.sleep(_INTERVAL_S)
            await self.close_surplus(asyncio.get_running_loop().time())

    async def close_surplus(self, now_s: float) -> int:
        """Close the connections beyond the limits, and return their number. Other tasks run in between,
        because an attack opens hundreds at once.
        """
        port = self._port()
        if port is None:
            return 0
        callers, open_now = list(self._callers), dict[Endpoint, OpenSocket]()
        listening: list[OpenSocket] = []
        for number, found in enumerate(self._sockets.open_now(), 1):
            if found.local[1] == port and found.remote is None:
                listening.append(found)
            elif found.local[1] == port and found.remote is not None:
                open_now[found.remote] = found
            if number % _PER_TURN == 0:
                await asyncio.sleep(0)
        self._since_s = {endpoint: self._since_s.get(endpoint, now_s) for endpoint in open_now}
        for endpoint in callers:  # only connections of the list, not those opened meanwhile
            if endpoint not in open_now:
                del self._callers[endpoint]
                self._refused.discard(endpoint)
        held = [
            Held(endpoint, since_s, self._callers.get(endpoint), self.prefix_of(endpoint))
            for endpoint, since_s in self._since_s.items()
        ]
        refused = [one for one in held if one.endpoint in self._refused]
        closed = refused + surplus(
            [one for one in held if one.endpoint not in self._refused], self._standing, now_s
        )
        for one in closed[len(refused) :]:
            if one.peer_id is None:
                self._arrivals.refuse(one.prefix)
        self._turn_away(listening, now_s)
        for number, one in enumerate(closed, 1):
            shut_down(open_now[one.endpoint])
            if number % _PER_TURN == 0:
                await asyncio.sleep(0)
        return len(closed)

    def _turn_away(self, listening: Iterable[OpenSocket], now_s: float) -> None:
        """Let the system drop new connections from prefixes that made too many. If it cannot, they are
        refused after the handshake.
        """
        away = self.turned_away = self._arrivals.turn(now_s)
        hosts = [*_LOCAL_HOSTS, *reversed(self._hosts)]
        instructions = program(away, hosts) if away else []
        if instructions == self._filter:
            return
        self._filter = instructions
        for one in listening:
            with contextlib.suppress(OSError):
                attach(one.descriptor, instructions)
