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
from collections.abc import Callable, Collection, Iterable

from averaging.blocklist import PeerBlocklist
from averaging.optim.exchange import REPORT
from averaging.optim.history import RunHistory
from averaging.optim.peer_node import PeerNode
from averaging.optim.progress.claims import claim_of, read_claim
from averaging.optim.progress.logic.relays import PROBED_MAX
from averaging.optim.progress.logic.reports import SAMPLES_MAX, EpochProgress, ProgressReport, with_state
from averaging.optim.progress.logic.standing import ReportStanding
from averaging.optim.progress.logic.view import ProgressView
from averaging.optim.progress.records import ProgressRecords
from averaging.optim.progress.report_sender import ReportSender
from averaging.optim.progress.tree import Tree
from swarm.core.errors import DeadlineExceeded, NetworkError, PeerError
from swarm.core.ids import Contact, PeerId
from swarm.core.notify import ChangeEvent
from swarm.dht.keeper import RecordKeeper
from swarm.wire import state_pb2

_log = logging.getLogger(__name__)

_CALL_TIMEOUT_S = 2.0  # time limit of a report to a peer; a live one answers within a round trip
_GOODBYE_S = 0.5  # leaving must not take long
_COMPARE_S_MAX = 3.0  # timeout of fetching histories; slower ones are compared after the next read
_RETRY_S = 1.0  # pause after the DHT could not be written or read
_VIEW_AGE_S_MIN = 0.2  # minimum age of the view before it is read again because of an unexpected announcement


