"""The client side of a simulated peer: unary calls and streams to the handlers of other peers."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any

from google.protobuf.message import Message

from swarm.core.errors import DeadlineExceeded, NetworkError, PeerError, SwarmError, UsageError
from swarm.core.ids import Contact, PeerId
from swarm.net.rpc import Method, ReplyT, RequestT, Stream, StreamHandler, StreamMethod, UnaryHandler
from swarm.testing.streams import SimulatedStream, stream_pair

if TYPE_CHECKING:
    from swarm.testing.network import Relayed, SimulatedPeer


class _Exchange:
    """One unary call: a request, perhaps delivered twice, a task of the handler for each delivery, and the
    first answer back.
    """

    __slots__ = ("_handlers", "_method", "_own", "_request", "_target", "answered")

    def __init__(
        self, own: SimulatedPeer, target: SimulatedPeer, method: Method[Any, Any], request: bytes
    ) -> None:
        self._own = own
        self._target = target
        self._method = method
        self._request = request
        self._handlers: list[asyncio.Task[Any]] = []
        self.answered: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def begin(self) -> None:
        self._own.network.send(self._own, self._target, self._method.name, len(self._request), self._arrived)

    def close(self) -> None:
        """Cancel running handlers, because the caller has its answer or has stopped waiting; gRPC does the
        same.
        """
        for task in self._handlers:
            if not task.done():
                task.cancel()

    def fail(self, error: SwarmError) -> None:
        if not self.answered.done():
            self.answered.set_exception(error)

    def _arrived(self, unreachable: NetworkError | None) -> None:
        target, method = self._target, self._method
        if unreachable is not None:
            return self.fail(unreachable)
        if self.answered.cancelled():
            return None  # the caller stopped waiting before it arrived
        handler = target.handlers.find(method.name)
        if not isinstance(handler, UnaryHandler):
            text = (
                f"peer {target.peer_id} does not serve {method.name}:"
                " it runs another version, or not this service"
            )
            return self._reply(b"", PeerError(text))
        work = handler.function(self._own.peer_id, method.request.FromString(self._request))
        task = asyncio.get_running_loop().create_task(_coroutine(work))
        self._handlers.append(task)
        target.handling[task] = None
        task.add_done_callback(self._handled)
        return None

    def _handled(self, task: asyncio.Task[Message]) -> None:
        target, method = self._target, self._method
        target.handling.pop(task, None)
        if task.cancelled():
            error: BaseException | None = asyncio.CancelledError()
        else:
            error = task.exception()
        payload = b""
        if error is None:
            payload = task.result().SerializeToString()
            if len(payload) > method.reply_bytes_max:
                error = RuntimeError(
                    f"the reply has {len(payload)} bytes, more than {method.name} allows"
                    f" ({method.reply_bytes_max})"
                )
                payload = b""
        failure = target.network.outcome(target, method.name, error)
        if not self.answered.cancelled():
            self._reply(payload, failure)

    def _reply(self, payload: bytes, failure: SwarmError | None) -> None:
        def arrived(unreachable: NetworkError | None) -> None:
            if self.answered.done():
                return
            if unreachable is not None or failure is not None:
                self.answered.set_exception(unreachable or failure)  # type: ignore[arg-type]
            else:
                self.answered.set_result(payload)

        self._own.network.send(self._target, self._own, self._method.name, len(payload), arrived)


class SimulatedCaller:
    """A simulated peer's client side: the interface of `swarm.net.channels.Channels`."""

    def __init__(self, own: SimulatedPeer) -> None:
        self._own = own

    async def call(
        self, contact: Contact, method: Method[RequestT, ReplyT], request: RequestT, *, timeout_s: float
    ) -> ReplyT:
        """Perform one unary call, with the errors of the real transport."""
        payload = request.SerializeToString()
        if len(payload) > method.request_bytes_max:
            raise UsageError(
                f"{method.name} takes requests of at most {method.request_bytes_max} bytes;"
                f" this one has {len(payload)}"
            )
        target, relay = self._reach(contact)
        if target is None:
            await asyncio.sleep(timeout_s)
            raise DeadlineExceeded(
                f"peer {contact.peer_id} did not answer {method.name} within {timeout_s:.3g} s"
            )
        exchange = _Exchange(self._own, target, method, payload)
        timer = asyncio.get_running_loop().call_later(
            timeout_s, _expire, exchange, contact, method.name, timeout_s
        )
        exchange.begin()
        try:
            with self._relayed(relay, exchange):
                answer = await exchange.answered
        finally:
            timer.cancel()
            exchange.close()
        return method.reply.FromString(answer)

    @contextmanager
    def _relayed(self, relay: PeerId | None, through: Relayed) -> Iterator[None]:
        """End this call or stream when its relay fails."""
        if relay is None:
            yield
            return
        ways = self._own.network.relayed.setdefault(relay, {})
        ways[through] = None
        try:
            yield
        finally:
            ways.pop(through, None)

    def _reach(self, contact: Contact) -> tuple[SimulatedPeer | None, PeerId | None]:
        """Return the peer that listens at the contact, and the relay of the connection, if any. The peer is
        None if none listens there and its machine does not answer. Raise NetworkError if the machine refuses
        the connection.
        """
        if contact.peer_id == self._own.peer_id:
            raise UsageError("a peer does not call itself")
        network = self._own.network
        target = network.peers.get(contact.peer_id)
        if target is not None and any(address in target.contact.addresses for address in contact.addresses):
            return target, None
        reserved = target.contact.relays if target is not None else ()
        for relay in contact.relays:
            if relay in reserved and network.peers[relay.peer_id].up:
                network.relayed_calls[self._own.peer_id] += 1
                return target, relay.peer_id
        if contact.addresses and network.config.dead_are_silent:
            return None, None
        raise NetworkError(f"peer {contact.peer_id} cannot be reached: it does not listen there")

    @asynccontextmanager
    async def open_stream(
        self, contact: Contact, method: StreamMethod, *, timeout_s: float | None, connection: int = 0
    ) -> AsyncIterator[SimulatedStream]:
        """Open a stream to the peer's handler; leaving the context cancels whatever is unfinished.
        `timeout_s` bounds its whole life; `connection` has no effect.
        """
        try:
            async with asyncio.timeout(timeout_s) as timeout:
                target, relay = self._reach(contact)
                if target is None:
                    await asyncio.get_running_loop().create_future()
                assert target is not None
                await self._own.network.travel(self._own, target, method.name, 0)
                found = target.handlers.find(method.name)
                if not isinstance(found, StreamHandler):
                    text = (
                        f"peer {target.peer_id} does not serve {method.name}:"
                        " it runs another version, or not this service"
                    )
                    raise PeerError(text)
                near, far = stream_pair(self._own, target, method)
                task = target.supervisor.spawn(
                    method.name, functools.partial(self._serve, found.function, far)
                )
                try:
                    with self._relayed(relay, near):
                        yield near
                finally:
                    near.cancel()
                    task.cancel()
        except TimeoutError as error:
            if not timeout.expired():
                raise
            raise DeadlineExceeded(
                f"the stream {method.name} with peer {contact.peer_id} did not end within {timeout_s} s"
            ) from error

    async def _serve(self, handler: Callable[[Stream], Awaitable[None]], stream: SimulatedStream) -> None:
        task = asyncio.get_running_loop().create_task(_coroutine(handler(stream)))
        try:
            await asyncio.wait({task})
        finally:
            task.cancel()
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        failure = stream.own.network.outcome(stream.own, stream.method.name, error)
        if failure is not None:
            stream.fail(failure)
        else:
            stream.end()


def _expire(exchange: _Exchange, contact: Contact, name: str, timeout_s: float) -> None:
    exchange.fail(DeadlineExceeded(f"peer {contact.peer_id} did not answer {name} within {timeout_s:.3g} s"))


def _coroutine(work: Awaitable[Any]) -> Coroutine[Any, Any, Any]:
    return work if asyncio.iscoroutine(work) else _awaited(work)


async def _awaited(work: Awaitable[Any]) -> Any:
    return await work
