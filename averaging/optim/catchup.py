"""Joining a run: download the state, and meanwhile take part in the swarm's rounds at weight 0, so that no
epoch is missed.

A download may take longer than an epoch. If a newcomer only downloaded, it would return with the state of
epoch s while the swarm is at s + 5, and downloading again would never end. So it registers in the present
epoch, records the results of rounds while chunks arrive, and replays those epochs on the downloaded state:
one optimizer step each, always faster than the swarm's epochs. docs/decisions/0005 has the argument.
"""

from __future__ import annotations

import concurrent.futures
import logging
import random
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from averaging.optim.admission import Blocklist
from averaging.optim.config import OptimizerConfig
from averaging.optim.contacts import contact_of
from averaging.optim.epoch_averager import EpochAverager
from averaging.optim.modes import CapturedRound, Mode
from averaging.optim.progress.tracker import Tracker
from averaging.optim.reports import LoadResult
from averaging.optim.state.download import Download, DownloadedState
from averaging.optim.state.intake import PartialState
from swarm.core.errors import NetworkError, NotEnoughPeers, PeerError, SwarmError
from swarm.core.ids import Contact, Key, PeerId

if TYPE_CHECKING:
    from swarm.node import Node

_log = logging.getLogger(__name__)

_POLL_INTERVAL_S = 0.05  # how often a newcomer checks, between rounds, whether its download is done
_READ_TIMEOUT_S = 5.0
_DISTRUSTED_MAX = 1024  # remembered; beyond this the oldest is forgotten
_FAILURES_SHOWN_MAX = 3  # in one message
_REGISTER_S = 1.0  # for the reports to the others; a peer that does not answer in time reads the DHT instead


@dataclass(slots=True)
class _Attempt:
    """State of one call of `load` across its downloads."""

    deadline_s: float
    started_s: float
    failures: dict[PeerId, str] = field(default_factory=dict)
    partial: PartialState | None = None  # chunks of an incomplete download
    bytes_received: int = 0
    reason: str = ""

    @property
    def left_s(self) -> float:
        return self.deadline_s - time.monotonic()


