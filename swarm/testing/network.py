"""A simulated network for real services: real protobuf messages, no sockets, and all faults of a real network
drawn from one seed.

    network = SimulatedNetwork(seed=7)
    one, two = network.peer(), network.peer()
    two.handlers.unary(PING, handler)
    reply = await one.caller.call(two.contact, PING, request, timeout_s=3)

Use it inside `run_virtual`. A peer has `identity`, `contact`, `caller`, `handlers`, `book`, `clock` and
`supervisor`; a service takes `peer.caller` and `peer.handlers` where it takes `Channels` and `Handlers` on a
real network, and `tests/conformance` holds both to the same behaviour. Messages are serialized, parsed again
and checked against the limits of their method, so that a message that a real network refuses is refused here,
too.

Errors are those of the real transport: NetworkError (crashed, no such peer), DeadlineExceeded (no answer:
lost, frozen, partitioned), PeerError (the handler refused). Any other exception of a handler reaches its
caller as PeerError("internal error") and is kept in `network.errors`: a scenario ends with `assert not
network.errors` and `await network.close()`.

Messages are delayed, reordered, lost and duplicated according to `LinkConfig`, which may be exchanged during
the simulation. Links are cut (`partition`, or `cut` in one direction only) and healed; peers crash, restart,
freeze, and have wrong clocks. Every message is counted and adds a line to `network.trace`. `network.digest`
covers all lines, those of one moment sorted, and is equal for equal seeds. Each peer has its own source of
random numbers, so that simultaneous events elsewhere change nothing.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from swarm.core.errors import NetworkError, PeerError, SwarmError
from swarm.core.ids import Address, Contact, PeerId
from swarm.net.peerbook import PeerBook
from swarm.net.rpc import Handlers
from swarm.runtime.supervise import Supervisor
from swarm.testing.caller import SimulatedCaller
from swarm.testing.chance import Chance
from swarm.testing.identities import SeededIdentity
from swarm.testing.uplink import Uplink
from swarm.testing.virtual_loop import VirtualClock

__all__ = ["Cut", "LinkConfig", "SimulatedNetwork", "SimulatedPeer"]

_TRACE_MAX = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkConfig:
    """Properties of all links. The default is a link without faults of about 20 ms one way. Loss, duplication
    and reordering apply to unary calls; like TCP, streams neither lose, repeat nor reorder messages.
    """

    delay_s: float = 0.02  # one way; 0: messages arrive at once, in order
    jitter: float = 0.25  # each message's delay is uniform in delay_s times 1 ± this
    loss: float = 0.0  # chance that a request or reply is lost: its caller gets no answer until its timeout
    # chance that a request or reply arrives twice: the handler runs twice, its first answer counts
    duplication: float = 0.0
    reorder: float = 0.0  # chance that a message is overtaken by others: it takes up to reorder_s longer
    reorder_s: float = 1.0
    bandwidth: float = 0.0  # bytes a second added to the delay by size; 0: no limit
    # a call to a crashed peer, or to an unused address, is refused at once (False) or gets no answer (True)
    dead_are_silent: bool = False


class Relayed(Protocol):
    """A call or a stream that goes through a relay."""

    def fail(self, error: SwarmError) -> None:
        """End, because the relay has died."""
        ...


@dataclass(slots=True, eq=False)
class SimulatedPeer:
    """One machine of the simulated network."""

    network: SimulatedNetwork
    index: int
    identity: SeededIdentity
    contact: Contact
    clock: VirtualClock
    book: PeerBook
    chance: Chance
    handlers: Handlers = field(default_factory=Handlers)
    supervisor: Supervisor = field(default_factory=Supervisor)
    up: bool = True  # False: crashed; calls to it fail at once
    # alive for the kernel, silent for its peers (SIGSTOP, a cut cable): calls to it wait for their timeout
    frozen: bool = False
    slowness: float = 1.0  # factor on the delay of all messages from and to it
    uplink: Uplink | None = None  # shared by all its messages; None: unlimited
    # calls of others in progress here, in order of arrival
    handling: dict[asyncio.Task[object], None] = field(default_factory=dict)
    messages_sent: int = 0
    bytes_sent: int = 0

    @property
    def peer_id(self) -> PeerId:
        return self.contact.peer_id

    @property
    def caller(self) -> SimulatedCaller:
        return SimulatedCaller(self)


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """A one-way cut: messages of `sources` do not reach `targets`; the other direction works."""

    sources: frozenset[int]  # by index
    targets: frozenset[int]


class SimulatedNetwork:
    """All peers and the links between them. All randomness comes from `seed`."""

    def __init__(self, seed: int, config: LinkConfig | None = None, *, disk: Path | None = None) -> None:
        """Create a network without peers. `disk` is a folder for the peer books, which then survive a
        restart.
        """
        self.config = config or LinkConfig()
        self.rng = Chance(seed, "network")
        self.seed = seed
        self.peers: dict[PeerId, SimulatedPeer] = {}
        self.errors: list[BaseException] = []
        self.trace: deque[str] = deque(maxlen=_TRACE_MAX)
        self._disk = disk
        self._digest = hashlib.blake2b(digest_size=16)
        self._moment_s = -1.0
        self._moment: list[str] = []  # lines of this moment, not in the digest yet
        self._sides: dict[PeerId, int] = {}
        self.relayed_calls: Counter[PeerId] = Counter()  # by caller
        self.relayed: dict[PeerId, dict[Relayed, None]] = {}  # what goes through each relay now
        self._cuts: list[Cut] = []

    def peer(
        self,
        *,
        dialable: bool = True,
        relays: Sequence[SimulatedPeer] = (),
        skew_s: float = 0.0,
        drift: float = 0.0,
        identity: SeededIdentity | None = None,
    ) -> SimulatedPeer:
        """Add a peer and return it.

        With `dialable=False` it has no address, so that other peers can call it through `relays` only, while
        these are up; its `contact` may be changed. `skew_s` and `drift` are the errors of its clock.
        `identity` is derived from the seed and the number of the peer unless it is given.
        """
        index = len(self.peers)
        identity = identity or SeededIdentity(f"{self.seed}/{index}")
        addresses = (
            (Address(f"10.{index >> 16 & 255}.{index >> 8 & 255}.{index & 255}", 4000),) if dialable else ()
        )
        clock = VirtualClock(skew_s, drift)
        through = tuple(one.contact for one in relays)
        contact = Contact(identity.peer_id, addresses, through)
        peer = SimulatedPeer(
            self,
            index,
            identity,
            contact,
            clock,
            self._book(index, contact, clock),
            Chance(self.seed, "peer", index),
        )
        self.peers[peer.peer_id] = peer
        return peer

    @property
    def keeps_books(self) -> bool:
        """Return whether peer books survive a restart."""
        return self._disk is not None

    def _book(self, index: int, contact: Contact, clock: VirtualClock) -> PeerBook:
        return PeerBook(
            contact.peer_id, clock.swarm_s, self._disk / f"peer-{index}.json" if self._disk else None
        )

    async def crash(self, peer: SimulatedPeer) -> None:
        """Kill the process of a peer: its background tasks end, its handlers are gone, and calls from it and
        to it fail, as does what goes through it as a relay. Its peer book is saved to `disk` first.
        """
        if not peer.up:
            return
        peer.up = False
        peer.book.save()
        self.note(peer, peer, "crash", "")
        for one in self.relayed.pop(peer.peer_id, ()):
            one.fail(NetworkError(f"relay {peer.peer_id.short} crashed in the simulation"))
        for task in peer.handling:
            task.cancel()
        await peer.supervisor.close()
        peer.handlers = Handlers()  # they hold all services of the process

    def restart(self, peer: SimulatedPeer) -> None:
        """Start the peer again with the same identity and address, and no memory but the peer book on `disk`.
        The scenario creates its services again.
        """
        peer.up, peer.handlers, peer.supervisor, peer.handling = True, Handlers(), Supervisor(), {}
        peer.clock.offset_s = 0.0
        peer.book = self._book(peer.index, peer.contact, peer.clock)
        self.note(peer, peer, "restart", "")

    async def close(self) -> None:
        """End the background tasks of all peers."""
        for peer in self.peers.values():
            for task in peer.handling:
                task.cancel()
            await peer.supervisor.close()

    def partition(self, *sides: Iterable[SimulatedPeer]) -> None:
        """Partition the network: peers reach only peers on their own side. Peers that are not named form one
        more side.
        """
        self._sides = {peer.peer_id: number for number, side in enumerate(sides, 1) for peer in side}

    def cut(self, sources: Iterable[SimulatedPeer], targets: Iterable[SimulatedPeer]) -> Cut:
        """Cut one direction: messages of `sources` silently do not reach `targets`. A call in either
        direction therefore times out, but a call by `targets` is handled. `heal(cut)` ends it.
        """
        made = Cut(frozenset(peer.index for peer in sources), frozenset(peer.index for peer in targets))
        self._cuts.append(made)
        return made

    def heal(self, cut: Cut | None = None) -> None:
        """End one cut, or without an argument the partition and all cuts."""
        if cut is None:
            self._sides, self._cuts = {}, []
        else:
            self._cuts = [other for other in self._cuts if other is not cut]

    @property
    def digest(self) -> str:
        """Return the digest of everything that happened so far; equal for equal seeds."""
        digest = self._digest.copy()
        digest.update("\n".join(sorted(self._moment)).encode())
        return digest.hexdigest()

    def note(self, source: SimulatedPeer, target: SimulatedPeer, what: str, outcome: str) -> None:
        """Add a line to the trace and to the digest."""
        now_s = asyncio.get_running_loop().time()
        line = f"{now_s:.6f} {source.index}->{target.index} {what} {outcome}"
        self.trace.append(line)
        if now_s != self._moment_s:
            if len(self._moment) > 1:
                self._moment.sort()
            self._digest.update("\n".join(self._moment).encode())
            self._moment.clear()
            self._moment_s = now_s
        self._moment.append(line)

    def delay_s(self, source: SimulatedPeer, target: SimulatedPeer, size_bytes: int) -> float:
        """Draw the delay of a message of `size_bytes`, in virtual seconds."""
        config = self.config
        spread = 1.0 + config.jitter * (2.0 * source.chance.random() - 1.0)
        slowness = max(source.slowness, target.slowness)
        return slowness * (
            config.delay_s * spread + (size_bytes / config.bandwidth if config.bandwidth else 0.0)
        )

    def silent_between(self, source: SimulatedPeer, target: SimulatedPeer) -> bool:
        """Return whether messages of `source` are silently lost on their way to `target`."""
        if source.frozen or target.frozen:
            return True
        if self._sides and self._sides.get(source.peer_id, 0) != self._sides.get(target.peer_id, 0):
            return True
        return any(source.index in cut.sources and target.index in cut.targets for cut in self._cuts)

    def send(
        self,
        source: SimulatedPeer,
        target: SimulatedPeer,
        what: str,
        size_bytes: int,
        arrive: Callable[[NetworkError | None], None],
    ) -> None:
        """Send a message. `arrive` is called with None on arrival, twice when the message is duplicated,
        never when it is lost, and with an error when the target or the sender is down.
        """
        config, random = self.config, source.chance.random
        source.messages_sent += 1
        source.bytes_sent += size_bytes
        delay_s = self.delay_s(source, target, size_bytes)
        if config.loss and random() < config.loss:
            arrive = _nothing
        if config.reorder and random() < config.reorder:
            delay_s += config.reorder_s * random()
        loop = asyncio.get_running_loop()
        if config.duplication and random() < config.duplication:
            again_s = delay_s + max(config.delay_s, 0.001) * 4.0 * random()
            loop.call_later(again_s, self._arrived, source, target, what, size_bytes, arrive)
        arrived = functools.partial(self._arrived, source, target, what, size_bytes, arrive)
        if source.uplink is not None:
            source.uplink.push(object(), size_bytes, functools.partial(loop.call_later, delay_s, arrived))
        elif delay_s:
            loop.call_later(delay_s, arrived)
        else:
            arrived()

    def _arrived(
        self,
        source: SimulatedPeer,
        target: SimulatedPeer,
        what: str,
        size_bytes: int,
        arrive: Callable[[NetworkError | None], None],
    ) -> None:
        if not source.up or not target.up:
            self.note(source, target, what, "down")
            if not (source.up and self.config.dead_are_silent):
                down = target if source.up else source
                arrive(NetworkError(f"peer {down.peer_id} cannot be reached: crashed in the simulation"))
        elif arrive is _nothing or self.silent_between(source, target):
            self.note(source, target, what, "lost")
        else:
            self.note(source, target, what, str(size_bytes))
            arrive(None)

    async def travel(self, source: SimulatedPeer, target: SimulatedPeer, what: str, size_bytes: int) -> None:
        """Send a message and wait for its arrival, forever when it is lost. Raise NetworkError when a peer
        is down.
        """
        arrived: asyncio.Future[NetworkError | None] = asyncio.get_running_loop().create_future()
        self.send(
            source,
            target,
            what,
            size_bytes,
            lambda error: None if arrived.done() else arrived.set_result(error),
        )
        error = await arrived
        if error is not None:
            raise error

    def outcome(self, target: SimulatedPeer, what: str, error: BaseException | None) -> SwarmError | None:
        """Return the error that the caller gets when the handler of `target` ends with `error`. Unexpected
        exceptions are kept in `errors`.
        """
        if error is None:
            return None
        if isinstance(error, asyncio.CancelledError):
            return NetworkError(f"peer {target.peer_id} broke off {what}")
        # PeerError or UsageError
        if isinstance(error, PeerError | ValueError) and isinstance(error, SwarmError):
            return PeerError(f"peer {target.peer_id} refused {what}: {error}")
        if isinstance(error, SwarmError):
            return NetworkError(f"peer {target.peer_id} broke off {what}: {error}")
        self.errors.append(error)
        return PeerError(f"peer {target.peer_id} refused {what}: internal error")


def _nothing(error: NetworkError | None) -> None:
    """Receive messages that are lost."""
