"""A simulated network: real services, real protobuf messages, no sockets; delay, loss, crashes and partitions from one seed.

    network = SimulatedNetwork(seed=7)
    one, two = network.peer(), network.peer()          # each has .identity .contact .caller .handlers .book .clock .supervisor
    two.handlers.unary(PING, handler)
    reply = await one.caller.call(two.contact, PING, request, timeout_s=3)

Use it inside `run_virtual`. A service takes `peer.caller` and `peer.handlers` where it takes `Channels` and `Handlers` on a real
network. What travels is serialized and parsed again, and held to the method's limits, so that a message that could not be sent in
earnest cannot be sent here. Errors are those of the real transport: NetworkError (crashed, nobody there), DeadlineExceeded (silence:
lost, frozen, cut off), PeerError (the handler refused). What a handler raises beside that reaches its caller as PeerError("internal
error") and is kept in `network.errors`: a scenario ends with `assert not network.errors`, and with `await network.close()`. Every
message is counted, and adds a line to `network.trace`, whose digest is the same for the same seed.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import random
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from swarm.errors import DeadlineExceeded, NetworkError, PeerError, SwarmError, UsageError
from swarm.ids import Address, Contact, PeerId
from swarm.net.rpc import Handlers, Method, ReplyT, RequestT, Stream, StreamHandler, StreamMethod, UnaryHandler
from swarm.peerbook import PeerBook
from swarm.runtime.supervise import Supervisor
from swarm.testing.identities import SeededIdentity
from swarm.testing.streams import SimulatedStream, stream_pair
from swarm.testing.virtual_loop import VirtualClock

T = TypeVar("T")

_TRACE_MAX = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkConfig:
    """How messages travel. The default is a quiet link of about 20 ms one way."""

    delay_s: float = 0.02  # one way; 0: messages arrive at once, in order
    jitter: float = 0.25  # each message's delay is delay_s times 1 ± this, evenly
    loss: float = (
        0.0  # chance that a unary request or reply is lost: its caller hears nothing until its timeout (streams lose nothing, as TCP)
    )
    bandwidth: float = 0.0  # bytes a second added to the delay by size; 0: no limit


@dataclass(slots=True, eq=False)
class SimulatedPeer:
    """One machine of the simulated network."""

    network: SimulatedNetwork
    index: int
    identity: SeededIdentity
    contact: Contact
    clock: VirtualClock
    book: PeerBook
    handlers: Handlers = field(default_factory=Handlers)
    supervisor: Supervisor = field(default_factory=Supervisor)
    up: bool = True  # False: crashed; calls to it fail at once
    frozen: bool = False  # alive for the kernel, silent for its peers (SIGSTOP, a cut cable): calls to it wait for their timeout
    slowness: float = 1.0  # everything it sends and is sent takes that many times as long
    messages_sent: int = 0
    bytes_sent: int = 0

    @property
    def peer_id(self) -> PeerId:
        return self.contact.peer_id

    @property
    def caller(self) -> SimulatedCaller:
        return SimulatedCaller(self)


class SimulatedNetwork:
    """All peers and what lies between them. Everything random comes from `seed`."""

    def __init__(self, seed: int, config: LinkConfig | None = None) -> None:
        self.config = config or LinkConfig()
        self.rng = random.Random(seed)
        self.seed = seed
        self.peers: dict[PeerId, SimulatedPeer] = {}
        self.errors: list[BaseException] = []
        self.trace: deque[str] = deque(maxlen=_TRACE_MAX)
        self._digest = hashlib.blake2b(digest_size=16)
        self._sides: dict[PeerId, int] = {}
        self._cuts: set[tuple[PeerId, PeerId]] = set()

    def peer(self, *, dialable: bool = True, skew_s: float = 0.0) -> SimulatedPeer:
        """Add a peer. `dialable=False`: it has no address, so that nobody can call it. `skew_s`: how wrong its clock is."""
        index = len(self.peers)
        identity = SeededIdentity(f"{self.seed}/{index}")
        addresses = (Address(f"10.{index >> 16 & 255}.{index >> 8 & 255}.{index & 255}", 4000),) if dialable else ()
        clock = VirtualClock(skew_s)
        book = PeerBook(identity.peer_id, clock.swarm_s)
        peer = SimulatedPeer(self, index, identity, Contact(identity.peer_id, addresses), clock, book)
        self.peers[peer.peer_id] = peer
        return peer

    async def crash(self, peer: SimulatedPeer) -> None:
        """The process dies: its background tasks end, its handlers are gone, its calls and the calls to it fail."""
        peer.up = False
        self.note(peer, peer, "crash", "")
        await peer.supervisor.close()

    def restart(self, peer: SimulatedPeer) -> None:
        """The same identity and address, with nothing remembered: the scenario makes the peer's services again."""
        peer.up, peer.handlers, peer.supervisor = True, Handlers(), Supervisor()
        peer.book = PeerBook(peer.peer_id, peer.clock.swarm_s)
        self.note(peer, peer, "restart", "")

    async def close(self) -> None:
        """End every peer's background tasks."""
        for peer in self.peers.values():
            await peer.supervisor.close()

    def partition(self, *sides: Iterable[SimulatedPeer]) -> None:
        """Cut the network: peers hear only their own side. Those not named form one more side."""
        self._sides = {peer.peer_id: number for number, side in enumerate(sides, 1) for peer in side}

    def cut(self, source: SimulatedPeer, target: SimulatedPeer) -> None:
        """Nothing that `source` sends reaches `target` any more; the other way is as it was."""
        self._cuts.add((source.peer_id, target.peer_id))

    def heal(self) -> None:
        self._sides = {}
        self._cuts = set()

    @property
    def digest(self) -> str:
        """Of everything that happened so far: equal for equal seeds."""
        return self._digest.hexdigest()

    def note(self, source: SimulatedPeer, target: SimulatedPeer, what: str, outcome: str) -> None:
        line = f"{asyncio.get_running_loop().time():.6f} {source.index}->{target.index} {what} {outcome}"
        self.trace.append(line)
        self._digest.update(line.encode())

    def delay_s(self, size_bytes: int, slowness: float = 1.0) -> float:
        config = self.config
        spread = 1.0 + config.jitter * (2.0 * self.rng.random() - 1.0)
        return slowness * (config.delay_s * spread + (size_bytes / config.bandwidth if config.bandwidth else 0.0))

    def silent_between(self, source: SimulatedPeer, target: SimulatedPeer) -> bool:
        """Whether nothing that `source` sends reaches `target`, and nobody says so."""
        apart = self._sides.get(source.peer_id, 0) != self._sides.get(target.peer_id, 0)
        return source.frozen or target.frozen or apart or (source.peer_id, target.peer_id) in self._cuts

    async def travel(self, source: SimulatedPeer, target: SimulatedPeer, what: str, size_bytes: int) -> None:
        """Let a message travel. Waits for ever when it is lost; NetworkError when nobody is there any more."""
        source.messages_sent += 1
        source.bytes_sent += size_bytes
        lost = self.rng.random() < self.config.loss
        delay_s = self.delay_s(size_bytes, max(source.slowness, target.slowness))
        if delay_s:
            await asyncio.sleep(delay_s)
        if not source.up or not target.up:
            self.note(source, target, what, "down")
            down = target if source.up else source
            raise NetworkError(f"peer {down.peer_id.short} cannot be reached: crashed in the simulation")
        if lost or self.silent_between(source, target):
            self.note(source, target, what, "lost")
            await asyncio.get_running_loop().create_future()
        self.note(source, target, what, str(size_bytes))

    async def handle(self, target: SimulatedPeer, what: str, work: Awaitable[T]) -> tuple[T | None, SwarmError | None]:
        """Run a handler: what it returned, or the error that its caller gets. Ends with the caller, as a handler of gRPC does."""
        task = asyncio.get_running_loop().create_task(_awaited(work))
        try:
            await asyncio.wait({task})
        finally:
            task.cancel()
            task.add_done_callback(_seen)  # what it raises once nobody waits is of no interest
        if task.cancelled():
            return None, NetworkError(f"peer {target.peer_id.short} broke off {what}")
        error = task.exception()
        if error is None:
            return task.result(), None
        if isinstance(error, PeerError | UsageError):
            return None, self.refusal(target, what, str(error))
        if isinstance(error, SwarmError):
            return None, NetworkError(f"peer {target.peer_id.short} broke off {what}: {error}")
        self.errors.append(error)
        return None, self.refusal(target, what, "internal error")

    def refusal(self, target: SimulatedPeer, what: str, reason: str) -> PeerError:
        return PeerError(f"peer {target.peer_id.short} refused {what}: {reason}")


