"""Decide which addresses this node announces: those that its user gives; in a private network those of the
machine; on the internet those at which other peers have called it back.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from swarm.core.errors import SwarmError
from swarm.core.ids import Address, Contact, PeerId
from swarm.core.notify import ChangeEvent
from swarm.core.standing import PeerStanding
from swarm.net.channels import Channels
from swarm.net.dial import resolve
from swarm.net.dialback import DIAL_BACK, DIAL_S
from swarm.net.hello import Introduction
from swarm.net.listening import WILDCARDS, machine_addresses
from swarm.net.logic.reachability import DialedBack, NodeReach, Reach, Reachability
from swarm.net.peerbook import PeerBook
from swarm.net.port_mapping import PortMapping
from swarm.net.scope import Scope, Surroundings, ip_of, prefix_of, scope_of
from swarm.wire import peer_pb2

_logger = logging.getLogger(__name__)

_ASK_S = DIAL_S + 2.0  # time to connect to the asked peer, and for its answer
_CANDIDATES_MAX = 64
_NAMES_MAX = 3  # peers named in a sentence
_INTERFACES_S = 15.0  # interval at which the machine's addresses are read


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnAddresses:
    """The facts about a node's addresses that are known when it starts."""

    peer_id: PeerId
    listening: tuple[str, int] | None = None  # host and port; None: it does not listen
    given: tuple[Address, ...] = ()  # given by the user; they are trusted to work, so no peer is asked
    named: tuple[Contact, ...] = ()  # peers that the user, or an invite, gave


@dataclass(frozen=True, slots=True)
class GivenCheck:
    """The answers of other peers about the addresses that the user has given."""

    failures: tuple[str, ...] = ()  # a sentence for each at which they do not reach this peer
    untried: tuple[str, ...] = ()  # "host:port" of each that no asked peer has called


