"""Joining a run: download the state, and meanwhile take part in the swarm's rounds at weight 0, so that no
epoch is missed.

A download may take longer than an epoch. If a newcomer only downloaded, it would return with the state of
epoch s while the swarm is at s + 5, and downloading again would never end. So it registers in the present
epoch, records the results of rounds while chunks arrive, and replays those epochs on the downloaded state:
one optimizer step each, always faster than the swarm's epochs. docs/decisions/0005 has the argument.
"""

from __future__ import annotations

import concurrent.futures
import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from averaging.blocklist import EXCLUDED, PeerBlocklist
from averaging.optim.capturing import RoundCapture
from averaging.optim.epoch_averager import EpochAverager
from averaging.optim.history import RunHistory
from averaging.optim.modes import CapturedRound, Mode
from averaging.optim.progress.tracker import Tracker
from averaging.optim.reports import LoadResult, hidden_reason
from averaging.optim.state.donor import donors_key
from averaging.optim.state.download import Download, DownloadedState, OnProgress
from averaging.optim.state.encoding import EXACT
from averaging.optim.state.intake import PartialState
from averaging.optim.state.snapshot import read_header
from averaging.optim.state.training_state import root_of_header
from swarm.core.backoff import Backoff
from swarm.core.clock import Clock
from swarm.core.errors import NetworkError, NotEnoughPeers, PeerError, SwarmError
from swarm.core.ids import Contact, PeerId
from swarm.dht.service.dht_service import Entry

if TYPE_CHECKING:
    from swarm.node import Node

_log = logging.getLogger(__name__)

# longest wait, in the first step, for the first read of the others' progress
FIRST_REFRESH_TIMEOUT_S = 5.0

_REFRESH_AGE_S_MAX = 5.0  # age of the last read of others' progress on which a first attempt is based
_READ_TIMEOUT_S = 5.0
_HISTORY_TIMEOUT_S = 5.0  # timeout for the history of a downloaded state
_UNREADABLE_S = 15.0  # a peer with a state that could read no record for this long assumes that it is alone
_SURVEY_S_MAX = 12.0  # longer than a read of the records and the comparison of histories
# Total time for which a report that the run has begun is believed without a certificate, if its sender is not
# an introducer. Too small: a peer whose history cannot be fetched yet is ignored; too large: a liar delays
# the beginning of a run
_UNPROVEN_S = 60.0
# While most electors do not report their state, none is loaded for this long, which is the shortest wait of a
# peer without a quorum. After it, others may have continued without them
_ELECTORS_WAIT_S = 15.0
# pause before the next download attempt, because many newcomers may wait for a few donors
_RETRY_S_FIRST = 0.25
_RETRY_S_MAX = 4.0
_DISTRUSTED_MAX = 1024  # remembered; beyond this the oldest is forgotten
_FAILURES_SHOWN_MAX = 3  # failures listed in one message
# timeout of reports to the others; a peer that does not answer in time reads the DHT instead
_REGISTER_S = 1.0
_HIDDEN_S = 10.0  # a peer that has just started announces no address until another one has called it back
_UNREAD = "no other peer has answered yet, so that this peer does not know whether the run has begun"


@dataclass(slots=True)
class _Attempt:
    """State of one call of `load` across its downloads."""

    clock: Clock
    retries: Backoff
    deadline_s: float
    started_s: float
    codec: str = EXACT
    among: frozenset[PeerId] = frozenset()  # as in `load`
    on_progress: OnProgress | None = None
    failures: dict[PeerId, str] = field(default_factory=dict)
    partial: PartialState | None = None  # chunks of an incomplete download
    bytes_received: int = 0
    reason: str = ""

    @property
    def left_s(self) -> float:
        return self.deadline_s - self.clock.monotonic_s()

    @property
    def seconds(self) -> float:
        return self.clock.monotonic_s() - self.started_s


