"""Download of the state from several donors at once. Every chunk is verified, and received chunks are kept
when donors fail.

The state that a majority of the electors of the swarm's head hold is taken, from whatever donor has it, and
donors that offer another one are named (`averaging.optim.state.vouching`). Where no elector can be asked, it
is the state that most donors hold, of the highest epoch that the swarm is known to have reached. The digest
commits to every chunk, so that a donor that sends other data is identified at that chunk and the rest
continue; another donor takes its place. When all have failed, because of a cut cable for instance, the same
state is requested again for a while, and only missing chunks are fetched. Chunks of a failed download are
reused by the next one, where the two states have them in common.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Executor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

from averaging.optim.exchange import CHUNKS, CLOSE, OPEN
from averaging.optim.state.encoding import EXACT
from averaging.optim.state.intake import Intake, PartialState
from averaging.optim.state.snapshot import CHUNK_BYTES, Blob, snapshot_digest
from averaging.optim.state.vouching import ELECTORS_ASKED_MAX, states_to_take
from swarm.core.backoff import Backoff
from swarm.core.errors import DeadlineExceeded, NetworkError, NotEnoughPeers, PeerError, SwarmError
from swarm.core.ids import Contact, PeerId
from swarm.net.rpc import Stream, StreamCaller
from swarm.wire import state_pb2

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
OnProgress: TypeAlias = Callable[[int, int], None]  # bytes so far and in total; called on the network thread

_CONNECTION = 7  # number of a separate connection: a download must not delay rounds and heartbeats
_EPOCH_AHEAD_MAX = 2  # donors may be this far ahead of the epoch that the swarm is known to have reached
_DIGEST_BYTES = 32
_LEASE_BYTES_MAX = 64
_LATE_S_MIN = 0.05
_CLOSE_TIMEOUT_S = 1.0
_HEDGE_S = 2.0  # when electors do not say in this time which state they hold, the others are asked too


DONORS_MAX = 5  # donors asked for the state; those that hold the same one all send parts of it
ASKED_MAX = 20  # donors asked for a place, until some have one
RESERVE_TIMEOUT_S = 5.0
OPEN_TIMEOUT_S = 60.0  # includes the time in which the donor copies and hashes its state
# how long to wait for the answer to a request for the state, beside its time on a slow link. Too
# large: a lost request costs that much time; too small: donors of large states are asked several times
OPEN_WAIT_S = 5.0
ANSWER_BYTES_PER_S = 50e3
# a donor that sends nothing for this long has failed; small enough to try the next, large enough for 50 kB/s
CHUNK_TIMEOUT_S = 20.0
BATCH = 8  # chunks requested ahead, per donor: covers 1 MiB/s at 8 s of delay
# how long a state is requested again after all its donors have failed. More than the time for which donors
# keep an idle lease is useless
RESUME_S = 25.0
RESUME_PAUSE_S = 0.5  # pause before the first retry; doubled with each further one
REOPEN_TIMEOUT_S = 3.0  # shorter than `OPEN_TIMEOUT_S`, since the donor has hashed the state already


@asynccontextmanager
async def _cancelling_group(running: set[asyncio.Task[_T]]) -> AsyncIterator[asyncio.TaskGroup]:
    """Return a group whose tasks in `running` are cancelled at the end."""
    async with asyncio.TaskGroup() as group:
        try:
            yield group
        finally:
            for task in running:
                task.cancel()


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
    epoch_known: Callable[[], int]  # returns the epoch that the swarm is known to have reached by now
    failures: dict[PeerId, str] = field(default_factory=dict)  # donors that failed, with the reason
    liars: set[PeerId] = field(default_factory=set)  # of these, donors that sent data other than declared
    on_progress: OnProgress | None = None
    pool: Executor | None = None  # threads that check chunks; None: the event loop's own
    codec: str = EXACT  # requested from donors; one that does not know it sends every tensor unencoded
    # returns the reachable electors of the head that the swarm is known to have reached, the most senior
    # first: the state that they hold is taken
    electors: Callable[[], Sequence[Contact]] = tuple
    waits_for_electors: bool = False  # fail while most of them are silent, so that they are asked again
    majority: bool = False  # accept only a state that most of the answering donors hold, of any epoch
    epoch: int | None = None  # epoch of the state that is being downloaded, once known
    partial: PartialState | None = None  # what has arrived; at first, the chunks of an earlier download
    _received_bytes: int = 0
    # all leases of this download, those of offers that were not taken included: each is closed at the end
    _leases: dict[PeerId, tuple[Contact, bytes]] = field(default_factory=dict)
    _reserved: list[Contact] = field(default_factory=list)  # donors that keep a place for this peer

    @property
    def _wire_codec(self) -> str:
        return "" if self.codec == EXACT else self.codec

    @property
    def received_bytes(self) -> int:
        """Return the bytes of valid chunks that were not there before."""
        return self._received_bytes

    async def reserve(self, donors: Sequence[Contact]) -> bool:
        """Ask donors for a place, some at a time, until some have one. Return False when all are full or
        cannot be reached. Follow this by `fetch`, which frees the places, or by `close`.
        """
        donors = self._electors_first(donors)
        for first in range(0, min(len(donors), ASKED_MAX), DONORS_MAX):
            asked = donors[first : first + DONORS_MAX]
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._reserve(contact)) for contact in asked]
            self._reserved += [contact for contact, task in zip(asked, tasks, strict=True) if task.result()]
            if self._reserved:
                return True
        return False

    def _electors_first(self, donors: Sequence[Contact]) -> list[Contact]:
        electors = {contact.peer_id for contact in self.electors()}
        return sorted(donors, key=lambda contact: contact.peer_id not in electors)

    async def _reserve(self, contact: Contact) -> bool:
        request = state_pb2.OpenRequest(run=self.run, reserve=True)
        try:
            reply = await self.caller.call(contact, OPEN, request, timeout_s=RESERVE_TIMEOUT_S)
        except SwarmError as error:
            self.failures[contact.peer_id] = str(error)
            return False
        self.failures.pop(contact.peer_id, None)
        self._leases[contact.peer_id] = (contact, reply.lease)
        return True

    async def close(self) -> None:
        """Free the places that donors keep for this peer."""
        leases, self._leases = list(self._leases.values()), {}
        async with asyncio.TaskGroup() as group:
            for contact, lease in leases:
                group.create_task(self._close(contact, lease))

    async def fetch(self, donors: Sequence[Contact], timeout_s: float) -> DownloadedState:
        """Download the state, from the donors of `reserve` first. Raise NotEnoughPeers when no donor could
        serve, and DeadlineExceeded after `timeout_s`; both messages list the donors and their failures.
        """
        others = [contact for contact in donors if contact not in self._reserved]
        donors = [*self._reserved, *self._electors_first(others)]
        offers: list[_Offer] = []
        try:
            async with asyncio.timeout(timeout_s):
                electors = list(self.electors())[:ELECTORS_ASKED_MAX]
                async with asyncio.TaskGroup() as group:
                    heard = group.create_task(self._hear(electors))
                    opened = group.create_task(self._open_all(self._reserved or donors[:DONORS_MAX]))
                offers += opened.result()
                vouched = heard.result()
                if vouched is None:
                    raise NotEnoughPeers(
                        f"most electors of run {self.run} have not said which state they hold"
                        f"{self._reasons()}"
                    )
                for digest in vouched:
                    candidates = await self._holders_of(digest, [*electors, *donors], offers)
                    fetched = await self._fetch_from(candidates, donors, offers) if candidates else None
                    if fetched is not None:
                        return fetched
                for candidates in self._by_preference(offers) if not vouched else ():
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
            await self.close()
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
        request = state_pb2.OpenRequest(
            run=self.run, epoch_min=self.epoch_min, digest=digest, codec=self._wire_codec
        )
        try:
            reply = await self._ask(contact, request, REOPEN_TIMEOUT_S if digest else OPEN_TIMEOUT_S)
            self._leases[contact.peer_id] = (contact, reply.lease[:_LEASE_BYTES_MAX])
            return self._check_offer(contact, reply)
        except SwarmError as error:
            self.failures[contact.peer_id] = str(error)
            return None

    async def _ask(
        self, contact: Contact, request: state_pb2.OpenRequest, timeout_s: float
    ) -> state_pb2.OpenReply:
        """Ask a donor about its state, again when the answer is late."""
        loop, digests_bytes = asyncio.get_running_loop(), self.bytes_max / CHUNK_BYTES * _DIGEST_BYTES
        end_s, wait_s = loop.time() + timeout_s, OPEN_WAIT_S + digests_bytes / ANSWER_BYTES_PER_S
        while end_s - loop.time() > wait_s:
            with contextlib.suppress(DeadlineExceeded):
                return await self.caller.call(contact, OPEN, request, timeout_s=wait_s)
        left_s = max(end_s - loop.time(), REOPEN_TIMEOUT_S)
        return await self.caller.call(contact, OPEN, request, timeout_s=left_s)

    def _check_offer(self, contact: Contact, reply: state_pb2.OpenReply) -> _Offer:
        raw, chunks = reply.chunk_digests, -(-reply.total_bytes // CHUNK_BYTES)
        if not 0 < reply.total_bytes <= self.bytes_max:
            raise PeerError(
                f"offers a state of {reply.total_bytes} bytes; ours has at most {self.bytes_max}: "
                "another model or optimizer"
            )
        if len(raw) != chunks * _DIGEST_BYTES or len(reply.lease) > _LEASE_BYTES_MAX:
            raise PeerError("offers a state with a wrong number of chunk digests")
        epoch_known = self.epoch_known()
        if not self.epoch_min <= reply.epoch <= epoch_known + _EPOCH_AHEAD_MAX:
            raise PeerError(
                f"offers epoch {reply.epoch}, while the swarm is known to be in epoch {epoch_known}"
            )
        digests = tuple(raw[at : at + _DIGEST_BYTES] for at in range(0, len(raw), _DIGEST_BYTES))
        digest = snapshot_digest(reply.total_bytes, digests)
        return _Offer(contact, reply.lease, reply.epoch, reply.canonical, reply.total_bytes, digests, digest)

    async def _hear(self, electors: Sequence[Contact]) -> tuple[bytes, ...] | None:
        """Ask electors which state they hold, as many at once as could decide, and more where these are late,
        silent or differ. Return what `states_to_take` says.
        """
        left, said, gone = deque(electors), dict[PeerId, bytes](), set[PeerId]()
        running: set[asyncio.Task[tuple[PeerId, bytes, bool]]] = set()
        late = False
        async with _cancelling_group(running) as group:
            while True:
                able = [one.peer_id for one in electors if one.peer_id not in gone]
                agreed = max(Counter(said.values()).values(), default=0)
                while left and (late or 2 * (agreed + len(running)) <= len(able)):
                    running.add(group.create_task(self._hear_one(left.popleft())))
                waits = bool(running) or self.waits_for_electors
                found = states_to_take(able, said, waits=waits)
                if found is not None or not running:
                    return found
                done, _ = await asyncio.wait(
                    running, timeout=_HEDGE_S if left else None, return_when=asyncio.FIRST_COMPLETED
                )
                running -= done
                late = not done
                for peer, digest, has_ended in (task.result() for task in done):
                    if digest:
                        said[peer] = digest
                    elif has_ended:
                        gone.add(peer)

    async def _hear_one(self, contact: Contact) -> tuple[PeerId, bytes, bool]:
        """Return an elector, the digest of the state that it holds (empty: unknown), and whether its process
        has ended.
        """
        request = state_pb2.OpenRequest(
            run=self.run, epoch_min=self.epoch_min, codec=self._wire_codec, only_digest=True
        )
        try:
            reply = await self._ask(contact, request, OPEN_TIMEOUT_S)
            if len(reply.digest) != _DIGEST_BYTES:
                raise PeerError("does not say which state it holds")
            return contact.peer_id, reply.digest, False
        except SwarmError as error:
            self.failures[contact.peer_id] = str(error)
            return contact.peer_id, b"", "connection refused" in str(error).lower()

    async def _holders_of(
        self, digest: bytes, donors: Sequence[Contact], offers: list[_Offer]
    ) -> list[_Offer]:
        """Return the offers of one state. If there is none yet, ask all donors, some at a time, until one
        offers it. Name those that offer another one. New offers are added to `offers`.
        """
        known = {offer.contact.peer_id for offer in offers} | self.liars
        left = deque(dict.fromkeys(contact for contact in donors if contact.peer_id not in known))
        running: set[asyncio.Task[_Offer | None]] = set()
        async with _cancelling_group(running) as group:
            while not any(offer.digest == digest for offer in offers) and (left or running):
                while left and len(running) < DONORS_MAX:
                    running.add(group.create_task(self._open(left.popleft(), digest)))
                done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                running -= done
                offers += [offer for task in done if (offer := task.result()) is not None]
        found = [offer for offer in offers if offer.digest == digest]
        for offer in offers if found else ():
            if offer.digest != digest:
                peer = offer.contact.peer_id
                self.failures[peer] = (
                    f"offers a state of epoch {offer.epoch} that differs from that of the electors, "
                    f"of epoch {found[0].epoch}"
                )
                _log.warning("peer %s %s", peer, self.failures[peer])
        return found

    @staticmethod
    def _by_preference(offers: Sequence[_Offer]) -> list[list[_Offer]]:
        """Group offers of the same state: the latest epoch first, within an epoch the state that most donors
        hold, then a canonical one.
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
        complete, and retries failed for some time. Later offers are added to `offers`.
        """
        first = candidates[0]
        self.epoch = first.epoch
        partial = self.partial = PartialState.begin(first.chunk_digests, first.total_bytes, self.partial)
        known = {offer.contact.peer_id for offer in offers} | self.failures.keys()
        spares = deque(contact for contact in donors if contact.peer_id not in known)
        live = [offer for offer in candidates if offer.contact.peer_id not in self.liars]
        asyncio.get_running_loop().run_in_executor(self.pool, partial.allocate_pages)
        while not partial.complete and live:
            try:
                async with asyncio.TaskGroup() as group:
                    # no donor takes chunks that others could deliver
                    ahead = max(1, min(BATCH, len(partial.missing) // (2 * len(live))))
                    for offer in live:
                        fetching = self._fetch_with_spares(offer, partial, spares, offers, ahead)
                        partial.tasks.add(group.create_task(fetching))
            finally:
                partial.settle()
            partial.tasks.clear()
            live = [] if partial.complete else await self._reopen(first, donors, offers)
        if not partial.complete:
            return None
        canonical, failures = any(o.canonical for o in candidates), dict(self.failures)
        return DownloadedState(
            first.epoch, canonical, first.digest, partial.blob, partial.given, failures, len(candidates)
        )

    async def _reopen(self, wanted: _Offer, donors: Sequence[Contact], offers: list[_Offer]) -> list[_Offer]:
        """Ask again for the same state after all donors failed, except those that lied: donors keep leases
        for a while.
        """
        loop = asyncio.get_running_loop()
        backoff = Backoff(RESUME_PAUSE_S, REOPEN_TIMEOUT_S)
        until_s = loop.time() + RESUME_S
        while loop.time() < until_s:
            await asyncio.sleep(backoff.next_s())
            asked = [contact for contact in donors if contact.peer_id not in self.liars][:DONORS_MAX]
            if not asked:
                break
            opened = await self._open_all(asked, wanted.digest)
            offers += opened
            if opened:  # a donor answers again: if it does not have that state, no donor will
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
                    CHUNK_TIMEOUT_S,
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
                # for as long as a chunk takes from this donor; one that has not delivered one by then is late
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
            total_bytes = len(self.partial.blob)
            received_bytes = min(len(self.partial.have) * CHUNK_BYTES, total_bytes)
            # an error of the caller's code, which only shows something, is the loop's to report
            asyncio.get_running_loop().call_soon(self.on_progress, received_bytes, total_bytes)

    async def _open_stream(self, stack: AsyncExitStack, offer: _Offer) -> Stream:
        try:
            async with asyncio.timeout(CHUNK_TIMEOUT_S):
                return await stack.enter_async_context(
                    self.caller.open_stream(offer.contact, CHUNKS, timeout_s=None, connection=_CONNECTION)
                )
        except TimeoutError:
            raise DeadlineExceeded(f"did not answer for {CHUNK_TIMEOUT_S:g} s") from None

    async def _close(self, contact: Contact, lease: bytes) -> None:
        request = state_pb2.CloseRequest(run=self.run, lease=lease)
        try:
            await self.caller.call(contact, CLOSE, request, timeout_s=_CLOSE_TIMEOUT_S)
        except SwarmError as error:
            _log.debug("the lease of peer %s was not closed after the download: %s", contact.peer_id, error)
