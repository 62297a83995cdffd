"""One epoch of a swarm that is larger than a group: rounds through the cells of the grid, then one of the
electors.

After as many rounds as the grid has dimensions every peer holds the average of the whole swarm, up to the
rounding of its cells. Then the electors average once more, in one cell, with a certificate: the proof that
the epoch is over, and the same bits on all of them. The other peers wait for that certificate and follow it.
docs/decisions/0030 has the rule.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import replace

from averaging.history.certificate import SAMPLES_MAX, Certificate, RoundKind
from averaging.optim.background_round import CANCEL_S_MAX, RoundPlan, check_interval_s
from averaging.optim.history import RunHistory
from averaging.result import PendingRound, RoundFailure, RoundResult
from swarm.core.backoff import Backoff
from swarm.core.ids import Contact, PeerId

_log = logging.getLogger(__name__)

_ASK_INTERVAL_S = 0.3  # interval at which one other peer is asked for the electors' certificate
_RETRY_S_FIRST, _RETRY_S_MAX = 0.1, 2.0  # between two attempts of the electors
_PART = "electors"


class GridRound:
    """The rounds of one epoch, one after the other. The interface is that of `RunningRound`."""

    def __init__(
        self, plan: RoundPlan, history: RunHistory, is_obsolete: Callable[[], bool], grace_s: float
    ) -> None:
        """Begin. The rounds are cancelled `grace_s` after the swarm continued without this peer
        (`is_obsolete`).
        """
        self._plan, self._history, self._node = plan, history, plan.averager.node
        self._is_obsolete, self._grace_s, self._obsolete_s = is_obsolete, grace_s, math.inf
        # number of rounds, and number of the round in progress
        self._rounds, self._number = self._history.grid_rounds, 1
        self._began_as_break = history.is_break
        self._weight, self._gather = plan.weight, plan.gather
        self._met: dict[PeerId, Contact] = {}
        self._averaged: RoundResult | None = None  # result of the last round that succeeded
        # the first round that succeeded, which contains this peer's own values
        self._first: RoundResult | None = None
        self._outcome: RoundResult | None = None
        self._is_unresolved = False  # others may have committed a round of a cell that failed here
        self.made_by_electors = False  # the values are those that the electors certified, bit for bit
        self._pending: PendingRound | None = None
        self._waits_since_s = self._asked_s = self._retry_s = -math.inf
        self._certified_s = math.inf  # since when the certificate is known
        self._retries = Backoff(_RETRY_S_FIRST, _RETRY_S_MAX, self._node.rng)
        self._begin_next()

    def done(self) -> bool:
        """Return whether `result` would not wait. Call it regularly: it begins one round after the other."""
        for advance in (self._take, self._follow, self._end_if_obsolete, self._wait):
            if self._outcome is None:
                advance(self._node.clock.monotonic_s())
        return self._outcome is not None

    def result(self) -> RoundResult:
        """Wait for the end and return the result: that of the last round, with the certificate of all, and
        with this peer's contribution and weight in the first one.
        """
        try:
            pause = self._node.network.waits.event()
            while not self.done():
                interval_s = check_interval_s(self._history.size.peers)
                if self._pending is not None:
                    self._pending.wait(interval_s)
                else:
                    pause.wait(interval_s)
        except BaseException:  # Ctrl-C: no work may continue in the background
            self.cancel()
            raise
        outcome, first, own = self._outcome, self._first, self._node.peer_id
        assert outcome is not None
        if outcome.failed or first is None:
            return outcome
        return replace(
            outcome,
            contributions={**outcome.contributions, own: first.contributions.get(own, 0.0)},
            weights={**outcome.weights, own: first.weights.get(own, 0.0)},
        )

    def cancel(self) -> None:
        """Cancel the round in progress; the tensors are free afterwards."""
        self._fail("cancelled", "the round was cancelled here")

    # ---- inside

    def _fail(self, reason: RoundFailure, detail: str) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.cancel()
            pending.wait_given_up(CANCEL_S_MAX)
        if self._outcome is None:
            self._outcome = RoundResult(
                failed=True, reason=reason, detail=detail, unresolved=self._is_unresolved
            )

    @property
    def _waits(self) -> bool:
        """Return whether the rounds of the cells are over, and the certificate is missing."""
        return self._number > self._rounds

    def _begin_next(self) -> None:
        """Begin the next round of this peer's cell."""
        key = self._history.round_key(self._plan.epoch, f"{self._number}/{self._rounds}")
        self._pending = self._plan.step(key, self._weight, self._gather)

    def _take(self, now_s: float) -> None:
        """Take the result of the round in progress if it has ended, and begin the next one."""
        pending = self._pending
        if pending is None or not pending.done:
            return
        self._pending = None
        result = self._plan.take(pending)
        if self._waits:
            if not result.failed:
                self._outcome, self.made_by_electors = result, True
            else:
                _log.debug("epoch %d: the electors' round failed: %s", self._plan.epoch, result.detail)
                self._retry_s = now_s + self._retries.next_s()
            return
        is_over = self._certificate() is not None
        can_repeat = self._number == 1 and result.reason != "passed"
        if result.failed and self._averaged is None and (is_over or can_repeat):
            # nothing has changed, and it can be tried again
            self._outcome = replace(result, unresolved=result.unresolved or self._is_unresolved)
            return
        if result.failed:
            self._is_unresolved |= result.unresolved
            _log.info(
                "epoch %d continues without round %d: %s", self._plan.epoch, self._number, result.detail
            )
            may_have_counted = result.unresolved or (self._number == 1 and self._plan.may_have_counted)
            if may_have_counted and result.reason == "passed":
                # the cell has committed, without this peer, a round for which this attempt or an earlier one
                # had sent its values: they count there already
                self._weight = 0.0
        else:
            self._averaged, self._weight = result, result.weight
            self._first = self._first or result
            self._gather = self._plan.merge(list(result.gathered.values()))
            own = self._plan.averager.node.peer_id
            self._met |= {one.peer_id: one for one in self._plan.averager.met if one.peer_id != own}
        self._number += 1
        if self._number <= self._rounds:
            self._begin_next()
        else:
            self._waits_since_s = now_s

    def _certificate(self) -> Certificate | None:
        """Return the certificate with which the electors have ended this epoch; None while none is known."""
        history, ahead = self._history, self._history.ahead
        if ahead is None:
            return None
        found = ahead.extending(history.head, self._plan.kind, self._plan.epoch_after)
        # the cells of a break differ from those of the rest of the swarm
        allowed = (True,) if self._began_as_break else (False, history.is_break)
        return found if found is not None and found.proposal.is_break in allowed else None

    def _follow(self, now_s: float) -> None:
        """End with the certificate of the electors, once it is known, if this peer was not in their round:
        at once when its rounds are over, and after `grace_s` when it still searches for members of a cell,
        who are most probably in the next epoch.
        """
        certificate = self._certificate()
        if certificate is None:
            self._certified_s = math.inf
            return
        if not self._waits:
            self._certified_s = min(self._certified_s, now_s)
            runner = self._plan.averager.runner
            if now_s - self._certified_s < self._grace_s or (runner is not None and runner.in_round):
                return
            # a round of the cell that failed before this search
            self._is_unresolved |= runner is not None and runner.unresolved
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.cancel()
            pending.wait_given_up(CANCEL_S_MAX)
            if pending.done and not (result := self._plan.take(pending)).failed:  # committed here, too
                if self._waits:
                    self._outcome, self.made_by_electors = result, True
                    return
                self._averaged, self._first = result, self._first or result
        if self._averaged is not None:
            self._outcome = replace(self._averaged, certificate=certificate)
        else:
            self._fail("passed", f"all cells have averaged epoch {self._plan.epoch} without this peer")

    def _end_if_obsolete(self, now_s: float) -> None:
        goes_on = self._history.certified_epoch > self._plan.epoch_after or self._certificate() is None
        self._obsolete_s = min(self._obsolete_s, now_s) if goes_on and self._is_obsolete() else math.inf
        if now_s - self._obsolete_s >= self._grace_s:
            self.cancel()

    def _wait(self, now_s: float) -> None:
        """Take part in the electors' round if this peer has a seat there, and ask others for its
        certificate.
        """
        plan, history = self._plan, self._history
        if not self._waits:
            return
        if now_s - self._asked_s >= _ASK_INTERVAL_S:
            self._asked_s = now_s
            if self._met:
                history.ask(self._node.rng.choice(list(self._met.values())))
            waited_s = now_s - self._waits_since_s
            if waited_s > plan.timeout_s:
                if plan.kind is RoundKind.STATE:
                    self._fail("deadline", "the electors did not certify the state in time")
                    return
                history.lacks_certificate(now_s)
                if history.is_break and history.size.peers <= 1:
                    self._fail("alone", "all other peers have left")
                    return
        seats = history.seats() if plan.weight > 0.0 or self._may_decide() else 0
        if seats and self._pending is None and now_s >= self._retry_s:
            key = history.round_key(plan.epoch, _PART)
            samples = min(int(plan.weight), SAMPLES_MAX)  # `_weight` is that of the cells
            lineage = history.round(plan.kind, plan.epoch_after, key, seats=seats)
            # a peer that had nothing to give is no contributor of the certificate, and leaves the electors
            weight = self._weight if plan.weight > 0.0 else 0.0
            self._pending = plan.step(replace(lineage, samples=samples), weight, self._gather)

    def _may_decide(self) -> bool:
        """Return whether this peer is an elector that may vote: others may need its vote even where it has
        nothing to average.
        """
        history = self._history
        return self._node.peer_id in history.root.electors and not history.abstains
