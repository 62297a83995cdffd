"""The end of an epoch: its round with the other peers, or a step alone, and the round over the state."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from averaging.blocklist import EXCLUDED
from averaging.history.certificate import SAMPLES_MAX, RoundKind
from averaging.optim.catchup import CatchUp
from averaging.optim.epoch_averager import OBSOLETE_ROUND_GRACE_S, EpochAverager, StateRound
from averaging.optim.modes import Mode
from averaging.optim.progress.logic.newcomers import NewcomerWait
from averaging.optim.progress.logic.punctuality import SLOW
from averaging.optim.progress.tracker import Tracker
from averaging.optim.state.donor import Donor
from averaging.result import RoundResult
from swarm.core.backoff import Backoff
from swarm.core.errors import NetworkError
from swarm.core.ids import PeerId

_log = logging.getLogger(__name__)

ROUNDS_MAX = 3  # attempts within one call of step; the next call tries again
STATE_ROUNDS_MAX = 3  # attempts at averaging the state in its epoch
# Groups of up to this many average their state whenever it is due, also when they have just doubled. Larger:
# peers that differ, for instance in frozen parameters, stay apart longer; smaller: newcomers wait for a round
_SMALL_MAX = 8
# a peer steps alone only if its latest read of the others' progress is not older than this
ALONE_CHECK_AGE_S_MAX = 4.0

_PROBE_TIMEOUT_S = 10.0
_REFRESH_TIMEOUT_S = 2.0
_QUORUM_POLL_S = 0.5  # interval of checks for a quorum
_QUORUM_PAUSE_S = 0.1  # shortest interval of checks for a quorum
# A search for a group asks the other peers for their reports after this time, and then after growing pauses.
# Too small: long searches cost a call to each peer; too large: a peer that was killed right after its last
# report counts as present, so that the grace begins late
_PROBE_S_FIRST, _PROBE_S_MAX = 2.0, 16.0
# Before the first certificate of a run, a peer that is ready waits this long for those without a step. Too
# small: a peer whose first step is slow downloads what it could have averaged; too large: a peer that never
# trains keeps the run from beginning
_FIRST_STEP_S = 15.0
# in modes where peers differ anyway: a peer at most this far behind keeps its own state
_TOLERATED_LAG_EPOCHS_MAX = 3
# for example: it must not vote after restoring its state, its values were not finite, or (with local steps)
# it had missed too many rounds
_NO_WEIGHT = "this peer had no weight in the round"


@dataclass(frozen=True, slots=True)
class CloseOutcome:
    """The outcome of an attempt to close the epoch."""

    stepped: bool
    reason: str = ""
    # why this peer's samples, if any, did not count in the step; "": they counted
    not_counted: str = ""
    alone: bool = False
    behind: bool = False
    round: RoundResult | None = None
    rounds_failed: int = 0

    @property
    def others_missed_it(self) -> bool:
        """Return whether this peer alone has the new state: all others will download it."""
        return self.alone or (self.round is not None and len(self.round.peers) == 1)


class EpochCloser:
    """Closes epochs together with the other peers. Runs on the trainer's thread."""

    def __init__(
        self,
        mode: Mode,
        tracker: Tracker,
        donor: Donor,
        averager: EpochAverager,
        catch_up: CatchUp,
        load_timeout_s: float,
    ) -> None:
        """`load_timeout_s`: how long a peer without a state of the run waits for one."""
        self._clock, self._load_timeout_s = catch_up.clock, load_timeout_s
        # when it began to wait instead of making the first certificate
        self._waits_to_begin_s: float | None = None
        # when the first epoch of the run was full here
        self._ready_to_begin_s: float | None = None
        self._mode, self._state, self._tracker, self._donor = mode, mode.state, tracker, donor
        self._averager, self._catch_up, self._history = averager, catch_up, tracker.history
        self._traits = mode.traits
        self._epoch_began_s = self._clock.monotonic_s()
        self._sought_s = -math.inf  # time of the last quorum check during a round
        self._lacks_quorum = False  # result of that check
        # when the search in progress asks the other peers again
        self._probes, self._probe_s = Backoff(_PROBE_S_FIRST, _PROBE_S_MAX), -math.inf
        self._announced_wait_epoch = -1  # latest epoch with a message that the peer waits for a quorum
        self.round_is_break = False  # the latest attempt began after the grace
        # the step of a committed round was not made here, because of an error or Ctrl-C, or a cell of the
        # grid may have committed a round that failed here: this peer's samples may be in the others' state
        self.has_lost_round = False
        self._epoch_s = 0.0  # running estimate of how long an epoch takes
        self._newcomers = NewcomerWait(self._epoch_began_s)

    def is_behind(self) -> bool:
        """Return whether the swarm continued without this peer. In modes where peers proceed alone, a few
        epochs of difference are tolerated.
        """
        if self._history is not None:
            return self._history.ahead is not None
        return self._tracker.swarm_epoch() > self._state.epoch + (
            _TOLERATED_LAG_EPOCHS_MAX if self._traits.proceeds_alone else 0
        )

    def is_obsolete(self) -> bool:
        """Return whether the running round can no longer succeed: the swarm continued without this peer, or,
        while it searched for a group, the quorum was lost for the length of the grace. The remaining peers
        then meet for a round with a break, once each has noticed it. A search is over, too, when nobody is
        left in this epoch: the others have died, or follow another history.
        """
        if self.is_behind():
            return True
        if self._history is None or not self._history.root.electors:
            return False
        if not self.round_is_break:
            self._look_for_quorum()
            if self._history.grid_rounds > 1:
                return False
            if self._history.is_break:
                return True
        return not (self._averager.in_round or self._has_peers_in_epoch())

    def _look_for_quorum(self) -> None:
        """Look for a quorum from time to time while a round runs; the grace runs while there is none. In a
        swarm larger than a group the electors decide after the rounds of the cells.
        """
        history, now_s = self._history, self._clock.monotonic_s()
        if history is None or history.grid_rounds > 1:
            self._lacks_quorum = False
        elif now_s - self._sought_s >= _QUORUM_POLL_S:
            self._probe_in_search(now_s)
            self._sought_s = now_s
            found = history.seek_quorum(self._tracker.voters(), now_s, self._epoch_s)
            self._lacks_quorum = not found or history.is_break

    def _probe_in_search(self, now_s: float) -> None:
        """Ask the other peers for their reports from time to time while a search for a group lasts. Some may
        have ended after their last reports, which count until they expire.
        """
        is_new = now_s - self._sought_s >= _PROBE_S_FIRST
        if is_new or self._averager.in_round or self._averager.in_state_round:
            self._probes.reset()
        elif now_s >= self._probe_s:
            self._catch_up.probe_soon()
        else:
            return
        self._probe_s = now_s + self._probes.next_s()

    def waits_for_newcomers(self) -> bool:
        """Return whether this peer, which is alone in its epoch, should continue training in it although it
        is full: newcomers are about to have its state, and would come too late for a shorter epoch.
        """
        history = self._history
        if history is None:
            return False
        mine, is_alone = self._tracker.view().peers[self._tracker.own], not self._has_peers_in_epoch()
        newcomers = is_alone and any(
            history.knows(other.head)
            and (other.joining or not history.ledger.has_standing(peer))
            # a peer that is known to be slow sends its samples late
            and not 0.0 < other.rate < SLOW * mine.samples_per_s
            for peer, other in self._tracker.others().items()
        )
        if self.round_is_break or history.is_break or self._has_waited_for_first_steps():
            self._newcomers.empty()  # this peer has waited long enough for others
        return self._newcomers.waits(self._clock.monotonic_s(), newcomers=newcomers)

    def run_rounds(self, *, again: bool) -> CloseOutcome:
        """Run rounds until one is committed, this peer turns out to be alone, the swarm is ahead, or
        `rounds_max` rounds have failed.
        """
        result: RoundResult | None = None
        failed, epoch = 0, self._state.epoch
        while failed < (1 if self._traits.keeps_progress else ROUNDS_MAX):
            waiting = self.wait_for_quorum(failed)
            if waiting is not None:
                return waiting
            if not self.has_peers():
                return self.step_alone(result, failed)
            if failed or again:
                self._tracker.announce_full(epoch)
            result = self._averager.average(
                epoch, self.is_obsolete, OBSOLETE_ROUND_GRACE_S, may_have_counted=self.has_lost_round
            )
            if not result.failed:
                return self.committed(result, failed)
            failed += 1
            outcome = self.failed(result, failed)
            if outcome is not None:
                return outcome
        assert result is not None
        return CloseOutcome(
            stepped=False,
            reason=f"round failed: {result.detail or result.reason}",
            round=result,
            rounds_failed=failed,
        )

    def wait_for_quorum(self, failed: int) -> CloseOutcome | None:
        """Wait until this peer may try to commit: with a majority of the peers that decide, or after the
        grace. Return None then, or the outcome of an attempt that ends here: others continued meanwhile, or
        the mode trains on while it waits.
        """
        history, self.round_is_break = self._history, False
        if history is None:
            return None
        history.leave(None)  # an interrupted trainer did not process the result of its round
        if not history.has_begun:
            if self._ready_to_begin_s is None:
                self._ready_to_begin_s = self._clock.monotonic_s()
            waiting = self._wait_to_begin(failed)
            if waiting is not None:
                return waiting
        if history.grid_rounds > 1 and self.has_peers():
            return None  # in a swarm larger than a group the electors decide after the others' rounds
        while not history.seek_quorum(self._tracker.voters(), self._clock.monotonic_s(), self._epoch_s):
            # modes that train during rounds get here at every step
            if self._announced_wait_epoch != self._state.epoch:
                _log.warning("epoch %d is full, and not closed: %s", self._state.epoch, history.quorum_text())
            self._announced_wait_epoch = self._state.epoch
            if self._catch_up.blocklist.own_is_banned:
                return CloseOutcome(stepped=False, reason=EXCLUDED, rounds_failed=failed)
            if self.is_behind():
                return self._missed(failed)
            if self._traits.keeps_progress and not history.waits_briefly:
                return CloseOutcome(stepped=False, reason=history.quorum_text(), rounds_failed=failed)
            self._tracker.wait_refresh(_QUORUM_POLL_S)
            # a peer that is cut off reads only its own records, at once
            self._tracker.wait_full(self._state.epoch + 1, _QUORUM_PAUSE_S, self.is_behind)
        self.round_is_break = history.is_break
        if history.is_break:
            _log.warning("continuing without a majority of the peers that decide about this run")
        return None

    def _wait_to_begin(self, failed: int) -> CloseOutcome | None:
        """Wait until this peer may make the first certificate of the run: until it knows that nobody else has
        one, at most for the time limit of a download. Return None then, else as `wait_for_quorum`.
        """
        epoch = self._state.epoch
        while obstacle := self._catch_up.obstacle_to_beginning():
            now_s = self._clock.monotonic_s()
            if self._waits_to_begin_s is None:
                self._waits_to_begin_s = now_s
                _log.warning("epoch %d is full, and not closed: %s", epoch, obstacle)
            if self.is_behind():
                return self._missed(failed)
            if now_s - self._waits_to_begin_s >= self._load_timeout_s:
                _log.warning("beginning the run after %g s, although %s", self._load_timeout_s, obstacle)
                return None
            if self._traits.keeps_progress:
                return CloseOutcome(stepped=False, reason=obstacle, rounds_failed=failed)
            self._tracker.wait_full(epoch + 1, _QUORUM_POLL_S, self.is_behind)
        self._waits_to_begin_s = None
        return None

    def step_alone(self, result: RoundResult | None, failed: int) -> CloseOutcome:
        """Step without a round: no other peer is live, or the mode allows it. Peers with which this one had
        found a quorum may have gone since then: it steps only when it is one by itself, or after the grace.
        """
        if self._history is not None and not self._history.may_commit_alone:
            return CloseOutcome(stepped=False, reason=self._history.quorum_text(), rounds_failed=failed)
        weight, _ = self._mode.prepare(self._state.epoch)
        with self._undone_if_not_applied():
            if self._history is not None:
                samples = (min(int(weight), SAMPLES_MAX),)
                self._history.commit_alone(self._state.epoch + 1, RoundKind.EPOCH, samples)
            self._advance([], ())
        return CloseOutcome(
            stepped=True,
            alone=True,
            round=result,
            rounds_failed=failed,
            # a step without others applies local steps unchanged
            not_counted="" if weight or self._traits.keeps_progress else _NO_WEIGHT,
        )

    def committed(self, result: RoundResult, failed: int, began_ago_s: float = 0.0) -> CloseOutcome:
        self.has_lost_round = True  # until the state has advanced
        with self._undone_if_not_applied():
            if self._history is not None and result.certificate is not None:
                self._history.commit(result.certificate)
            self._advance(
                list(result.gathered.values()),
                [peer for peer in result.peers if peer not in result.left_out],
                began_ago_s,
            )
        own = self._tracker.own
        counted = result.contributions.get(own, 0.0) > 0.0
        return CloseOutcome(
            stepped=True,
            round=result,
            rounds_failed=failed,
            not_counted="" if counted else result.left_out.get(own, _NO_WEIGHT),
        )

    @contextlib.contextmanager
    def _undone_if_not_applied(self) -> Iterator[None]:
        """Return to the previous head when the state was not advanced, because of Ctrl-C or of an exception
        of the inner optimizer. Nobody could compare what this peer would certify after a head whose state it
        does not have. As after a restart it takes no part in decisions on that head for now.
        """
        root, epoch = self._history.root if self._history is not None else None, self._state.epoch
        try:
            yield
        except BaseException:
            if self._history is not None and root is not None and self._state.epoch == epoch:
                self._history.restore(root)
            raise

    def failed(self, result: RoundResult, failed: int) -> CloseOutcome | None:
        """Return the outcome of a failed round, or None when it may be tried again."""
        self._mode.failed(result.reason)
        epoch = self._state.epoch
        _log.info("round of epoch %d failed: %s", epoch, result.detail)
        if self._traits.proceeds_alone:
            return self.step_alone(result, failed)
        self._probe()
        # the certificates of a swarm larger than a group do not say whose values its cells have averaged; a
        # later attempt may be the one that learns that the others have continued
        is_grid = self._history is not None and self._history.grid_rounds > 1
        self.has_lost_round |= is_grid and result.unresolved
        if result.reason == "passed" or self.is_behind():
            # a search that found no group before the others closed the epoch does not count as a round
            return self._missed(failed if result.attempts else failed - 1, result)
        return None

    def _missed(self, failed: int, result: RoundResult | None = None) -> CloseOutcome:
        """Return the outcome of an attempt that ends because the others have closed this epoch."""
        reason = f"the swarm completed epoch {self._state.epoch} without this peer"
        return CloseOutcome(stepped=False, behind=True, reason=reason, round=result, rounds_failed=failed)

    def _advance(self, metadata: list[object], members: Sequence[PeerId], began_ago_s: float = 0.0) -> None:
        now_s = self._clock.monotonic_s()
        took_s, self._epoch_began_s = now_s - self._epoch_began_s, now_s
        self._epoch_s = took_s if self._epoch_s == 0.0 else 0.8 * self._epoch_s + 0.2 * took_s
        self._sought_s = -math.inf  # the head has moved, so the last quorum check is outdated
        epoch = self._state.epoch
        try:
            self._catch_up.advance(lambda: self._mode.apply(metadata))
            if self._traits.proceeds_alone:
                # catch up with epochs that passed while this peer waited for a partner in vain
                for _ in range(self._state.epoch, self._tracker.swarm_epoch()):
                    self._catch_up.advance(lambda: None)
        finally:
            if self._state.epoch > epoch:  # also where the caller's scheduler raised an error after the step
                self.has_lost_round = False
                self._tracker.begin_epoch(self._state.epoch, members=members, began_ago_s=began_ago_s)
                self._donor.changed()

    def has_peers(self) -> bool:
        """Return whether another peer trains in this epoch. Peers that lag behind do not count, because they
        will fetch the state. False follows only from a recent read of the DHT.
        """
        if not self._has_peers_in_epoch() and self._tracker.refresh_age_s() > ALONE_CHECK_AGE_S_MAX:
            self._tracker.wait_refresh(_REFRESH_TIMEOUT_S)
        return self._has_peers_in_epoch()

    def is_left_alone(self) -> bool:
        """Return whether nobody else has this peer's history any more, so that a failed round can be retried
        without waiting for others.
        """
        return self._history is not None and not self._has_peers_in_epoch()

    def _has_peers_in_epoch(self) -> bool:
        others, history = self._tracker.others(), self._history
        if history is None:
            return any(other.epoch >= self._state.epoch for other in others.values())
        # after the grace, others do not wait for a peer that loads a state; it joins only rounds with a
        # quorum
        waits_for_joining = not (history.is_break or self._has_waited_for_first_steps())
        partners = [
            other
            for other in self._tracker.others_at_head().values()
            if waits_for_joining or not other.joining
        ]
        # heads that were not compared yet may turn out to be the same history, one round further
        return bool(partners) or any(history.is_new(peer, other.head) for peer, other in others.items())

    def _has_waited_for_first_steps(self) -> bool:
        """Return whether this peer has waited long enough to begin the run without those that do not step."""
        if self._ready_to_begin_s is None or self._history is None or self._history.has_begun:
            return False
        return self._clock.monotonic_s() - self._ready_to_begin_s >= _FIRST_STEP_S

    def _probe(self) -> None:
        """Contact the other peers directly, so that dead ones are known at once."""
        try:
            self._catch_up.probe(_PROBE_TIMEOUT_S)
        except NetworkError as error:
            _log.info("not all peers could be asked: %s", error)

    def average_state_if_due(self, *, alone: bool) -> StateRound | None:
        """Average the state when it is due in this epoch. Return None when no round was made."""
        epoch = self._state.epoch
        if not self._averager.state_sync_epochs or not self._traits.canonical:
            return None
        # also when alone, because newcomers must be able to find this peer for the round
        self._averager.open_state()
        if epoch % self._averager.state_sync_epochs and epoch != min(2, self._averager.state_sync_epochs):
            return None
        if not alone and self._has_just_grown():
            _log.info("the state of epoch %d is not averaged: most peers have just loaded it", epoch)
            return None
        if alone:
            with self._state.lock:
                self._state.agree_extras()
                self._state.mark_changed(epoch, root=self._averager.root_of(epoch))
            return None
        state_round = self._averager.average_state(self._state_round_is_obsolete)
        for _ in range(STATE_ROUNDS_MAX - 1):
            if (
                not state_round.result.failed
                or state_round.result.reason == "passed"
                or self._state_round_is_obsolete()
            ):
                break
            # a peer that opened its averager a moment later is known by now
            self._tracker.wait_refresh(_REFRESH_TIMEOUT_S)
            state_round = self._averager.average_state(self._state_round_is_obsolete)
        if state_round.result.failed:
            _log.warning("the state of epoch %d was not averaged: %s", epoch, state_round.result.detail)
        else:
            result = state_round.result
            self._tracker.on_round(peer for peer in result.peers if peer not in result.left_out)
        self._donor.changed()
        return state_round

    def _has_just_grown(self) -> bool:
        """Return whether most peers have come since the state was due last. They hold it as they loaded it,
        and more of them may be about to come, whose processors and links a round over the state would take.
        Certificates say so, hence all peers agree.
        """
        if self._history is None:
            return False
        now, before = self._history.past().contributors(self._averager.state_sync_epochs)
        return now > _SMALL_MAX and now >= 2 * before

    def _state_round_is_obsolete(self) -> bool:
        """Return whether a round over the state cannot succeed: nobody will join it, or there is no quorum.
        Then this peer continues training while the grace runs, and the state is averaged the next time.
        """
        if self._others_continued():
            return True
        self._look_for_quorum()
        # the missing vote may be that of this round
        free = not self._averager.in_state_round or (self._history is not None and self._history.is_bound)
        return self._lacks_quorum and free

    def _others_continued(self) -> bool:
        """Return whether all others have finished averaging the state of this epoch, so that nobody will join
        that round.
        """
        epoch = self._state.epoch
        others = self._tracker.others().values()
        return all(other.epoch > epoch or (other.epoch == epoch and other.samples > 0) for other in others)
