"""Server of this peer's state to joining peers: snapshots under leases, and the DHT record that declares
it.

A lease is on a view of the state (`averaging.optim.state.view`), hashed in the pool when the first one is
opened. A state in host memory is copied only if a lease is still open when the state is about to change;
the copy starts early, while this peer's round is on the network, so that a donor's training does not stall.
A state on devices is copied to the host, once, while it is hashed: each leased view costs host memory for
the whole state. Peers that join in the same epoch share a view; it is freed when its last lease is closed
or has been idle for too long.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from averaging.blocklist import PeerBlocklist
from averaging.optim.exchange import parse_chunks_request
from averaging.optim.peer_node import PeerNode
from averaging.optim.state.encoding import EXACT, STATE_CODECS, encode_view
from averaging.optim.state.snapshot import CHUNK_BYTES
from averaging.optim.state.training_state import TrainingState
from averaging.optim.state.view import StateView
from swarm.core.device import is_out_of_memory
from swarm.core.errors import PeerError, SwarmError
from swarm.core.ids import Key, PeerId
from swarm.dht.keeper import RecordKeeper
from swarm.net.rpc import Stream
from swarm.wire import state_pb2

_log = logging.getLogger(__name__)

_STORE_TIMEOUT_S = 5.0
# downloads at once. Only a few share the uplink, so that they end soon and those peers can serve the next
# ones
LEASES_MAX = 4
# states of different epochs leased at once, each a copy in host memory; further joiners wait until one is
# free
SNAPSHOTS_MAX = 2
# a download that has taken this long, and needs another `COPY_WORTH_S` at its present rate, is served from a
# copy that is made while it runs. Too small: memory and time are spent on downloads that are almost over; too
# large: the next writer has to make the whole copy
COPY_AFTER_S = 0.5
COPY_WORTH_S = 5.0
LEASE_IDLE_S = 30.0  # a joiner that is silent for this long is considered gone
# When all places are taken, a peer keeps its place for this long, and for the time that its chunks take
# at this rate. Too large or too slow: slow or malicious downloads keep others waiting. A download that loses
# its place keeps what it has fetched, and asks again.
LEASE_S = 30.0
LEASE_PACE_BYTES_PER_S = 256 << 10
SEND_S_MAX = 60.0  # for one chunk; a peer that needs longer loses its place
# a donor that has failed stays in the DHT for at most this long; at least twice `RECORD_RENEW_S`
RECORD_TTL_S = 60.0
RECORD_RENEW_S = 15.0
RECORD_GAP_S = 2.0  # minimum time between two updates of the record
INDICES_MAX = 1024  # chunks requested in one message


def donors_key(run: str, shard: str) -> Key:
    """Return the key of the donors of a run, or in a large run of one of its shards."""
    return Key(f"run.{run}", f"donors.{shard}" if shard else "donors")


def is_first(shard: str) -> bool:
    """Return whether a shard, named `bits.prefix`, is the first one of its division."""
    return shard.endswith(".0")


@dataclass(slots=True)
class _ChunkDigests:
    """The digests of a view's chunks, for later views with the same contents."""

    contents: tuple[object, ...]
    digests: tuple[bytes, ...]
    uses: int = 0  # later views that were compared with them


@dataclass(slots=True)
class _Lease:
    """A peer's place among the downloads, and the view that it reads; None before it has opened the state."""

    peer: PeerId
    view: StateView | None
    opened_s: float
    used_s: float
    copying: bool = False
    sent: set[int] = field(default_factory=set)  # chunks; requesting one twice does not prolong the lease

    @property
    def ends_s(self) -> float:
        """Return when the place may be given to another peer that asks for one."""
        return self.opened_s + LEASE_S + len(self.sent) * CHUNK_BYTES / LEASE_PACE_BYTES_PER_S


