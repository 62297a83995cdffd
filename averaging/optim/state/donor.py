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
import logging
import secrets
from dataclasses import dataclass
from typing import ClassVar

from averaging.optim.admission import Blocklist
from averaging.optim.contacts import ADDRESSES_MAX
from averaging.optim.exchange import chunk_head, parse_chunks_request
from averaging.optim.peer_node import PeerNode
from averaging.optim.state.training_state import TrainingState
from averaging.optim.state.view import StateView
from swarm.core.device import is_out_of_memory
from swarm.core.errors import NetworkError, PeerError, SwarmError
from swarm.core.ids import Key, PeerId
from swarm.net.rpc import Stream
from swarm.wire import state_pb2

_log = logging.getLogger(__name__)

_STORE_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DonorConfig:
    """How much this peer serves to joining peers."""

    serve: bool = True  # False: this peer never serves its state
    leases_max: int = 16  # downloads at once
    # states of different epochs leased at once, each a copy in host memory; further joiners wait until one is
    # free
    snapshots_max: int = 2
    # a download that has taken this long, and would take another `copy_worth_s` for the whole state at its
    # present rate, is served from a copy that is made meanwhile. Too small: memory and time for downloads
    # that are almost over; too large: the next writer has to make the whole copy
    copy_after_s: float = 0.5
    copy_worth_s: float = 5.0
    lease_idle_s: ClassVar[float] = 30.0  # a joiner that is silent for this long is considered gone
    # a failed donor is asked in vain for at most this long; at least twice `record_renew_s`
    record_ttl_s: ClassVar[float] = 60.0
    record_renew_s: ClassVar[float] = 15.0
    record_gap_s: ClassVar[float] = 2.0  # minimum time between two updates of the record
    indices_max: ClassVar[int] = 1024  # chunks requested in one message


@dataclass(slots=True)
class _Lease:
    peer: PeerId
    view: StateView
    opened_s: float
    used_s: float
    sent: int = 0  # chunks
    copying: bool = False