class Tracker:
    """Tracker of the progress of one run; one per optimizer."""

    def __init__(
        self,
        node: PeerNode,
        run: str,
        target: int | None,
        blocklist: PeerBlocklist | None = None,
        on_full: Callable[[], None] = lambda: None,
        *,
        history: RunHistory | None = None,
    ) -> None:
        """Track `run`, whose epochs have `target` samples; None: this peer reads what others report, and
        reports nothing itself. Peers in `blocklist` are ignored.

        `on_full` is called with the lock held when this peer's epoch is full and its round begins. `history`:
        of this peer's state; None in modes without a common state.
        """
        self._observes, self.own = target is None, node.contact.peer_id
        self._blocklist, self.history = blocklist or PeerBlocklist(self.own, node.clock), history
        self._node, self.run_id, self._on_full = node, run, on_full
        dht, now_s = node.dht.service, node.clock.swarm_s()
        self.tree = Tree(dht, run, self.own, now_s)  # this peer's place in a run of several shards
        self._records = ProgressRecords(lambda: node.contact, dht, node.clock, self.tree)
        self._progress = EpochProgress(
            self.own, target or SAMPLES_MAX, now_s, node.timings.progress_refresh_s_max
        )
        self._lock = threading.Lock()
        # wakes the trainer's thread: an epoch began, or a refresh ended
        self._changed = node.network.waits.condition(self._lock)
        self._refreshes, self._refreshing, self._refreshed_s = 0, False, -1e9
        self._full_epoch = -1  # the latest epoch that was agreed to be full
        self._full_epoch_of_others = -1  # the latest epoch that another peer announced as full
        self._announced_epoch = -1  # the latest epoch that this peer announced as full
        self.full_announcements = 0  # announcements by others that this peer's epoch is full
        self._keeper = RecordKeeper(
            self._publish_and_refresh,
            f"the progress of run {run}",
            renew_s=self._refresh_s,
            retry_s=_RETRY_S,
            gap_s=0.0,
        )
        self._announce = ChangeEvent()  # announce the full epoch now
        self._sender = ReportSender(self._report_one)
        self._closed, self._unreported = False, set[PeerId]()  # the latter: known, and not reported to yet

    # --- the trainer's thread

    def update_own(self, samples: int, rate: float) -> bool:
        """Record that this peer has accumulated `samples` at `rate` samples/s. Return whether the epoch is
        full and its round should begin now.
        """
        with self._lock:
            now_s = self._node.clock.swarm_s()
            self._update_history()
            was_joining = self._progress.own_report.joining
            self._progress.update_own(samples, rate, now_s)
            has_joined = was_joining and not self._progress.own_report.joining
            epoch = self._progress.epoch
            self._update_full_epoch(now_s)
            is_full = self._full_epoch >= epoch
            announce = is_full and self._announced_epoch < epoch and not self._closed
        if announce:
            self._node.network.loop.call_soon_threadsafe(self._announce.notify)
        if has_joined:
            self._request_refresh()
        return is_full

    def _update_history(self) -> None:
        """Update this peer and the swarm from the history. The lock is held."""
        history, progress = self.history, self._progress
        if history is None:
            return
        root, progress.abstains = history.root, history.abstains or history.is_bound
        progress.head, progress.certified_epoch = root.head, history.certified_epoch
        # while every contributor becomes an elector, no peer is a stranger, because all begin together
        electors = frozenset[PeerId]() if root.root_register.at_once else frozenset(root.electors)
        is_large = root.root_grid_rounds > 1
        progress.standing = ReportStanding(self.own, electors, history.ledger.has_standing, is_large)
        peers, there = progress.standing.peers(progress.others(self._node.clock.swarm_s()))
        history.size.update(progress.total.peers if progress.total else peers, there)

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

    def announce_full(self, epoch: int) -> None:
        """Announce once more that `epoch` is full: a round that had failed is tried again."""
        with self._lock:
            self._announced_epoch = min(self._announced_epoch, epoch - 1)
        if not self._closed:
            self._node.network.loop.call_soon_threadsafe(self._announce.notify)

    def begin_epoch(
        self,
        epoch: int,
        *,
        late: bool = False,
        joining: bool = False,
        members: Iterable[PeerId] = (),
        began_ago_s: float = 0.0,
    ) -> None:
        """Record that this peer is in `epoch` now, and so are the `members` of the round that began it.

        `late`: it was absent when the others began. `joining`: it has not got the epoch's state, and the
        others do not learn from it which epoch the swarm is in. `began_ago_s`: how long it has trained in it.
        """
        with self._changed:
            now_s = self._node.clock.swarm_s()
            self._update_history()
            if epoch < self._progress.epoch:  # announcements of a parted history do not count here
                self._full_epoch = self._full_epoch_of_others = self._announced_epoch = -1
            self._progress.begin_epoch(epoch, now_s, late=late, joining=joining, began_ago_s=began_ago_s)
            self._progress.on_round(members, epoch, now_s)
            self._changed.notify_all()
        self._request_refresh()

    def others(self) -> dict[PeerId, ProgressReport]:
        """Return the latest reports of the live peers, without this one."""
        with self._lock:
            return self._progress.others(self._node.clock.swarm_s())

    def is_alone(self) -> bool:
        """Return whether no other peer takes part in the run, as far as this peer knows."""
        with self._lock:
            return self._progress.is_alone(self._node.clock.swarm_s())

    def has_begun(self, believed: Collection[PeerId] | None = None) -> bool:
        """Return whether the run has completed an epoch, as `EpochProgress.has_begun`."""
        with self._lock:
            return self._progress.has_begun(self._node.clock.swarm_s(), believed)

    def swarm_epoch(self) -> int:
        """Return the epoch that the swarm has reached."""
        with self._lock:
            self._update_history()
            return self._progress.swarm_epoch(self._node.clock.swarm_s())

    def view(self) -> ProgressView:
        """Return a snapshot of the progress."""
        with self._lock:
            return self._progress.view(self._node.clock.swarm_s())

    def fraction(self) -> float:
        """Return the fraction of its target that this peer's epoch has reached, as `view().fraction`."""
        with self._lock:
            return self._progress.fraction(self._node.clock.swarm_s())

    def set_target(self, target: int) -> None:
        """Set the number of samples in an epoch. A peer that learns of it later closes at most one epoch by
        the old number.
        """
        with self._lock:
            self._progress.target = target
        self._request_refresh()

    def pause(self, samples: int, paused: bool) -> None:
        """Report that all training is paused, with this peer's `samples`, or that all continue: the pause of
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
                if self.history is not None:
                    self.history.forget(peer)
                self._progress.on_goodbye(peer)
                self._records.contacts.pop(peer, None)
            self._changed.notify_all()

    def others_at_head(self) -> dict[PeerId, ProgressReport]:
        """Return the reports of the live peers with the same history as this one."""
        with self._lock:
            self._update_history()
            return self._progress.others_at_head(self._node.clock.swarm_s())

    def on_round(self, members: Iterable[PeerId]) -> None:
        """Record that these peers and this one have completed a round within the epoch."""
        with self._changed:
            self._update_history()
            self._progress.on_round(members, self._progress.epoch, self._node.clock.swarm_s())
        self._request_refresh()

    def voters(self) -> list[PeerId]:
        """Return the live peers that have the same history as this one and vote on it."""
        found = self.others_at_head()
        return [peer for peer, one in found.items() if not one.abstains and not one.joining]

    def contacts(self) -> list[Contact]:
        """Return the contacts of peers that can be called."""
        return [contact for contact in list(self._records.contacts.values()) if contact.is_callable]

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
            done = self._changed.wait_for(lambda: self._refreshes >= wanted or self._closed, timeout_s)
            return done and not self._closed

    def refresh_age_s(self) -> float:
        """Return the age of the latest complete refresh."""
        return self._node.clock.swarm_s() - self._refreshed_s if self._refreshes else math.inf

    def wait_full(self, epoch: int, timeout_s: float, until: Callable[[], bool] = bool) -> bool:
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
        self._update_history()
        return self._progress.swarm_epoch(self._node.clock.swarm_s()) > epoch

    def _request_refresh(self) -> None:
        if not self._closed:
            self._node.network.loop.call_soon_threadsafe(self._keeper.renew_soon)

    # --- the network thread

    async def run(self) -> None:
        """Read, publish and announce until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._keep_record(), name=f"progress of run {self.run_id}")
            group.create_task(self._announce_loop(), name=f"announcing full epochs of run {self.run_id}")
            group.create_task(self._sender.run(), name=f"reports to strangers of run {self.run_id}")

    async def _keep_record(self) -> None:
        # read before the first publication: a newcomer to a large run does not know its shard yet
        await self._refresh()
        await self._keeper.run()

    async def _publish_and_refresh(self) -> bool:
        """Write this peer's record and read those of the others. Return whether both succeeded."""
        with self._lock:
            self._update_history()
            report = self._progress.own_report
        is_published = self._observes or await self._records.publish(report)
        return await self._refresh() and is_published

    def _refresh_s(self) -> float:
        with self._lock:
            return self._progress.refresh_s(self._node.clock.swarm_s())

    async def _announce_loop(self) -> None:
        while True:
            await self._announce.wait()
            with self._lock:
                epoch, now_s = self._progress.epoch, self._node.clock.swarm_s()
                if not self._full_epoch >= epoch > self._announced_epoch:
                    continue
                self._announced_epoch = epoch
                others = self._progress.others(now_s)
            await self._report_to([peer for peer, one in others.items() if one.epoch <= epoch], full=True)

    async def probe(self, *, everybody: bool = True) -> None:
        """Exchange reports directly with the live peers that have a state: with all, or with those that this
        one passes news to, as in a large run. A peer that cannot be reached does not count any more.
        """
        asks_all = len(peers := with_state(self.others())) <= PROBED_MAX and everybody
        await (self._sender.send(self._counted(peers)) if asks_all else self._report_to(peers))

    async def close(self) -> None:
        """Report that this peer leaves, and withdraw its record. The caller has cancelled `run`."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        await self._sender.send(self._counted(self.others()), goodbye=True)
        await self._records.withdraw(_GOODBYE_S)

    async def on_report(self, peer: PeerId, request: state_pb2.ReportRequest) -> state_pb2.ReportReply:
        """Handle another peer's report, which may say that the epoch is full or that the peer leaves. Raise
        PeerError for a banned peer or a malformed report.
        """
        report = self._take_report(peer, request.claim)
        if request.goodbye:
            if self.history is not None:
                self.history.on_goodbye(peer, request.farewell)
            with self._changed:
                self._progress.on_goodbye(peer)
                self._changed.notify_all()
        believed = request.full and await self._confirm_full(peer, report.epoch)
        if believed:
            self._announce.notify()  # it is forwarded without waiting for this peer's next step
        with self._lock:
            return state_pb2.ReportReply(claim=claim_of(self._progress.own_report), believed=believed)

    async def _confirm_full(self, peer: PeerId, epoch: int) -> bool:
        """Return whether `epoch` is full in this peer's own view, after a fresh read of the DHT if the
        present view does not agree.
        """
        for attempt in range(2):
            now_s = self._node.clock.swarm_s()
            with self._changed:
                ours = self._progress.epoch
                if not self._progress.standing.counts(peer):
                    return False
                if epoch <= ours + 1:
                    self._full_epoch_of_others = max(self._full_epoch_of_others, epoch)
                self.full_announcements += attempt == 0 and epoch == ours
                self._update_full_epoch(now_s)
                if self._full_epoch >= epoch:
                    return True
            if epoch != ours or attempt or now_s - self._refreshed_s < _VIEW_AGE_S_MIN:
                break
            await self._refresh()
        # in different epochs: one of the two peers is about to notice
        text = "peer %s announced that epoch %d of run %s is full; this one (in epoch %d) has another view"
        _log.log(logging.INFO if epoch == ours else logging.DEBUG, text, peer, epoch, self.run_id, ours)
        return False

    async def _report_to(
        self, peers: Collection[PeerId], *, among: Collection[PeerId] | None = None, full: bool = False
    ) -> None:
        """Report to the relays of `peers` (`among`: to these only); wait for answers of those that count."""
        members = self._counted(peers)
        to_members = self._records.relays(members)
        to_strangers = self._records.relays([peer for peer in peers if peer not in members], known=members)
        if among is not None:
            to_members = [peer for peer in to_members if peer in among]
            to_strangers = [peer for peer in to_strangers if peer in among]
        self._sender.send_to_strangers(to_strangers, full=full)
        await self._sender.send(to_members, full=full)

    def _counted(self, peers: Iterable[PeerId]) -> Collection[PeerId]:
        """Return those of the peers whose reports count."""
        with self._lock:
            return self._progress.standing.counted(dict.fromkeys(peers))

    async def _report_one(self, peer: PeerId, full: bool, goodbye: bool) -> bool:
        contact = self._records.contacts.get(peer)
        if self._observes or contact is None or not contact.is_called_by(self._node.contact):
            return True  # a client peer reads the DHT instead
        with self._lock:
            report = self._progress.own_report
            full = full and self._full_epoch >= report.epoch  # strangers are told later
            self._unreported.discard(peer)
        request = state_pb2.ReportRequest(run=self.run_id, claim=claim_of(report), full=full, goodbye=goodbye)
        if goodbye and self.history is not None:
            request.farewell = self.history.farewell()
        try:
            reply = await self._node.channels.call(
                contact, REPORT, request, timeout_s=_GOODBYE_S if goodbye else _CALL_TIMEOUT_S
            )
            self._take_report(peer, reply.claim)
            return True
        except (PeerError, NetworkError) as error:
            _log.info("peer %s did not take this peer's progress report: %s", peer, error)
            with self._lock:
                self._progress.on_unreachable(peer, refused=not isinstance(error, DeadlineExceeded))
            return False

    def _take_report(self, peer: PeerId, wire: state_pb2.Claim) -> ProgressReport:
        self._blocklist.check_not_banned(peer)  # it may have been banned since it was called
        now_s = self._node.clock.swarm_s()
        report = read_claim(wire, now_s)
        with self._changed:
            self._progress.on_report(peer, report, now_s)
            self._changed.notify_all()
        contact = self._records.contacts.get(peer)
        if contact is None and self._progress.standing.counts(peer):  # any number of identities may call
            self._keeper.renew_soon()  # its record has its address
        elif contact is not None and self.history is not None:
            self.history.heard(contact, report.head)
        return report

    async def survey(self) -> bool:
        """Read the records and reports of all peers of this run. Return False when none answered."""
        return await self._refresh(confirmed=True)

    async def _refresh(self, *, confirmed: bool = False) -> bool:
        """Read the dictionary once, and report to newcomers that have a state and that this peer passes news
        to. Return whether it could be read.
        """
        started_s = self._node.clock.swarm_s()
        self._refreshing = True
        try:
            joining = self._progress.own_report.joining  # it must not assume that it is alone
            entries = await self._records.read(self._blocklist, thorough=joining, confirmed=confirmed)
        finally:
            self._refreshing = False
        if entries is None:
            return False
        received, newcomers = self._records.reports(entries)
        with self._changed:
            now_s = self._node.clock.swarm_s()
            for writer, report, expires_s in received:
                self._progress.on_report(writer, report, now_s, expires_s)
            self._update_history()
            own = {} if self._observes else {self.own: self._progress.own_report}
            reports, standing = {**own, **self._progress.others(now_s)}, self._progress.standing
        if await self.tree.after_refresh(entries, reports, standing, now_s):
            self._records.invalidate()
            self._keeper.renew_soon()
        await self._compare_histories(received)
        with self._changed:
            self._progress.total = self.tree.total
            self._update_history()
            self._update_full_epoch(self._node.clock.swarm_s())
            self._refreshes, self._refreshed_s = self._refreshes + 1, started_s
            self._changed.notify_all()
            reports = self._progress.others(now_s)
            self._unreported = (self._unreported | set(newcomers)) & reports.keys()
            if not (recipients := with_state(reports)) and self._progress.own_report.joining:
                recipients = list(reports)  # all begin together
        self._announce.notify()
        await self._report_to(recipients, among=self._unreported)
        return True

    async def _compare_histories(self, received: Iterable[tuple[PeerId, ProgressReport, float]]) -> None:
        """Compare the histories of unknown heads before a read of records counts as complete."""
        if self.history is None:
            return
        # in modes with local steps the trainer looks for a quorum at the end of its epochs only
        self.history.keep_waiting(self.voters(), self._node.clock.monotonic_s())
        for writer, report, _ in received:
            if (contact := self._records.contacts.get(writer)) is not None:
                self.history.heard(contact, report.head)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_COMPARE_S_MAX):
                await self.history.compare()