def _checked(payload: bytes, size_max: int, what: str) -> bytes:
    if len(payload) > size_max:
        raise UsageError(f"{what} has {len(payload)} bytes, more than the {size_max} allowed")
    return payload


class SimulatedCaller:
    """A simulated peer's client side: the interface of `swarm.net.channels.Channels`."""

    def __init__(self, own: SimulatedPeer) -> None:
        self._own = own

    async def call(self, contact: Contact, method: Method[RequestT, ReplyT], request: RequestT, *, timeout_s: float) -> ReplyT:
        try:
            async with asyncio.timeout(timeout_s) as timeout:
                return await self._call(contact, method, request)
        except TimeoutError as error:
            if not timeout.expired():
                raise
            raise DeadlineExceeded(f"peer {contact.peer_id.short} did not answer {method.name} within {timeout_s:g} s") from error

    async def _call(self, contact: Contact, method: Method[RequestT, ReplyT], request: RequestT) -> ReplyT:
        own, network = self._own, self._own.network
        target = self._reach(contact)
        payload = _checked(request.SerializeToString(), method.request_bytes_max, f"a request of {method.name}")
        await network.travel(own, target, method.name, len(payload))
        answer: bytes = b""
        failure: SwarmError | None = network.refusal(target, method.name, f"{method.name} is not offered")
        found = target.handlers.find(method.name)
        if isinstance(found, UnaryHandler):
            reply, failure = await network.handle(target, method.name, found.function(own.peer_id, method.request.FromString(payload)))
            if reply is not None:
                answer = _checked(reply.SerializeToString(), method.reply_bytes_max, f"a reply of {method.name}")
        await network.travel(target, own, method.name, len(answer))
        if failure is not None:
            raise failure
        return method.reply.FromString(answer)

    def _reach(self, contact: Contact) -> SimulatedPeer:
        target = self._own.network.peers.get(contact.peer_id)
        if target is None or contact.addresses != target.contact.addresses or not contact.addresses:
            raise NetworkError(f"peer {contact.peer_id.short} cannot be reached: nobody of that name listens there")
        return target

    @asynccontextmanager
    async def open_stream(
        self, contact: Contact, method: StreamMethod, *, timeout_s: float | None, lane: int = 0
    ) -> AsyncIterator[SimulatedStream]:
        """A stream to the peer's handler; leaving the context cancels what is unfinished. `timeout_s` bounds its whole life; lanes
        share a link.
        """
        target = self._reach(contact)
        try:
            async with asyncio.timeout(timeout_s) as timeout:
                await self._own.network.travel(self._own, target, method.name, 0)
                found = target.handlers.find(method.name)
                if not isinstance(found, StreamHandler):
                    raise self._own.network.refusal(target, method.name, f"{method.name} is not offered")
                near, far = stream_pair(self._own, target, method)
                task = target.supervisor.spawn(method.name, functools.partial(self._serve, found.function, far))
                try:
                    yield near
                finally:
                    near.cancel()
                    task.cancel()
        except TimeoutError as error:
            if not timeout.expired():
                raise
            raise DeadlineExceeded(
                f"the stream {method.name} with peer {contact.peer_id.short} did not end within {timeout_s} s"
            ) from error

    async def _serve(self, handler: Callable[[Stream], Awaitable[None]], stream: SimulatedStream) -> None:
        _, failure = await self._own.network.handle(stream.own, stream.method.name, handler(stream))
        if failure is not None:
            stream.fail(failure)
        else:
            await stream.finish()


def _seen(task: asyncio.Task[T]) -> None:
    if not task.cancelled():
        task.exception()


async def _awaited(work: Awaitable[T]) -> T:
    return await work