class Donor:
    """Server of one optimizer's state. Runs on the network thread; `changed` and `start` may be called from
    any.
    """

    def __init__(
        self,
        node: PeerNode,
        run: str,
        state: TrainingState,
        config: DonorConfig,
        blocklist: Blocklist | None = None,
    ) -> None:
        self._blocklist = blocklist or Blocklist()
        self._node, self.run_id, self._state, self._config = node, run, state, config
        self._key = Key(f"run.{run}", "donors")
        self._leases: dict[bytes, _Lease] = {}
        self._latest: StateView | None = None  # the latest view
        self._copying = asyncio.Lock()
        self._wake = asyncio.Event()
        self._serving = self._is_published = False

    # --- any thread

    def start(self) -> None:
        """Begin to serve: this peer's state is valid from now on."""
        if self._config.serve and not self._serving:
            self._serving = True
            self._state.after_write()  # a model's first values may have been set without the state's lock
            self.changed()

    def changed(self) -> None:
        """Update the record soon: the state is in another epoch."""
        if self._serving:
            self._node.network.loop.call_soon_threadsafe(self._wake.set)

    def on_round_begin(self) -> None:
        """Complete the copies of leased views while the network is busy: the state is about to change. May
        be called with locks held.
        """
        if self._leases:
            self._node.network.loop.call_soon_threadsafe(self._copy_leased)

    # --- the network thread

    def _copy_leased(self) -> None:
        for view in {
            id(lease.view): lease.view for lease in self._leases.values() if not lease.view.is_copied
        }.values():
            self._copy(view)

    def _copy(self, view: StateView) -> None:
        self._node.network.loop.run_in_executor(self._node.network.pool, view.complete_copy)

    async def run(self) -> None:
        """Keep the record fresh and drop idle leases, until cancelled."""
        while True:
            await self._wait_for_change(self._config.record_renew_s if self._serving else None)
            self._end_idle_leases()
            if self._serving:
                await self._declare()
            await asyncio.sleep(self._config.record_gap_s)

    async def close(self) -> None:
        """Withdraw the record and end all leases."""
        self._serving = False
        for name in list(self._leases):
            self._end_lease(name)
        self._release_latest()
        if self._is_published:
            try:
                await self._node.dht.service.delete(
                    self._key, subkey=str(self._node.contact.peer_id), timeout_s=0.5
                )
            except SwarmError as error:
                _log.debug("the donor record of run %s was not withdrawn: %s", self.run_id, error)

    async def on_open(self, peer: PeerId, request: state_pb2.OpenRequest) -> state_pb2.OpenReply:
        """Give a peer a lease on a view of the present state. Raise PeerError with the reason when it is
        refused.
        """
        self._blocklist.check(peer)
        self._end_idle_leases()
        if not self._serving:
            raise PeerError("this peer has no state to give yet")
        view = self._leased_view(request.digest)
        if view is None and self._state.epoch < request.epoch_min:
            raise PeerError(f"this peer is in epoch {self._state.epoch} only")
        if len(self._leases) >= self._config.leases_max:
            raise PeerError(f"busy: {self._config.leases_max} peers are downloading from this one already")
        view = view or await self._latest_view()
        lease = secrets.token_bytes(16)
        now_s = self._node.clock.monotonic_s()
        self._leases[lease] = _Lease(peer, view, now_s, now_s)
        return state_pb2.OpenReply(
            lease=lease,
            epoch=view.epoch,
            canonical=view.canonical,
            total_bytes=view.total_bytes,
            chunk_digests=b"".join(view.chunk_digests),
        )

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
            self._blocklist.check(stream.peer_id)
            lease = self._leases.get(request.lease)
            if lease is None or lease.peer != stream.peer_id:
                raise PeerError("this lease is over: open the state again")
            if len(request.indices) > self._config.indices_max:
                raise PeerError(f"at most {self._config.indices_max} chunks in one request")
            for index in request.indices:
                if index >= lease.view.chunks:
                    raise PeerError(f"the state has {lease.view.chunks} chunks; there is no number {index}")
                await stream.send(await self._chunk_message(lease.view, index))
                lease.sent += 1
                lease.used_s = self._node.clock.monotonic_s()
                if not lease.copying and self._takes_long(lease):
                    lease.copying = True
                    self._copy(lease.view)
            message = await stream.receive()
            if message is None:
                return
            request = parse_chunks_request(message)

    def _takes_long(self, lease: _Lease) -> bool:
        """Return whether a download is slow enough to be worth a copy: it has taken some time, and at its
        rate is far from its end.
        """
        took_s = lease.used_s - lease.opened_s
        return (
            took_s > self._config.copy_after_s
            and took_s * (lease.view.chunks - lease.sent) > self._config.copy_worth_s * lease.sent
        )

    async def _chunk_message(self, view: StateView, index: int) -> bytes:
        """Return the message for a chunk, assembled in one copy."""
        head = chunk_head(index)
        message = view.chunk_without_waiting(index, head)
        if message is None:  # from live tensors: in the pool, since it waits while they are being changed
            message = await asyncio.get_running_loop().run_in_executor(
                self._node.network.pool, view.chunk, index, head
            )
        return message

    def _leased_view(self, digest: bytes) -> StateView | None:
        """Return a view that is leased already, by its digest."""
        held = [lease.view for lease in self._leases.values() if digest and not lease.view.closed]
        return next((view for view in held if view.digest == digest), None)

    async def _latest_view(self) -> StateView:
        async with self._copying:  # one at a time; callers that waited share the result
            latest = self._latest
            if latest is not None and latest.version == self._state.version and not latest.closed:
                return latest
            held = {id(lease.view) for lease in self._leases.values()}
            if len(held) >= self._config.snapshots_max:
                raise PeerError("busy: other peers are downloading states of earlier epochs from this one")
            self._release_latest()
            self._latest = await asyncio.get_running_loop().run_in_executor(
                self._node.network.pool, self._open_view
            )
            return self._latest

    def _open_view(self) -> StateView:
        try:
            view = self._state.view()
        except (MemoryError, RuntimeError) as error:
            if is_out_of_memory(error):
                raise PeerError("this peer has no memory to read its state with: ask another") from error
            raise
        try:
            view.compute_digests()
        except BaseException:  # this view has no reader, so no writer must copy it
            view.close()
            raise
        return view

    def _end_idle_leases(self) -> None:
        oldest_s = self._node.clock.monotonic_s() - self._config.lease_idle_s
        gone = [name for name, lease in self._leases.items() if lease.used_s < oldest_s]
        for name in gone:
            self._end_lease(name)
        if not self._leases and not self._copying.locked():
            self._release_latest()

    def _end_lease(self, name: bytes) -> None:
        """End a lease, and close its view if it was the last one on it."""
        view = self._leases.pop(name).view
        if view is not self._latest and all(lease.view is not view for lease in self._leases.values()):
            view.close()

    def _release_latest(self) -> None:
        """Stop handing out the latest view, and close it if it is not leased."""
        view, self._latest = self._latest, None
        if view is not None and all(lease.view is not view for lease in self._leases.values()):
            view.close()

    async def _declare(self) -> None:
        contact = self._node.contact
        if not contact.addresses:
            return  # other peers cannot connect to this one
        value = {
            "epoch": self._state.epoch,
            "canonical": self._state.canonical,
            "digest": self._latest.digest if self._latest is not None and self._latest.chunk_digests else b"",
            "bytes": self._state.bytes_about,
            "addresses": [address.multiaddr for address in contact.addresses[:ADDRESSES_MAX]],
        }
        try:
            await self._node.dht.service.store(
                self._key,
                value,
                ttl_s=self._config.record_ttl_s,
                subkey=str(contact.peer_id),
                timeout_s=_STORE_TIMEOUT_S,
            )
            self._is_published = True
        except NetworkError as error:
            _log.info("the donor record of run %s was not stored: %s", self.run_id, error)

    async def _wait_for_change(self, timeout_s: float | None) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._wake.wait()
        except TimeoutError:
            return
        self._wake.clear()