class Donor:
    """Server of one optimizer's state. Runs on the network thread; `changed` and `start` may be called from
    any.
    """

    def __init__(
        self,
        node: PeerNode,
        run: str,
        state: TrainingState,
        blocklist: PeerBlocklist | None = None,
        *,
        shard: Callable[[], str] = str,
    ) -> None:
        """`shard` returns the name of this peer's shard in a large run, whose donors stand in a dictionary of
        their own; "" in a small run.
        """
        self._blocklist = blocklist or PeerBlocklist(node.contact.peer_id, node.clock)
        self._node, self.run_id, self._state = node, run, state
        self._shard = shard
        self._stored: set[Key] = set()  # keys under which this peer's record may stand
        self._leases: dict[bytes, _Lease] = {}
        self._latest: dict[str, StateView] = {}  # the latest view in each codec
        # what `only_digest` is answered with in each codec, and the version of the state that it is of
        self._digest_replies: dict[str, tuple[int, state_pb2.OpenReply]] = {}
        # the chunk digests of the last view in each codec, for newcomers that come one by one
        self._chunk_digests: dict[str, _ChunkDigests] = {}
        # the view that is being hashed in the pool; one at a time
        self._making: asyncio.Future[StateView] | None = None
        self._started = asyncio.Event()
        self._serving = False
        self._keeper = RecordKeeper(
            self._declare,
            f"the donor record of run {run}",
            renew_s=RECORD_RENEW_S,
            retry_s=RECORD_GAP_S,
        )

    # --- any thread

    def start(self) -> None:
        """Begin to serve: this peer's state is valid from now on."""
        if not self._serving:
            self._serving = True
            # the model's initial values may have been written without the state's lock
            self._state.after_write()
            self._node.network.loop.call_soon_threadsafe(self._started.set)

    def changed(self) -> None:
        """Update the record soon: the state is in another epoch."""
        if self._serving:
            self._node.network.loop.call_soon_threadsafe(self._keeper.renew_soon)

    def on_round_begin(self) -> None:
        """Complete the copies of leased views while the network is busy: the state is about to change. May
        be called with locks held.
        """
        if self._leases:
            self._node.network.loop.call_soon_threadsafe(self._copy_leased)

    # --- the network thread

    @property
    def downloads(self) -> int:
        """Return how many peers are downloading from this one, or have a place for a download."""
        return sum(not self._is_idle(lease) for lease in self._leases.values())

    def _copy_leased(self) -> None:
        for view in self.leased_views():
            if not view.is_copied:
                self._copy(view)

    def leased_views(self) -> list[StateView]:
        """Return the views that peers read, each once."""
        views = [lease.view for lease in self._leases.values() if lease.view is not None]
        return list({id(view): view for view in views}.values())

    def _copy(self, view: StateView) -> None:
        self._node.network.loop.run_in_executor(self._node.network.pool, view.complete_copy)

    async def run(self) -> None:
        """Keep the record fresh and drop idle leases, until cancelled."""
        await self._started.wait()
        await self._keeper.run()

    async def close(self) -> None:
        """Withdraw the record and end all leases."""
        self._serving = False
        for name in list(self._leases):
            self._end_lease(name)
        self._release_latest()
        await self._withdraw_all()

    async def _withdraw_all(self) -> None:
        keys = list(self._stored)
        self._stored.clear()
        async with asyncio.TaskGroup() as group:
            for key in keys:
                group.create_task(self._withdraw(key))

    async def _withdraw(self, key: Key) -> None:
        try:
            await self._node.dht.service.delete(key, subkey=str(self._node.contact.peer_id), timeout_s=0.5)
        except SwarmError as error:
            _log.debug("the donor record of run %s was not withdrawn: %s", self.run_id, error)

    async def on_open(self, peer: PeerId, request: state_pb2.OpenRequest) -> state_pb2.OpenReply:
        """Give a peer a lease on a view of the present state, or a place for one that it opens later. This
        ends its earlier lease. Raise PeerError with the reason when it is refused.
        """
        self._blocklist.check_not_banned(peer)
        self._end_idle_leases()
        if not self._serving:
            raise PeerError("this peer has no state to give yet")
        codec = request.codec or EXACT
        if codec not in STATE_CODECS:
            raise PeerError(f"this peer cannot encode its state by {codec[:60]!r}")
        view = self._leased_view(request.digest)
        if view is None and self._state.epoch < request.epoch_min:
            raise PeerError(f"this peer is in epoch {self._state.epoch} only")
        if request.only_digest:
            return await self._digest(codec)
        if request.reserve:
            return state_pb2.OpenReply(lease=self._grant(peer, None), epoch=self._state.epoch)
        if view is None:
            lease = self._grant(peer, None)  # taken while the state is hashed, which may take long
            try:
                view = await self._latest_view(codec)
            # only after an error: a caller whose request was cancelled keeps its place, since it will ask
            # again
            except PeerError:
                self._end_lease(lease)
                raise
        lease = self._grant(peer, view)
        return state_pb2.OpenReply(
            lease=lease,
            epoch=view.epoch,
            canonical=view.canonical,
            total_bytes=view.total_bytes,
            chunk_digests=b"".join(view.chunk_digests),
        )

    async def _digest(self, codec: str) -> state_pb2.OpenReply:
        """Return the digest of the present state. It is hashed at most once, however many callers ask."""
        await self._others_view()
        version, reply = self._digest_replies.get(codec, (-1, None))
        if reply is None or version != self._state.version:
            await self._latest_view(codec)
            _, reply = self._digest_replies[codec]
        return reply

    def _grant(self, peer: PeerId, view: StateView | None) -> bytes:
        """Give a peer a lease instead of its earlier one. Raise PeerError when this peer is busy."""
        earlier = [name for name, lease in self._leases.items() if lease.peer == peer]
        name, now_s = self._node.rng.randbytes(16), self._node.clock.monotonic_s()
        opened_s, sent = now_s, set[int]()
        if earlier:  # opening the state again does not prolong the lease
            opened_s, sent = self._leases[earlier[0]].opened_s, self._leases[earlier[0]].sent
        elif len(self._leases) >= LEASES_MAX:
            self._make_room(peer, now_s)
        self._leases[name] = _Lease(peer, view, opened_s, now_s, sent=sent)
        for one in earlier:  # after the new lease exists, so that a view that both leases use stays open
            self._end_lease(one)
        return name

    def _make_room(self, peer: PeerId, now_s: float) -> None:
        """End the lease of a peer whose time is over, or, if the caller is a member, of a peer that is none.
        Raise PeerError when there is no such lease.
        """
        is_member = self._node.standing.is_member
        displaced = [
            (is_member(lease.peer, self.run_id), lease.ends_s, name)
            for name, lease in self._leases.items()
            if lease.ends_s <= now_s
            or (is_member(peer, self.run_id) and not is_member(lease.peer, self.run_id))
        ]
        if not displaced:
            raise PeerError(f"busy: {LEASES_MAX} peers are downloading from this one already")
        self._end_lease(min(displaced)[2])

    async def on_close(self, peer: PeerId, request: state_pb2.CloseRequest) -> state_pb2.CloseReply:
        """End a lease of the calling peer."""
        lease = self._leases.get(request.lease)
        if lease is not None and lease.peer == peer:
            self._end_lease(request.lease)
        self._end_idle_leases()
        return state_pb2.CloseReply()

    async def on_chunks(self, first: state_pb2.ChunksRequest, stream: Stream) -> None:
        """Send the requested chunks, one request after another, until the other end finishes. Raise
        PeerError for an invalid lease or request.
        """
        request = first
        while True:
            self._blocklist.check_not_banned(stream.peer_id)
            lease = self._leases.get(request.lease)
            view = lease.view if lease is not None and lease.peer == stream.peer_id else None
            if lease is None or view is None:
                raise PeerError("this lease is over: open the state again")
            if len(request.indices) > INDICES_MAX:
                raise PeerError(f"at most {INDICES_MAX} chunks in one request")
            for index in request.indices:
                if index >= view.chunks:
                    raise PeerError(f"the state has {view.chunks} chunks; there is no number {index}")
                if self._leases.get(request.lease) is not lease:
                    raise PeerError("this lease is over: open the state again")
                await self._send(stream, await self._chunk(view, index))
                lease.sent.add(index)
                lease.used_s = self._node.clock.monotonic_s()
                if not lease.copying and self._takes_long(lease, view):
                    lease.copying = True
                    self._copy(view)
            try:
                async with asyncio.timeout(LEASE_IDLE_S):
                    message = await stream.receive()
            except TimeoutError:
                raise PeerError(f"nothing was asked for {LEASE_IDLE_S:g} s") from None
            if message is None:
                return
            request = parse_chunks_request(message)

    @staticmethod
    async def _send(stream: Stream, message: bytes) -> None:
        try:
            async with asyncio.timeout(SEND_S_MAX):
                await stream.send(message)
        except TimeoutError:
            raise PeerError(f"a chunk was not taken for {SEND_S_MAX:g} s") from None

    def _takes_long(self, lease: _Lease, view: StateView) -> bool:
        """Return whether a download is slow enough to be worth a copy: it has taken some time, and at its
        rate is far from its end.
        """
        took_s = lease.used_s - lease.opened_s
        sent = len(lease.sent)
        return took_s > COPY_AFTER_S and took_s * (view.chunks - sent) > COPY_WORTH_S * sent

    async def _chunk(self, view: StateView, index: int) -> bytes:
        chunk = view.chunk_without_waiting(index)
        if chunk is None:  # from live tensors: in the pool, since it waits while they are being changed
            chunk = await asyncio.get_running_loop().run_in_executor(
                self._node.network.pool, view.chunk, index
            )
        return chunk

    def _leased_view(self, digest: bytes) -> StateView | None:
        """Return the leased view with this digest."""
        held = [view for view in self.leased_views() if digest and not view.closed]
        return next((view for view in held if view.digest == digest), None)

    async def _latest_view(self, codec: str) -> StateView:
        """Return the view of the present state. Its creation continues even when the callers have gone: a
        caller whose answer was lost asks again.
        """
        await self._others_view()
        latest = self._latest.get(codec)
        if latest is not None and latest.version == self._state.version and not latest.closed:
            return latest
        if len(self.leased_views()) >= SNAPSHOTS_MAX:
            raise PeerError("busy: other peers are downloading states of earlier epochs from this one")
        version = self._state.version
        self._release_latest(codec, *(one for one, old in self._latest.items() if old.version != version))
        making = self._making = asyncio.get_running_loop().run_in_executor(
            self._node.network.pool, self._open_view, codec
        )
        making.add_done_callback(functools.partial(self._made, codec))
        await asyncio.wait({making})
        return making.result()

    async def _others_view(self) -> None:
        """Wait until no view is being made for another caller."""
        while self._making is not None:
            await asyncio.wait({self._making})

    def _made(self, codec: str, making: asyncio.Future[StateView]) -> None:
        self._making = None
        if making.cancelled() or making.exception() is not None:
            return
        view = self._latest[codec] = making.result()
        self._digest_replies[codec] = (
            view.version,
            state_pb2.OpenReply(
                epoch=view.epoch,
                canonical=view.canonical,
                total_bytes=view.total_bytes,
                digest=view.digest,
            ),
        )
        self._end_idle_leases()  # a view that nobody leases is not needed

    def _open_view(self, codec: str) -> StateView:
        try:
            view = self._state.view()
        except (MemoryError, RuntimeError) as error:
            if is_out_of_memory(error):
                raise PeerError("this peer has no memory to read its state with: ask another") from error
            raise
        contents = view.contents
        try:
            if codec != EXACT:
                encoded = encode_view(view, codec)
                view.close()
                view = encoded
            self._hash(view, codec, contents)
        except BaseException as error:
            view.close()  # this view has no reader, so no writer must copy it
            if isinstance(error, (MemoryError, RuntimeError)) and is_out_of_memory(error):
                raise PeerError("this peer has no memory to encode its state: ask another") from error
            raise
        return view

    def _hash(self, view: StateView, codec: str, contents: tuple[object, ...]) -> None:
        """Compute the digests of a view, or take those of an earlier view of the same state: a newcomer can
        ask for nothing before it has them.
        """
        kept = self._chunk_digests.get(codec)
        if kept is not None and kept.contents == contents:
            kept.uses += 1
            if view.adopt_digests(kept.digests, kept.uses):
                return
        view.compute_digests()
        self._chunk_digests[codec] = _ChunkDigests(contents, view.chunk_digests)

    def _end_idle_leases(self) -> None:
        for name in [name for name, lease in self._leases.items() if self._is_idle(lease)]:
            self._end_lease(name)
        if not self._leases:
            self._release_latest()

    def _is_idle(self, lease: _Lease) -> bool:
        return lease.used_s < self._node.clock.monotonic_s() - LEASE_IDLE_S

    def _end_lease(self, name: bytes) -> None:
        """End a lease, and close its view if it was the last one on it."""
        lease = self._leases.pop(name, None)
        view = lease.view if lease is not None else None
        if view is not None and view not in self._latest.values() and view not in self.leased_views():
            view.close()

    def _release_latest(self, *codecs: str) -> None:
        """Stop handing out the latest views in these codecs, or in all; close those that are not leased."""
        for codec in codecs or tuple(self._latest):
            view = self._latest.pop(codec, None)
            if view is not None and view not in self.leased_views():
                view.close()

    async def _declare(self) -> bool:
        """Store the record once. Return whether it was stored, or is not needed. While others cannot connect
        to this peer, there is none.
        """
        self._end_idle_leases()
        contact = self._node.contact
        if not self._serving:
            return True  # it is closing
        if not contact.is_callable:
            await self._withdraw_all()
            return False
        exact = self._latest.get(EXACT)
        value = {
            "epoch": self._state.epoch,
            "canonical": self._state.canonical,
            "digest": exact.digest if exact is not None and exact.chunk_digests else b"",
            "bytes": self._state.bytes_about,
            "addresses": contact.published,
        }
        shard = self._shard()
        # the first shard's donors are those of the run for peers that do not know its division
        for key in {donors_key(self.run_id, name) for name in (shard, "" if is_first(shard) else shard)}:
            self._stored.add(key)
            await self._node.dht.service.store(
                key,
                value,
                ttl_s=RECORD_TTL_S,
                subkey=str(contact.peer_id),
                timeout_s=_STORE_TIMEOUT_S,
            )
        return True
