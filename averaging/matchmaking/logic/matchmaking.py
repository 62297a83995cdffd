"""Matchmaking for one averaging round: a state machine without I/O, clock or randomness of its own.

Each search has a rank, (deadline, PeerID); the lowest leads. Electors of the run's head lead before all
others; their rank is a hash of the round and the PeerID, which does not depend on their claims. A searching
peer announces itself to every live holder of the averager (`LookForGroup`) and learns the status of each.
Then it either asks the best of them to lead (`Join`, answered when the group begins) or, being the best
itself, waits for the others.

A leader begins when the group is full; when every expected peer has joined, declined or failed to answer;
when the grace periods of the missing peers are over; or at its deadline; never while another group has a
quorum of the run's electors. A follower accepts nobody and names its leader; a leader that learns of a better
one sends its followers there. A peer only ever waits for a lower rank, fixed per search: never in a circle.

Effects come out of `poll(now_s)`, events go in through `on_*`; `wake_s()` says when to poll at the latest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from averaging.matchmaking.logic.grace_period import GracePeriod
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
    PeerStatus,
    ReadRecords,
    SearchFailed,
    SearchFinished,
    SearchRequest,
    SendJoin,
    SendLookForGroup,
    VectorSchema,
)
from averaging.matchmaking.logic.peer_table import PeerState, PeerTable
from averaging.matchmaking.logic.search import GroupFollower, Search
from swarm.core.errors import UsageError
from swarm.core.ids import PeerId

if TYPE_CHECKING:
    import random

_FIRST_READ_INTERVAL_S = 0.25  # interval of reads of the presence records while no holder is known
_EMPTY_CELL_WAIT_S = 1.0  # a grid cell without known members counts as empty after this
_READ_INTERVAL_S = 2.0  # presence records older than this are read again during a search
# records older than this are not used to predict which peers will come. Too large: newcomers are overlooked
_RECORDS_AGE_S_MAX = 5.0
_RECORDS_WAIT_S = 2.0  # a group that is large enough waits this long for newer records
# a search does not end with "alone" before the averager has existed this long, because others may be starting
_SETTLE_S = 0.5
_UNREACHABLE_S = 10.0  # searches do not wait for a peer that did not answer within this time
# share of the window by which a leader begins before its deadline, so that its replies arrive in time
_BEGIN_EARLY_SHARE = 0.03
# interval at which a follower checks that its leader is alive. Too large: a frozen leader is noticed late
LEADER_PING_INTERVAL_S = 0.5
TARGET_GROUP_SIZE = 4
MIN_GROUP_SIZE = 2


class Matchmaker:
    """One averager's part in the search for groups. Every `now_s` is monotonic; swarm times are only
    compared.

    `target_group_size`: a leader takes at most this many, itself included. `min_group_size`: a smaller group
    does not begin. Raises UsageError when they do not fit each other.
    """

    def __init__(
        self,
        *,
        own: PeerId,
        schema: VectorSchema,
        rng: random.Random,
        now_s: float,
        target_group_size: int = TARGET_GROUP_SIZE,
        min_group_size: int = MIN_GROUP_SIZE,
        grace_period: GracePeriod | None = None,
    ) -> None:
        if not 1 <= min_group_size <= target_group_size <= GROUP_MEMBERS_MAX:
            raise UsageError(
                f"group sizes must satisfy 1 <= min_group_size <= target_group_size <= {GROUP_MEMBERS_MAX},"
                f" not {min_group_size} and {target_group_size}"
            )
        self._own = own
        self._target_group_size, self._min_group_size = target_group_size, min_group_size
        self._schema = schema
        self._rng = rng
        self._created_s = now_s
        self._history = RoundHistory(
            grace_period=grace_period or GracePeriod(), unreachable_s=_UNREACHABLE_S, now_s=now_s
        )
        self._search: Search | None = None
        self._outbox: list[Effect] = []
        self._tickets = 0

    @property
    def following(self) -> PeerId | None:
        """Return the leader that this peer waits for, if any."""
        return self._search.following if self._search is not None else None

    @property
    def followers(self) -> frozenset[PeerId]:
        """Return the peers that wait for this one, their calls held back here."""
        return frozenset(self._search.followers) if self._search is not None else frozenset()

    # --- requests of the caller

    def start(self, request: SearchRequest, member: Member, now_s: float) -> None:
        """Begin a search as `member`; its outcome comes as `SearchFinished`. Raise UsageError when a search
        or round is in progress.
        """
        if self._search is not None or self._history.in_round:
            raise UsageError("this averager is already averaging")
        query = LookForGroup(
            contact=member.contact,
            round_key=request.round_key,
            schema=self._schema.digest,
            schema_text=self._schema.text,
            deadline_s=request.rank_deadline_s,
            can_lead=member.contact.is_callable,
            turn=self._history.next_turn(),
        )
        self._history.grace_period.pay(now_s)
        table = PeerTable(
            query=query,
            started_s=now_s,
            grace_period=self._history.grace_period,
            precedence=request.precedence,
        )
        begin_by_s = request.deadline_s - _BEGIN_EARLY_SHARE * max(request.deadline_s - now_s, 0.0)
        size = self._target_group_size
        self._search = Search(request, member, query, table, size, started_s=now_s, begin_by_s=begin_by_s)
        table.on_holders(self._history.holders, self._history.unreachable(now_s))
        for leader in self._history.take_early_leaders(request.round_key):
            table.on_report(leader, now_s)

    def stop(self, now_s: float) -> None:
        """Cancel the search. Followers are answered, and the leader notices."""
        if self._search is not None:
            self._end_search(SearchFailed(reason="cancelled", detail="the search was cancelled"), now_s)

    def round_over(self, *, committed: bool, left_out: frozenset[PeerId], now_s: float) -> None:
        """Record the end of the round of the group that was found. The next search does not wait for peers in
        `left_out`.
        """
        self._history.round_over(committed=committed, now_s=now_s)
        for peer_id in left_out:
            self._history.mark_unreachable(peer_id, now_s)

    # --- events from the network

    def on_holders(self, holders: Mapping[PeerId, Holder], now_s: float) -> None:
        """Process presence records that were just read."""
        self._history.set_holders(
            {peer_id: holder for peer_id, holder in holders.items() if peer_id != self._own}, now_s
        )
        if (search := self._search) is not None:
            # a read that began before the search may have missed later announcements
            search.records_read, search.reading_records = search.records_read or search.reading_records, False
            search.table.on_holders(self._history.holders, self._history.unreachable(now_s))

    def set_candidates(self, holders: Mapping[PeerId, Holder]) -> None:
        """Set the peers that may come to the next search, as far as is known. That search reads the records
        first.
        """
        self._history.set_holders(holders, -math.inf)

    def on_announce(self, holder: Holder) -> None:
        """Process the announcement of a new holder. A search in progress learns of it at its next read of the
        records.
        """
        self._history.mark_reachable(holder.contact.peer_id)
        self._history.add_holder(holder)

    def on_read_failed(self, now_s: float) -> None:
        """Record that the presence records could not be read."""
        if self._search is not None:
            self._search.reading_records, self._search.read_started_s = False, now_s

    def on_query(self, query: LookForGroup, now_s: float) -> Answer:
        """Process the query of another peer, and return the status of this one."""
        peer_id = query.contact.peer_id
        self._history.mark_reachable(peer_id)
        if query.schema == self._schema.digest and self._search is None:
            self._history.on_early_query(query, now_s)
        if self._search is not None:
            self._search.table.on_query(query, now_s)
        return self.status_for(query, now_s)

    def on_query_answer(self, peer_id: PeerId, answer: Answer, now_s: float) -> None:
        """Process a peer's reply to a query."""
        self._history.mark_reachable(peer_id)
        if (search := self._search) is None:
            return
        is_latest = search.table.on_answer(peer_id, answer, now_s)
        if is_latest and search.following == peer_id:
            leads = answer.status is PeerStatus.SEARCHING and answer.round_key == search.request.round_key
            # replies to queries from before it led this peer do not count
            search.contrary_answers = 0 if leads or not search.pinged else search.contrary_answers + 1

    def on_query_failed(self, peer_id: PeerId, text: str, now_s: float) -> None:
        """Record that a query to this peer failed, for the reason `text`."""
        self._history.mark_unreachable(peer_id, now_s)
        if self._search is not None:
            self._search.table.on_failure(peer_id, text, now_s)

    def on_join(self, join: Join, now_s: float) -> Answer | int:
        """Process the request of another peer to be led. Return this peer's status when it declines, or a
        ticket: the reply then comes as `AnswerJoin` with that ticket. Raise UsageError when values are out of
        bounds.
        """
        peer_id = join.query.contact.peer_id
        member = Member(
            contact=join.query.contact,
            weight=join.weight,
            bandwidth=join.bandwidth,
            bandwidth_is_set=join.bandwidth_is_set,
            auxiliary=join.auxiliary,
            grid_rounds=join.grid_rounds,
            new_hour=join.new_hour,
            gone=join.gone,
            samples=join.samples,
        )
        if len(join.gathered) > GATHERED_BYTES_MAX:
            raise UsageError(
                f"gathered metadata has at most {GATHERED_BYTES_MAX} bytes, not {len(join.gathered)}"
            )
        self._history.mark_reachable(peer_id)
        search = self._search
        if search is None:
            return self.status_for(join.query, now_s)
        search.table.on_query(join.query, now_s)
        fits = join.query.schema == self._schema.digest and join.query.round_key == search.request.round_key
        search.followers.pop(peer_id, None)  # its earlier call, if any, is superseded
        if not fits or search.following is not None or not search.leads(join.query):
            return self.status_for(join.query, now_s)
        if 1 + len(search.followers) >= self._target_group_size:
            if not (displaced := search.displace_stranger(peer_id, self.status_for(join.query, now_s))):
                return self.status_for(join.query, now_s)
            self._outbox.append(displaced)
        self._tickets += 1
        search.followers[peer_id] = GroupFollower(member, join.gathered, self._tickets)
        return self._tickets

    def on_join_lost(self, peer_id: PeerId, ticket: int) -> None:
        """Record that a follower's call ended before it was answered, because the follower gave up or
        died.
        """
        search = self._search
        if (
            search is not None
            and (follower := search.followers.get(peer_id)) is not None
            and follower.ticket == ticket
        ):
            del search.followers[peer_id]
            search.table.forget_status(peer_id)

    def on_join_answer(self, peer_id: PeerId, answer: Group | Answer, now_s: float) -> None:
        """Process the leader's reply to a `Join`: the group, or the leader's status."""
        search = self._search
        if search is None or search.following != peer_id:
            return
        self._stop_following(search, now_s)
        if isinstance(answer, Group):
            wrong = mismatch(
                answer,
                leader=peer_id,
                own=search.member,
                gathered=search.request.gathered,
                codec=self._schema.codec,
            )
            if not wrong:
                self._begin_round(answer, now_s)
                return
            search.table.on_failure(peer_id, wrong, now_s)
            return
        search.table.on_answer(peer_id, answer, now_s)
        search.table.on_refusal(peer_id, now_s)

    def on_join_failed(self, peer_id: PeerId, text: str, now_s: float) -> None:
        """Record that the call to the leader failed, for the reason `text`."""
        search = self._search
        if search is not None and search.following == peer_id:
            self._stop_following(search, now_s)
            self._history.mark_unreachable(peer_id, now_s)
            search.table.on_failure(peer_id, text, now_s)

    # --- time

    def poll(self, now_s: float) -> list[Effect]:
        """Return the effects to perform now."""
        search = self._search
        if search is not None:
            self._read_records_if_due(search, now_s)
            if search.following is not None:
                self._watch_leader(search, now_s)
            if self._search is search and search.following is None:
                self._lead_or_follow(search, now_s)
            if self._search is search:
                due = search.table.due_queries(
                    now_s, self._needs_no_query, first_only=search.following is not None
                )
                self._outbox += [
                    SendLookForGroup(contact=peer.contact, query=search.stamped_query(self._history.turn))
                    for peer in due
                ]
        effects, self._outbox = self._outbox, []
        return effects

    def wake_s(self, now_s: float) -> float | None:
        """Return when to poll at the latest if nothing happens; None when only an event makes that
        necessary.
        """
        search = self._search
        if search is None:
            return None
        times = [search.request.deadline_s, self._next_read_s(search, now_s)]
        if search.following is not None:
            times.append(search.pinged_s + LEADER_PING_INTERVAL_S)
        else:
            times += [search.table.next_query_s(self._needs_no_query), search.table.next_leader_retry_s()]
            times += [
                search.begin_by_s,
                search.request.stay_until_s,
                self._wait_until_s(search),
                self._created_s + _SETTLE_S,
            ]
        # past times were handled by the last poll, or wait for a reply
        return min((at for at in times if now_s < at < math.inf), default=now_s + _READ_INTERVAL_S)

    # --- presence records and status

    def _next_read_s(self, search: Search, now_s: float) -> float:
        if search.reading_records:
            return math.inf
        if not self._history.holders or (not search.records_read and search.table.is_impossible(now_s)):
            # the search might end because this peer is alone
            return search.read_started_s + _FIRST_READ_INTERVAL_S
        return max(self._history.records_read_s, search.read_started_s) + _READ_INTERVAL_S

    def _read_records_if_due(self, search: Search, now_s: float) -> None:
        if now_s >= self._next_read_s(search, now_s):
            search.reading_records, search.read_started_s = True, now_s
            self._outbox.append(ReadRecords())

    def _needs_no_query(self, peer_id: PeerId) -> bool:
        """Return whether this peer need not be queried: the leader is pinged by its own rule, and followers
        are connected.
        """
        search = self._search
        return search is not None and (peer_id == search.following or peer_id in search.followers)

    def status_for(self, query: LookForGroup, now_s: float) -> Answer:
        """Return this peer's status in reply to `query`."""
        return replace(self._current_status(query, now_s), turn=self._history.turn)

    def _current_status(self, query: LookForGroup, now_s: float) -> Answer:
        if query.schema != self._schema.digest:
            return Answer(status=PeerStatus.REFUSED, text=self._schema.text)
        if query.round_key in self._history.passed:
            return Answer(status=PeerStatus.PASSED, round_key=query.round_key)
        if self._search is not None:
            return self._search.status()
        return self._history.status(now_s)

    # --- following

    def _watch_leader(self, search: Search, now_s: float) -> None:
        assert search.following is not None
        state = search.table.peers[search.following]
        if now_s >= search.request.deadline_s or state.failed or search.contrary_answers >= 2:
            self._outbox.append(AbandonJoin(peer_id=search.following))
            if not state.failed and search.contrary_answers < 2:
                search.held_by = search.following
            if search.contrary_answers >= 2:
                search.table.on_refusal(search.following, now_s)
            self._stop_following(search, now_s)
        elif now_s >= search.pinged_s + LEADER_PING_INTERVAL_S:
            search.pinged_s, search.pinged = now_s, True
            self._outbox.append(
                SendLookForGroup(contact=state.contact, query=search.stamped_query(self._history.turn))
            )

    def _follow(self, search: Search, state: PeerState, now_s: float) -> None:
        assert state.rank is not None
        leader = Leader(contact=state.contact, deadline_s=state.rank.deadline_s)
        turn = self._history.next_turn()
        search.follow(state.contact.peer_id, now_s)
        following = Answer(
            status=PeerStatus.FOLLOWING,
            round_key=search.request.round_key,
            deadline_s=search.query.deadline_s,
            leader=leader,
            turn=turn,
        )
        self._answer(search.followers, following)
        self._outbox.append(SendJoin(contact=state.contact, join=search.join(turn)))

    def _stop_following(self, search: Search, now_s: float) -> None:
        search.stop_following(now_s)
        self._history.next_turn()

    # --- leading

    def _lead_or_follow(self, search: Search, now_s: float) -> None:
        """Follow the best leader, or lead: begin the round, wait, or end the search."""
        size, overdue = search.size, now_s >= search.request.deadline_s
        if not overdue and (best := search.table.best_leader(now_s)) is not None:
            self._follow(search, best, now_s)
            return
        may_be_alone = search.request.may_be_alone and not search.table.round_has_begun()
        size_min = 1 if may_be_alone else self._min_group_size
        enough = size >= size_min and now_s >= min(search.begin_by_s, self._wait_until_s(search))
        if (enough or size >= self._target_group_size) and search.can_commit():
            unseated = search.unseated()
            group = search.group(self._schema.codec, self._rng)
            self._answer(search.followers, group)
            self._begin_round(group, now_s)
            self._answer(unseated, self._history.status(now_s))
        elif overdue or search.is_committed_elsewhere():
            self._end_search(search.table.explain(deadline=overdue), now_s)
        # in a grid: try another place, but only if there is no peer left to wait for
        elif search.request.expected:
            if search.records_read and now_s >= max(search.request.stay_until_s, self._wait_until_s(search)):
                self._end_search(search.table.explain(deadline=False), now_s)
        elif (
            search.records_read
            and search.table.is_impossible(now_s)
            and (search.table.peers or now_s >= self._created_s + _SETTLE_S)
        ):
            self._end_search(search.table.explain(deadline=False), now_s)

    def _wait_until_s(self, search: Search) -> float:
        """Return until when a group of sufficient size waits for others: the latest of the times for the
        peers that may still come.
        """
        waits = [
            search.table.wait_until_s(peer)
            for peer_id, peer in search.table.peers.items()
            if peer_id not in search.followers
        ]
        expected = search.request.expected
        if expected and 1 + (known := search.table.reachable_count()) < expected:
            # no peer has reported the others yet
            grace_s = self._history.grace_period.grace_s(self._own)
            waits.append(search.started_s + (grace_s if known else min(grace_s, _EMPTY_CELL_WAIT_S)))
        if not search.records_read and search.started_s - self._history.records_read_s > _RECORDS_AGE_S_MAX:
            waits.append(search.started_s + _RECORDS_WAIT_S)
        return max(waits, default=-math.inf)

    def _answer(self, followers: dict[PeerId, GroupFollower], answer: Group | Answer) -> None:
        """Answer the calls of these followers, which end with it."""
        for peer_id, follower in followers.items():
            self._outbox.append(AnswerJoin(peer_id=peer_id, ticket=follower.ticket, answer=answer))
        followers.clear()

    # --- end of the search

    def _begin_round(self, group: Group, now_s: float) -> None:
        search = self._search
        assert search is not None
        members = frozenset(group.peer_ids)
        missing_s, waited_s = search.table.missing_s(now_s), now_s - search.started_s
        strangers = [peer_id for peer_id in missing_s if search.request.precedence.is_stranger(peer_id)]
        # the lateness of a cell's last members is recorded under this peer's own id
        if search.request.expected:
            full = len(members) >= search.request.expected
            self._history.grace_period.record_cell_group(self._own, waited_s, full)
            if not full:
                missing_s[self._own] = waited_s
        self._history.grace_period.charge(missing_s, strangers)
        search.table.on_round_began(members)
        self._history.round_began(
            round_key=search.request.round_key,
            members=members,
            search_started_s=search.started_s,
            now_s=now_s,
        )
        self._search = None
        self._outbox.append(SearchFinished(outcome=group))

    def _end_search(self, failed: SearchFailed, now_s: float) -> None:
        search = self._search
        assert search is not None
        self._search = None
        if search.following is not None:
            self._outbox.append(AbandonJoin(peer_id=search.following))
        self._history.next_turn()
        self._answer(search.followers, self.status_for(search.query, now_s))
        self._outbox.append(SearchFinished(outcome=replace(failed, held_by=search.held_by)))
