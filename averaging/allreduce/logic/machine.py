"""One running round of one member, as a pure state machine.

`begin`, `step(event, now_s)` and `tick(now_s)` return effects; a driver performs these, and feeds their
results back as events. The machine composes its parts, each of which returns values: `Membership` (who is
alive), `OwnShard` (what this member reduces), `ReducerStreams` and `Assembly` (which averages are in place),
`Repairs` (lost reducers), `VoteExchange` and `Agreement` (votes, and what they decide).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from averaging.allreduce.logic import effects as do
from averaging.allreduce.logic import events as on
from averaging.allreduce.logic.agreement import Agreement, Commit, Fail, GiveUpOwnWork, Standing
from averaging.allreduce.logic.assembly import Assembly
from averaging.allreduce.logic.effects import Effect
from averaging.allreduce.logic.failure_detector import HEARTBEAT_INTERVAL_S
from averaging.allreduce.logic.membership import Alive, Failure, Membership, Suspicion
from averaging.allreduce.logic.reducers import ReducerStreams
from averaging.allreduce.logic.repairs import Repairs
from averaging.allreduce.logic.replacement import EVERYTHING
from averaging.allreduce.logic.setup import RoundSetup
from averaging.allreduce.logic.shard import OwnShard
from averaging.allreduce.logic.stragglers import PACE_TICK_S
from averaging.allreduce.logic.values import CallFailure, RoundState, Statement
from averaging.allreduce.logic.versions import Version
from averaging.allreduce.logic.votes import VoteExchange
from swarm.core.errors import PeerError


class RoundMachine:
    """The round of one member. Members are places in the group; times are in seconds on any one clock."""

    def __init__(self, setup: RoundSetup) -> None:
        self.setup = setup
        self.membership = Membership(setup)
        self.shard = OwnShard(setup)
        self.assembly = Assembly(setup.plan, setup.codec, setup.contributors)
        self.reducers = ReducerStreams(setup, self.assembly)
        self.repairs = Repairs(setup, self.assembly)
        self.votes = VoteExchange(setup)
        self.agreement = Agreement(setup, self.assembly, self.votes)
        self.excluded_reason = ""  # reason why this member's own values do not count any more
        self.gave_up: set[int] = set()  # members that left the round after doing their part
        self.finished: do.Finish | None = None
        self.voted_s: float | None = None  # when everything was in place
        self._own = setup.own
        self._now_s = self._ticked_s = self._paced_s = setup.begun_s
        self._prepared = False
        self._given_up_own = False  # others took over this member's own shard
        self._handlers = self._table()

    # ---- the interface

    def begin(self) -> list[Effect]:
        """Return the first effects."""
        return [*self.reducers.begin(), *self.shard.begin(self.contributes)]

    def step(self, event: on.Event, now_s: float) -> list[Effect]:
        """Process an event, and return the effects to perform now."""
        self._now_s = now_s
        effects = self._handlers[type(event)](event)
        if type(event) not in on.WITHOUT_CONSEQUENCES:
            effects += self._follow_up()
        return effects

    def tick(self, now_s: float) -> list[Effect]:
        """Advance the clock; call it at `deadline_s`."""
        self._now_s = self._ticked_s = now_s
        effects: list[Effect] = []
        if self.finished is None:
            for found in self.membership.tick(now_s):
                effects += self._mark_failed(found) if isinstance(found, Failure) else [found]
            if now_s - self._paced_s >= PACE_TICK_S:
                self._paced_s = now_s
                effects += self._pace()
            if now_s >= self.setup.deadline_s:
                effects += self._fail(f"deadline: {self.votes.missing(self.assembly)}")
        return effects + self._follow_up()

    def deadline_s(self) -> float:
        """Return when `tick` must be called next."""
        return min(self._ticked_s + HEARTBEAT_INTERVAL_S, max(self.setup.deadline_s, self._now_s))

    # ---- questions that change nothing

    @property
    def contributes(self) -> bool:
        """Return whether this member's values go into averages."""
        return self.setup.weights[self._own] > 0 and not self.excluded_reason

    @property
    def left_out(self) -> dict[int, str]:
        """Return the members that this one has left out, itself included, and why."""
        own = {self._own: self.excluded_reason} if self.excluded_reason else {}
        return self.repairs.left_out | self.shard.left_out | own

    @property
    def state(self) -> RoundState:
        """Return the state that answers to heartbeats report."""
        if self.finished is None:
            return RoundState.RUNNING
        return RoundState.COMMITTED if self.finished.failure is None else RoundState.FAILED

    # ---- events

    def _table(self) -> dict[type, Callable[[Any], list[Effect]]]:
        return {
            on.AverageArrived: self._on_average,
            on.AverageChecked: self._on_checked,
            on.RefusalArrived: lambda event: [do.StopSending(event.reducer)],
            on.WaitingArrived: self._on_waiting,
            on.LeftOutTold: lambda event: [*self.votes.on_left_out(event.place, event.reason)],
            on.ReducerStreamEnded: self._on_reducer_stream_ended,
            on.ContributionSent: self._on_contribution_sent,
            on.SenderOpened: self._on_sender_opened,
            on.ContributionArrived: self._on_contribution,
            on.SenderFailed: lambda event: self._leave_out(event.sender, event.reason),
            on.SenderFinished: lambda event: [*self.shard.finished(event.sender, self.contributes)],
            on.SenderStreamBroke: self._on_sender_stream_broke,
            on.BytesArrived: self._on_bytes,
            on.BytesSent: lambda event: self.membership.sent(event.place),
            on.MemoryPrepared: self._on_prepared,
            on.ChunkReduced: self._on_reduced,
            on.ChunkSpoiled: self._on_spoiled,
            on.OwnValuesExcluded: self._on_excluded,
            on.Audited: self._on_audited,
            on.VoteSigned: self._on_signed,
            on.SigningRefused: self._on_signing_refused,
            on.GiveUp: lambda event: self._fail(event.reason),
            on.PingAnswered: self._on_ping_answered,
            on.VotesAnswered: self._on_votes_answered,
            on.InventoryAnswered: self._on_inventory,
            on.ChunkFetched: self._on_fetched,
            on.ContributionFetched: self._on_contribution_fetched,
            on.OfferEnded: self._on_offer_ended,
            on.CallFailed: self._on_call_failed,
            on.Endorsed: self._on_endorsed,
            on.Heard: lambda event: self.membership.heard(event.place),
            on.VotesAsked: self._on_votes_asked,
            on.InventoryAsked: self._on_inventory_asked,
            on.CallEnded: self._on_call_ended,
        }

    def _on_average(self, event: on.AverageArrived) -> list[Effect]:
        if not any(event.contributors) and self._somebody_contributes(event.reducer):
            raise PeerError(
                f"an average of chunk {event.chunk} that nobody is in, although members that contribute live"
            )
        return [
            self.reducers.on_average(
                event.reducer, event.chunk, event.contributors, event.clipped, event.size_bytes
            )
        ]

    def _on_checked(self, event: on.AverageChecked) -> list[Effect]:
        if self.reducers.on_checked(event.chunk, event.digest):
            return []
        reducer = self.setup.plan.chunks[event.chunk].reducer
        return self._lose(reducer, f"its average of chunk {event.chunk} is none: {event.flaw}")

    def _on_waiting(self, event: on.WaitingArrived) -> list[Effect]:
        self.reducers.on_waiting(event.reducer, self._now_s)
        return []

    def _on_contribution_sent(self, event: on.ContributionSent) -> list[Effect]:
        self.reducers.on_sent(event.reducer)
        return []

    def _on_reducer_stream_ended(self, event: on.ReducerStreamEnded) -> list[Effect]:
        place = event.reducer
        self.reducers.on_ended(place)
        if not self.assembly.outstanding(place) or place in self.repairs.lost or self.finished is not None:
            return []
        if event.broken:
            why = f"its stream broke ({event.why})"
            return self._suspect(place, Suspicion(why, lost_reducer=f"it lives, but {why}"))
        why = event.why or f"it finished after {self.assembly.share(place)}"
        lost = self._lose(place, f"the exchange with it ended: {why}")
        return lost + self._suspect(place, Suspicion(f"the exchange with it ended ({why})"))

    def _on_sender_opened(self, event: on.SenderOpened) -> list[Effect]:
        self.shard.opened(event.sender)
        self.membership.detector.starting(event.sender, self.shard.remaining(event.sender) > 0)
        return []

    def _on_contribution(self, event: on.ContributionArrived) -> list[Effect]:
        try:
            return [*self.shard.accept(event.sender, event.chunk, event.size_bytes, self.contributes)]
        except PeerError as error:
            return self._leave_out(event.sender, f"it broke the protocol: {error}")

    def _on_sender_stream_broke(self, event: on.SenderStreamBroke) -> list[Effect]:
        if self.finished is not None:
            return []
        # a member that has sent everything is finished: it has its averages, or asks another member for them
        doing = self.shard.doing(event.sender)
        lost = f"its stream broke while it was {doing}: {event.why}" if doing else ""
        return self._suspect(event.sender, Suspicion(f"its stream broke ({event.why})", lost_sender=lost))

    def _on_bytes(self, event: on.BytesArrived) -> list[Effect]:
        self.membership.heard(event.place)
        if event.averages:
            self.reducers.on_bytes(event.place, event.size_bytes)
        else:
            self.membership.detector.starting(event.place, False)
            self.shard.on_bytes(event.place, event.size_bytes)
        return []

    def _on_prepared(self, event: on.MemoryPrepared) -> list[Effect]:
        self._prepared = True
        return []

    def _on_reduced(self, event: on.ChunkReduced) -> list[Effect]:
        if self.repairs.takes_over(event.chunk):
            version = self.repairs.version_of(event.chunk, event.contributors, event.digest, event.clipped)
            self.assembly.settle(event.chunk, version)
            self.repairs.on_reduced(event.chunk)
        else:
            self.assembly.settle(event.chunk, Version(0, event.contributors, event.digest, event.clipped))
            self.shard.on_reduced(event.chunk)
        return []

    def _on_spoiled(self, event: on.ChunkSpoiled) -> list[Effect]:
        if not event.flaws:
            return self._fail(f"the sum of chunk {event.chunk} overflows float32")
        if self.repairs.takes_over(event.chunk):
            return self.repairs.on_spoiled(event.chunk, event.flaws)
        return [*self.shard.on_spoiled(event.chunk, event.flaws, self.contributes)]

    def _on_excluded(self, event: on.OwnValuesExcluded) -> list[Effect]:
        self.excluded_reason = self.excluded_reason or event.reason
        return []

    def _on_audited(self, event: on.Audited) -> list[Effect]:
        if event.finding:
            return self._fail(event.finding)
        self.agreement.on_audited()
        return []

    def _on_signed(self, event: on.VoteSigned) -> list[Effect]:
        self.agreement.signing = False
        self.votes.add_own(event.vote, self._now_s)
        return []

    def _on_signing_refused(self, event: on.SigningRefused) -> list[Effect]:
        return [*self.agreement.on_refused(event.reason)]

    def _on_ping_answered(self, event: on.PingAnswered) -> list[Effect]:
        effects: list[Effect] = []
        if event.state is RoundState.COMMITTED and self.votes.certificate is None:
            effects += self.votes.ask_all([event.place])
        for found in self.membership.on_answer(
            event.place, event.state, event.reason, event.round_trip_s, self._now_s
        ):
            effects += self._mark_failed(found) if isinstance(found, Failure) else self._on_alive(found)
        return effects

    def _on_call_failed(self, event: on.CallFailed) -> list[Effect]:
        call = event.call
        if isinstance(call, do.Ping):
            effects: list[Effect] = []
            for found in self.membership.on_no_answer(call, event.failure, event.why):
                effects += self._mark_failed(found) if isinstance(found, Failure) else [found]
            return effects
        if isinstance(call, do.AskVotes):
            self.votes.on_no_answer(call.place, self._now_s)
            if event.failure is CallFailure.REFUSED:
                return self._mark_failed(Failure(call.place, f"it does not vote: {event.why}", gave_up=True))
        else:
            self.agreement.on_no_inventory(call.place, call.question, event.why)
            self.repairs.on_no_inventory(call.place, call.question, self._now_s)
        if event.failure is CallFailure.BROKEN:
            return self._suspect(call.place, Suspicion(f"its connection broke ({event.why})"))
        return []

    def _on_votes_answered(self, event: on.VotesAnswered) -> list[Effect]:
        self.membership.heard(event.place)
        self.votes.on_answer(event.place, event.statement)
        return self._on_statement(event.place, event.statement)

    def _on_votes_asked(self, event: on.VotesAsked) -> list[Effect]:
        self.membership.heard(event.place)
        self.votes.on_question(event.call, event.place, event.statement)
        try:
            return self._on_statement(event.place, event.statement)
        except PeerError:
            self.votes.on_call_ended(event.call)
            raise

    def _on_statement(self, place: int, statement: Statement) -> list[Effect]:
        self.votes.on_statement(place, statement, self._now_s)
        if statement.gave_up and self.finished is None:
            return self._mark_failed(Failure(place, statement.gave_up, gave_up=True))
        return []

    def _on_endorsed(self, event: on.Endorsed) -> list[Effect]:
        if event.vote is not None:
            self.votes.on_statement(self._own, Statement((event.vote,)), self._now_s)
        return []

    def _on_inventory(self, event: on.InventoryAnswered) -> list[Effect]:
        self.membership.heard(event.place)
        if event.question == EVERYTHING:
            self.agreement.on_inventory(event.place, event.inventory)
            return []
        return self.repairs.on_inventory(event.place, event.question, event.inventory, self._now_s)

    def _on_fetched(self, event: on.ChunkFetched) -> list[Effect]:
        chunk, version = event.chunk, event.version
        if event.ok:
            self.assembly.settle(chunk, version)
        if not self.agreement.on_fetched(chunk, version, event.ok):
            self.repairs.on_fetched(event.place, chunk, version, event.ok)
        return []

    def _on_contribution_fetched(self, event: on.ContributionFetched) -> list[Effect]:
        return self.repairs.on_contribution(
            event.place, event.chunk, event.size_bytes, event.error, own=self.contributes
        )

    def _on_offer_ended(self, event: on.OfferEnded) -> list[Effect]:
        self.repairs.on_offer_ended(event.place, event.chunk, event.taken)
        return []

    def _on_inventory_asked(self, event: on.InventoryAsked) -> list[Effect]:
        self.membership.heard(event.place)
        self.repairs.on_question(event.call, event.place, event.question, self._now_s)
        reducer = event.question.reducer
        if reducer is None or self.finished is not None or reducer == event.place:
            return []
        return self._heed_loss(reducer, event.place)

    def _on_call_ended(self, event: on.CallEnded) -> list[Effect]:
        self.repairs.on_call_ended(event.call)
        self.votes.on_call_ended(event.call)
        return []

    # ---- members

    def _mark_failed(self, failure: Failure) -> list[Effect]:
        place = failure.place
        if self.finished is not None or place in self.membership.failed:
            return []
        if self.reducers.outstanding(place) and place != self._own:
            doing = f"reducing; {self.assembly.share(place)} of its shard had come back"
        else:
            doing = self.shard.doing(place) or "committing"
        if failure.gave_up and place not in self.left_out and place not in self.repairs.lost:
            self.gave_up.add(place)
        reason = self.membership.mark_failed(failure, doing)
        if failure.gave_up and self.setup.audited:  # the member may have found a liar
            return self._fail(reason)
        effects: list[Effect] = [] if self.agreement.adopting else [do.CancelCalls(place)]
        self.agreement.on_member_failed(place)
        effects += [*self._leave_out(place, reason), *self.repairs.give_up(place, self.contributes)]
        effects += self._lose(place, reason)
        if self.membership.live == {self._own} and not self._complete and not self.agreement.adopting:
            effects += self._fail(f"nobody else is left: {'; '.join(self.membership.failed.values())}")
        return effects

    def _suspect(self, place: int, suspicion: Suspicion) -> list[Effect]:
        if self.finished is not None:
            return []
        effects: list[Effect] = []
        for found in self.membership.suspect(place, suspicion):
            effects += self._on_alive(found) if isinstance(found, Alive) else [found]
        return effects

    def _on_alive(self, alive: Alive) -> list[Effect]:
        effects: list[Effect] = []
        if alive.suspicion.lost_sender:
            effects += self._leave_out(alive.place, alive.suspicion.lost_sender)
        if alive.suspicion.lost_reducer:
            effects += self._lose(alive.place, alive.suspicion.lost_reducer, trusted=True)
        return effects

    def _leave_out(self, sender: int, reason: str) -> list[Effect]:
        return [*self.shard.leave_out(sender, reason, own=self.contributes)]

    def _lose(self, reducer: int, reason: str, *, trusted: bool = False) -> list[Effect]:
        """Stop reading this reducer's stream. `trusted`: averages that it holds may still be requested."""
        if reducer not in self.setup.plan.reducers or reducer == self._own or self.finished is not None:
            return []
        if self.setup.audited:  # neither a successor nor the chunks that it reduced could be audited
            if self.reducers.outstanding(reducer):
                return self._fail(f"{self.setup.name(reducer)} was lost as a reducer: {reason}")
            return []
        # a member that lacks no averages need not repair, unless it may have to reduce or cannot be asked
        lacks = self.reducers.outstanding(reducer) or self.setup.own_auxiliary
        if not lacks and self.setup.can_dial(self._own):
            return [*self.reducers.close(reducer)]
        self.repairs.lose(reducer, reason, trusted=trusted, now_s=self._now_s)
        return [*self.reducers.close(reducer)]

    def _heed_loss(self, reducer: int, place: int) -> list[Effect]:
        """Process the report of a member that has lost this reducer, which may be alive."""
        if reducer == self._own or reducer not in self.setup.plan.reducers or self.repairs.knows(reducer):
            return []
        effects = self._suspect(reducer, Suspicion(f"{self.setup.name(place)} has lost it"))
        # an auxiliary member receives no averages, so none are missing, but it may have to take over a shard
        if self.setup.own_auxiliary:
            self.repairs.help(reducer, trusted=reducer not in self.membership.failed, now_s=self._now_s)
        return effects

    def _pace(self) -> list[Effect]:
        """Continue without live members that delay the others."""
        effects: list[Effect] = [*self.shard.pace(self.contributes, self._now_s)]
        for place, why in self.reducers.stalled(self._now_s):
            effects += [*self.repairs.give_up(place, self.contributes, why), *self._lose(place, why)]
        for place, why in self.reducers.slow(self._now_s):
            effects += self._lose(place, why)
        return effects + self.repairs.pace(self.contributes, self._now_s)

    def _somebody_contributes(self, reducer: int) -> bool:
        """Return whether a live member other than this reducer contributes, which refutes its claim that
        nobody does.
        """
        live = self.membership.live - {reducer, self._own}
        return self.contributes or any(self.setup.weights[place] > 0 for place in live)

    # ---- after every event

    @property
    def _complete(self) -> bool:
        """Return whether this member holds all averages that it must hold."""
        if not self._prepared:
            return False
        if self.setup.own_auxiliary:
            return self.shard.reduced or self._given_up_own
        return self.assembly.complete

    def _follow_up(self) -> list[Effect]:
        effects: list[Effect] = []
        if self.finished is None:
            effects += self._decide()
        if self.finished is None:
            effects += self.repairs.poll(self.contributes, self._now_s)
            effects += self.votes.endorsements(self.membership.live, self._now_s)
            votes = self._own in self.setup.contributors
            speaks = self.agreement.speaks or (self._complete and (self.votes.has_spoken or not votes))
            if speaks and not self.agreement.signing:
                effects += self.votes.asks(self.membership.live, self._now_s)
        effects += self.votes.answers(self._complete, self._now_s)
        return [*effects, *self.repairs.answers(self.finished is not None, self._now_s)]

    def _decide(self) -> list[Effect]:
        if not self._complete and not self.membership.failed and self.votes.nobody_has_voted:
            return []  # the usual case: nothing to decide after this event
        if self._complete and self.voted_s is None:
            self.voted_s = self._now_s
        standing = Standing(
            complete=self._complete,
            # if others have averages of this member's unreduced shard, the shard was taken over
            may_complete=self.shard.reduced and not self.repairs.lacking,
            repaired=self.repairs.any or self._given_up_own,
            live=self.membership.live,
            failed=self.membership.failed,
            left_out=self.left_out,
            now_s=self._now_s,
        )
        effects: list[Effect] = []
        for one in self.agreement.decide(standing):
            match one:
                case Commit():
                    effects += self._finish(do.Finish(None, self.votes.certificate))
                case Fail():
                    effects += self._fail(one.reason)
                case GiveUpOwnWork():
                    self.repairs.stopped = self.shard.halted = True
                    self._given_up_own = not self.shard.reduced
                    effects += [do.HaltReduction(), *self.reducers.close_all()]
                case do.Sign():
                    self.votes.left_out |= standing.left_out
                    effects.append(one)
                case _:
                    effects.append(one)
        return effects

    def _fail(self, reason: str) -> list[Effect]:
        if self.finished is not None:
            return []
        self.votes.gave_up = reason
        vote, certificate = self.votes.own_vote, self.votes.certificate
        effects: list[Effect] = []
        if vote is None and not self.agreement.signing and self._own in self.setup.contributors:
            effects.append(do.Sign(b""))
        # even with the certificate: the average cannot be obtained, and nobody votes on its head any more
        unresolved = bool(vote is not None and vote.result and not self.votes.tally.is_dead())
        return effects + self._finish(do.Finish(reason, certificate, unresolved))

    def _finish(self, finish: do.Finish) -> list[Effect]:
        self.finished, self.votes.over = finish, True
        return [finish]

    def farewell(self) -> list[Effect]:
        """Return the calls that tell members how the round ended, once its last effects are performed."""
        return [*self.votes.farewell(self.membership.live)]
