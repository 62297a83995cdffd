"""Admission: roles, expiry, revocation and uses, the last against a model that sorts all holders."""

from __future__ import annotations

import random

import pytest

from swarm.core.errors import NotInvited
from swarm.core.identity import Identity
from swarm.membership.admission import Admission
from swarm.membership.capability import Grants, roles_of
from tests.membership.members import DAY_S, NOW_S, InvitedRun, identity

JOIN, STATE, REPORT, EXPERT = (
    "/swarm.Groups/Join",
    "/swarm.State/Open",
    "/swarm.Run/Report",
    "/swarm.Expert/Call",
)


def door(run: InvitedRun) -> Admission:
    return Admission(run.run_id, run.owner.peer_id)


def admitted(admission: Admission, holder: Identity, grants: Grants, now_s: float = NOW_S) -> bool:
    try:
        admission.admit(holder.peer_id, grants, now_s)
    except NotInvited:
        return False
    return True


def test_a_stranger_is_refused_and_the_owner_is_not() -> None:
    run, stranger = InvitedRun(1), identity(random.Random(2))
    admission = door(run)
    assert "joins with an invite" in admission.refusal(stranger.peer_id, STATE, NOW_S)
    assert not admitted(admission, stranger, ())
    assert admission.refusal(run.owner.peer_id, JOIN, NOW_S) == ""
    assert admitted(admission, run.owner, ())


def test_the_capability_of_another_peer_is_of_no_use() -> None:
    run, holder, thief = InvitedRun(3), identity(random.Random(4)), identity(random.Random(5))
    admission = door(run)
    grants = run.invite().capability_of(holder.peer_id, NOW_S)
    assert not admitted(admission, thief, grants)
    assert not admitted(admission, thief, grants[:-1])
    assert admitted(admission, holder, grants)


@pytest.mark.parametrize(
    ("roles", "allowed"),
    [
        (("train",), {JOIN, STATE, REPORT, EXPERT}),
        (("serve",), {JOIN, STATE, EXPERT}),
        (("observe",), {STATE}),
        (("invite",), {STATE}),
    ],
)
def test_a_role_allows_its_methods_only(roles: tuple[str, ...], allowed: set[str]) -> None:
    run, holder = InvitedRun(6), identity(random.Random(7))
    admission = door(run)
    invite = run.invite(roles=roles_of(roles))
    admission.admit(holder.peer_id, invite.capability_of(holder.peer_id, NOW_S), NOW_S)
    for method in (JOIN, STATE, REPORT, EXPERT):
        refusal = admission.refusal(holder.peer_id, method, NOW_S)
        assert (refusal == "") == (method in allowed), refusal


def test_a_standing_ends_with_its_capability() -> None:
    run, holder = InvitedRun(8), identity(random.Random(9))
    admission = door(run)
    grants = run.invite(days=1).capability_of(holder.peer_id, NOW_S)
    assert admitted(admission, holder, grants)
    assert admission.refusal(holder.peer_id, STATE, NOW_S + DAY_S - 1) == ""
    assert admission.refusal(holder.peer_id, STATE, NOW_S + DAY_S) != ""
    assert not admitted(admission, holder, grants, NOW_S + DAY_S)


@pytest.mark.parametrize("revoked", ["invite", "holder", "issuer", "nobody"])
def test_a_revocation_reaches_those_that_were_admitted_through_it(revoked: str) -> None:
    run, holder, guest = InvitedRun(10), identity(random.Random(11)), identity(random.Random(12))
    admission = door(run)
    invite = run.invite(uses=5)
    held = invite.capability_of(holder.peer_id, NOW_S)
    further = run.invite(holder, held).capability_of(guest.peer_id, NOW_S)
    assert admitted(admission, holder, held)
    assert admitted(admission, guest, further)
    peers = {"invite": invite.subject, "holder": guest.peer_id, "issuer": holder.peer_id}
    admission.revoke([peers[revoked]] if revoked in peers else [run.owner.peer_id])
    guest_stays, holder_stays = revoked == "nobody", revoked in ("nobody", "holder")
    for _ in range(2):  # a second attempt changes nothing
        assert (admission.refusal(guest.peer_id, STATE, NOW_S) == "") == guest_stays
        assert (admission.refusal(holder.peer_id, STATE, NOW_S) == "") == holder_stays
        assert admitted(admission, guest, further) == guest_stays
        assert admitted(admission, holder, held) == holder_stays
    assert (admission.problem(guest.peer_id, further, NOW_S) == "") == guest_stays


@pytest.mark.parametrize("seed", range(20))
def test_those_that_signed_first_have_the_uses_whatever_the_order_in_which_they_come(seed: int) -> None:
    run = InvitedRun(seed)
    uses = run.rng.randint(1, 4)
    invite = run.invite(uses=uses, days=1)
    bearers = [identity(run.rng) for _ in range(7)]
    signed_s = {bearer.peer_id: NOW_S + run.rng.randint(0, 5) for bearer in bearers}
    shown = {one.peer_id: invite.capability_of(one.peer_id, signed_s[one.peer_id]) for one in bearers}
    first = sorted(shown, key=lambda peer: (int(signed_s[peer]), peer))[:uses]
    for _ in range(3):
        admission = door(run)
        run.rng.shuffle(bearers)
        for bearer in bearers:
            admitted(admission, bearer, shown[bearer.peer_id], NOW_S + 9)
        stayed = {peer for peer in shown if admission.refusal(peer, STATE, NOW_S + 9) == ""}
        assert stayed == set(first)


def test_the_uses_of_a_holder_are_shared_by_all_that_it_invites() -> None:
    run, holder = InvitedRun(13), identity(random.Random(14))
    admission = door(run)
    held = run.invite(uses=3).capability_of(holder.peer_id, NOW_S)
    assert admitted(admission, holder, held)
    guests = [identity(run.rng) for _ in range(4)]
    invites = [run.invite(holder, held, uses=3) for _ in guests]
    outcome = [
        admitted(admission, guest, invite.capability_of(guest.peer_id, NOW_S + 1 + place), NOW_S + 9)
        for place, (guest, invite) in enumerate(zip(guests, invites, strict=True))
    ]
    assert outcome == [True, True, False, False]
    assert admitted(admission, guests[0], invites[0].capability_of(guests[0].peer_id, NOW_S + 60), NOW_S + 60)