class CatchUp:
    """Brings this peer to the swarm's epoch. Runs on the trainer's thread."""

    def __init__(
        self,
        node: Node,
        mode: Mode,
        tracker: Tracker,
        averager: EpochAverager,
        blocklist: PeerBlocklist,
        history: RunHistory | None,
    ) -> None:
        """`history`: of the state; None in modes without a common state."""
        self.clock: Clock = node.clock
        self._history = history
        self._node, self._run_id, self._mode, self._state = node, tracker.run_id, mode, mode.state
        self._tracker, self._averager = tracker, averager
        self._capture = RoundCapture(node, mode, tracker, averager, history)
        # donors of an incompatible state, or of chunks with wrong digests -> reason; this optimizer does not
        # ask them again
        self.distrusted: dict[PeerId, str] = {}
        self._unproven_since_s: float | None = None  # a report without a certificate was believed first
        self._registered_epoch = -1  # epoch that was last reported to the others
        self._probing: concurrent.futures.Future[None] | None = None  # begun by `probe_soon`
        self.blocklist = blocklist

    def load(
        self,
        timeout_s: float,
        among: frozenset[PeerId] = frozenset(),
        codec: str = EXACT,
        on_progress: OnProgress | None = None,
    ) -> LoadResult:
        """Fetch the state until it is loaded, no other peer takes part in the run, or `timeout_s` is over.
        With `among`, only these donors are asked, as long as one of them declares the state. `codec`: how
        they are asked to encode it (`averaging.optim.state.encoding`).

        The learner is suspended, and the caller resumes it. `bytes_received` and `failures` of the result
        cover all downloads of this call.
        """
        retries = Backoff(_RETRY_S_FIRST, _RETRY_S_MAX, self._node.rng)
        now_s = self.clock.monotonic_s()
        attempt = _Attempt(self.clock, retries, now_s + timeout_s, now_s, codec, among, on_progress)
        self._tracker.wait_refresh(min(FIRST_REFRESH_TIMEOUT_S, timeout_s), first=True)
        while True:
            if self.blocklist.own_is_banned:
                return self._not_loaded(attempt, EXCLUDED)
            if attempt.reason or self._tracker.refresh_age_s() > _REFRESH_AGE_S_MAX:  # another attempt
                self._tracker.wait_refresh(min(FIRST_REFRESH_TIMEOUT_S, max(attempt.left_s, 0.01)))
            donors = self._donors(attempt, among)
            # records of failed donors live on, and a peer that has a state does not wait until they expire
            may_be_alone = not donors or (self._state.epoch and self._tracker.is_alone())
            if may_be_alone and (alone := self._reason_to_begin(attempt)):
                return self._not_loaded(attempt, alone, alone=True)
            if not donors:
                others = [self._tracker.contact(peer) for peer in self._tracker.others()]
                is_any_open = any(contact is None or contact.is_callable for contact in others)
                if attempt.seconds >= _HIDDEN_S and self._tracker.has_begun() and not is_any_open:
                    return self._not_loaded(attempt, hidden_reason(len(others)))
            else:
                try:
                    result = self._download_once(attempt, donors)
                except BaseException:  # Ctrl-C: this peer follows a history whose state it has not got
                    self._unregister()
                    raise
                if result is not None:
                    return result
            pause_s = attempt.retries.next_s()
            if attempt.left_s <= pause_s:
                return self._not_loaded(attempt, f"not done within {timeout_s:g} s: {attempt.reason}")
            self._node.network.waits.event().wait(pause_s)

    def _reason_to_begin(self, attempt: _Attempt) -> str:
        """Return why this peer need not wait for a state of others; "" when it must, with the reason in
        `attempt`. A peer that wrongly believes that it is alone begins another history of the run.
        """
        waited_s = attempt.seconds
        has_waited = waited_s >= self._node.timings.no_donor_wait_s
        if has_waited or not self._node.peers():
            has_read = self._survey()
            if not has_read:
                attempt.reason = _UNREAD
            gives_up = self._state.epoch > 0 and waited_s >= _UNREADABLE_S
            if self._tracker.is_alone() and (has_read or gives_up):
                return self._alone_reason()
            if has_waited and has_read and self._state.epoch == 0 and not self._has_begun():
                return "all peers of this run are in its first epoch, and none has a state to give"
        attempt.reason = attempt.reason or "no peer declares that it has the state"
        return ""

    def _survey(self) -> bool:
        """Read the reports and histories of others. Return False when nobody could be asked."""
        try:
            return self._node.network.run(self._tracker.survey(), _SURVEY_S_MAX)
        except NetworkError:
            return False

    def obstacle_to_beginning(self) -> str:
        """Return why this peer, whose history has no certificate, must not make the first one of the run: it
        would be the second one. "" when it may. Asks other peers.
        """
        if not self._survey():
            return _UNREAD
        return "others have a state of this run, and this peer has none" if self._has_begun() else ""

    def _has_begun(self) -> bool:
        """Return whether the run has begun: by a certificate, by an introducer, or for a limited time by
        anybody's report.
        """
        if not self._tracker.has_begun():
            return False
        now_s = self.clock.monotonic_s()
        if self._unproven_since_s is None:
            self._unproven_since_s = now_s
        return now_s - self._unproven_since_s < _UNPROVEN_S or self._tracker.has_begun(self._node.introducers)

    def _alone_reason(self) -> str:
        """Describe a run in which no other peer is visible, including failed connections: perhaps this peer
        has reached no peer that could know of others.
        """
        alone = "nobody else takes part in this run"
        failures = "; ".join(self._node.join_failures[:_FAILURES_SHOWN_MAX])
        unreached = f", as far as this peer knows, which has reached nobody: {failures}"
        return alone + unreached if failures else alone

    def _not_loaded(self, attempt: _Attempt, reason: str, *, alone: bool = False) -> LoadResult:
        return LoadResult(
            loaded=False,
            epoch=self._state.epoch,
            reason=reason,
            alone=alone,
            failures=dict(attempt.failures),
            bytes_received=attempt.bytes_received,
            seconds=attempt.seconds,
        )

    def _download_once(self, attempt: _Attempt, donors: list[Contact]) -> LoadResult | None:
        """Make one download and take part in its rounds. Return None when it must be tried again."""
        download = Download(
            run=self._run_id,
            caller=self._node.channels,
            bytes_max=self._state.bytes_max(),
            epoch_min=0,
            epoch_known=self._tracker.swarm_epoch,
            on_progress=attempt.on_progress,
            partial=attempt.partial,
            pool=self._node.network.pool,
            codec=attempt.codec,
            electors=lambda: self._electors(attempt.among),
            waits_for_electors=attempt.seconds < _ELECTORS_WAIT_S,
        )
        # until a donor has a place for it, rounds do not wait for this peer
        if not self._reserve(attempt, download, donors):
            return None
        attempt.retries.reset()
        self._mode.learner.suspend()
        self._capture.follow_history()  # to learn the members and introduce this peer to them
        # before requesting the state, so that this peer takes part in all rounds after the state's epoch
        self._averager.open()
        # after a parting, the history that it follows may be shorter than its own was
        certified = self._history.certified_epoch if self._history and self._history.has_begun else None
        download.epoch_min = epoch = (
            max(self._tracker.swarm_epoch(), self._state.epoch) if certified is None else certified
        )
        # a peer that closes the epoch now waits for this one, at weight 0
        self._register(epoch, joining=True)
        future = self._node.network.submit(download.fetch(donors, max(attempt.left_s, 0.1)))
        try:
            captured, epoch = self._capture.run_during(download, future, epoch)
            downloaded = future.result()
        except (NetworkError, PeerError, NotEnoughPeers, concurrent.futures.CancelledError) as error:
            attempt.reason = (
                str(error)
                or "the swarm completed an epoch during the download, and this peer was not in its round"
            )
            self._unregister()
            return None
        finally:
            future.cancel()  # Ctrl-C: no work may continue in the background
            attempt.failures.update(download.failures)
            self._distrust({peer: download.failures[peer] for peer in download.liars})
            attempt.bytes_received += download.received_bytes
            attempt.partial = download.partial
        return self._install(attempt, downloaded, captured, epoch)

    def _electors(self, among: frozenset[PeerId]) -> list[Contact]:
        """Return the electors of the swarm's head that can be called, the most senior first. `among`: only
        these, after a round has found which of them hold the state.
        """
        ignored = {self._node.peer_id, *self.distrusted, *self.blocklist.banned}
        found = self._history.electors() if self._history is not None else ()
        contacts = [
            self._tracker.contact(peer) for peer in found if peer not in ignored and peer in (among or found)
        ]
        return [contact for contact in contacts if contact is not None and contact.is_callable]

    def _reserve(self, attempt: _Attempt, download: Download, donors: list[Contact]) -> bool:
        """Return whether a donor keeps a place for this peer; if not, note why."""
        timeout_s = max(attempt.left_s, 0.1)
        try:
            if self._node.network.run(download.reserve(donors), timeout_s):
                return True
        except NetworkError as error:
            attempt.reason = str(error)
        else:
            reasons = {peer: why for peer, why in download.failures.items() if why}
            attempt.failures.update(reasons)
            shown = [f"{peer}: {why}" for peer, why in reasons.items()][:_FAILURES_SHOWN_MAX]
            attempt.reason = f"no donor has a place for this peer ({'; '.join(shown)})"
        return False

    def _install(
        self, attempt: _Attempt, downloaded: DownloadedState, captured: dict[int, CapturedRound], epoch: int
    ) -> LoadResult | None:
        missing = [e for e in range(downloaded.epoch, epoch) if e not in captured]
        if missing:
            attempt.reason = (
                f"the swarm completed epoch {missing[0]} while the state of epoch {downloaded.epoch} "
                "was being downloaded"
            )
            self._unregister()
            return None
        try:
            # the swarm has advanced, or the donor belongs to another history
            if not self._belongs(downloaded):
                attempt.reason = "the downloaded state belongs to another history than the swarm's"
                self._unregister()
                return None
            self._state.load(downloaded.blob, attempt.codec)
        except PeerError as error:
            attempt.reason = str(error)
            attempt.failures.update(dict.fromkeys(downloaded.donors, str(error)))
            attempt.partial = None
            self._distrust(dict.fromkeys(downloaded.donors, str(error)))
            self._unregister()
            return None
        for one in (replayed := range(downloaded.epoch, epoch)):
            self.advance(functools.partial(self._mode.replay, captured.pop(one)))
        if self._history is not None:
            self._history.settle()
        self._register(self._state.epoch, joining=False)
        return LoadResult(
            loaded=True,
            epoch=self._state.epoch,
            donors=downloaded.donors,
            failures=dict(attempt.failures),
            digest=downloaded.digest.hex(),
            canonical=downloaded.canonical,
            replayed=len(replayed),
            bytes_received=attempt.bytes_received,
            seconds=attempt.seconds,
        )

    def _belongs(self, downloaded: DownloadedState) -> bool:
        """Return whether a downloaded state belongs to the history that this peer follows. Raise PeerError
        when it is of another epoch than its certificate says.
        """
        if self._history is None:
            return True
        header = read_header(downloaded.blob)[0]
        root = root_of_header(header)
        if root is None:
            return True
        following = self._history.follow_to(root.head, header["epoch"], downloaded.donors)
        return self._node.network.run(following, _HISTORY_TIMEOUT_S)

    def _distrust(self, peers: Mapping[PeerId, str]) -> None:
        self.distrusted.update(peers)
        while len(self.distrusted) > _DISTRUSTED_MAX:
            del self.distrusted[next(iter(self.distrusted))]

    def _unregister(self) -> None:
        """Report that this peer is no longer in the epoch that it had reported, and waits for a state."""
        if self._history is not None:
            self._history.unfollow()
        self._tracker.begin_epoch(self._state.epoch, joining=True)

    def _register(self, epoch: int, *, joining: bool) -> None:
        """Enter `epoch`, and report it directly to some peers that have a state, unless they know it already:
        a single one that reads it later in the DHT could close the epoch alone. Those that do not close it
        alone learn of this peer from its averager. `joining`: this peer has not got the epoch's state.
        """
        self._tracker.begin_epoch(epoch, late=True, joining=joining)
        if not joining and epoch == self._registered_epoch:
            return
        self._registered_epoch = epoch
        try:
            self._node.network.run(self._tracker.probe(everybody=False), _REGISTER_S)
        except NetworkError as error:
            text = "not all peers know yet that this peer is in epoch %d of run %s: %s"
            _log.info(text, epoch, self._run_id, error)

    def probe(self, timeout_s: float) -> None:
        """Exchange reports with all peers directly. Raise NetworkError when that takes longer."""
        self._node.network.run(self._tracker.probe(), timeout_s)

    def probe_soon(self) -> None:
        """Begin to exchange reports with all peers, unless that is in progress. Does not wait."""
        if self._probing is None or self._probing.done():
            self._probing = self._node.network.submit(self._tracker.probe())

    def advance(self, apply: Callable[[], None]) -> None:
        """Move the state one epoch forward: apply the mode's step, then the scheduler's. When this raises an
        error although the step is complete, the state is in the next epoch.
        """
        state = self._state
        with state.lock:
            try:
                apply()
                state.has_stepped = True
            finally:
                if state.has_stepped:
                    self._end_epoch()

    def _end_epoch(self) -> None:
        state = self._state
        try:
            if state.scheduler is not None:
                state.scheduler.step()
        finally:  # the step is made, even if the caller's scheduler has no more epochs
            state.mark_changed(state.epoch + 1, root=self._averager.root_of(state.epoch + 1))

    def _read_donors(self, shard: str) -> dict[str, Entry]:
        key = donors_key(self._run_id, shard)
        for latest in (False, True):  # new replicas may lack the records
            get = self._node.dht.service.get(key, latest=latest, timeout_s=_READ_TIMEOUT_S)
            found = self._node.network.run(get, _READ_TIMEOUT_S + 1)
            if isinstance(found, dict) and found:
                return found
        return {}

    def _donors(self, attempt: _Attempt, among: frozenset[PeerId]) -> list[Contact]:
        """Return the peers that declare to have the state, the most promising first: those in the swarm's
        epoch, then those with a canonical state, in random order. In a large run they are of this peer's
        shard, so that newcomers spread over all donors.
        """
        shard = self._tracker.tree.shard_name
        try:
            found = self._read_donors(shard) or (self._read_donors("") if shard else {})
        except SwarmError as error:
            attempt.reason = str(error)
            return []
        epoch = self._tracker.swarm_epoch()
        ranked: list[tuple[bool, bool, float, Contact]] = []
        for entry in found.values():
            value: Any = entry.value
            if (
                entry.writer == self._node.peer_id
                or entry.writer in self.distrusted
                or entry.writer in self.blocklist.banned
                or not isinstance(value, dict)
            ):
                continue
            try:
                contact = Contact.from_record(entry.writer, value.get("addresses"))
            except PeerError as error:
                attempt.failures[entry.writer] = str(error)
                continue
            reported = value.get("epoch")
            plausible = isinstance(reported, int) and epoch - 1 <= reported <= epoch + 1
            ranked.append(
                (not plausible, value.get("canonical") is not True, self._node.rng.random(), contact)
            )
        ranked.sort(key=lambda one: one[:3])
        donors = [contact for *_, contact in ranked]
        return [contact for contact in donors if contact.peer_id in among] or donors
