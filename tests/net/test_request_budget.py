"""Budgets of costly requests: per caller, in total, and for strangers."""

from __future__ import annotations

from swarm.core.standing import PeerStanding
from swarm.net.logic.request_budget import PER_CALLER_S, WINDOW_S, RequestBudget
from swarm.testing.identities import SeededIdentity

CALLS_MAX = 30
MEMBERS = [SeededIdentity(f"member {number}").peer_id for number in range(40)]
STRANGERS = [SeededIdentity(f"stranger {number}").peer_id for number in range(40)]


def budget(*, members: bool = True) -> RequestBudget:
    standing = PeerStanding()
    if members:
        standing.add_members("run", MEMBERS)
    return RequestBudget(standing, CALLS_MAX, "called back")


def test_a_caller_is_called_back_once_in_ten_seconds() -> None:
    own = budget()
    assert own.enter(MEMBERS[0], 0.0) == ""
    assert "called back" in own.enter(MEMBERS[0], PER_CALLER_S - 0.1)
    assert own.enter(MEMBERS[1], 1.0) == ""
    assert own.enter(MEMBERS[0], PER_CALLER_S) == ""


def test_strangers_get_half_where_members_are_known_and_members_the_rest() -> None:
    own = budget()
    assert sum(own.enter(peer, 0.0) == "" for peer in STRANGERS) == CALLS_MAX // 2
    assert sum(own.enter(peer, 1.0) == "" for peer in MEMBERS) == CALLS_MAX - CALLS_MAX // 2
    assert own.enter(STRANGERS[-1], WINDOW_S - 1.0) != ""
    assert own.enter(STRANGERS[-1], WINDOW_S) == ""


def test_members_leave_strangers_nothing_when_they_need_all() -> None:
    own = budget()
    assert sum(own.enter(peer, 0.0) == "" for peer in MEMBERS) == CALLS_MAX
    assert own.enter(STRANGERS[0], 1.0).startswith("busy")


def test_without_members_all_calls_are_for_strangers() -> None:
    own = budget(members=False)
    assert sum(own.enter(peer, 0.0) == "" for peer in STRANGERS) == CALLS_MAX