class Announcing:
    """The contact that a node announces, updated from the answers of other peers. It belongs to the network
    thread.
    """

    def __init__(
        self,
        own: OwnAddresses,
        channels: Channels,
        book: PeerBook,
        standing: PeerStanding,
        surroundings: Surroundings,
        on_changed: Callable[[Contact], None],
    ) -> None:
        """`on_changed` is called with every contact after the first one."""
        self._peer_id, self._own = own.peer_id, own
        self._channels, self._book, self._standing = channels, book, standing
        self._surroundings, self._on_changed = surroundings, on_changed
        # addresses of this machine's interfaces, or the one that the node listens on
        self._of_machine = machine_addresses(*own.listening) if own.listening is not None else ()
        port = own.listening[1] if own.listening is not None else 0
        self._changed = ChangeEvent()
        self._mapping = PortMapping(port, on_found=self._changed.notify)
        self._relay_mapping: PortMapping | None = None  # mapping of the port at which this peer relays
        hosts = [address.host for one in own.named for address in one.addresses]
        # names that the user gave may resolve to addresses on the internet
        self._is_unresolved = any(scope_of(host) is None for host in hosts) and surroundings.is_open
        surroundings.widen(address.host for address in own.given)
        presumed: list[Address] = []
        if not self._is_unresolved and surroundings.own < Scope.INTERNET:
            # No peer in the internet was named, so none can be asked yet.
            surroundings.widen(address.host for address in self._of_machine)
            presumed = self._public()
        host = own.listening[0] if own.listening is not None else ""
        self._is_closed = host not in WILDCARDS and scope_of(host) is Scope.MACHINE
        now_s = asyncio.get_running_loop().time()
        self._machine = Reachability(port, now_s, presumed, is_closed=self._is_closed)
        self._is_seen = False  # a peer of the internet has answered a Hello
        self._has_waited = False  # it has waited in vain for such an answer
        self._was_asked = False  # others were asked, or it has waited again
        self._last_sentence = ""
        # relays through which this peer can be called while it is hidden
        self._relays: tuple[Contact, ...] = ()
        self._is_searching = False  # it is looking for such relays
        self.on_verdict: list[Callable[[], None]] = []  # called when `reach` or `contact` has changed
        self._listeners: list[Callable[[str], None]] = []
        self.contact = Contact(own.peer_id, self._addresses())
        self._followed = self.reach, self.contact

    @property
    def reach(self) -> NodeReach:
        """Return how others can call this peer, as far as it knows: "direct", "relayed" (through relays),
        "hidden" (they have tried in vain), "none" (it does not listen), or "unknown".
        """
        if self._own.listening is None:
            return "none"
        if self.contact.relays:
            return "relayed"
        return self._machine.reach.verdict if self._asks() else "direct" if self.contact.addresses else "none"

    @property
    def sentence(self) -> str:
        """Return how others reach this peer, as a sentence for its user; empty while that is not known, on
        loopback, and if the user has given the addresses.
        """
        if self._asks():
            if self._is_searching and self.is_hidden and not self._relays:
                return ""
            said = _sentence(self._machine.reach, self.contact.through, was_asked=self._was_asked)
            is_lent = self._mapping.is_open and self._machine.reach.verdict == "direct"
            return (
                f"{said}. Its router forwards the port, because this program asked for it by UPnP"
                if is_lent
                else said
            )
        if self._own.given or self._surroundings.own is not Scope.SITE:
            return ""
        if self._is_closed:
            return _sentence(Reach("hidden", 0.0), "", was_asked=False)
        if not self.contact.addresses:
            return ""
        first = self.contact.addresses[0]
        elsewhere = "; for others, forward a TCP port of the router to it and name it with --announce"
        return f"peers in this network reach this machine at {first.host}:{first.port}" + (
            elsewhere if self._surroundings.is_open else ""
        )

    @property
    def is_hidden(self) -> bool:
        """Return whether others have called this peer in vain."""
        return self._asks() and self._machine.reach.verdict == "hidden"

    @property
    def is_open_to_all(self) -> bool:
        """Return whether peers of the internet can call this one."""
        return any(scope_of(one.host) in (None, Scope.INTERNET) for one in self.contact.addresses)

    def on_relays(self, relays: Sequence[Contact], *, is_searching: bool) -> None:
        """Set the relays through which this peer can be called now, and whether it is still looking for some.
        While it is looking, it does not report that nobody can call it.
        """
        self._relays, self._is_searching = tuple(relays), is_searching
        self._update()

    def tell(self, listener: Callable[[str], None]) -> None:
        """Call `listener` with `sentence` now, unless it is empty, and with every later one."""
        self._listeners.append(listener)
        if self._last_sentence:
            listener(self._last_sentence)

    def on_introduced(self, introduction: Introduction) -> None:
        """Process a peer's answer to a Hello. A peer in the internet can be asked for a call, and knows the
        address from which this peer calls.
        """
        self._is_unresolved = False
        peer, observed = introduction.contact.peer_id, introduction.observed
        connection = self._channels.connection_to(peer)
        hosts = [host for host, _ in connection.endpoints] if connection is not None else []
        # a peer in the same network cannot confirm this
        if observed and Scope.INTERNET in map(scope_of, hosts):
            self._surroundings.widen([observed])
            self._machine.on_observed(peer, observed, asyncio.get_running_loop().time())
            self._machine.on_candidate(asyncio.get_running_loop().time())
            self._is_seen = True
        self._update()
        self._changed.notify()

    async def run(self) -> None:
        """Ask other peers to call back whenever this is due, and follow the machine's addresses, until
        cancelled.
        """
        loop = asyncio.get_running_loop()
        if self._asks() and not self._is_unresolved and self._is_behind_router():
            self._mapping.begin()
        while True:
            self._changed.clear()
            self._look_at_interfaces()
            if self._mapping.has_found_late:
                self._machine.on_router(loop.time())
            candidates = self._candidates() if self._asks() else []
            if candidates and self._machine.due_s <= loop.time():
                await self._check(candidates)
            self._update()
            # without candidates, wait for the next introduction
            wait_s = self._machine.due_s - loop.time() if candidates else _INTERFACES_S
            await self._changed.wait(min(max(wait_s, 0.0), _INTERFACES_S))

    def relay_port(self, port: int) -> int:
        """Return the port at which others may reach a relay that listens at this port: this port, or the one
        that a router forwards on request; 0: the router does not forward one (yet).
        """
        if not self._mapping.is_open:
            return port
        return self._relay_mapping.port if self._relay_mapping is not None else 0

    async def relay_reached(self, port: int) -> bool | None:
        """Return whether others reach this machine at the port at which it relays; None if the asked peers
        gave no answer. If nobody can be asked, it is presumed, like the addresses of a first peer. A router
        that has forwarded a port on request is asked to forward this one, too.
        """
        if self._mapping.is_open:
            if self._relay_mapping is None:
                self._relay_mapping = PortMapping(port)
            await self._relay_mapping.open()
            port = self._relay_mapping.port
            if not port:
                return None if self._relay_mapping.is_searching else False
        candidates = self._candidates()
        if not candidates:
            return True
        async with asyncio.TaskGroup() as group:
            asking = [
                group.create_task(self._ask_relay(one, port)) for one in self._machine.choose(candidates)
            ]
        answers = [answer for task in asking if (answer := task.result()) is not None]
        return any(answers) if answers else None

    async def _ask_relay(self, contact: Contact, port: int) -> bool | None:
        request = peer_pb2.DialBackRequest(port=port, relay=True)
        try:
            reply = await self._channels.call(contact, DIAL_BACK, request, timeout_s=_ASK_S)
        except SwarmError as error:
            _logger.debug("%s did not look at the relay's port: %s", contact.peer_id.short, error)
            return None
        return bool(reply.reached)

    async def check_given(self) -> GivenCheck:
        """Let other peers call the addresses that the user has given. A peer calls this one only once in a
        while, so that each is asked about one address. Where nobody of the internet can be asked, no address
        counts as untried.
        """
        candidates = self._candidates() if self._is_seen else []
        if not candidates:
            return GivenCheck()
        failures, untried = [], []
        for address in self._own.given:
            place, scope = f"{address.host}:{address.port}", scope_of(address.host)
            if scope is not None and scope < Scope.INTERNET:
                failures.append(f"peers of the internet do not dial {place}")
                continue
            try:
                hosts = [host for host, _ in await resolve(address)]
            except OSError:
                untried.append(f"{place} (this machine cannot resolve the name)")
                continue
            asked = self._machine.choose(candidates)
            candidates = [one for one in candidates if one not in asked]
            async with asyncio.TaskGroup() as group:
                asking = [group.create_task(self._ask(contact, address.port)) for contact in asked]
            # they call the address that they see; another one of this machine cannot be tried
            answers = [one[0] for task in asking if (one := task.result()) and one[0].observed in hosts]
            if not answers:
                untried.append(place)
            elif not any(one.reached for one in answers):
                names = ", ".join(one.peer.short for one in answers[:_NAMES_MAX])
                failures.append(f"{names} called {place} in vain")
        return GivenCheck(tuple(failures), tuple(untried))

    async def close(self) -> None:
        """Give a forwarded port back to the router."""
        async with asyncio.TaskGroup() as group:
            for one in (self._mapping, self._relay_mapping):
                if one is not None:
                    group.create_task(one.close())

    def _asks(self) -> bool:
        """Return whether this node is in the internet, listens, and was given no addresses."""
        return (
            self._own.listening is not None
            and not self._own.given
            and (self._is_unresolved or self._surroundings.own is Scope.INTERNET)
        )

    def _public(self) -> list[Address]:
        return [one for one in self._of_machine if scope_of(one.host) is Scope.INTERNET]

    def _is_behind_router(self) -> bool:
        """Return whether this machine has private IPv4 addresses only, as behind a router with NAT."""
        versions = {ip.version for one in self._public() if (ip := ip_of(one.host)) is not None}
        return 4 not in versions and any(scope_of(one.host) is Scope.SITE for one in self._of_machine)

    def _look_at_interfaces(self) -> None:
        listening = self._own.listening
        if listening is None or listening[0] not in WILDCARDS or self._own.given:
            return
        now, before = machine_addresses(*listening), self._of_machine
        if now == before:
            return
        self._of_machine = now
        for mapping in (self._mapping, self._relay_mapping):
            if mapping is not None:
                mapping.on_moved()
        if not self._asks():
            self._surroundings.widen(one.host for one in now)
        hosts = {one.host for one in now}
        gone = [one.host for one in before if one.host not in hosts]
        self._machine.on_interfaces(self._public(), gone, asyncio.get_running_loop().time())

    def _addresses(self) -> tuple[Address, ...]:
        if self._own.listening is None or self._own.given:
            return self._own.given
        if self._asks():
            return self._machine.reach.addresses
        return self._surroundings.announceable(self._of_machine)

    def _update(self) -> None:
        contact = Contact(self._peer_id, self._addresses(), self._relays if self.is_hidden else ())
        if contact != self.contact:
            self.contact = contact
            _logger.info("this peer announces %s", ", ".join(contact.published) or "no address")
            self._on_changed(contact)
        sentence = self.sentence
        if sentence and sentence != self._last_sentence:
            self._last_sentence = sentence
            for listener in self._listeners:
                listener(sentence)
        now = self.reach, contact
        if now != self._followed:
            self._followed = now
            for follower in self.on_verdict:
                follower()

    def _candidates(self) -> list[Contact]:
        """Return the peers that can be asked: members of this node's runs first, then those that its user
        named, then the others, the one seen last first. Their contacts have only addresses that may be in the
        internet.
        """
        found: dict[PeerId, Contact] = {}
        known = [peer.contact for peer in self._book.known()[:_CANDIDATES_MAX]]
        for contact in (*self._own.named, *known):
            far = tuple(one for one in contact.addresses if scope_of(one.host) in (None, Scope.INTERNET))
            if far and contact.peer_id != self._peer_id:
                found.setdefault(contact.peer_id, Contact(contact.peer_id, far))
        return sorted(found.values(), key=lambda one: not self._standing.is_member(one.peer_id))

    async def _check(self, candidates: Sequence[Contact]) -> None:
        now_s = asyncio.get_running_loop().time
        if not self._is_seen:  # before anybody in the internet has answered, there is nobody to ask
            self._was_asked, self._has_waited = self._has_waited, True
            self._machine.on_answers([], len(candidates), now_s())
            return
        if self._is_behind_router():
            self._machine.port = await self._mapping.open()
            if self._relay_mapping is not None:
                await self._relay_mapping.open()
        asked = self._machine.choose(candidates)
        async with asyncio.TaskGroup() as group:
            asking = [group.create_task(self._ask(contact, self._machine.port)) for contact in asked]
        self._was_asked = True
        found = [one for task in asking if (one := task.result()) is not None]
        # A peer in the same network may be inside the same firewall, so its call would prove nothing.
        outside = [answer for answer, source in found if prefix_of(source) != prefix_of(answer.observed)]
        answers = outside or [answer for answer, _ in found]
        self._machine.on_answers(answers, len(candidates), now_s())

    async def _ask(self, contact: Contact, port: int) -> tuple[DialedBack, str] | None:
        """Let a peer call this one at this port. Return its answer, and the IP address from which it called;
        None when there is no answer, or when it claims a call that did not arrive.
        """
        request = peer_pb2.DialBackRequest(port=port)
        with self._surroundings.awaiting(contact.peer_id) as source:
            try:
                reply = await self._channels.call(contact, DIAL_BACK, request, timeout_s=_ASK_S)
            except SwarmError as error:
                _logger.debug("%s was not asked for a call: %s", contact.peer_id.short, error)
                return None
            if ip_of(reply.observed) is None or (reply.reached and not source()):
                return None
            return DialedBack(contact.peer_id, reply.observed, reply.reached), source()


def _sentence(reach: Reach, through: str, *, was_asked: bool) -> str:
    names = ", ".join(peer.short for peer in reach.by[:_NAMES_MAX])
    if reach.verdict == "direct" and reach.by:
        places = " and ".join(f"{one.host}:{one.port}" for one in reach.addresses)
        return f"others reach this machine at {places}: {names} called it there"
    why = f"{names} called it directly in vain" if reach.by else "it listens for calls from this machine only"
    if reach.verdict == "hidden" and through:
        return f"others reach this machine through {through}, because {why}"
    if reach.verdict == "hidden" and not reach.by:
        return (
            f"others cannot call this machine, because {why}: it only uses connections that it opens itself"
        )
    if reach.verdict == "hidden":
        return (
            f"others cannot call this machine ({names} tried in vain), so it takes part over connections "
            "that it opens itself. To change that, switch UPnP on in the router, or forward a TCP port of it "
            "to this machine, or open one in the firewall, and listen there with --listen 0.0.0.0:PORT"
        )
    if reach.verdict == "unknown" and was_asked:
        return (
            "no peer has called this machine back yet: until one has, it takes part over connections that it "
            "opens itself"
        )
    return ""
