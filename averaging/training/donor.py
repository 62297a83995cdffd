"""Serves this peer's state to those who join: snapshots under leases, and the record that says so.

A snapshot is copied only when somebody opens a lease, between two updates, in the pool: a donor that trains is not stalled. Those who come
in the same epoch share it; it goes when its last lease is closed or has been idle for too long.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass

from averaging.training.runexchange import ADDRESSES_MAX, pack_chunk, parse_chunks_request
from averaging.training.snapshot import Snapshot
from averaging.training.state import TrainingState
from swarm.clock import Clock
from swarm.dht.service import DhtService
from swarm.errors import NetworkError, PeerError, SwarmError, UsageError
from swarm.ids import Contact, Key, PeerId
from swarm.net.rpc import Stream
from swarm.wire import state_pb2

_log = logging.getLogger(__name__)

_STORE_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DonorConfig:
    """How much this peer gives to those who join."""

    serve: bool = True  # False: this peer never gives its state
    leases_max: int = 16  # downloads at once
    snapshots_max: int = 2  # copies of the state in memory at once; further joiners wait until one is free
    lease_idle_s: float = 30.0  # a joiner that is silent for so long has gone
    record_ttl_s: float = 60.0  # a donor that died is asked in vain for so long
    record_renew_s: float = 15.0
    record_gap_s: float = 2.0  # the record follows the epoch no more often than this
    indices_max: int = 1024  # chunks asked for in one message

    def __post_init__(self) -> None:
        if self.record_renew_s * 2 > self.record_ttl_s:
            raise UsageError("record_ttl_s must be at least twice record_renew_s, or live donors would vanish between two renewals")


@dataclass(frozen=True, slots=True, kw_only=True)
class DonorServices:
    """What a donor needs of its node."""

    own: Callable[[], Contact]
    dht: DhtService
    clock: Clock
    loop: asyncio.AbstractEventLoop
    pool: Executor


@dataclass(slots=True)
class _Lease:
    peer: PeerId
    snapshot: Snapshot
    used_s: float


class Donor:
    """One per optimizer. Lives on the network thread; `changed` and `start` may be called from any."""

    def __init__(self, services: DonorServices, run: str, state: TrainingState, config: DonorConfig) -> None:
        self._services, self.run_id, self._state, self._config = services, run, state, config
        self._key = Key(f"run.{run}", "donors")
        self._leases: dict[bytes, _Lease] = {}
        self._fresh: Snapshot | None = None  # the latest
        self._copying = asyncio.Lock()
        self._wake = asyncio.Event()
        self._serving = self._stored = False

    # any thread

    def start(self) -> None:
        """From now on this peer's state is worth having."""
        if self._config.serve and not self._serving:
            self._serving = True
            self.changed()

    def changed(self) -> None:
        """The state has another epoch."""
        if self._serving:
            self._services.loop.call_soon_threadsafe(self._wake.set)

    # the network thread

    async def run(self) -> None:
        """Keep the record fresh and drop idle leases, until cancelled."""
        while True:
            await self._wait(self._config.record_renew_s if self._serving else None)
            self._drop_idle()
            if self._serving:
                await self._declare()
            await asyncio.sleep(self._config.record_gap_s)

    async def close(self) -> None:
        """Withdraw the record and let all leases go."""
        self._serving = False
        self._leases.clear()
        self._fresh = None
        if self._stored:
            try:
                await self._services.dht.delete(self._key, subkey=str(self._services.own().peer_id), timeout_s=0.5)
            except SwarmError as error:
                _log.debug("the donor record of run %s was not withdrawn: %s", self.run_id, error)

    async def on_open(self, peer: PeerId, request: state_pb2.OpenRequest) -> state_pb2.OpenReply:
        """A peer wants the state: give it a lease on a snapshot of this moment."""
        self._drop_idle()
        if not self._serving:
            raise PeerError("this peer has no state to give yet")
        if self._state.epoch < request.epoch_min:
            raise PeerError(f"this peer is in epoch {self._state.epoch} only")
        if len(self._leases) >= self._config.leases_max:
            raise PeerError(f"busy: {self._config.leases_max} peers are downloading from this one already")
        snapshot = await self._snapshot()
        lease = secrets.token_bytes(16)
        self._leases[lease] = _Lease(peer, snapshot, self._services.clock.monotonic_s())
        return state_pb2.OpenReply(
            lease=lease,
            epoch=snapshot.epoch,
            canonical=snapshot.canonical,
            total_bytes=len(snapshot.blob),
            chunk_digests=b"".join(snapshot.chunk_digests),
        )

    async def on_close(self, peer: PeerId, request: state_pb2.CloseRequest) -> state_pb2.CloseReply:
        lease = self._leases.get(request.lease)
        if lease is not None and lease.peer == peer:
            del self._leases[request.lease]
        self._drop_idle()
        return state_pb2.CloseReply()

    async def on_chunks(self, first: state_pb2.ChunksRequest, stream: Stream) -> None:
        """Send what is asked for, one request after another, until the other end finishes."""
        request = first
        while True:
            lease = self._leases.get(request.lease)
            if lease is None or lease.peer != stream.peer_id:
                raise PeerError("this lease is over: open the state again")
            if len(request.indices) > self._config.indices_max:
                raise PeerError(f"at most {self._config.indices_max} chunks in one request")
            for index in request.indices:
                if index >= len(lease.snapshot.chunk_digests):
                    raise PeerError(f"the state has {len(lease.snapshot.chunk_digests)} chunks; there is no number {index}")
                await stream.send(pack_chunk(index, lease.snapshot.chunk(index)))
                lease.used_s = self._services.clock.monotonic_s()
            message = await stream.receive()
            if message is None:
                return
            request = parse_chunks_request(message)

    async def _snapshot(self) -> Snapshot:
        async with self._copying:  # one copy at a time; who waited shares it
            if self._fresh is not None and self._fresh.version == self._state.version:
                return self._fresh
            held = {id(lease.snapshot) for lease in self._leases.values()}
            if len(held) >= self._config.snapshots_max:
                raise PeerError("busy: other peers are downloading states of earlier epochs from this one")
            self._fresh = await asyncio.get_running_loop().run_in_executor(self._services.pool, self._state.snapshot)
            return self._fresh

    def _drop_idle(self) -> None:
        oldest_s = self._services.clock.monotonic_s() - self._config.lease_idle_s
        self._leases = {name: lease for name, lease in self._leases.items() if lease.used_s >= oldest_s}
        if not self._leases and not self._copying.locked():
            self._fresh = None

    async def _declare(self) -> None:
        contact = self._services.own()
        if not contact.addresses:
            return  # nobody can connect to this peer
        value = {
            "epoch": self._state.epoch,
            "canonical": self._state.canonical,
            "digest": self._fresh.digest if self._fresh is not None else b"",
            "bytes": self._state.bytes_about,
            "addresses": [address.multiaddr for address in contact.addresses[:ADDRESSES_MAX]],
        }
        try:
            await self._services.dht.store(
                self._key, value, ttl_s=self._config.record_ttl_s, subkey=str(contact.peer_id), timeout_s=_STORE_TIMEOUT_S
            )
            self._stored = True
        except NetworkError as error:
            _log.info("the donor record of run %s was not stored: %s", self.run_id, error)

    async def _wait(self, timeout_s: float | None) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._wake.wait()
        except TimeoutError:
            return
        self._wake.clear()
