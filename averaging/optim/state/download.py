"""Download of the state from several donors at once. Every chunk is verified, and received chunks are kept
when donors fail.

Of the highest epoch that the swarm is known to have reached, the state that most donors hold is taken. The
digest commits to every chunk, so that a donor that sends other data is identified at that chunk and the
rest go on; another donor takes its place. When all have failed, because of a cut cable for instance, the
same state is requested again for a while, and only missing chunks are fetched. Chunks of a failed download
are reused by the next one, where the two states have them in common.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from averaging.optim.exchange import CHUNKS, CLOSE, OPEN
from averaging.optim.state.intake import Intake, PartialState
from averaging.optim.state.snapshot import CHUNK_BYTES, Blob, snapshot_digest
from swarm.core.errors import DeadlineExceeded, NetworkError, NotEnoughPeers, PeerError, SwarmError
from swarm.core.ids import Contact, PeerId
from swarm.net.rpc import Caller, Stream, StreamMethod
from swarm.wire import state_pb2

_log = logging.getLogger(__name__)

_CONNECTION = 7  # a connection of its own: a download must not hold up rounds and heartbeats
_EPOCH_AHEAD_MAX = 2  # donors may be this far ahead of the epoch that the swarm is known to have reached
_DIGEST_BYTES = 32
_LATE_S_MIN = 0.05


class StreamCaller(Caller, Protocol):
    """Unary calls and streams, as `swarm.net.channels.Channels` has them."""

    def open_stream(
        self, contact: Contact, method: StreamMethod, *, timeout_s: float | None, connection: int = 0
    ) -> AbstractAsyncContextManager[Stream]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DownloadConfig:
    """Limits and times of a download."""

    donors_max: int = 5  # asked for the state, and downloaded from if they hold the same one
    open_timeout_s: float = 60.0  # includes the time in which the donor copies and hashes its state
    # a donor that sends nothing for this long has failed; small enough to try the next, large enough for 50
    # kB/s
    chunk_timeout_s: float = 20.0
    batch: int = 8  # chunks requested ahead, per donor: covers 1 MiB/s at 8 s of delay
    # after all donors of a state have failed, how long it is requested again. Useless beyond the time for
    # which donors keep an idle lease
    resume_s: float = 25.0
    resume_pause_s: ClassVar[float] = 0.5  # before the first retry; doubled with each
    reopen_timeout_s: ClassVar[float] = 3.0  # shorter, since nothing has to be hashed then


@dataclass(slots=True)
class DownloadedState:
    """A complete, verified snapshot. `failures`: the donors that failed, with the reason."""

    epoch: int
    canonical: bool
    digest: bytes
    blob: Blob
    donors: dict[PeerId, int]  # bytes from each donor
    failures: dict[PeerId, str]
    agreed: int = 1  # donors that offered this state


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
    """One attempt at downloading the state of a run."""

    run: str
    caller: StreamCaller
    bytes_max: int  # maximum size of a snapshot that fits this peer's optimizer
    epoch_min: int
    epoch_known: int  # the epoch that the swarm is known to have reached
    config: DownloadConfig
    failures: dict[PeerId, str] = field(default_factory=dict)  # donors that failed, with the reason
    liars: set[PeerId] = field(default_factory=set)  # of these, donors that sent data other than declared
    on_progress: Callable[[int, int], None] | None = None  # bytes so far and in total
    pool: Executor | None = None  # threads that check chunks; None: the event loop's own
    majority: bool = False  # accept only a state that most of the answering donors hold, of any epoch
    epoch: int | None = None  # of the state that is being downloaded, once it is known
    partial: PartialState | None = None  # what has arrived of it; at first that of an earlier download
    _received_bytes: int = 0

    @property
    def received_bytes(self) -> int:
        """Return the bytes of valid chunks that were not there before."""
        return self._received_bytes

    async def fetch(self, donors: Sequence[Contact], timeout_s: float) -> DownloadedState:
        """Download the state. Raise NotEnoughPeers when no donor could serve, and DeadlineExceeded after
        `timeout_s`; both messages list the donors and their failures.
        """
        offers: list[_Offer] = []
        try:
            async with asyncio.timeout(timeout_s):
                offers += await self._open_all(donors[: self.config.donors_max])
                for candidates in self._by_preference(offers):
                    if self.majority and 2 * len(candidates) <= len(offers):
                        continue
                    fetched = await self._fetch_from(candidates, donors, offers)
                    if fetched is not None:
                        return fetched
        except TimeoutError:
            raise DeadlineExceeded(
                f"the state was not downloaded within {timeout_s:g} s{self._reasons()}"
            ) from None
        finally:
            await self._close_all(offers)
        if self.majority and len(offers) > 1:
            raise NotEnoughPeers(
                f"the {len(offers)} donors that answered hold different states of run {self.run}"
                f"{self._reasons()}"
            )
        raise NotEnoughPeers(f"no peer could give the state of run {self.run}{self._reasons()}")

    def _reasons(self) -> str:
        shown = "; ".join(f"{peer}: {reason}" for peer, reason in itertools.islice(self.failures.items(), 8))
        return f" ({shown})" if shown else " (no peer declares that it has it)"

    async def _open_all(self, donors: Sequence[Contact], digest: bytes = b"") -> list[_Offer]:
        """Ask for the newest state, or for the one with this digest."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._open(contact, digest)) for contact in donors]
        return [offer for offer in (task.result() for task in tasks) if offer is not None]

    async def _open(self, contact: Contact, digest: bytes) -> _Offer | None:
        request = state_pb2.OpenRequest(run=self.run, epoch_min=self.epoch_min, digest=digest)
        try:
            timeout_s = self.config.reopen_timeout_s if digest else self.config.open_timeout_s
            reply = await self.caller.call(contact, OPEN, request, timeout_s=timeout_s)
            return self._check_offer(contact, reply)
        except SwarmError as error:
            self.failures[contact.peer_id] = str(error)
            return None

    def _check_offer(self, contact: Contact, reply: state_pb2.OpenReply) -> _Offer:
        raw, chunks = reply.chunk_digests, -(-reply.total_bytes // CHUNK_BYTES)
        if not 0 < reply.total_bytes <= self.bytes_max:
            raise PeerError(
                f"offers a state of {reply.total_bytes} bytes; ours has at most {self.bytes_max}: "
                "another model or optimizer"
            )
        if len(raw) != chunks * _DIGEST_BYTES or len(reply.lease) > 64:
            raise PeerError("offers a state with a wrong number of chunk digests")
        if not self.epoch_min <= reply.epoch <= self.epoch_known + _EPOCH_AHEAD_MAX:
            raise PeerError(
                f"offers epoch {reply.epoch}, while the swarm is known to be in epoch {self.epoch_known}"
            )
        digests = tuple(raw[at : at + _DIGEST_BYTES] for at in range(0, len(raw), _DIGEST_BYTES))
        digest = snapshot_digest(reply.total_bytes, digests)
        return _Offer(contact, reply.lease, reply.epoch, reply.canonical, reply.total_bytes, digests, digest)

    def _by_preference(self, offers: Sequence[_Offer]) -> list[list[_Offer]]:
        """Group offers of the same state. The latest epoch comes first, within an epoch the state that most
        donors hold, then a canonical one.
        """
        groups: dict[bytes, list[_Offer]] = {}
        for offer in offers:
            groups.setdefault(offer.digest, []).append(offer)
        return sorted(
            groups.values(),
            key=lambda g: (g[0].epoch, len(g), any(o.canonical for o in g), g[0].digest),
            reverse=True,
        )

    async def _fetch_from(
        self, candidates: list[_Offer], donors: Sequence[Contact], offers: list[_Offer]
    ) -> DownloadedState | None:
        """Download one state from all donors that hold it. Return None when they failed before it was
        complete, and retries failed for some time.

        Every lease that is opened is added to `offers`, so that it is closed in the end.
        """
        first = candidates[0]
        self.epoch = first.epoch
        partial = self.partial = PartialState.begin(first.chunk_digests, first.total_bytes, self.partial)
        known = {offer.contact.peer_id for offer in offers} | self.failures.keys()
        spares = deque(contact for contact in donors if contact.peer_id not in known)
        live = [offer for offer in candidates if offer.contact.peer_id not in self.liars]
        while not partial.complete and live:
            async with asyncio.TaskGroup() as group:
                # no donor takes chunks that others could deliver
                ahead = max(1, min(self.config.batch, len(partial.missing) // (2 * len(live))))
                for offer in live:
                    task = group.create_task(self._fetch_with_spares(offer, partial, spares, offers, ahead))
                    partial.tasks.add(task)
            partial.tasks.clear()
            live = [] if partial.complete else await self._reopen(first, donors, offers)
        if not partial.complete:
            return None
        return DownloadedState(
            first.epoch,
            any(o.canonical for o in candidates),
            first.digest,
            partial.blob,
            partial.given,
            dict(self.failures),
            len(candidates),
        )

    async def _reopen(self, wanted: _Offer, donors: Sequence[Contact], offers: list[_Offer]) -> list[_Offer]:
        """Ask again for the same state after all donors failed, except those that lied: donors keep leases
        for a while.
        """
        loop, pause_s = asyncio.get_running_loop(), self.config.resume_pause_s
        until_s = loop.time() + self.config.resume_s
        while loop.time() < until_s:
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, self.config.reopen_timeout_s)
            asked = [contact for contact in donors if contact.peer_id not in self.liars][
                : self.config.donors_max
            ]
            if not asked:
                break
            opened = await self._open_all(asked, wanted.digest)
            offers += opened
            if opened:  # a donor is back: either it has that state, or no donor will
                return [offer for offer in opened if offer.digest == wanted.digest]
        return []

    async def _fetch_with_spares(
        self, offer: _Offer, partial: PartialState, spares: deque[Contact], offers: list[_Offer], ahead: int
    ) -> None:
        """Fetch chunks from one donor, and when it fails from one that was not asked yet."""
        serving: _Offer | None = offer
        while serving is not None and not await self._fetch_chunks_from(serving, partial, ahead):
            serving = None
            while spares and serving is None and not partial.complete:
                opened = await self._open(spares.popleft(), offer.digest)
                if opened is not None:
                    offers.append(opened)
                    serving = opened if opened.digest == offer.digest else None

    async def _fetch_chunks_from(self, offer: _Offer, partial: PartialState, ahead: int) -> bool:
        """Fetch chunks from one donor until none are left, including those that others are late with.
        Return False when it failed.
        """
        peer = offer.contact.peer_id
        intake: Intake | None = None
        try:
            async with AsyncExitStack() as stack:
                stream = await self._open_stream(stack, offer)
                intake = Intake(
                    partial,
                    peer,
                    stream,
                    offer.chunk_digests,
                    self.pool,
                    self.config.chunk_timeout_s,
                    self._on_new_bytes,
                )
                try:
                    await self._request_and_receive(intake, offer, ahead)
                except (PeerError, NetworkError):
                    # account for the chunks received before, above all a false one
                    await intake.wait_checked()
                    raise
                await stream.finish()
        except (PeerError, NetworkError) as error:
            self.failures[peer] = str(error)
            if intake is not None and intake.lie:
                self.liars.add(peer)
            _log.warning("peer %s failed as a donor of run %s: %s", peer, self.run, error)
            return False
        finally:
            partial.return_undelivered(intake.close() if intake is not None else ())
        return True

    async def _request_and_receive(self, intake: Intake, offer: _Offer, ahead: int) -> None:
        partial, asked, loop = intake.partial, intake.requested, asyncio.get_running_loop()
        took_s, before_s = 0.0, loop.time()
        while not partial.complete:
            # request several with one message
            batch = partial.take(ahead - len(asked)) if 2 * len(asked) <= ahead else []
            if not batch and not asked:
                if intake.checking:
                    await intake.wait_checked()
                    continue
                # as long as a chunk takes from this donor: then another donor counts as late with it
                await asyncio.sleep(max(took_s, _LATE_S_MIN))
                late = partial.find_late(asked)
                batch = partial.take(1) if late is None else [late]
                partial.requested.update(batch if late is not None else ())
                before_s = loop.time()
            if batch:
                asked.extend(batch)
                request = state_pb2.ChunksRequest(run=self.run, lease=offer.lease, indices=batch)
                await intake.stream.send(request.SerializeToString())
            if asked:
                await intake.receive()
                took_s, before_s = loop.time() - before_s, loop.time()

    def _on_new_bytes(self, new_bytes: int) -> None:
        """Account for a valid chunk with `new_bytes` bytes that were not there before."""
        self._received_bytes += new_bytes
        if self.on_progress is not None and self.partial is not None:
            self.on_progress(
                min(len(self.partial.have) * CHUNK_BYTES, len(self.partial.blob)), len(self.partial.blob)
            )

    async def _open_stream(self, stack: AsyncExitStack, offer: _Offer) -> Stream:
        try:
            async with asyncio.timeout(self.config.chunk_timeout_s):
                return await stack.enter_async_context(
                    self.caller.open_stream(offer.contact, CHUNKS, timeout_s=None, connection=_CONNECTION)
                )
        except TimeoutError:
            raise DeadlineExceeded(f"did not answer for {self.config.chunk_timeout_s:g} s") from None

    async def _close_all(self, offers: Sequence[_Offer]) -> None:
        async with asyncio.TaskGroup() as group:
            for offer in offers:
                group.create_task(self._close(offer))

    async def _close(self, offer: _Offer) -> None:
        try:
            await self.caller.call(
                offer.contact, CLOSE, state_pb2.CloseRequest(run=self.run, lease=offer.lease), timeout_s=1.0
            )
        except SwarmError as error:
            _log.debug(
                "the lease of peer %s was not closed after the download: %s", offer.contact.peer_id, error
            )
