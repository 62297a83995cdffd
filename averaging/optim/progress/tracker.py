"""Exchange of progress over the network: this peer's report is published, those of the others are read, and
the peer that first sees the epoch full announces it to the others.

Runs on the network thread. Methods for the trainer's thread hold a lock for microseconds and never wait for
the network, except those whose name begins with `wait_`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
from collections.abc import Callable, Iterable

from averaging.optim.admission import Blocklist
from averaging.optim.exchange import REPORT
from averaging.optim.peer_node import PeerNode
from averaging.optim.progress.logic.reports import EpochProgress, ProgressConfig, ProgressReport, ProgressView
from averaging.optim.progress.records import ProgressRecords
from averaging.optim.progress.tree import Tree
from swarm.core.errors import NetworkError, PeerError
from swarm.core.ids import Contact, PeerId
from swarm.wire import state_pb2

_log = logging.getLogger(__name__)

_CALL_TIMEOUT_S = 2.0  # of a report to a peer; a live one answers within a round trip
_GOODBYE_S = 0.5  # leaving must not take long
_CONCURRENT_REPORTS_MAX = 16
_VIEW_AGE_S_MIN = 0.2  # minimum age of the view before it is read again because of an unexpected announcement


def _never() -> bool:
    return False


def _nothing() -> None:
    return None


class Tracker:
    """Tracker of the progress of one run; one per optimizer."""

    def __init__(
        self,
        node: PeerNode,
        run: str,
        target: int,
        config: ProgressConfig,
        blocklist: Blocklist | None = None,
        on_full: Callable[[], None] = _nothing,
    ) -> None:
        """Track `run`, whose epochs have `target` samples. Peers in `blocklist` are ignored.

        `on_full` is called with the lock held when this peer's epoch is full and its round begins.
        """
        self._blocklist = blocklist or Blocklist()
        self._node, self.run_id, self._config, self._on_full = node, run, config, on_full
        dht, now_s = node.dht.service, node.clock.swarm_s()
        self._own = node.contact.peer_id
        self._tree = Tree(dht, run, self._own, config, now_s)
        self._records = ProgressRecords(lambda: node.contact, dht, node.clock, self._tree, config)
        self._progress = EpochProgress(self._own, target, config, now_s)
        self._lock = threading.Lock()
        # wakes the trainer's thread: an epoch began, or a refresh ended
        self._changed = threading.Condition(self._lock)
        self._refreshes = 0
        self._refreshing = False
        self._refreshed_s = -1e9
        self._full_epoch = -1  # the latest epoch that was agreed to be full
        self._full_epoch_of_others = -1  # the latest epoch that another peer announced as full
        self._announced_epoch = -1  # the latest epoch that this peer announced as full
        self._full_announcements = 0  # announcements by others that this peer's epoch is full
        self._wake = asyncio.Event()  # refresh and publish now
        self._announce = asyncio.Event()  # announce the full epoch now
        self._closed = False

    # --- the trainer's thread

    def update_own(self, samples: int, rate: float) -> bool:
        """Record that this peer has accumulated `samples` at `rate` samples/s. Return whether the epoch is
        full and its round should begin now.
        """
        with self._lock:
            now_s = self._node.clock.swarm_s()
            self._progress.update_own(samples, rate, now_s)
            epoch = self._progress.epoch
            self._update_full_epoch(now_s)
            is_full = self._full_epoch >= epoch
            announce = is_full and self._announced_epoch < epoch and not self._closed
        if announce:
            self._node.network.loop.call_soon_threadsafe(self._announce.set)
        return is_full

    def _update_full_epoch(self, now_s: float) -> None:
        """Mark this peer's epoch as full when it is, or when another peer announced it and this peer's own
        view nearly agrees. The lock is held.
        """
        epoch = self._progress.epoch
        if self._full_epoch < epoch and (
            self._progress.is_full(now_s)
            or (self._full_epoch_of_others == epoch and self._progress.is_plausibly_full(epoch, now_s))
        ):
            self._full_epoch = epoch
            self._changed.notify_all()
            self._on_full()

    @property
    def full_announcements(self) -> int:
        """Return the number of announcements by others that this peer's epoch is full."""
        return self._full_announcements

    def announce_full(self, epoch: int) -> None:
        """Announce once more that `epoch` is full: a round that had failed is tried again."""
        with self._lock:
            self._announced_epoch = min(self._announced_epoch, epoch - 1)
        if not self._closed:
            self._node.network.loop.call_soon_threadsafe(self._announce.set)

    def begin_epoch(
        self, epoch: int, *, joining: bool = False, members: Iterable[PeerId] = (), began_ago_s: float = 0.0
    ) -> None:
        """Record that this peer is in `epoch` now, and so are the `members` of the round that began it.
        This peer has trained in it for `began_ago_s`.
        """
        with self._changed:
            now_s = self._node.clock.swarm_s()
            self._progress.begin_epoch(epoch, now_s, joining=joining, began_ago_s=began_ago_s)
            self._progress.on_round(members, epoch, now_s)
            self._changed.notify_all()
        self._request_refresh()

    def others(self) -> dict[PeerId, ProgressReport]:
        """Return the latest reports of the live peers, without this one."""
        with self._lock:
            return self._progress.others(self._node.clock.swarm_s())

    def swarm_epoch(self) -> int:
        """Return the epoch that the swarm has reached."""
        with self._lock:
            return self._progress.swarm_epoch(self._node.clock.swarm_s())

    def view(self) -> ProgressView:
        """Return a snapshot of the progress."""
        with self._lock:
            return self._progress.view(self._node.clock.swarm_s())

    def set_target(self, target: int) -> None:
        """Set the number of samples in an epoch. A peer that learns of it later closes at most one epoch by
        the old number.
        """
        with self._lock:
            self._progress.target = target
        self._request_refresh()

    def pause(self, samples: int, paused: bool) -> None:
        """Report that all training is paused, with this peer's `samples`, or that all go on: the pause of
        other peers then does not count as a hang.
        """
        with self._lock:
            now_s = self._node.clock.swarm_s()
            if paused:
                self._progress.update_own(samples, 0.0, now_s)
            else:
                self._progress.on_resumed(now_s)
        self._request_refresh()

    def forget(self, peers: Iterable[PeerId]) -> None:
        """Remove these peers from this peer's view."""
        with self._changed:
            for peer in peers:
                self._progress.on_goodbye(peer)
                self._records.contacts.pop(peer, None)
            self._changed.notify_all()

    @property
    def tree(self) -> Tree:
        """Return this peer's place in a run of several shards."""
        return self._tree

    def contacts(self) -> list[Contact]:
        """Return the contacts of peers that can be called."""
        return [contact for contact in list(self._records.contacts.values()) if contact.addresses]

    def contact(self, peer: PeerId) -> Contact | None:
        """Return the contact of a peer, if it is known."""
        return self._records.contacts.get(peer)

    def wait_refresh(self, timeout_s: float, *, first: bool = False) -> bool:
        """Wait until the DHT was read by a refresh that began after this call (`first`: or by any earlier
        one). Return False when there was none in time.
        """
        with self._changed:
            wanted = 1 if first else self._refreshes + 2 if self._refreshing else self._refreshes + 1
            if self._refreshes < wanted:
                self._request_refresh()
            return (
                self._changed.wait_for(lambda: self._refreshes >= wanted or self._closed, timeout_s)
                and not self._closed
            )

    def refresh_age_s(self) -> float:
        """Return the age of the latest complete refresh."""
        return self._node.clock.swarm_s() - self._refreshed_s if self._refreshes else math.inf

    def wait_full(self, epoch: int, timeout_s: float, until: Callable[[], bool] = _never) -> bool:
        """Wait until `epoch` is known to be full or over, and return whether it is. Stop waiting when
        `until()` is true; call `wake_waiters` after that changes.
        """

        def is_full() -> bool:
            return self._full_epoch >= epoch or self._swarm_is_past(epoch) or self._closed

        with self._changed:
            self._changed.wait_for(lambda: is_full() or until(), timeout_s)
            return is_full()

    def wake_waiters(self) -> None:
        """Make waiting threads check their conditions again. Callable from any thread."""
        with self._changed:
            self._changed.notify_all()

    def _swarm_is_past(self, epoch: int) -> bool:
        return self._progress.swarm_epoch(self._node.clock.swarm_s()) > epoch

    def _request_refresh(self) -> None:
        if not self._closed:
            self._node.network.loop.call_soon_threadsafe(self._wake.set)

    # --- the network thread

    async def run(self) -> None:
        """Read, publish and announce until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._refresh_loop(), name=f"progress of run {self.run_id}")
            group.create_task(self._announce_loop(), name=f"announcing full epochs of run {self.run_id}")

    async def _refresh_loop(self) -> None:
        # read before the first publication: a newcomer to a large run does not know its shard yet
        await self._refresh()
        while not self._closed:
            self._wake.clear()
            with self._lock:
                report = self._progress.own_report
            await self._records.publish(report)
            await self._refresh()
            with self._lock:
                wait_s = self._progress.refresh_s(self._node.clock.swarm_s())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._wake.wait()

    async def _announce_loop(self) -> None:
        while not self._closed:
            await self._announce.wait()
            self._announce.clear()
            with self._lock:
                epoch, now_s = self._progress.epoch, self._node.clock.swarm_s()
                if not self._full_epoch >= epoch > self._announced_epoch:
                    continue
                self._announced_epoch = epoch
                peers = [
                    peer for peer, report in self._progress.others(now_s).items() if report.epoch <= epoch
                ]
            await self._report_to(peers, full=True)

    async def probe(self) -> None:
        """Exchange reports with every live peer directly. A peer that cannot be reached does not count any
        more.
        """
        await self._report_to(list(self.others()))

    async def close(self) -> None:
        """Report that this peer leaves, and withdraw its record."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._wake.set()
        self._announce.set()
        await self._report_to(list(self.others()), goodbye=True)
        await self._records.withdraw(_GOODBYE_S)

    async def on_report(self, peer: PeerId, request: state_pb2.ReportRequest) -> state_pb2.ReportReply:
        """Handle another peer's report, which may say that the epoch is full or that the peer leaves. Raise
        PeerError for a banned peer or a malformed report.
        """
        self._blocklist.check(peer)
        report = self._take_report(peer, request.claim)
        if request.goodbye:
            with self._changed:
                self._progress.on_goodbye(peer)
                self._changed.notify_all()
        believed = request.full and await self._confirm_full(peer, report.epoch)
        with self._lock:
            return state_pb2.ReportReply(claim=_to_wire(self._progress.own_report), believed=believed)

    async def _confirm_full(self, peer: PeerId, epoch: int) -> bool:
        """Return whether `epoch` is full in this peer's own view, after a fresh read of the DHT if the
        present view does not agree.
        """
        for attempt in range(2):
            now_s = self._node.clock.swarm_s()
            with self._changed:
                ours = self._progress.epoch
                self._full_epoch_of_others = (
                    max(self._full_epoch_of_others, epoch)
                    if epoch <= ours + 1
                    else self._full_epoch_of_others
                )
                self._full_announcements += attempt == 0 and epoch == ours
                self._update_full_epoch(now_s)
                if self._full_epoch >= epoch:
                    return True
            if epoch != ours or attempt or now_s - self._refreshed_s < _VIEW_AGE_S_MIN:
                break
            await self._refresh()
        # in different epochs: one of the two peers is about to notice
        level = logging.INFO if epoch == ours else logging.DEBUG
        _log.log(
            level,
            "peer %s announced that epoch %d of run %s is full; the view of this peer (in epoch %d) differs",
            peer,
            epoch,
            self.run_id,
            ours,
        )
        return False

    async def _report_to(self, peers: list[PeerId], *, full: bool = False, goodbye: bool = False) -> None:
        limit = asyncio.Semaphore(_CONCURRENT_REPORTS_MAX)
        async with asyncio.TaskGroup() as group:
            for peer in peers:
                group.create_task(self._report_one(peer, full, goodbye, limit))

    async def _report_one(self, peer: PeerId, full: bool, goodbye: bool, limit: asyncio.Semaphore) -> None:
        contact = self._records.contacts.get(peer)
        if contact is None or not contact.addresses:
            return  # a client peer: it reads the DHT instead
        async with limit:
            with self._lock:
                report = _to_wire(self._progress.own_report)
            request = state_pb2.ReportRequest(run=self.run_id, claim=report, full=full, goodbye=goodbye)
            try:
                reply = await self._node.channels.call(
                    contact, REPORT, request, timeout_s=_GOODBYE_S if goodbye else _CALL_TIMEOUT_S
                )
                self._take_report(peer, reply.claim)
            except PeerError as error:
                _log.info("peer %s refused this peer's progress report: %s", peer, error)
                self._mark_unreachable(peer)
            except NetworkError as error:
                _log.info("peer %s did not answer a progress report: %s", peer, error)
                self._mark_unreachable(peer)

    def _mark_unreachable(self, peer: PeerId) -> None:
        with self._lock:
            self._progress.on_unreachable(peer)

    def _take_report(self, peer: PeerId, wire: state_pb2.Claim) -> ProgressReport:
        value = {
            "epoch": wire.epoch,
            "samples": wire.samples,
            "rate": wire.samples_per_s,
            "at": wire.at_s,
            "since": wire.since_s,
        }
        now_s = self._node.clock.swarm_s()
        report = ProgressReport.decode(value, now_s, self._config)
        with self._changed:
            self._progress.on_report(peer, report, now_s)
            self._changed.notify_all()
        if peer not in self._records.contacts:
            self._wake.set()  # its record has its address
        return report

    async def _refresh(self) -> None:
        """Read the dictionary once, and send this peer's report to newcomers."""
        started_s = self._node.clock.swarm_s()
        self._refreshing = True
        try:
            entries = await self._records.read(self._blocklist)
        finally:
            self._refreshing = False
        if entries is None:
            return
        received, newcomers = self._records.reports(entries)
        with self._changed:
            now_s = self._node.clock.swarm_s()
            for writer, report, expires_s in received:
                self._progress.on_report(writer, report, now_s, expires_s)
            reports = {self._own: self._progress.own_report, **self._progress.others(now_s)}
        if await self._tree.after_refresh(entries, reports, now_s):
            self._records.invalidate()
            self._wake.set()
        with self._changed:
            self._progress.total = self._tree.total
            self._update_full_epoch(self._node.clock.swarm_s())
            self._refreshes, self._refreshed_s = self._refreshes + 1, started_s
            self._changed.notify_all()
        self._announce.set()
        await self._report_to(newcomers)


def _to_wire(report: ProgressReport) -> state_pb2.Claim:
    return state_pb2.Claim(
        epoch=report.epoch,
        samples=report.samples,
        samples_per_s=report.rate,
        at_s=report.at_s,
        since_s=report.since_s,
    )
