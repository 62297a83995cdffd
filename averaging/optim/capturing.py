"""A newcomer's part in the rounds of others while it downloads the state: at weight 0, for their results."""

from __future__ import annotations

import concurrent.futures
import logging
import math
from typing import TYPE_CHECKING

from averaging.optim.epoch_averager import EpochAverager
from averaging.optim.history import RunHistory
from averaging.optim.modes import CapturedRound, Mode
from averaging.optim.progress.tracker import Tracker
from averaging.optim.state.download import Download, DownloadedState

if TYPE_CHECKING:
    from swarm.node import Node

_log = logging.getLogger(__name__)

# epochs captured while the state is downloaded, one copy of the gradients each; beyond it the download
# restarts
REPLAY_ROUNDS_MAX = 64
# During a first download shorter than this, the peer does not take part in rounds; it is also the longest
# that others wait for it
CAPTURE_AFTER_S = 0.5
# How long the search for the group of a full epoch continues after the download has ended; a round in
# progress is not left. Too small: others have counted on this peer
CAPTURE_GRACE_S = 3.0

# The search for a round begins this long before the expected end of its epoch. Too small: a newcomer that
# learns of the end after the others' round misses short epochs; too large: messages of useless searches
_EARLY_S = 2.0
_POLL_INTERVAL_S = 0.05  # how often a newcomer checks, between rounds, whether its download is done


class RoundCapture:
    """Takes part in the rounds of others on behalf of a peer without a state. Runs on the trainer's thread.

    While others believe that this peer is in their epoch they wait for it, as long as its account allows,
    which is short. This peer therefore follows the swarm's history as soon as it advances, searches for no
    round that is over, and begins to search before the epoch is full.
    """

    def __init__(
        self, node: Node, mode: Mode, tracker: Tracker, averager: EpochAverager, history: RunHistory | None
    ) -> None:
        """`history`: of the state; None in modes without a common state."""
        self._node, self._mode, self._tracker = node, mode, tracker
        self._averager, self._history = averager, history
        # the swarm was faster: the latest download was abandoned after a missed epoch
        self._is_outpaced = False

    def run_during(
        self, download: Download, future: concurrent.futures.Future[DownloadedState], epoch: int
    ) -> tuple[dict[int, CapturedRound], int]:
        """Take part in rounds at weight 0, from that of `epoch` on, until the download is over: `future` is
        its result, and cancelled when the state in transit can no longer be brought up to date. Return the
        captured result of each epoch, and the epoch that the swarm is in.
        """
        captured: dict[int, CapturedRound] = {}
        ended = self._node.network.waits.event()
        future.add_done_callback(lambda _: ended.set())
        ended.wait(0.0 if self._is_outpaced else CAPTURE_AFTER_S)
        self._is_outpaced = False
        future.add_done_callback(lambda _: self._tracker.wake_waiters())
        while not future.done():
            if self._is_behind() or self._tracker.swarm_epoch() > epoch:  # missed a round
                captured.clear()
                self.follow_history()
                epoch = self._tracker.swarm_epoch()
            elif not self._is_near_end(epoch, future):
                continue
            elif (one := self._capture(epoch, future)) is None:
                self._node.network.waits.event().wait(_POLL_INTERVAL_S)
                continue
            else:
                captured[epoch] = one
                epoch += 1
                if len(captured) > REPLAY_ROUNDS_MAX:
                    captured.clear()
            self._tracker.begin_epoch(epoch, late=True, joining=True)
            if download.epoch is not None and any(
                one not in captured for one in range(download.epoch, epoch)
            ):
                # restarting is better than completing a useless download
                self._is_outpaced = True
                future.cancel()
                break
        return captured, epoch

    def follow_history(self) -> None:
        """Follow the swarm's history when it has advanced, so that this peer finds the rounds of its head:
        rounds of an older head never commit.
        """
        if self._history is not None and (ahead := self._history.ahead) is not None:
            self._history.follow(ahead)

    def _is_behind(self) -> bool:
        return self._history is not None and self._history.ahead is not None

    def _is_near_end(self, epoch: int, future: concurrent.futures.Future[DownloadedState]) -> bool:
        """Return whether to search for the round of this epoch; wait a moment if the epoch is not full."""
        history = self._history
        # without electors that must agree, or in a cell of the grid, newcomers would form a separate group
        may_be_early = history is not None and history.has_begun and history.grid_rounds == 1
        if may_be_early and self._tracker.view().eta_s <= _EARLY_S:
            return True
        return self._tracker.wait_full(epoch, _POLL_INTERVAL_S, future.done)

    def _capture(
        self, epoch: int, future: concurrent.futures.Future[DownloadedState]
    ) -> CapturedRound | None:
        """Take part in the round of this epoch, and return its result, or None when there is none."""
        ended_s = math.inf

        def is_obsolete() -> bool:
            nonlocal ended_s
            if self._averager.in_round:
                return False
            now_s = self._node.clock.monotonic_s()
            if future.done():
                ended_s = min(ended_s, now_s)
                if not self._tracker.wait_full(epoch, 0.0):
                    return True  # no other peer waits for this one yet
            return self._is_behind() or now_s - ended_s >= CAPTURE_GRACE_S

        result = self._averager.average(epoch, is_obsolete, 0.0)
        if result.failed:
            text = "epoch %d of run %s was not received during the download: %s"
            _log.info(text, epoch, self._tracker.run_id, result.detail)
            self._mode.failed(result.reason)
            return None
        if self._history is not None and result.certificate is not None:
            self._history.commit(result.certificate)
        return self._mode.capture(epoch, list(result.gathered.values()))
