"""The order of peers in a group: seats, weights and reducers of newcomers, and peers that are passed over."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, replace

import pytest

from averaging.history.electors import is_quorum
from averaging.matchmaking.logic.grace_period import GracePeriod
from averaging.matchmaking.logic.group import WEIGHT_MAX, Group, Member
from averaging.matchmaking.logic.matchmaking import Matchmaker
from averaging.matchmaking.logic.messages import (
    AbandonJoin,
    Answer,
    AnswerJoin,
    Effect,
    Leader,
    PeerStatus,
    Precedence,
    SearchFailed,
    SearchFinished,
    SearchRequest,
    SendJoin,
)
from averaging.matchmaking.logic.precedence import (
    WEIGHT_RATIO_MAX,
    is_passed_over,
    seated,
    with_standing,
)
from averaging.reduction.balance import shares_of
from swarm.core.ids import PeerId
from tests.averaging.matchmaking.bench import OURS, contact, holder, join_of, query_of

OWN = 5
KEY = "a round 6"  # in which of the electors 5 to 8 number 8 leads, and then 5


def ids(*numbers: int) -> frozenset[PeerId]:
    return frozenset(contact(number).peer_id for number in numbers)


def precedence(
    electors: Collection[int] = (), *, proven: Collection[int] = (), passed_over: Collection[int] = ()
) -> Precedence:
    return Precedence(
        electors=ids(*electors),
        is_member=ids(*electors).__contains__,
        is_proven=ids(*electors, *proven).__contains__,
        is_passed_over=ids(*passed_over).__contains__,
    )


# ---- the peers that a peer passes over


@pytest.mark.parametrize(
    ("electors", "faulty", "absent", "expected"),
    [
        ((5, 6, 7, 8), (6,), (), True),  # one of four
        ((5, 6, 7, 8), (6, 7), (), False),  # half of the electors
        ((5, 6, 7), (6, 7), (), False),  # this peer is more likely the victim
        ((5, 6), (6,), (), False),  # of two peers neither has anybody else
        ((5, 6, 7), (6,), (), True),
        ((5, 6, 7), (6,), (7,), False),  # the other one has left
        ((7, 8, 9), (6,), (), True),  # a stranger, with electors present
        ((7, 8, 9), (6,), (7, 8, 9), False),  # all electors are gone
        ((5,), (6,), (), True),  # a founder continues alone
        ((7, 8, 9), (7,), (), True),  # from the view of a newcomer
    ],
)
def test_a_peer_is_passed_over_only_if_the_others_can_do_without_it(
    electors: tuple[int, ...], faulty: tuple[int, ...], absent: tuple[int, ...], expected: bool
) -> None:
    here = ids(*electors, *faulty) - ids(*absent)
    order = precedence(electors, passed_over=faulty)
    own = contact(OWN).peer_id
    assert is_passed_over(contact(6 if 6 in faulty else 7).peer_id, own, order, here.__contains__) is expected


@pytest.mark.parametrize("seed", range(50))
def test_electors_that_pass_over_others_are_always_a_majority(seed: int) -> None:
    """Two groups of electors that pass over each other cannot both continue, no matter which peers each of
    them blames.
    """
    rng = random.Random(seed)
    electors = list(range(1, 1 + rng.randrange(1, 9)))
    taken = []
    for own in electors:
        faulty = [one for one in electors if one != own and rng.random() < 0.5]
        order = precedence(electors, passed_over=faulty)
        peers = {one: contact(one).peer_id for one in electors}
        rest = [
            one
            for one in electors
            if one == own or not is_passed_over(peers[one], peers[own], order, lambda peer: True)
        ]
        taken.append(set(rest))
        assert len(rest) > 1 or len(electors) == 1
    assert all(one & other for one in taken for other in taken)


# ---- seats


@pytest.mark.parametrize(
    ("followers", "proven", "expected"),
    [
        ((6, 20, 21, 22, 23), (), (6, 20, 21, 22)),
        ((20, 21, 22, 23), (), (20, 21, 22)),  # a lone elector takes as many newcomers
        ((20, 21, 22, 23), (21, 22), (20, 21, 22, 23)),  # after a certified round they are no strangers
        ((6, 7), (), (6, 7)),
    ],
)
def test_strangers_have_at_most_half_of_the_seats_of_a_full_group(
    followers: tuple[int, ...], proven: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    order = precedence((OWN, 6, 7), proven=proven)
    found = seated([contact(number).peer_id for number in followers], 6, order)
    assert found == [contact(number).peer_id for number in expected]


def test_before_the_first_certificate_all_peers_are_alike() -> None:
    followers = [contact(number).peer_id for number in range(20, 40)]
    assert seated(followers, 40, precedence()) == followers


# ---- weights and reducers


def group_of(weights: dict[int, float], *, auxiliary: Collection[int] = ()) -> Group:
    members = tuple(
        Member(contact=contact(one), weight=weight, bandwidth=1e6, auxiliary=one in auxiliary)
        for one, weight in sorted(weights.items())
    )
    return Group(group_id=bytes(32), members=members, codec="float32", gathered=(b"",) * len(members))


def test_a_claim_of_2_to_the_40_samples_counts_as_three_times_the_electors_median() -> None:
    group = group_of({1: 10.0, 2: 30.0, 3: 20.0, 9: 2.0**39, 8: 5.0})
    counted = with_standing(group, precedence((1, 2, 3)))
    assert [member.weight for member in counted.members] == [
        10.0,
        30.0,
        20.0,
        5.0,
        WEIGHT_RATIO_MAX * 20.0,
    ]
    assert counted.peer_ids == group.peer_ids
    assert with_standing(counted, precedence((1, 2, 3))) == counted


@pytest.mark.parametrize("seed", range(20))
def test_all_members_count_a_group_alike_although_they_know_different_strangers(seed: int) -> None:
    rng = random.Random(seed)
    group = group_of({number: rng.choice([0.0, 1.0, 7.0, 1e9]) for number in range(1, 12)})
    numbers = rng.sample(range(1, 20), 6)
    electors = ids(*numbers)
    counted = with_standing(group, precedence(numbers))
    other = with_standing(group, precedence(numbers, proven=rng.sample(range(1, 12), 4)))
    assert replace(other, strangers=counted.strangers) == counted
    weights = sorted(one.weight for one in group.members if one.peer_id in electors and one.weight)
    for before, after in zip(group.members, counted.members, strict=True):
        assert (after.weight > 0.0) == (before.weight > 0.0), "nobody loses its vote"
        if weights and before.peer_id not in electors:
            assert after.weight <= WEIGHT_RATIO_MAX * weights[(len(weights) - 1) // 2]
        else:
            assert after == before


def test_electors_and_auxiliary_members_reduce_and_strangers_do_not() -> None:
    group = with_standing(group_of({1: 1.0, 2: 1.0, 8: 1.0, 9: 0.0}, auxiliary=(9,)), precedence((1, 2)))
    shares = shares_of(group.members, 1 << 30, group.reducers)
    assert [share > 0.0 for share in shares] == [True, True, False, True]
    assert sum(shares) == pytest.approx(1.0)


def test_strangers_reduce_where_no_elector_can_be_dialed() -> None:
    group = group_of({1: 1.0, 8: 1.0})
    client = replace(group.members[0], contact=contact(1, dialable=False), bandwidth=0.0)
    group = with_standing(replace(group, members=(client, group.members[1])), precedence((1,)))
    assert shares_of(group.members, 1 << 30, group.reducers) == [0.0, 1.0]


def test_in_a_cell_of_the_grid_a_claim_counts_as_three_times_the_median_of_all() -> None:
    cell = replace(precedence(), is_cell=True)
    group = group_of({1: 10.0, 2: 20.0, 3: 30.0, 4: 0.0, 8: WEIGHT_MAX})
    counted = with_standing(group, cell)
    assert [one.weight for one in counted.members] == [10.0, 20.0, 30.0, 0.0, 60.0]
    assert (counted.reducers, counted.strangers) == (None, frozenset())
    assert with_standing(counted, cell) == counted
    pair = group_of({1: 10.0, 8: WEIGHT_MAX})
    assert with_standing(pair, cell) is pair, "of two peers it is unknown which one is right"


def test_a_group_without_contributing_electors_is_as_it_was() -> None:
    group = group_of({1: 0.0, 8: 1e9, 9: 1.0})
    assert with_standing(group, precedence((1,))) is group
    assert with_standing(group, precedence()) is group


# ---- the search


class Bench:
    """One machine with the number 5, which searches under `KEY` from time 0 to 10 s."""

    def __init__(
        self, order: Precedence, *, holders: Collection[int], grace_period: GracePeriod | None = None
    ) -> None:
        self.machine = Matchmaker(
            own=contact(OWN).peer_id,
            schema=OURS,
            rng=random.Random(1),
            now_s=-10.0,
            target_group_size=8,
            grace_period=grace_period,
        )
        self.machine.on_holders({contact(one).peer_id: holder(one) for one in holders}, 0.0)
        member = Member(contact=contact(OWN), weight=1.0, bandwidth=1.0)
        request = SearchRequest(round_key=KEY, deadline_s=10.0, rank_deadline_s=10.0, precedence=order)
        self.machine.start(request, member, 0.0)
        self.poll(0.0)

    def poll(self, now_s: float) -> list[Effect]:
        return self.machine.poll(now_s)

    def searches(self, number: int, deadline_s: float, now_s: float = 0.1) -> None:
        self.machine.on_query(query_of(number, deadline_s, key=KEY), now_s)

    def follows(self, number: int, leader: int, now_s: float = 0.2, turn: int = 2) -> None:
        answer = Answer(
            status=PeerStatus.FOLLOWING,
            round_key=KEY,
            deadline_s=10.0 + number,
            leader=Leader(contact=contact(leader), deadline_s=1.0),
            turn=turn,
        )
        self.machine.on_query_answer(contact(number).peer_id, answer, now_s)

    def joins(self, number: int, now_s: float = 0.2) -> Answer | int:
        return self.machine.on_join(join_of(number, 20.0, key=KEY), now_s)


def test_an_elector_that_claims_the_earliest_deadlines_leads_no_more_rounds_than_others() -> None:
    """A leader decides who is in its group: one that led every round excluded a member of four
    permanently.
    """
    order, leaders = precedence((1, 2, 3, 4)), Counter[int]()
    for epoch in range(400):
        query = {one: query_of(one, 1.0 if one == 3 else 20.0 + one, key=f"{epoch}") for one in range(1, 6)}
        leaders[min(query, key=lambda one: order.order(query[one].rank, f"{epoch}"))] += 1
    assert all(75 <= leaders[elector] <= 125 for elector in (1, 2, 3, 4)), leaders
    assert not leaders[5], "electors come before everybody else"


def test_an_elector_does_not_follow_a_stranger_that_claims_an_earlier_deadline() -> None:
    bench = Bench(precedence((OWN, 6)), holders=(6, 20))
    bench.searches(20, 1.0)
    bench.searches(6, 20.0)
    bench.poll(0.1)
    assert bench.machine.following is None
    strangers = Bench(precedence(), holders=(6, 20))
    strangers.searches(20, 1.0)
    strangers.poll(0.1)
    assert strangers.machine.following == contact(20).peer_id


def test_a_stranger_follows_an_elector_with_a_later_deadline() -> None:
    bench = Bench(precedence((6,)), holders=(6, 4))
    bench.searches(4, 1.0)
    bench.searches(6, 20.0)
    bench.poll(0.1)
    assert bench.machine.following == contact(6).peer_id
    assert isinstance(bench.joins(4), Answer)


def test_a_peer_that_is_passed_over_gets_no_seat_and_is_not_waited_for() -> None:
    bench = Bench(precedence((OWN, 6, 7, 8), passed_over=(8,)), holders=(6, 7, 8))
    assert isinstance(bench.joins(8), Answer)
    for number in (6, 7):
        bench.searches(number, 20.0)
        assert isinstance(bench.joins(number), int)
    [finished] = [effect for effect in bench.poll(0.2) if isinstance(effect, SearchFinished)]
    assert isinstance(finished.outcome, Group)
    assert finished.outcome.peer_ids == tuple(sorted(ids(OWN, 6, 7)))


def test_a_leader_that_is_passed_over_is_followed_once_others_follow_it() -> None:
    """Peers that disagree about a fault still form one group."""
    bench = Bench(precedence((OWN, 6, 7, 8), passed_over=(8,)), holders=(6, 7, 8))
    bench.searches(8, 1.0)
    bench.searches(7, 20.0)
    bench.poll(0.1)
    assert bench.machine.following is None
    bench.follows(6, leader=8)
    assert [effect.contact for effect in bench.poll(0.2) if isinstance(effect, SendJoin)] == [contact(8)]


def test_a_leader_that_held_this_peer_is_not_followed_while_it_still_holds_others() -> None:
    """Their deadlines are a moment later. Four peers followed such a leader again and again, in turn."""
    order = replace(precedence((OWN, 6, 7, 8), passed_over=(8,)), is_holding=ids(8).__contains__)
    bench = Bench(order, holders=(6, 7, 8))
    bench.searches(8, 1.0)
    for number in (6, 7):
        bench.follows(number, leader=8)
    assert not [effect for effect in bench.poll(0.2) if isinstance(effect, SendJoin)]


def test_of_two_peers_neither_passes_over_the_other() -> None:
    bench = Bench(precedence((OWN, 6), passed_over=(6,)), holders=(6,))
    assert isinstance(bench.joins(6), int)


def test_a_group_begins_without_the_strangers_that_have_no_seat_and_tells_them() -> None:
    bench = Bench(precedence((OWN, 6)), holders=(6,))
    tickets = [bench.joins(number) for number in (20, 21, 22, 23, 24, 6)]  # of eight seats
    effects = bench.poll(5.0)
    [finished] = [effect for effect in effects if isinstance(effect, SearchFinished)]
    assert isinstance(finished.outcome, Group)
    assert finished.outcome.peer_ids == tuple(sorted(ids(OWN, 6, 20, 21, 22, 23)))
    answers = {effect.ticket: effect.answer for effect in effects if isinstance(effect, AnswerJoin)}
    assert answers.keys() == set(tickets)
    refused = answers.pop(tickets[4])
    assert isinstance(refused, Answer)
    assert refused.status is PeerStatus.BUSY
    assert all(answer == finished.outcome for answer in answers.values())


def test_strangers_together_are_waited_for_as_long_as_one_small_account_allows() -> None:
    """Each of them searches, and joins nobody; a peer that is known to be good would be waited for."""
    period = GracePeriod(30.0, unknown_peer_s=2.0, waiting_share_max=0.1)
    period.charge({contact(20).peer_id: 1.6}, ids(20))
    assert period.strangers_s == pytest.approx(30.0 / 6 - 1.6)
    period.charge({contact(one).peer_id: 4.0 for one in range(20, 40)}, ids(*range(20, 40)))
    assert period.strangers_s == 0.0
    bench = Bench(precedence((OWN, 6)), holders=(6, 20, 21), grace_period=period)
    bench.searches(20, 20.0)
    assert isinstance(bench.joins(6), int)
    assert any(isinstance(effect, SearchFinished) for effect in bench.poll(0.3))


def test_the_budget_for_strangers_grows_a_quarter_as_fast_as_that_for_a_peer() -> None:
    period = GracePeriod(30.0, unknown_peer_s=2.0, waiting_share_max=0.1)
    period.charge({contact(20).peer_id: 100.0}, ids(20))
    period.pay(0.0)
    period.pay(40.0)
    assert period.strangers_s == pytest.approx(1.0)
    period.pay(1e6)
    assert period.strangers_s == pytest.approx(5.0)


def test_a_leader_that_has_not_begun_at_the_deadline_is_named() -> None:
    bench = Bench(precedence((OWN, 8)), holders=(8,))
    bench.searches(8, 1.0)
    bench.poll(0.1)
    assert bench.machine.following == contact(8).peer_id
    effects = bench.poll(10.0)
    assert any(isinstance(effect, AbandonJoin) for effect in effects)
    [finished] = [effect for effect in effects if isinstance(effect, SearchFinished)]
    assert isinstance(finished.outcome, SearchFailed)
    assert finished.outcome.held_by == contact(8).peer_id


def test_a_leader_that_died_is_not_blamed_for_holding_its_followers() -> None:
    bench = Bench(precedence((OWN, 8)), holders=(8,))
    bench.searches(8, 1.0)
    bench.poll(0.1)
    bench.machine.on_query_failed(contact(8).peer_id, "no answer", 9.0)
    bench.poll(9.0)
    [finished] = [effect for effect in bench.poll(10.0) if isinstance(effect, SearchFinished)]
    assert isinstance(finished.outcome, SearchFailed)
    assert finished.outcome.held_by is None


# ---- a quorum of the electors


@dataclass
class _Newcomer:
    """A newcomer that leads another one, and meets three electors of its run with these statuses."""

    machine: Matchmaker
    now_s: float = 0.0
    turn: int = 0

    @classmethod
    def make(cls, present: Collection[int] = (1, 2, 3)) -> _Newcomer:
        """`present`: the electors that have not missed the last certificate."""
        machine = Matchmaker(
            own=contact(OWN).peer_id, schema=OURS, rng=random.Random(0), now_s=-100.0, target_group_size=64
        )
        electors = [contact(number).peer_id for number in (1, 2, 3)]

        def is_quorum_without(taken: Collection[PeerId]) -> bool:
            return is_quorum(electors, {*electors}.difference(taken))

        order = replace(precedence(present), is_quorum_without=is_quorum_without)
        request = SearchRequest(round_key=KEY, deadline_s=40.0, rank_deadline_s=40.0, precedence=order)
        machine.on_holders({contact(n).peer_id: holder(n) for n in (1, 2, 3, 6)}, 0.0)
        machine.start(request, Member(contact=contact(OWN), weight=1.0, bandwidth=1.0), 0.0)
        machine.poll(0.0)
        machine.on_join(join_of(6, 41.0, key=KEY), 0.0)
        return cls(machine)

    def told(self, *answers: Answer) -> list[Effect]:
        """Return its actions within the ten seconds in which the electors give these answers."""
        effects: list[Effect] = []
        for _ in range(20):
            self.now_s, self.turn = self.now_s + 0.5, self.turn + 1
            for number, answer in enumerate(answers, 1):
                told = replace(answer, turn=self.turn)
                self.machine.on_query_answer(contact(number).peer_id, told, self.now_s)
            effects += self.machine.poll(self.now_s)
            if any(isinstance(one, SearchFinished | SendJoin) for one in effects):
                break
        return effects


IDLE = Answer(status=PeerStatus.IDLE)
IN_THEIR_ROUND = Answer(status=PeerStatus.BUSY, round_key=KEY, expected_s=1.0)
THEIR_LEADER = Leader(contact=contact(1), deadline_s=30.0)
FOLLOWS = Answer(status=PeerStatus.FOLLOWING, round_key=KEY, deadline_s=30.0, leader=THEIR_LEADER)
PASSED = Answer(status=PeerStatus.PASSED, round_key=KEY)
SEARCHES = Answer(status=PeerStatus.SEARCHING, round_key=KEY, deadline_s=50.0)


def found_in(effects: list[Effect]) -> list[Group | SearchFailed]:
    return [one.outcome for one in effects if isinstance(one, SearchFinished)]


@pytest.mark.parametrize("second", [IN_THEIR_ROUND, FOLLOWS])
def test_a_group_of_newcomers_does_not_begin_beside_a_round_with_the_quorum(second: Answer) -> None:
    """Such a group could not commit, and its members would miss the next round, too."""
    newcomer = _Newcomer.make()
    assert not found_in(newcomer.told(IN_THEIR_ROUND, second, IDLE))


def test_newcomers_that_wait_for_a_round_join_the_electors_when_it_has_failed() -> None:
    newcomer = _Newcomer.make()
    newcomer.told(IN_THEIR_ROUND, IN_THEIR_ROUND, IDLE)
    effects = newcomer.told(SEARCHES, SEARCHES, IDLE)
    assert [one.contact for one in effects if isinstance(one, SendJoin)] == [contact(1)]
    [told] = [one.answer for one in effects if isinstance(one, AnswerJoin)]
    assert isinstance(told, Answer)
    assert told.leader is not None
    assert told.leader.contact == contact(1), "its follower is sent there"


def test_newcomers_that_wait_for_a_round_end_their_search_when_it_is_committed() -> None:
    newcomer = _Newcomer.make()
    newcomer.told(IN_THEIR_ROUND, IN_THEIR_ROUND, IDLE)
    [failed] = found_in(newcomer.told(PASSED, PASSED, IDLE))
    assert isinstance(failed, SearchFailed)
    assert failed.reason == "passed"


@pytest.mark.parametrize("present", [(1, 2, 3), (2,)], ids=["all-present", "most-missed-a-round"])
def test_a_minority_of_electors_elsewhere_holds_nobody_up(present: Collection[int]) -> None:
    """The other electors may be busy with long steps and sign from outside, even those that have missed a
    round.
    """
    [group] = found_in(_Newcomer.make(present).told(IN_THEIR_ROUND, IDLE, IDLE))
    assert isinstance(group, Group)
    assert group.peer_ids == (contact(OWN).peer_id, contact(6).peer_id)