class CatchUp:
    """Brings this peer to the swarm's epoch. Runs on the trainer's thread."""

    def __init__(
        self,
        node: Node,
        mode: Mode,
        tracker: Tracker,
        averager: EpochAverager,
        blocklist: Blocklist,
        config: OptimizerConfig,
    ) -> None:
        self._node, self._run_id, self._mode, self._state = node, tracker.run_id, mode, mode.state
        self._tracker, self._averager, self._config = tracker, averager, config
        # bytes so far and in total; called on the network thread
        self.on_progress: Callable[[int, int], None] | None = None
        # donors of a state that does not fit, or of chunks that do not match their digests, with the reason:
        # this optimizer does not ask them again
        self.distrusted: dict[PeerId, str] = {}
        self._blocklist = blocklist

    def load(self, timeout_s: float) -> LoadResult:
        """Fetch the state until it is loaded, no other peer takes part in the run, or `timeout_s` is over.

        What was accumulated is dropped. `bytes_received` and `failures` of the result cover all downloads
        of this call.
        """
        now_s = time.monotonic()
        attempt = _Attempt(deadline_s=now_s + timeout_s, started_s=now_s)
        self._tracker.wait_refresh(min(self._config.first_refresh_timeout_s, timeout_s), first=True)
        while True:
            if self._blocklist.own:
                return self._not_loaded(attempt, "the owner of this run has banned this peer")
            self._tracker.wait_refresh(min(self._config.first_refresh_timeout_s, max(attempt.left_s, 0.01)))
            donors = self._donors(attempt)
            if not donors:
                if not self._tracker.others():
                    return self._not_loaded(attempt, self._alone_reason(), alone=True)
                waited_s = time.monotonic() - attempt.started_s
                if (
                    self._tracker.swarm_epoch() == 0
                    and self._state.epoch == 0
                    and waited_s >= self._config.no_donor_wait_s
                ):
                    return self._not_loaded(
                        attempt,
                        "all peers of this run are in its first epoch, and none has a state to give",
                        alone=True,
                    )
                attempt.reason = attempt.reason or "no peer declares that it has the state"
            else:
                result = self._download_once(attempt, donors)
                if result is not None:
                    return result
            if attempt.left_s <= self._config.load_retry_s:
                return self._not_loaded(attempt, f"not done within {timeout_s:g} s: {attempt.reason}")
            threading.Event().wait(self._config.load_retry_s * random.uniform(0.5, 1.0))

    def _alone_reason(self) -> str:
        """Describe a run in which no other peer is visible, including failed connections: perhaps this peer
        has reached no peer that could know of others.
        """
        failures = self._node.join_failures
        unreached = (
            ", as far as this peer knows, which has reached nobody: "
            f"{'; '.join(failures[:_FAILURES_SHOWN_MAX])}"
            if failures
            else ""
        )
        return f"nobody else takes part in this run{unreached}"

    def _not_loaded(self, attempt: _Attempt, reason: str, *, alone: bool = False) -> LoadResult:
        return LoadResult(
            loaded=False,
            epoch=self._state.epoch,
            reason=reason,
            alone=alone,
            failures=dict(attempt.failures),
            bytes_received=attempt.bytes_received,
            seconds=time.monotonic() - attempt.started_s,
        )

    def _download_once(self, attempt: _Attempt, donors: list[Contact]) -> LoadResult | None:
        """Make one download and take part in its rounds. Return None when it must be tried again."""
        self._mode.learner.suspend()
        # before asking for the state: this peer takes part in all rounds after whatever epoch the state has
        self._averager.open()
        epoch = max(self._tracker.swarm_epoch(), self._state.epoch)
        self._register(epoch)  # a peer that closes the epoch now waits for this one, at weight 0
        download = Download(
            run=self._run_id,
            caller=self._node.channels,
            bytes_max=self._state.bytes_max(),
            epoch_min=epoch,
            epoch_known=epoch,
            config=self._config.download,
            on_progress=self.on_progress,
            partial=attempt.partial,
            pool=self._node.network.pool,
        )
        future = self._node.network.submit(download.fetch(donors, max(attempt.left_s, 0.1)))
        try:
            captured, epoch = self._capture_rounds_during(download, future, epoch)
            downloaded = future.result()
        except (NetworkError, PeerError, NotEnoughPeers, concurrent.futures.CancelledError) as error:
            attempt.reason = (
                str(error)
                or "the swarm completed an epoch during the download, and this peer was not in its round"
            )
            self._tracker.begin_epoch(self._state.epoch)  # this peer is not in the epoch that it reported
            return None
        finally:
            future.cancel()  # Ctrl-C: no work may continue in the background
            attempt.failures.update(download.failures)
            self._distrust({peer: download.failures[peer] for peer in download.liars})
            attempt.bytes_received += download.received_bytes
            attempt.partial = download.partial
        return self._install(attempt, downloaded, captured, epoch)

    def _capture_rounds_during(
        self, download: Download, future: concurrent.futures.Future[DownloadedState], epoch: int
    ) -> tuple[dict[int, CapturedRound], int]:
        """Take part in rounds at weight 0 until the download is over. Return the captured result of each
        epoch, and the epoch that the swarm is in.
        """
        captured: dict[int, CapturedRound] = {}
        concurrent.futures.wait([future], self._config.capture_after_s)
        future.add_done_callback(lambda _: self._tracker.wake_waiters())
        while not future.done():
            if not self._tracker.wait_full(epoch, _POLL_INTERVAL_S, future.done):
                continue
            swarm_epoch = self._tracker.swarm_epoch()
            if swarm_epoch > epoch:  # missed an epoch
                captured.clear()
                epoch = swarm_epoch
            else:
                result = self._averager.average(epoch, future.done, self._config.capture_grace_s)
                if result.failed:
                    _log.info(
                        "epoch %d of run %s was not received during the download: %s",
                        epoch,
                        self._run_id,
                        result.detail,
                    )
                    self._mode.failed(result.reason)
                    threading.Event().wait(_POLL_INTERVAL_S)
                    continue
                captured[epoch] = self._mode.capture(epoch, list(result.gathered.values()))
                epoch += 1
                if len(captured) > self._config.replay_rounds_max:
                    captured.clear()
            self._tracker.begin_epoch(epoch, joining=True)
            if download.epoch is not None and any(
                one not in captured for one in range(download.epoch, epoch)
            ):
                # the state in transit can no longer be brought up to date: restarting is better than
                # finishing in vain
                future.cancel()
                break
        return captured, epoch

    def _install(
        self, attempt: _Attempt, downloaded: DownloadedState, captured: dict[int, CapturedRound], epoch: int
    ) -> LoadResult | None:
        missing = [e for e in range(downloaded.epoch, epoch) if e not in captured]
        if missing:
            attempt.reason = (
                f"the swarm completed epoch {missing[0]} while the state of epoch {downloaded.epoch} "
                "was being downloaded"
            )
            self._tracker.begin_epoch(self._state.epoch)
            return None
        try:
            self._state.load(downloaded.blob)
        except PeerError as error:
            attempt.reason = str(error)
            attempt.failures.update(dict.fromkeys(downloaded.donors, str(error)))
            attempt.partial = None
            self._distrust(dict.fromkeys(downloaded.donors, str(error)))
            self._tracker.begin_epoch(self._state.epoch)
            return None
        replayed = range(downloaded.epoch, epoch)
        for one in replayed:
            self.advance(lambda one=one: self._mode.replay(captured.pop(one)))  # type: ignore[misc]
        self._register(self._state.epoch)
        return LoadResult(
            loaded=True,
            epoch=self._state.epoch,
            donors=downloaded.donors,
            failures=dict(attempt.failures),
            digest=downloaded.digest.hex(),
            canonical=downloaded.canonical,
            replayed=len(replayed),
            bytes_received=attempt.bytes_received,
            seconds=time.monotonic() - attempt.started_s,
        )

    def _distrust(self, peers: Mapping[PeerId, str]) -> None:
        self.distrusted.update(peers)
        while len(self.distrusted) > _DISTRUSTED_MAX:
            del self.distrusted[next(iter(self.distrusted))]

    def _register(self, epoch: int) -> None:
        """Enter `epoch`, and report it to the others directly: a peer that reads it later in the DHT could
        close the epoch without this peer.
        """
        self._tracker.begin_epoch(epoch, joining=True)
        try:
            self.probe(_REGISTER_S)
        except NetworkError as error:
            _log.info(
                "not all peers know yet that this peer is in epoch %d of run %s: %s",
                epoch,
                self._run_id,
                error,
            )

    def probe(self, timeout_s: float) -> None:
        """Exchange reports with all peers directly. Raise NetworkError when that takes longer."""
        self._node.network.run(self._tracker.probe(), timeout_s)

    def advance(self, apply: Callable[[], None]) -> None:
        """Move the state one epoch forward: apply the mode's step, then the scheduler's."""
        state = self._state
        with state.lock:
            apply()
            if state.scheduler is not None:
                state.scheduler.step()
            state.mark_changed(state.epoch + 1)

    def _donors(self, attempt: _Attempt) -> list[Contact]:
        """Return the peers that declare to have the state, the most promising first: those in the swarm's
        epoch, then those with a canonical state, in random order.
        """
        try:
            found = self._node.network.run(
                self._node.dht.service.get(Key(f"run.{self._run_id}", "donors"), timeout_s=_READ_TIMEOUT_S),
                _READ_TIMEOUT_S + 1,
            )
        except SwarmError as error:
            attempt.reason = str(error)
            return []
        epoch = self._tracker.swarm_epoch()
        ranked: list[tuple[bool, bool, float, Contact]] = []
        for entry in found.values() if isinstance(found, dict) else ():
            value: Any = entry.value
            if (
                entry.writer == self._node.peer_id
                or entry.writer in self.distrusted
                or entry.writer in self._blocklist
                or not isinstance(value, dict)
            ):
                continue
            try:
                contact = contact_of(entry.writer, value.get("addresses"))
            except PeerError as error:
                attempt.failures[entry.writer] = str(error)
                continue
            reported = value.get("epoch")
            plausible = isinstance(reported, int) and epoch - 1 <= reported <= epoch + 1
            ranked.append((not plausible, value.get("canonical") is not True, random.random(), contact))
        ranked.sort(key=lambda one: one[:3])
        return [contact for *_, contact in ranked]
