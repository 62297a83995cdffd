"""Cuts between real nodes of one process: calls and streams between chosen peers fail for as long as a cut
lasts, in one direction or in both.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

from swarm.core.errors import NetworkError
from swarm.core.ids import Contact, PeerId
from swarm.net.rpc import Stream
from swarm.node import Node

T = TypeVar("T")

_POLL_S = 0.02  # delay until a call in progress notices a cut


class Cuts:
    """The cuts between some nodes. Make it before the nodes call one another."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._cut: frozenset[tuple[PeerId, PeerId]] = frozenset()
        for node in nodes:
            self._wrap(node)

    def cut(self, senders: Iterable[Node], receivers: Iterable[Node], *, both_ways: bool = True) -> None:
        """Let every call and stream that `senders` open to `receivers` fail, and with `both_ways` the
        opposite ones, too.
        """
        senders, receivers = list(senders), list(receivers)
        pairs = {(one.peer_id, other.peer_id) for one in senders for other in receivers}
        if both_ways:
            pairs |= {(other, one) for one, other in pairs}
        self._cut |= pairs

    def heal(self) -> None:
        """End all cuts."""
        self._cut = frozenset()

    def _wrap(self, node: Node) -> None:
        channels: Any = node.channels
        own, call, open_stream = node.peer_id, channels.call, channels.open_stream

        async def guarded_call(contact: Contact, *args: Any, **options: Any) -> Any:
            return await self._guard(own, contact.peer_id, lambda: call(contact, *args, **options))

        @contextlib.asynccontextmanager
        async def guarded_stream(contact: Contact, *args: Any, **options: Any) -> AsyncIterator[Stream]:
            self._check(own, contact.peer_id)
            opened: AbstractAsyncContextManager[Stream] = open_stream(contact, *args, **options)
            async with opened as stream:
                yield _CutStream(stream, self, own, contact.peer_id)

        channels.call, channels.open_stream = guarded_call, guarded_stream

    def _check(self, one: PeerId, other: PeerId) -> None:
        if (one, other) in self._cut:
            raise NetworkError(f"peer {other} is cut off")

    async def _guard(self, one: PeerId, other: PeerId, work: Callable[[], Awaitable[T]]) -> T:
        """Run `work`; fail if there is a cut, or if one begins before the work is done."""
        self._check(one, other)
        try:
            async with asyncio.TaskGroup() as tasks:
                watching = tasks.create_task(self._watch(one, other))
                result = await work()
                watching.cancel()
        except BaseExceptionGroup as failures:  # the group contains the failure of the work, or the cut
            raise failures.exceptions[0] from None
        self._check(one, other)
        return result

    async def _watch(self, one: PeerId, other: PeerId) -> None:
        while True:
            await asyncio.sleep(_POLL_S)
            self._check(one, other)


class _CutStream:
    """A stream that fails while its peers are cut off."""

    def __init__(self, stream: Stream, cuts: Cuts, own: PeerId, other: PeerId) -> None:
        self._stream, self._cuts, self._own, self._other = stream, cuts, own, other

    @property
    def peer_id(self) -> PeerId:
        return self._stream.peer_id

    async def send(self, message: bytes) -> None:
        await self._cuts._guard(self._own, self._other, lambda: self._stream.send(message))

    async def receive(self) -> bytes | None:
        return await self._cuts._guard(self._own, self._other, self._stream.receive)

    async def receive_into(self, buffer: memoryview) -> int | None:
        return await self._cuts._guard(self._own, self._other, lambda: self._stream.receive_into(buffer))

    async def finish(self) -> None:
        await self._stream.finish()

    def cancel(self) -> None:
        self._stream.cancel()
