"""Fetching the state from those who have it: several donors at once, every chunk checked, what was received kept when a donor fails.

What most donors hold is taken, of the highest epoch that the swarm is known to have reached. The digest commits to every chunk, so that a
donor that sends something else is found out at that chunk, by name, and the others go on.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field
from typing import Protocol

from averaging.training.runexchange import CHUNKS, CLOSE, OPEN, unpack_chunk
from averaging.training.snapshot import CHUNK_BYTES, chunk_digest, snapshot_digest
from swarm.errors import DeadlineExceeded, NetworkError, NotEnoughPeers, PeerError, SwarmError
from swarm.ids import Contact, PeerId
from swarm.net.rpc import Caller, Stream, StreamMethod
from swarm.wire import state_pb2

_log = logging.getLogger(__name__)

_LANE = 7  # a connection of its own: a download must not hold up rounds and heartbeats
_EPOCH_AHEAD_MAX = 2  # donors may be this far ahead of what the swarm was last known to have reached
_DIGEST_BYTES = 32


class StreamCaller(Caller, Protocol):
    """Unary calls and streams: `swarm.net.channels.Channels`."""

    def open_stream(
        self, contact: Contact, method: StreamMethod, *, timeout_s: float | None, lane: int = 0
    ) -> AbstractAsyncContextManager[Stream]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DownloadConfig:
    """How a download goes about it."""

    donors_max: int = 5  # asked for the state, and downloaded from if they hold the same
    open_timeout_s: float = 60.0  # the donor copies and hashes its state meanwhile
    # a donor that sends nothing for so long is given up; small enough to try the next, large enough for 50 kB/s
    chunk_timeout_s: float = 20.0
    batch: int = 8  # chunks asked for ahead, per donor: covers 1 MiB/s at 8 s of delay


@dataclass(slots=True)
class Fetched:
    """A complete, verified snapshot. `failures`: who did not do their part, and why."""

    epoch: int
    canonical: bool
    digest: bytes
    blob: bytearray
    donors: dict[PeerId, int]  # bytes that each gave
    failures: dict[PeerId, str]


@dataclass(frozen=True, slots=True)
class _Offer:
    contact: Contact
    lease: bytes
    epoch: int
    canonical: bool
    total_bytes: int
    chunk_digests: tuple[bytes, ...]
    digest: bytes


@dataclass(slots=True)
class Download:
    """One attempt at getting the state of a run."""

    run: str
    caller: StreamCaller
    bytes_max: int  # no snapshot that fits our optimizer is larger
    epoch_min: int
    epoch_known: int  # what the swarm is known to have reached
    config: DownloadConfig
    failures: dict[PeerId, str] = field(default_factory=dict)
    on_progress: Callable[[int, int], None] | None = None  # bytes so far, of how many
    epoch: int | None = None  # of the state that is being downloaded, once that is known

    async def fetch(self, donors: Sequence[Contact], timeout_s: float) -> Fetched:
        """NotEnoughPeers when no donor could serve; DeadlineExceeded; both say who was asked and what each answered."""
        offers: list[_Offer] = []
        try:
            async with asyncio.timeout(timeout_s):
                offers += await self._open_all(donors)
                for candidates in self._by_preference(offers):
                    fetched = await self._fetch_from(candidates)
                    if fetched is not None:
                        return fetched
        except TimeoutError:
            raise DeadlineExceeded(f"the state was not downloaded within {timeout_s:g} s{self._reasons()}") from None
        finally:
            await self._close_all(offers)
        raise NotEnoughPeers(f"no peer could give the state of run {self.run}{self._reasons()}")

    def _reasons(self) -> str:
        told = "; ".join(f"{peer}: {reason}" for peer, reason in itertools.islice(self.failures.items(), 8))
        return f" ({told})" if told else " (nobody declares that it has it)"

    async def _open_all(self, donors: Sequence[Contact]) -> list[_Offer]:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._open(contact)) for contact in donors[: self.config.donors_max]]
        return [offer for offer in (task.result() for task in tasks) if offer is not None]

    async def _open(self, contact: Contact) -> _Offer | None:
        request = state_pb2.OpenRequest(run=self.run, epoch_min=self.epoch_min)
        try:
            reply = await self.caller.call(contact, OPEN, request, timeout_s=self.config.open_timeout_s)
            return self._check_offer(contact, reply)
        except SwarmError as error:
            self.failures[contact.peer_id] = str(error)
            return None

    def _check_offer(self, contact: Contact, reply: state_pb2.OpenReply) -> _Offer:
        raw, chunks = reply.chunk_digests, -(-reply.total_bytes // CHUNK_BYTES)
        if not 0 < reply.total_bytes <= self.bytes_max:
            raise PeerError(f"offers a state of {reply.total_bytes} bytes; ours has at most {self.bytes_max}: another model or optimizer")
        if len(raw) != chunks * _DIGEST_BYTES or len(reply.lease) > 64:
            raise PeerError("offers a state with a wrong number of chunk digests")
        if not self.epoch_min <= reply.epoch <= self.epoch_known + _EPOCH_AHEAD_MAX:
            raise PeerError(f"offers epoch {reply.epoch}, while the swarm is known to be in epoch {self.epoch_known}")
        digests = tuple(raw[at : at + _DIGEST_BYTES] for at in range(0, len(raw), _DIGEST_BYTES))
        digest = snapshot_digest(reply.total_bytes, digests)
        return _Offer(contact, reply.lease, reply.epoch, reply.canonical, reply.total_bytes, digests, digest)

    def _by_preference(self, offers: Sequence[_Offer]) -> list[list[_Offer]]:
        """Offers of the same state together; the latest epoch first, of one epoch what most hold, then what came out of a round."""
        groups: dict[bytes, list[_Offer]] = {}
        for offer in offers:
            groups.setdefault(offer.digest, []).append(offer)
        return sorted(groups.values(), key=lambda g: (g[0].epoch, len(g), any(o.canonical for o in g), g[0].digest), reverse=True)

    async def _fetch_from(self, offers: Sequence[_Offer]) -> Fetched | None:
        """Download one state from all who hold it; None when they failed before it was complete."""
        first = offers[0]
        self.epoch = first.epoch
        blob = bytearray(first.total_bytes)
        missing = deque(range(len(first.chunk_digests)))
        given: dict[PeerId, int] = {}
        live = [offer for offer in offers if offer.contact.peer_id not in self.failures]
        while missing and live:  # once more for the chunks that a donor did not deliver, with those who did
            batch = max(1, min(self.config.batch, len(missing) // (2 * len(live))))  # so that no donor takes what others could give
            async with asyncio.TaskGroup() as group:
                for offer in live:
                    group.create_task(self._take(offer, blob, missing, given, batch))
            live = [offer for offer in live if offer.contact.peer_id not in self.failures]
        if missing:
            return None
        return Fetched(first.epoch, any(o.canonical for o in offers), first.digest, blob, given, dict(self.failures))

    async def _take(self, offer: _Offer, blob: bytearray, missing: deque[int], given: dict[PeerId, int], ahead: int) -> None:
        """Take chunks off the queue and fetch them from one donor until none is left; what it fails to give goes back."""
        asked: deque[int] = deque()
        peer = offer.contact.peer_id
        try:
            async with AsyncExitStack() as stack:
                stream = await self._opened(stack, offer)
                while asked or missing:
                    batch = [missing.popleft() for _ in range(min(len(missing), ahead - len(asked)))]
                    if batch:
                        asked.extend(batch)
                        request = state_pb2.ChunksRequest(run=self.run, lease=offer.lease, indices=batch)
                        await stream.send(request.SerializeToString())
                    given[peer] = given.get(peer, 0) + await self._receive(stream, offer, asked, blob)
                    if self.on_progress is not None:
                        self.on_progress(sum(given.values()), len(blob))
                await stream.finish()
        except (PeerError, NetworkError) as error:
            self.failures[peer] = str(error)
            _log.warning("peer %s failed as a donor of run %s: %s", peer, self.run, error)
        finally:
            missing.extend(asked)

    async def _opened(self, stack: AsyncExitStack, offer: _Offer) -> Stream:
        try:
            async with asyncio.timeout(self.config.chunk_timeout_s):
                return await stack.enter_async_context(self.caller.open_stream(offer.contact, CHUNKS, timeout_s=None, lane=_LANE))
        except TimeoutError:
            raise DeadlineExceeded(f"did not answer for {self.config.chunk_timeout_s:g} s") from None

    async def _receive(self, stream: Stream, offer: _Offer, asked: deque[int], blob: bytearray) -> int:
        """The next chunk, into its place; returns its length."""
        try:
            async with asyncio.timeout(self.config.chunk_timeout_s):
                message = await stream.receive()
        except TimeoutError:
            raise DeadlineExceeded(f"sent nothing for {self.config.chunk_timeout_s:g} s") from None
        if message is None:
            raise PeerError("stopped before it had sent what was asked for")
        index, payload = unpack_chunk(message)
        if index != asked[0]:
            raise PeerError(f"sent chunk {index} where {asked[0]} was asked for")
        start = index * CHUNK_BYTES
        if len(payload) != min(CHUNK_BYTES, len(blob) - start) or chunk_digest(payload) != offer.chunk_digests[index]:
            raise PeerError(f"sent a chunk {index} whose digest is not what it had declared: it lies, or its memory is broken")
        blob[start : start + len(payload)] = payload
        asked.popleft()
        return len(payload)

    async def _close_all(self, offers: Sequence[_Offer]) -> None:
        async with asyncio.TaskGroup() as group:
            for offer in offers:
                group.create_task(self._close(offer))

    async def _close(self, offer: _Offer) -> None:
        try:
            await self.caller.call(offer.contact, CLOSE, state_pb2.CloseRequest(run=self.run, lease=offer.lease), timeout_s=1.0)
        except SwarmError as error:
            _log.debug("peer %s was not told that the download is over: %s", offer.contact.peer_id, error)
