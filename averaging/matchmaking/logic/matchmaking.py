"""How peers find one another for one averaging round: a state machine without I/O, clock or chance of its
own.

Each search has a rank, (deadline, PeerID); the lowest leads. A searching peer tells every live holder of the
averager that it is looking (`LookForGroup`) and learns where each stands; then either it asks the best of
them to lead (`Join`, answered when the group begins) or, being the best itself, it waits for the others. A
leader starts when the group is full; when every expected peer has joined, declined or failed to answer; when
those missing have been given the time by which they used to be late; or at its deadline. Who follows accepts
nobody and names its leader; who leads and learns of a better leader sends its followers there. A peer only
ever waits for a lower rank, and ranks are fixed per search: no waits in a circle.

Effects come out of `poll(now_s)`, what happened goes in through `on_*`; `wake_s()` says when to poll at the
latest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from averaging.matchmaking.logic.grace_period import GracePeriod, PatienceConfig
from averaging.matchmaking.logic.group import GATHERED_BYTES_MAX, GROUP_MEMBERS_MAX, Group, Member, mismatch
from averaging.matchmaking.logic.history import RoundHistory
from averaging.matchmaking.logic.messages import (
    AbandonJoin,
    Answer,
    AnswerJoin,
    Effect,
    Holder,
    Join,
    Leader,
    LookForGroup,
    LookUp,
    PeerStatus,
    SearchFailed,
    SearchFinished,
    SearchRequest,
    SendJoin,
    SendSeek,
    VectorSchema,
)
from averaging.matchmaking.logic.peer_table import PeerState, PeerTable, PeerTableConfig
from averaging.matchmaking.logic.search import GroupFollower, Search
from swarm.core.errors import UsageError
from swarm.core.ids import PeerId

if TYPE_CHECKING:
    import random

_LOOK_SOON_S = 0.25  # between two looks when nobody is known
_LONELY_S = 1.0  # in one cell of several where nobody is known to be: then it is taken to be empty


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchmakingConfig:
    target_group_size: int = 4  # a leader takes at most this many, itself included
    min_group_size: int = 2  # fewer are no group
    # a follower makes sure that its leader lives every so often. Too large: a frozen leader costs that long
    leader_ping_s: float = 0.5
    look_again_s: float = 2.0  # presence records older than this are read again during a search
    # records older than this do not say who is expected. Too large: newcomers are overlooked
    view_max_s: float = 5.0
    look_wait_s: float = 2.0  # how long a group that is large enough waits for fresher records
    # nobody is called alone before it has held the averager this long: others may be starting in the same
    # moment
    settle_s: float = 0.5
    unreachable_s: float = 10.0  # the next searches do not wait for a peer that did not answer, this long
    # share of the window by which a leader acts before its deadline, so that its answers arrive in time
    act_early: float = 0.03
    patience: PatienceConfig = field(default_factory=PatienceConfig)
    book: PeerTableConfig = field(default_factory=PeerTableConfig)

    def __post_init__(self) -> None:
        if not 1 <= self.min_group_size <= self.target_group_size <= GROUP_MEMBERS_MAX:
            raise UsageError(
                f"group sizes must satisfy 1 <= min_group_size <= target_group_size <= {GROUP_MEMBERS_MAX},"
                f" not {self.min_group_size} and {self.target_group_size}"
            )


class Matchmaker:
    """One averager's part in the search for groups. `swarm_s` times are opaque numbers here; every `now_s` is
    monotonic.
    """

    def __init__(
        self,
        *,
        own: PeerId,
        config: MatchmakingConfig,
        schema: VectorSchema,
        rng: random.Random,
        now_s: float,
    ) -> None:
        self._own = own
        self._config = config
        self._schema = schema
        self._rng = rng
        self._born_s = now_s
        self._history = RoundHistory(
            patience=GracePeriod(config.patience), unreachable_s=config.unreachable_s, now_s=now_s
        )
        self._run: Search | None = None
        self._outbox: list[Effect] = []
        self._tickets = 0

    @property
    def searching(self) -> bool:
        return self._run is not None

    @property
    def following(self) -> PeerId | None:
        """Whom this peer waits for; the simulator looks for circles in it."""
        return self._run.following if self._run is not None else None

    @property
    def followers(self) -> frozenset[PeerId]:
        """Who waits for this peer, its call held back here."""
        return frozenset(self._run.followers) if self._run is not None else frozenset()

    # --- the caller

    def start(self, want: SearchRequest, member: Member, now_s: float) -> None:
        """Begin a search as `member`; the outcome comes as `SearchFinished`."""
        if self._run is not None or self._history.in_round:
            raise UsageError("this averager is already averaging")
        seek = LookForGroup(
            contact=member.contact,
            round_key=want.round_key,
            schema=self._schema.digest,
            schema_text=self._schema.text,
            deadline_s=want.rank_s,
            can_lead=bool(member.contact.addresses),
            turn=self._history.next_turn(),
        )
        book = PeerTable(
            seek=seek, started_s=now_s, patience=self._history.patience, config=self._config.book
        )
        act_by_s = want.deadline_s - self._config.act_early * max(want.deadline_s - now_s, 0.0)
        self._run = Search(want=want, member=member, seek=seek, book=book, started_s=now_s, act_by_s=act_by_s)
        book.on_holders(self._history.holders, self._history.unreachable(now_s))

    def stop(self, now_s: float) -> None:
        """Give the search up: followers are told, the leader notices."""
        if self._run is not None:
            self._finish(SearchFailed(reason="cancelled", detail="the search was cancelled"), now_s)

    def round_over(self, *, committed: bool, left_out: frozenset[PeerId], now_s: float) -> None:
        """The round of the group that was found has ended; who was `left_out` is not waited for next time."""
        self._history.round_over(committed=committed, now_s=now_s)
        for peer_id in left_out:
            self._history.mark_unreachable(peer_id, now_s)

    # --- the network

    def on_holders(self, holders: Mapping[PeerId, Holder], now_s: float) -> None:
        """The presence records, read afresh."""
        self._history.saw_holders(
            {peer_id: holder for peer_id, holder in holders.items() if peer_id != self._own}, now_s
        )
        if (run := self._run) is not None:
            # a look that was under way when the search began may have missed whoever declared itself since
            run.looked, run.looking = run.looked or run.looking, False
            run.book.on_holders(self._history.holders, self._history.unreachable(now_s))

    def moved(self, holders: Mapping[PeerId, Holder]) -> None:
        """Between two searches: from now on these are who may come, as far as is known, and the next search
        looks first.
        """
        self._history.saw_holders(holders, -math.inf)

    def on_announce(self, holder: Holder) -> None:
        """A peer holds the averager from now on. A search in progress hears of it when it looks itself."""
        self._history.heard(holder.contact.peer_id)
        self._history.met(holder)

    def on_look_failed(self, now_s: float) -> None:
        if self._run is not None:
            self._run.looking, self._run.look_s = False, now_s

    def on_seek(self, seek: LookForGroup, now_s: float) -> Answer:
        """Another peer is looking: remember it, and say where we stand."""
        peer_id = seek.contact.peer_id
        self._history.heard(peer_id)
        if seek.schema == self._schema.digest and self._run is None:
            self._history.note_late(seek, now_s)
        if self._run is not None:
            self._run.book.on_seek(seek, now_s)
        return self.stand(seek, now_s)

    def on_seek_answer(self, peer_id: PeerId, answer: Answer, now_s: float) -> None:
        self._history.heard(peer_id)
        if (run := self._run) is None:
            return
        news = run.book.on_answer(peer_id, answer, now_s)
        if news and run.following == peer_id:
            leads = answer.standing is PeerStatus.SEEKING and answer.round_key == run.want.round_key
            # others were asked before it led us
            run.odd_answers = 0 if leads or not run.pinged else run.odd_answers + 1

    def on_seek_failed(self, peer_id: PeerId, text: str, now_s: float) -> None:
        self._history.mark_unreachable(peer_id, now_s)
        if self._run is not None:
            self._run.book.on_failure(peer_id, text)

    def on_join(self, join: Join, now_s: float) -> Answer | int:
        """Another peer asks us to lead. A number: the answer comes as `AnswerJoin` with that ticket.
        UsageError: claims out of bounds.
        """
        peer_id = join.seek.contact.peer_id
        member = Member(
            contact=join.seek.contact, weight=join.weight, bandwidth=join.bandwidth, auxiliary=join.auxiliary
        )
        if len(join.gathered) > GATHERED_BYTES_MAX:
            raise UsageError(
                f"gathered metadata has at most {GATHERED_BYTES_MAX} bytes, not {len(join.gathered)}"
            )
        self._history.heard(peer_id)
        run = self._run
        if run is None:
            return self.stand(join.seek, now_s)
        run.book.on_seek(join.seek, now_s)
        ranks_before_us = join.seek.can_lead and join.seek.rank < run.seek.rank
        fits = join.seek.schema == self._schema.digest and join.seek.round_key == run.want.round_key
        run.followers.pop(peer_id, None)  # its earlier call, if any, is superseded
        full = 1 + len(run.followers) >= self._config.target_group_size
        if not fits or run.following is not None or not run.seek.can_lead or ranks_before_us or full:
            return self.stand(join.seek, now_s)
        self._tickets += 1
        run.followers[peer_id] = GroupFollower(member, join.gathered, self._tickets)
        return self._tickets

    def on_join_lost(self, peer_id: PeerId, ticket: int) -> None:
        """A follower's call ended before it was answered: it gave up or died."""
        run = self._run
        if (
            run is not None
            and (follower := run.followers.get(peer_id)) is not None
            and follower.ticket == ticket
        ):
            del run.followers[peer_id]
            state = run.book.peers.get(peer_id)
            # it is asked where it stands, and waited for no longer than its answer takes
            if state is not None:
                state.standing, state.was_seeking, state.asked_s, state.asking = None, False, -math.inf, False

    def on_join_answer(self, peer_id: PeerId, answer: Group | Answer, now_s: float) -> None:
        run = self._run
        if run is None or run.following != peer_id:
            return
        self._leave(run, now_s)
        if isinstance(answer, Group):
            wrong = mismatch(
                answer, leader=peer_id, own=run.member, gathered=run.want.gathered, codec=self._schema.codec
            )
            if not wrong:
                self._begin(answer, now_s)
                return
            run.book.on_failure(peer_id, wrong)
            return
        run.book.on_answer(peer_id, answer, now_s)
        run.book.refused(peer_id, now_s)

    def on_join_failed(self, peer_id: PeerId, text: str, now_s: float) -> None:
        run = self._run
        if run is not None and run.following == peer_id:
            self._leave(run, now_s)
            self._history.mark_unreachable(peer_id, now_s)
            run.book.on_failure(peer_id, text)

    # --- time

    def poll(self, now_s: float) -> list[Effect]:
        """What to do now."""
        run = self._run
        if run is not None:
            self._look(run, now_s)
            if run.following is not None:
                self._watch_leader(run, now_s)
            if self._run is run and run.following is None:
                self._choose(run, now_s)
            if self._run is run:
                due = run.book.to_ask(now_s, self._needs_no_asking, first_only=run.following is not None)
                self._outbox += [
                    SendSeek(contact=peer.contact, seek=run.speak(self._history.turn)) for peer in due
                ]
        effects, self._outbox = self._outbox, []
        return effects

    def wake_s(self, now_s: float) -> float | None:
        """When to poll at the latest if nothing happens; None: when something happens."""
        run = self._run
        if run is None:
            return None
        times = [run.want.deadline_s, self._next_look_s(run)]
        if run.following is not None:
            times.append(run.pinged_s + self._config.leader_ping_s)
        else:
            times += [run.book.next_ask_s(self._needs_no_asking), run.book.next_leader_s()]
            times += [
                run.act_by_s,
                run.want.stays_until_s,
                self._waits_until_s(run),
                self._born_s + self._config.settle_s,
            ]
        # what is past was acted upon by the last poll, or waits for an answer
        return min((at for at in times if now_s < at < math.inf), default=now_s + self._config.look_again_s)

    # --- inside: looking around

    def _next_look_s(self, run: Search) -> float:
        if run.looking:
            return math.inf
        if not self._history.holders or (not run.looked and run.book.hopeless()):
            return run.look_s + _LOOK_SOON_S  # what is at stake is whether we are alone
        return max(self._history.view_s, run.look_s) + self._config.look_again_s

    def _look(self, run: Search, now_s: float) -> None:
        if now_s >= self._next_look_s(run):
            run.looking, run.look_s = True, now_s
            self._outbox.append(LookUp())

    def _needs_no_asking(self, peer_id: PeerId) -> bool:
        """Our leader is pinged by its own rule; our followers are connected."""
        run = self._run
        return run is not None and (peer_id == run.following or peer_id in run.followers)

    def stand(self, seek: LookForGroup, now_s: float) -> Answer:
        """Where we stand, as the asker needs to know it."""
        return replace(self._stand(seek, now_s), turn=self._history.turn)

    def _stand(self, seek: LookForGroup, now_s: float) -> Answer:
        if seek.schema != self._schema.digest:
            return Answer(standing=PeerStatus.REFUSED, text=self._schema.text)
        if seek.round_key in self._history.passed:
            return Answer(standing=PeerStatus.PASSED, round_key=seek.round_key)
        if (run := self._run) is not None:
            key, deadline_s = run.want.round_key, run.seek.deadline_s
            if run.following is not None:
                state = run.book.peers[run.following]
                leader = (
                    Leader(contact=state.contact, deadline_s=state.rank.deadline_s)
                    if state.rank is not None
                    else None
                )
                return Answer(
                    standing=PeerStatus.FOLLOWING,
                    round_key=key,
                    deadline_s=deadline_s,
                    can_lead=run.seek.can_lead,
                    leader=leader,
                )
            return Answer(
                standing=PeerStatus.SEEKING, round_key=key, deadline_s=deadline_s, can_lead=run.seek.can_lead
            )
        return self._history.busy(now_s) or Answer(standing=PeerStatus.IDLE)

    # --- inside: following

    def _watch_leader(self, run: Search, now_s: float) -> None:
        assert run.following is not None
        state = run.book.peers[run.following]
        if now_s >= run.want.deadline_s or state.failed or run.odd_answers >= 2:
            self._outbox.append(AbandonJoin(peer_id=run.following))
            if run.odd_answers >= 2:
                run.book.refused(run.following, now_s)
            self._leave(run, now_s)
        elif now_s >= run.pinged_s + self._config.leader_ping_s:
            run.pinged_s, run.pinged = now_s, True
            self._outbox.append(SendSeek(contact=state.contact, seek=run.speak(self._history.turn)))

    def _follow(self, run: Search, state: PeerState, now_s: float) -> None:
        assert state.rank is not None
        leader = Leader(contact=state.contact, deadline_s=state.rank.deadline_s)
        turn = self._history.next_turn()
        run.follow(state.contact.peer_id, now_s)
        there = Answer(
            standing=PeerStatus.FOLLOWING,
            round_key=run.want.round_key,
            deadline_s=run.seek.deadline_s,
            leader=leader,
            turn=turn,
        )
        self._dismiss(run, there)
        own = run.member
        join = Join(
            seek=run.speak(turn),
            weight=own.weight,
            bandwidth=own.bandwidth,
            auxiliary=own.auxiliary,
            gathered=run.want.gathered,
        )
        self._outbox.append(SendJoin(contact=state.contact, join=join))

    def _leave(self, run: Search, now_s: float) -> None:
        run.leave(now_s)
        self._history.next_turn()

    # --- inside: leading

    def _choose(self, run: Search, now_s: float) -> None:
        """Follow the best, or lead: begin, wait, or give up."""
        size, overdue = 1 + len(run.followers), now_s >= run.want.deadline_s
        if not overdue and (best := run.book.best_leader(now_s)) is not None:
            self._follow(run, best, now_s)
            return
        enough = size >= self._config.min_group_size and now_s >= min(run.act_by_s, self._waits_until_s(run))
        if enough or size >= self._config.target_group_size:
            group = run.group(self._schema.codec, self._rng)
            self._dismiss(run, group)
            self._begin(group, now_s)
        elif overdue:
            self._finish(run.book.explain(deadline=True), now_s)
        # one cell of several: who has nobody left to wait for tries elsewhere, and not before
        elif run.want.expected:
            if run.looked and now_s >= max(run.want.stays_until_s, self._waits_until_s(run)):
                self._finish(run.book.explain(deadline=False), now_s)
        elif (
            run.looked
            and run.book.hopeless()
            and (run.book.peers or now_s >= self._born_s + self._config.settle_s)
        ):
            self._finish(run.book.explain(deadline=False), now_s)

    def _waits_until_s(self, run: Search) -> float:
        """Until when a group of at least the least size waits for others: the latest of those who may still
        come.
        """
        waits = [
            run.book.wait_until_s(peer)
            for peer_id, peer in run.book.peers.items()
            if peer_id not in run.followers
        ]
        if 1 + (known := run.book.company()) < run.want.expected:  # nobody has told us of the others yet
            grace_s = self._history.patience.grace_s(self._own)
            waits.append(run.started_s + (grace_s if known else min(grace_s, _LONELY_S)))
        if not run.looked and run.started_s - self._history.view_s > self._config.view_max_s:
            waits.append(run.started_s + self._config.look_wait_s)
        return max(waits, default=-math.inf)

    def _dismiss(self, run: Search, answer: Group | Answer) -> None:
        """Answer all who joined."""
        for peer_id, follower in run.followers.items():
            self._outbox.append(AnswerJoin(peer_id=peer_id, ticket=follower.ticket, answer=answer))
        run.followers.clear()

    # --- inside: the end

    def _begin(self, group: Group, now_s: float) -> None:
        run = self._run
        assert run is not None
        members = frozenset(group.peer_ids)
        run.book.observe(members)
        if run.want.expected:  # how late its last members are is a habit of a cell, kept under our own name
            self._history.patience.filled(self._own, now_s - run.started_s, len(members) >= run.want.expected)
        self._history.round_began(
            round_key=run.want.round_key, members=members, search_started_s=run.started_s, now_s=now_s
        )
        self._run = None
        self._outbox.append(SearchFinished(outcome=group))

    def _finish(self, failed: SearchFailed, now_s: float) -> None:
        run = self._run
        assert run is not None
        self._run = None
        if run.following is not None:
            self._outbox.append(AbandonJoin(peer_id=run.following))
        self._history.next_turn()
        self._dismiss(run, self.stand(run.seek, now_s))
        self._outbox.append(SearchFinished(outcome=failed))
